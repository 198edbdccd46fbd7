"""Which part of a weight a chain of slices has left: vLLM's loaders cut weights by slicing tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Window:
    """A rectangular part of a weight ``(N, K)`` or ``(E, N, K)``, seen as a tensor.

    **Fields:** ``starts``, ``lengths``: per dimension of the weight; ``kept``: whether the dimension is one of the
    view: it is not after one expert was selected; ``lead``: dimensions of size 1 in front of the others; ``flipped``:
    whether the view is ``(K, N)``, as some models store float weights; their loaders transpose it.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    kept: tuple[bool, ...]
    lead: int = 0
    flipped: bool = False

    @classmethod
    def whole(cls, shape: tuple[int, ...], *, flipped: bool = False) -> Window:
        """All of a weight of this shape."""
        return cls((0,) * len(shape), tuple(shape), (True,) * len(shape), flipped=flipped)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the view."""
        return (1,) * self.lead + tuple(self.lengths[at] for at in self._dimensions())

    @property
    def rows(self) -> tuple[int, int]:
        """Start and length along N."""
        return self.starts[-2], self.lengths[-2]

    @property
    def columns(self) -> tuple[int, int]:
        """Start and length along K."""
        return self.starts[-1], self.lengths[-1]

    @property
    def experts(self) -> range:
        """The experts in the view; of a weight without experts, the number 0."""
        if len(self.starts) == 2:
            return range(1)
        return range(self.starts[0], self.starts[0] + self.lengths[0])

    def sliced(self, dim: int, start: int, stop: int) -> Window | None:
        """Entries ``start`` to ``stop`` along a dimension of the view; None for a part of a leading dimension."""
        if dim < self.lead:
            return self if (start, stop) == (0, 1) else None
        at = self._dimension(dim)
        starts, lengths = list(self.starts), list(self.lengths)
        starts[at], lengths[at] = starts[at] + start, max(0, stop - start)
        return replace(self, starts=tuple(starts), lengths=tuple(lengths))

    def selected(self, dim: int, index: int) -> Window | None:
        """One entry along a leading dimension or along the experts; None along another dimension."""
        if dim < self.lead:
            return replace(self, lead=self.lead - 1)
        at = self._dimension(dim)
        if at != 0 or len(self.starts) == 2:
            return None
        found = self.sliced(dim, index, index + 1)
        assert found is not None
        return replace(found, kept=(False, *self.kept[1:]))

    def transposed(self, order: tuple[int, ...]) -> Window | None:
        """With dimensions in another order: None unless it makes a flipped view ``(N, K)``."""
        size = len(self.shape)
        swapped = (*range(size - 2), size - 1, size - 2)
        return replace(self, flipped=False) if self.flipped and order == swapped else None

    def unsqueezed(self, dim: int) -> Window | None:
        """With another dimension of size 1 in front; None if it would not be in front."""
        return replace(self, lead=self.lead + 1) if dim == 0 else None

    def _dimension(self, dim: int) -> int:
        """The dimension of the weight behind one of the view."""
        return self._dimensions()[dim - self.lead]

    def _dimensions(self) -> list[int]:
        """The dimensions of the weight that the view has, in its order."""
        found = [at for at, kept in enumerate(self.kept) if kept]
        return [*found[:-2], found[-1], found[-2]] if self.flipped else found
