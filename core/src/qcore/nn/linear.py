"""`QuantizedLinear`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..contracts import LinearRequest
from ..errors import FormatError
from ..formats.tracing import is_transformed
from ..functional.checks import check_last_dimension, check_module
from ..resolving.binding import Bound, WeightStore
from ..weights.qtensor import QTensor
from ..weights.quantizers import quantize
from ..weights.schemes import Scheme
from .base import FLOATS, QuantizedModule, adopt
from .capturing import captured_linear

# The public function checks one device, by name, and takes four times as long.
_any_autocast = torch._C._is_any_autocast_enabled  # noqa: SLF001


class QuantizedLinear(QuantizedModule):
    """``y = A(x) @ W^T + bias`` with a quantized weight; replaces `torch.nn.Linear`.

    ``x``: ``(..., in_features)`` of any float dtype; ``y``: ``(..., out_features)`` of x's dtype (int8 codes for a
    scheme with ``-o8``). Create a layer with `from_float` or `from_qtensor`.
    """

    is_transposed = False
    """Whether the float layer is transformers' Conv1D, whose weight is (K, N)."""

    def __init__(self, store: WeightStore, scheme: Scheme, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = store.shape
        super().__init__(store, scheme, bias, dtype)

    @classmethod
    def from_float(
        cls, module: nn.Linear, scheme: Scheme | str, *, name: str = "weight", moments: Tensor | None = None
    ) -> QuantizedLinear:
        """Quantize a `torch.nn.Linear`.

        ``moments``: for ``@gptq`` and ``@awq``, the sum of ``x x^T`` over inputs x, ``(in_features, in_features)``.
        Raises `FormatError` for NaN or Inf in the weight, naming ``name``.
        """
        check_module(module, "from_float")
        wanted = Scheme.parse(scheme)
        weight = quantize(module.weight, wanted.weight, wanted.quantizer, moments=moments, name=name)
        made = cls(WeightStore(weight), wanted, module.bias, module.weight.dtype)
        adopt(made, module)
        return made

    @classmethod
    def from_qtensor(
        cls,
        weight: QTensor,
        bias: Tensor | None = None,
        scheme: Scheme | str | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> QuantizedLinear:
        """Wrap a quantized weight ``(N, K)``.

        ``scheme``: supplies activation and output; default float activations. ``dtype``: compute dtype, default the
        scale's dtype. Raises `FormatError` for a bias of another shape.
        """
        wanted = Scheme(weight.format) if scheme is None else Scheme.parse(scheme)
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise FormatError(f"bias has shape {tuple(bias.shape)}; this weight needs ({weight.shape[0]},).")
        return cls(WeightStore(weight), wanted, bias, dtype or weight.dtype)

    def _request(self, x_dtype: torch.dtype, training: bool) -> LinearRequest:
        scheme, out = self.scheme, self._out_dtype(x_dtype)
        sizes = (self.out_features, self.in_features, None)
        return LinearRequest(
            self._store.device, x_dtype, out, *sizes, scheme.weight, scheme.activation, scheme.output,
            self.bias is not None, training,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer. Raises `FormatError` if the last dimension of x is not ``in_features``."""
        # is_compiling() comes first: dynamo guards on every value that a trace reads, and recompiles if it changes.
        if torch.compiler.is_compiling():
            y = captured_linear(self, x)
            return self._run(x) if y is None else y
        bias = self._parameters.get("bias")
        bound = self._fast_bound(x, bias)
        return self._run(x) if bound is None else bound.call(x, bias)

    def _fast_bound(self, x: Tensor, bias: Tensor | None) -> Bound | None:
        """Return the kernel if x and bias need no other check: dense, of the layer's own dtype, device and sizes.

        Called for every forward, because the bias and its ``data`` can be replaced at any time.
        """
        device = self._store.device
        if (
            type(x) is not Tensor
            or (bound := self._primary) is None
            or not bound.proven
            or (self._store.watch.handed and self._store.watch.is_changed())
            or not self._has_own_buffers()
            or x.dtype is not self._dtype
            or x.dtype is not bound.x_dtype
            or x.device != device
            or x.layout is not torch.strided
            or x.is_nested
            or not x.dim()
            or x.shape[-1] != self.in_features
            or is_transformed()
            or (torch.is_grad_enabled() and self._needs_grad(x))
            or _any_autocast()
        ):
            return None
        fits = bias is None or (
            bias.shape == self._bias_shape
            and bias.dtype in FLOATS
            and bias.device == device
            and bias.layout is torch.strided
        )
        return bound if fits else None

    def _check_shape(self, x: Tensor) -> None:
        check_last_dimension(x, self.in_features, "in_features")

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        bound_kernel = "not bound" if self._primary is None else self._primary.name
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, scheme={self.scheme}, kernel={bound_kernel}"
