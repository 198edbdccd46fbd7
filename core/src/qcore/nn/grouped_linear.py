"""`QuantizedGroupedLinear`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contracts import GroupedLinearRequest
from ..contracts.grouped import is_for_experts
from ..errors import FormatError, UnsupportedError
from ..functional.checks import check_grouped
from ..resolving.binding import WeightStore
from ..weights.qtensor import QTensor
from ..weights.quantizers import quantize
from ..weights.schemes import Scheme
from .base import QuantizedModule


class QuantizedGroupedLinear(QuantizedModule):
    """E linear layers ``(N, K)``, each applied to its own rows: ``y[i] = A(x[i]) @ W[e]^T + bias[e]``.

    ``x``: ``(T, K)`` of any float dtype, rows sorted by expert; ``offsets``: int32 ``(E,)``, the end of each expert's
    rows; ``y``: ``(T, N)`` of x's dtype. Make one with `from_float` or `from_qtensor`.
    """

    def __init__(self, store: WeightStore, scheme: Scheme, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.num_experts, self.out_features, self.in_features = store.shape
        if not is_for_experts(scheme):
            raise UnsupportedError(f"scheme {str(scheme)!r} is not supported for experts: they return floats.")
        super().__init__(store, scheme, bias, dtype)
        self._bias_shape = torch.Size(store.shape[:2])

    @classmethod
    def from_float(
        cls, weight: Tensor, scheme: Scheme | str, *, bias: Tensor | None = None, name: str = "weight"
    ) -> QuantizedGroupedLinear:
        """Quantize a dense weight ``(E, N, K)``, expert by expert; ``bias``: ``(E, N)``.

        Raises `FormatError` for NaN or Inf in the weight, naming ``name``, and `UnsupportedError` for a quantizer that
        needs inputs of each expert.
        """
        wanted = Scheme.parse(scheme)
        if wanted.needs_moments:
            raise UnsupportedError(
                f"quantizer {wanted.quantizer!r} needs the inputs of each expert, which are not collected.\n"
                f"Use another one for experts, such as {{'*.experts': '{Scheme(wanted.weight)}', '*': '{wanted}'}}."
            )
        if weight.dim() != 3:
            raise FormatError(f"{name} has shape {tuple(weight.shape)}; experts have weights (E, N, K).")
        return cls(WeightStore(quantize_experts(weight, wanted, name)), wanted, bias, weight.dtype)

    @classmethod
    def from_qtensor(
        cls,
        weight: QTensor,
        bias: Tensor | None = None,
        scheme: Scheme | str | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> QuantizedGroupedLinear:
        """Wrap a quantized weight ``(E, N, K)``; arguments as in `QuantizedLinear.from_qtensor`."""
        if weight.dim() != 3:
            raise FormatError(f"weight has shape {tuple(weight.shape)}; experts have weights (E, N, K).")
        wanted = Scheme(weight.format) if scheme is None else Scheme.parse(scheme)
        if bias is not None and tuple(bias.shape) != tuple(weight.shape[:2]):
            raise FormatError(f"bias has shape {tuple(bias.shape)}; this weight needs {tuple(weight.shape[:2])}.")
        return cls(WeightStore(weight), wanted, bias, dtype or weight.dtype)

    def _request(self, x_dtype: torch.dtype, training: bool) -> GroupedLinearRequest:
        sizes = (self.num_experts, self.out_features, self.in_features)
        scheme, out = self.scheme, self._out_dtype(x_dtype)
        has_bias, device = self.bias is not None, self._store.device
        return GroupedLinearRequest(device, x_dtype, out, *sizes, scheme.weight, scheme.activation, has_bias, training)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Apply each expert to its rows. Raises `FormatError` for other shapes, and for ends that are not sorted."""
        if not torch.compiler.is_compiling():
            check_grouped(x, offsets, self.bias, self.weight)
        return self._run_checked(x, offsets=offsets)

    def extra_repr(self) -> str:
        """The line that ``print(model)`` shows."""
        bound = "not bound" if self._primary is None else self._primary.name
        sizes = f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, scheme={self.scheme}, kernel={bound}"


def quantize_experts(weight: Tensor, scheme: Scheme, name: str, *, scale_dtype: torch.dtype | None = None) -> QTensor:
    """Quantize a dense weight ``(E, N, K)``, expert by expert. Raises `FormatError` for NaN or Inf, naming ``name``."""
    made = [
        quantize(w, scheme.weight, scheme.quantizer, scale_dtype=scale_dtype, name=f"{name}[{e}]")
        for e, w in enumerate(weight)
    ]
    return QTensor.stack(made)
