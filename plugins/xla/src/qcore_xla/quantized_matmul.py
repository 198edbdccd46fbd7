"""The API of torch_xla's quantized ops: ``torch.ops.xla.quantized_matmul`` and `XlaQuantizedLinear`, on any device.

torch_xla's own op is never replaced: ours is defined only if torch_xla is not installed. The module calls
``torch.ops.qcore.quantized_matmul``, with the same arguments. It supports every row of torch_xla's table, even those
that torch_xla does not support (blockwise weights with int8 activations, int4 on XLA:CPU).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from qcore import FormatError, QTensor, ZeroPoint

_SCHEMA = (
    "quantized_matmul(Tensor x, Tensor w, Tensor scale, Tensor? zero_point=None, int? block_size=-1, "
    "bool? int4_weight=False, bool? quantize_activation=False) -> Tensor"
)
_library: Any = None
"""Holds our definition of the op; None if torch_xla or another package defines it."""


def _quantized_matmul(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    block_size: int | None = -1,
    int4_weight: bool | None = False,
    quantize_activation: bool | None = False,
) -> Tensor:
    """``xla::quantized_matmul``: see ``torch.ops.qcore.quantized_matmul``."""
    size = -1 if block_size is None else block_size
    flags = (bool(int4_weight), bool(quantize_activation))
    result: Tensor = torch.ops.qcore.quantized_matmul(x, w, scale, zero_point, size, *flags)
    return result


def define_op() -> bool:
    """Define ``torch.ops.xla.quantized_matmul`` unless another package does; returns whether it is ours."""
    global _library  # noqa: PLW0603 - a definition lives as long as the process, like the op
    if _library is None and find_spec("torch_xla") is None and not hasattr(torch.ops.xla, "quantized_matmul"):
        _library = torch.library.Library("xla", "FRAGMENT")  # type: ignore[no-untyped-call]
        _library.define(_SCHEMA)
        # Composite: shapes, dtypes and devices are those of the op that it calls.
        _library.impl("quantized_matmul", _quantized_matmul, "CompositeImplicitAutograd")
    return _library is not None


define_op()

XlaWeight = tuple[Tensor, Tensor, Tensor | None]
"""Weight, scaler and zero point (multiplied by the scale) as ``quantized_matmul`` takes them."""


def xla_weight(weight: QTensor) -> XlaWeight:
    """A `QTensor` ``(N, K)`` as ``quantized_matmul`` takes it; its group size must divide K.

    Per channel: codes int8 ``(N, K)``, scaler ``(N,)``. Blockwise: codes int8 ``(K/bs, bs, N)``, scaler ``(K/bs, N)``.
    The zero point has the scaler's shape, is multiplied by it, and is subtracted.
    """
    n, k = weight.shape
    size, codes, scale = weight.format.group_size, weight.codes(), weight.scale
    zero = _subtracted(weight)
    if size is None:
        return codes, scale.view(n), None if zero is None else zero.view(n)
    if k % size:
        raise FormatError(f"group size {size} does not divide K = {k}; quantized_matmul needs one that does.")
    return codes.view(n, k // size, size).permute(1, 2, 0).contiguous(), scale, zero


def _subtracted(weight: QTensor) -> Tensor | None:
    if weight.format.zero is ZeroPoint.INT:
        zero = weight.integer_zero()
        assert zero is not None  # the format says that there is one
        # In float32: a product rounded to bfloat16 would move every weight of the group.
        return zero.float() * weight.scale.float()
    return None if weight.zero is None else -weight.zero


class XlaQuantizedLinear(nn.Module):
    """A linear layer on a weight as ``quantized_matmul`` takes it; the name and arguments are torch_xla's.

    **Arguments:** ``input_dim``, ``output_dim``: K and N; ``is_symmetric``: there is no zero point; ``block_size``:
    columns that share a scale, -1 per channel; ``int4_weight``: codes in -8..7 (still in int8 tensors);
    ``quantize_activation``: x to int8 per token. Fill it with `load_quantized_weight` or ``load_state_dict``.
    """

    weight: Tensor
    weight_scaler: Tensor
    zero_point: Tensor | None

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        is_symmetric: bool = False,
        block_size: int = -1,
        int4_weight: bool = False,
        quantize_activation: bool = False,
    ) -> None:
        super().__init__()
        if block_size != -1 and (block_size < 1 or input_dim % block_size):
            raise FormatError(f"block_size {block_size} must divide input_dim = {input_dim}, or be -1 (per channel).")
        self.input_dim, self.output_dim, self.is_symmetric = input_dim, output_dim, is_symmetric
        self.block_size, self.int4_weight, self.quantize_activation = block_size, int4_weight, quantize_activation
        codes, scales = self._shapes()
        self.register_buffer("weight", torch.zeros(codes, dtype=torch.int8))
        self.register_buffer("weight_scaler", torch.zeros(scales))
        self.register_buffer("zero_point", None if is_symmetric else torch.zeros(scales))

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the codes, and of the scaler and zero point."""
        n, k, size = self.output_dim, self.input_dim, self.block_size
        return ((n, k), (n,)) if size == -1 else ((k // size, size, n), (k // size, n))

    def load_quantized_weight(
        self,
        weight: Tensor | QTensor | tuple[Tensor | None, ...],
        weight_scaler: Tensor | None = None,
        zero_point: Tensor | None = None,
    ) -> None:
        """Load a weight: its tensors one by one, as one tuple of two or three, or a `QTensor`.

        Per channel: ``weight`` int8 ``(N, K)``, ``weight_scaler`` and ``zero_point`` ``(N,)``; blockwise: int8
        ``(K/bs, bs, N)`` and ``(K/bs, N)``. ``zero_point`` is multiplied by the scale. Raises `FormatError` if
        shapes or the dtype do not fit.
        """
        if isinstance(weight, QTensor):
            weight = self._of(weight)
        parts = (weight, weight_scaler, zero_point) if isinstance(weight, Tensor) else (*weight, None, None)[:3]
        self._check(*parts)
        self.weight, self.weight_scaler, self.zero_point = parts  # type: ignore[assignment] # _check has tested them

    def _of(self, weight: QTensor) -> XlaWeight:
        fmt, bits = weight.format, 4 if self.int4_weight else 8
        if (fmt.group_size or -1) != self.block_size or fmt.bits != bits:
            raise FormatError(
                f"the weight is {fmt}, but this layer was made for int{bits} with block_size={self.block_size}.\n"
                f"Create the layer with block_size={fmt.group_size or -1}, int4_weight={fmt.bits == 4}."
            )
        return xla_weight(weight)

    def _check(self, weight: Tensor | None, scaler: Tensor | None, zero_point: Tensor | None) -> None:
        codes, scales = self._shapes()
        if weight is None or scaler is None:
            raise FormatError("load_quantized_weight needs a weight and its scaler.")
        if weight.dtype != torch.int8 or weight.shape != codes:
            form = f"dtype {weight.dtype}, shape {tuple(weight.shape)}"
            raise FormatError(f"weight has {form}; this layer needs int8 {codes}; int4 codes are stored as int8.")
        for name, value in (("weight_scaler", scaler), ("zero_point", zero_point)):
            if value is not None and value.shape != scales:
                raise FormatError(f"{name} has shape {tuple(value.shape)}; this layer needs {scales}.")
        if zero_point is not None and self.is_symmetric:
            raise FormatError("zero_point was given to a layer made with is_symmetric=True; omit one of the two.")

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``(..., K)`` to ``(..., N)`` in x's dtype."""
        constants = (self.block_size, self.int4_weight, self.quantize_activation)
        result: Tensor = torch.ops.qcore.quantized_matmul(
            x, self.weight, self.weight_scaler, self.zero_point, *constants
        )
        return result

    def extra_repr(self) -> str:
        """The sizes and flags of the layer, for ``print(model)``."""
        block = "per channel" if self.block_size == -1 else f"block_size={self.block_size}"
        kind = f"w{4 if self.int4_weight else 8}a{8 if self.quantize_activation else 16}"
        return f"{self.input_dim}, {self.output_dim}, {kind}, {block}"
