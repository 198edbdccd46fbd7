"""`PackedWeight`: a quantized weight as a pytree of packed arrays, and `pack`, which makes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.sharding import Mesh
from torch import Tensor

from qcore import FormatError, QTensor, Scheme

from ..engines import crossing
from ..graphs.meshes import MeshCut, Placement, axis_of, placed
from ..graphs.quantized import Layer

_GPUS = {"gpu", "cuda", "rocm"}


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight, packed for products or, for a table, for lookups, on one kind of device.

    A pytree: its leaves are the arrays, everything else is static under `jax.jit`. So it can be an argument of jitted
    functions, be donated, placed with `jax.device_put`, or be stacked with others of its shape and scheme for
    `jax.vmap` or `jax.lax.scan`.

    **Fields:** ``arrays``: by name (``data``: the codes, ``scale``, and ``zero``, ``factor``, ``sums`` and ``order`` if
    there are any), see `qcore_xla.packing`; ``layer``: shape, scheme and layout.
    """

    arrays: dict[str, Any]
    layer: Layer

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape: ``(N, K)``, or ``(E, N, K)`` for experts."""
        size = (self.layer.n, self.layer.k)
        return (self.layer.experts, *size) if self.layer.experts else size

    @property
    def scheme(self) -> str:
        """The scheme, e.g. ``"w4a16-g128"``, with calibrated numbers."""
        return str(self.layer.scheme)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(array.size) * int(array.dtype.itemsize) for array in self.arrays.values())

    @property
    def part(self) -> PackedWeight:
        """Inside `jax.shard_map`, of a weight that is cut, passed with ``PartitionSpec(axis)``: this device's weight.

        ``linear(x, weight.part)`` gives this device's output features of a ``"column"`` cut; for a ``"row"`` cut it
        takes this device's input features, and sums over the axis.
        """
        if self.layer.cut is None:
            raise FormatError(f"a weight of shape {self.shape} that is whole has no parts: see qcore_xla.pack, cut.")
        return PackedWeight(jax.tree.map(lambda parts: parts[0], self.arrays), self.layer.part)

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{name} {tuple(array.shape)}" for name, array in self.arrays.items() if hasattr(array, "shape")
        )
        return f"PackedWeight({self.layer.kind} {self.shape}, {self.scheme}: {sizes})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        """For JAX."""
        names = tuple(sorted(self.arrays))
        return [(jax.tree_util.DictKey(name), self.arrays[name]) for name in names], (names, self.layer)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> PackedWeight:
        """For JAX."""
        names, layer = static
        return cls(dict(zip(names, leaves, strict=True)), layer)


def pack(
    weight: QTensor, scheme: str | Scheme | None = None, *, table: bool = False, groups: int = 1, platform: str = "",
    cut: str = "", mesh: Mesh | None = None, axis: str | None = None,
) -> PackedWeight:  # fmt: skip
    """Pack a `qcore.QTensor` for `qcore_xla.linear` and the other functions.

    **Arguments:**

    - ``weight``: ``(N, K)`` or ``(E, N, K)``.
    - ``scheme``: with the activation that x gets, by default weight-only.
    - ``table``: for `qcore_xla.embedding`; ``groups``: channel groups of a convolution.
    - ``platform``: ``"cpu"``, ``"gpu"`` or ``"tpu"`` to run on, by default that of ``jax.devices()[0]``, to which the
      arrays go.
    - ``cut``: of a linear layer over an ``axis`` of a ``mesh`` (`jax.sharding.Mesh`): ``"column"``
      for its output features, or ``"row"`` for its input features, along groups.

    A weight that is cut has its parts along a first dimension of each array, sharded over ``axis``. `qcore_xla.linear`
    takes and gives global shapes; results of ``"row"`` are summed over the devices. See `PackedWeight.part` for use
    inside `jax.shard_map`.

    Raises `FormatError` for a scheme with parameters per token, for one that is not of the weight's format, and for
    another platform.
    """
    chosen = Scheme(weight.format) if scheme is None else Scheme.parse(str(scheme))
    if chosen.weight != weight.format:
        raise FormatError(f"the scheme {chosen} has weights in {chosen.weight}, but this one is in {weight.format}.")
    if any(getattr(part, "per_token", False) for part in (chosen.activation, chosen.output)):
        raise FormatError(f"{chosen}: parameters per token are not supported here; use a dynamic or a static scheme.")
    experts = weight.shape[0] if weight.dim() == 3 else 0
    kind = "embedding" if table else "grouped_linear" if experts else "conv2d" if groups > 1 else "linear"
    n, k = weight.shape[-2:]
    target = _torch_device(platform or jax.devices()[0].platform)
    over = _cut(cut, mesh, axis, weight, kind) if cut else None
    layer = Layer(kind, n, k, chosen, groups, experts, target, cut=over)
    place = Placement({} if over is None else {None: over}).parts(over)
    return PackedWeight({name: placed(array_of(part), place) for name, part in layer.pack(weight).items()}, layer)


def _cut(kind: str, mesh: Mesh | None, axis: str | None, weight: QTensor, of: str) -> MeshCut:
    """Raises `FormatError` with what stands in the way."""
    if mesh is None or kind not in {"column", "row"} or of != "linear":
        raise FormatError(f"cut={kind!r}: a linear layer is cut by 'column' or 'row', over a mesh.")
    made = MeshCut(kind, *axis_of(mesh, axis))
    if reason := made.why_not_weight(weight):
        raise FormatError(f"a weight of shape {tuple(weight.shape)} cannot be cut by {kind}: {reason}.")
    return made


def _torch_device(platform: str) -> str:
    """The type of torch device for which layouts of a platform are known. Raises `FormatError` if none are."""
    if platform not in _GPUS | {"cpu", "tpu"}:
        raise FormatError(f"platform={platform!r}: weights are packed for 'cpu', 'gpu' or 'tpu'.")
    return "cuda" if platform in _GPUS else platform


def array_of(tensor: Tensor) -> jax.Array:
    """The values of a tensor on JAX's first device; on CPUs in the tensor's own memory. 64-bit numbers get 32 bits.

    Raises `OverflowError` for integers that do not fit.
    """
    narrow = tensor.detach().float() if tensor.dtype == torch.float64 else tensor
    made: jax.Array = jax.device_put(crossing.array_of(narrow), jax.devices()[0])
    return made
