"""`QuantizedConv2d`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..contracts import Conv2dRequest
from ..contracts.conv2d import as_pair, laid_out_like
from ..errors import FormatError
from ..functional.checks import check_module
from ..resolving.binding import WeightStore
from ..weights.qtensor import QTensor
from ..weights.quantizers import quantize
from ..weights.schemes import Scheme
from .base import QuantizedModule, adopt
from .geometry import Geometry, Pair, pad


class QuantizedConv2d(QuantizedModule):
    """A 2-D convolution with a quantized weight; replaces `torch.nn.Conv2d`.

    ``x``: ``(B, in_channels, H, W)`` or ``(in_channels, H, W)``; the result has x's memory format. Kernels work in
    channels_last: an x in that format saves a copy of x and of the result. The weight is a `QTensor` of shape
    ``(out_channels, KH*KW*in_channels/groups)``, columns in (KH, KW, IC) order.
    """

    def __init__(
        self,
        store: WeightStore,
        scheme: Scheme,
        bias: Tensor | None,
        dtype: torch.dtype,
        geometry: Geometry,
    ) -> None:
        # Plain attributes, with the names of torch.nn.Conv2d.
        self.in_channels, self.out_channels = geometry.in_channels, store.shape[0]
        self.kernel_size, self.stride = geometry.kernel_size, geometry.stride
        self.padding, self.dilation, self.groups = geometry.padding, geometry.dilation, geometry.groups
        self.padding_mode, self._outer_padding = geometry.padding_mode, geometry.outer_padding
        if store.shape[1] != geometry.columns:
            needed = f"KH*KW*IC/groups = {geometry.columns} columns"
            raise FormatError(f"weight has shape {tuple(store.shape)}; this convolution needs {needed}.")
        super().__init__(store, scheme, bias, dtype)

    @classmethod
    def from_float(
        cls, module: nn.Conv2d, scheme: Scheme | str, *, name: str = "weight", moments: Tensor | None = None
    ) -> QuantizedConv2d:
        """Quantize a `torch.nn.Conv2d` with any padding mode.

        ``moments``: for ``@gptq`` and ``@awq``, the sum of ``x x^T`` over the columns of `im2col`, ``(groups, K, K)``.
        Raises `FormatError` for NaN or Inf in the weight, naming ``name``.
        """
        check_module(module, "from_float")
        wanted = Scheme.parse(scheme)
        flat = module.weight.detach().permute(0, 2, 3, 1).reshape(module.out_channels, -1)
        weight = _quantize(flat, wanted, name, moments, module.groups)
        made = cls(WeightStore(weight), wanted, module.bias, module.weight.dtype, Geometry.of(module))
        adopt(made, module)
        return made

    @classmethod
    def from_qtensor(
        cls,
        weight: QTensor,
        bias: Tensor | None = None,
        scheme: Scheme | str | None = None,
        *,
        in_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        dtype: torch.dtype | None = None,
    ) -> QuantizedConv2d:
        """Wrap a quantized weight ``(OC, KH*KW*IC/groups)``, columns in (KH, KW, IC) order."""
        geometry = Geometry(
            in_channels=in_channels,
            kernel_size=as_pair("kernel_size", kernel_size),
            stride=as_pair("stride", stride),
            padding=as_pair("padding", padding),
            dilation=as_pair("dilation", dilation),
            groups=groups,
        )
        wanted = Scheme(weight.format) if scheme is None else Scheme.parse(scheme)
        return cls(WeightStore(weight), wanted, bias, dtype or weight.dtype, geometry)

    @property
    def _geometry(self) -> Geometry:
        """Kernel size, stride, padding, dilation and groups of the convolution."""
        return Geometry(
            self.in_channels, self.kernel_size, self.stride, self.padding, self.dilation, self.groups,
            self._outer_padding, self.padding_mode,
        )  # fmt: skip

    def _request(self, x_dtype: torch.dtype, training: bool) -> Conv2dRequest:
        scheme, out = self.scheme, self._out_dtype(x_dtype)
        geometry = (self.kernel_size, self.stride, self.padding, self.dilation, self.groups)
        return Conv2dRequest(
            self._store.device, x_dtype, out, self.in_channels, self.out_channels, *geometry,
            scheme.weight, scheme.activation, scheme.output, self.bias is not None, training,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer. Raises `FormatError` if x does not have ``in_channels`` channels."""
        self._check(x)
        if x.dim() == 3:
            return self._convolve(x.unsqueeze(0)).squeeze(0)
        return self._convolve(x)

    def _check_shape(self, x: Tensor) -> None:
        channels = self.in_channels
        if x.dim() not in (3, 4) or x.shape[-3] != channels:
            raise FormatError(f"x has shape {tuple(x.shape)}; it must be (B, {channels}, H, W) or ({channels}, H, W).")

    def _convolve(self, x: Tensor) -> Tensor:
        x = pad(x, self._outer_padding, self.padding_mode)
        return laid_out_like(self._run_checked(x), x)

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        bound_kernel = "not bound" if self._primary is None else self._primary.name
        shape = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        shape += f", padding={self.padding}, dilation={self.dilation}, groups={self.groups}"
        return f"{shape}, scheme={self.scheme}, kernel={bound_kernel}"


def im2col(module: nn.Conv2d, x: Tensor) -> Tensor:
    """Unfold x ``(B, IC, H, W)`` to the columns of each group, ``(groups, positions, KH*KW*IC/groups)``.

    Columns are in (KH, KW, IC) order, as in the quantized weight; x is padded as in the layer.
    """
    geometry = Geometry.of(module)
    x, groups = pad(x, geometry.outer_padding, geometry.padding_mode), geometry.groups
    window = (geometry.kernel_size, geometry.dilation, geometry.padding, geometry.stride)
    columns: Tensor = nn.functional.unfold(x, *window)
    # unfold gives (B, IC*KH*KW, positions).
    h, w = geometry.kernel_size
    split = columns.view(len(x), groups, geometry.in_channels // groups, h * w, -1).permute(1, 0, 4, 3, 2)
    return split.reshape(groups, -1, geometry.columns)


def _quantize(flat: Tensor, scheme: Scheme, name: str, moments: Tensor | None, groups: int) -> QTensor:
    """Quantize the flat weight; with moments, each group of output channels by its own moments."""
    if moments is None:
        return quantize(flat, scheme.weight, scheme.quantizer, name=name)
    if moments.dim() != 3 or len(moments) != groups:
        raise FormatError(f"moments for {name} have shape {tuple(moments.shape)}; a convolution's are (groups, K, K).")
    pairs = zip(flat.chunk(groups), moments, strict=True)
    parts = [quantize(rows, scheme.weight, scheme.quantizer, moments=own, name=name) for rows, own in pairs]
    return parts[0] if len(parts) == 1 else QTensor.cat(parts, 0)
