"""`PackedWeight`: a quantized weight as a pytree of packed arrays, and `pack`, which makes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch import Tensor

from qcore import FormatError, QTensor, Scheme

from ..graphs.quantized import Layer, why_not_scheme

_GPUS = {"gpu", "cuda", "rocm"}


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight, packed for products or, for a table, for lookups, on one kind of device.

    A pytree: its leaves are the arrays, everything else is static under `jax.jit`. So it can be an argument of jitted
    functions, be donated, placed with `jax.device_put`, or be stacked with others of its shape and scheme for `jax.vmap`
    or `jax.lax.scan`.

    **Fields:** ``arrays``: by name (``data``: the codes, ``scale``, and ``zero``, ``sums`` and ``order`` if there are
    any); ``layer``: shape, scheme and layout.
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

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in self.arrays.items() if hasattr(array, "shape"))
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
    weight: QTensor, scheme: str | Scheme | None = None, *, table: bool = False, groups: int = 1, platform: str = ""
) -> PackedWeight:
    """Pack a `qcore.QTensor` for `qcore_xla.linear` and the other functions.

    **Arguments:** ``weight``: ``(N, K)`` or ``(E, N, K)``; ``scheme``: with the activation that x gets, by default
    weight-only; ``table``: for `qcore_xla.embedding`; ``groups``: channel groups of a convolution; ``platform``: ``"cpu"``,
    ``"gpu"`` or ``"tpu"`` to run on, by default that of ``jax.devices()[0]``, to which the arrays go.

    Raises `FormatError` for a scheme that is not supported, or that is not one of the weight's format.
    """
    chosen = Scheme(weight.format) if scheme is None else Scheme.parse(str(scheme))
    if chosen.weight != weight.format:
        raise FormatError(f"the scheme {chosen} has weights in {chosen.weight}, but this one is in {weight.format}.")
    if reason := why_not_scheme(str(chosen)):
        raise FormatError(reason)
    if any(getattr(part, "per_token", False) for part in (chosen.activation, chosen.output)):
        raise FormatError(f"{chosen}: parameters per token are not supported here; use a dynamic or a static scheme.")
    experts = weight.shape[0] if weight.dim() == 3 else 0
    kind = "embedding" if table else "grouped_linear" if experts else "conv2d" if groups > 1 else "linear"
    n, k = weight.shape[-2:]
    target = _torch_device(platform or jax.devices()[0].platform)
    layer = Layer(kind, n, k, chosen, groups, experts, target)
    return PackedWeight({name: array_of(part) for name, part in layer.pack(weight).items()}, layer)


def _torch_device(platform: str) -> str:
    """The type of torch device for which layouts of a platform are known."""
    return "cuda" if platform in _GPUS else platform


def array_of(tensor: Tensor) -> jax.Array:
    """The values of a tensor on JAX's first device; on CPUs in the tensor's own memory. 64-bit numbers get 32 bits."""
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32}.get(tensor.dtype, tensor.dtype)
    here = jax.dlpack.from_dlpack(tensor.detach().to(narrow).contiguous())
    made: jax.Array = jax.device_put(here, jax.devices()[0])
    return made
