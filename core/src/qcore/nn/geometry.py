"""The geometry of a 2-D convolution layer, shared by the float and the quantized module."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

Pair = tuple[int, int]
"""(height, width)."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of a convolution apart from its output channels.

    **Fields:** ``in_channels``; ``kernel_size``, ``stride``, ``padding``, ``dilation``: (height, width); ``groups``;
    ``outer_padding``: (left, right, top, bottom), applied to x before the convolution by `pad`, or empty;
    ``padding_mode``: of `torch.nn.Conv2d`. Kernels pad with zeros and symmetrically, by ``padding``; every other
    padding is an outer padding.
    """

    in_channels: int
    kernel_size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    outer_padding: tuple[int, ...] = ()
    padding_mode: str = "zeros"

    @classmethod
    def of(cls, module: nn.Conv2d) -> Geometry:
        """Return the geometry of a float convolution with any padding mode."""
        padding, outer_padding = _paddings(module)
        return cls(
            in_channels=module.in_channels,
            kernel_size=_pair(module.kernel_size),
            stride=_pair(module.stride),
            padding=padding,
            dilation=_pair(module.dilation),
            groups=module.groups,
            outer_padding=outer_padding,
            padding_mode=module.padding_mode,
        )

    @property
    def columns(self) -> int:
        """Columns of the weight: KH * KW * IC / groups."""
        return self.kernel_size[0] * self.kernel_size[1] * self.in_channels // max(self.groups, 1)


def pad(x: Tensor, outer_padding: tuple[int, ...], padding_mode: str) -> Tensor:
    """Apply the outer padding to x ``(B, IC, H, W)``; returns x itself if there is none."""
    if not outer_padding:
        return x
    mode = "constant" if padding_mode == "zeros" else padding_mode
    return nn.functional.pad(x, outer_padding, mode=mode)


def _pair(value: int | tuple[int, ...]) -> Pair:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _paddings(module: nn.Conv2d) -> tuple[Pair, tuple[int, ...]]:
    """Split a module's padding into the part that kernels support (zeros, symmetric) and the outer padding."""
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return _pair(module.padding), ()
    if module.padding == "valid":
        return (0, 0), ()
    left, right, top, bottom = module._reversed_padding_repeated_twice  # noqa: SLF001
    if module.padding_mode == "zeros" and (left, top) == (right, bottom):
        return (top, left), ()
    return (0, 0), (left, right, top, bottom)
