"""`QuantizedConv2d`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..contracts import Conv2dRequest
from ..contracts.conv2d import as_pair, laid_out_like
from ..errors import FormatError
from ..resolving.binding import WeightStore
from ..weights.qtensor import QTensor
from ..weights.quantizers import quantize
from ..weights.schemes import Scheme
from .base import QuantizedModule, adopt

Pair = tuple[int, int]


class QuantizedConv2d(QuantizedModule):
    """A 2-D convolution with a quantized weight; stands in for `torch.nn.Conv2d`.

    ``x``: ``(B, in_channels, H, W)`` or ``(in_channels, H, W)``; the result has its memory format. Kernels work on
    channels_last, so an x in it saves a copy of x and one of the result. The weight is a `QTensor` of shape
    ``(out_channels, KH*KW*in_channels/groups)``, columns in (KH, KW, IC) order.
    """

    def __init__(
        self,
        store: WeightStore,
        scheme: Scheme,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        in_channels: int,
        kernel_size: Pair,
        stride: Pair = (1, 1),
        padding: Pair = (0, 0),
        dilation: Pair = (1, 1),
        groups: int = 1,
        outer_padding: tuple[int, ...] = (),
        padding_mode: str = "zeros",
    ) -> None:
        self.in_channels, self.out_channels = in_channels, store.shape[0]
        self.kernel_size, self.stride, self.padding, self.dilation = kernel_size, stride, padding, dilation
        self.groups, self.padding_mode, self._outer_padding = groups, padding_mode, outer_padding
        expected = kernel_size[0] * kernel_size[1] * in_channels // max(groups, 1)
        if store.shape[1] != expected:
            raise FormatError(
                f"weight has shape {tuple(store.shape)}; this convolution needs KH*KW*IC/groups = {expected} columns."
            )
        super().__init__(store, scheme, bias, dtype)

    @classmethod
    def from_float(
        cls, module: nn.Conv2d, scheme: Scheme | str, *, name: str = "weight", moments: Tensor | None = None
    ) -> QuantizedConv2d:
        """Quantize a `torch.nn.Conv2d`, whatever its padding mode.

        ``moments``: for ``@gptq``, the sum of ``x x^T`` over the columns of `im2col`: ``(groups, K, K)``.
        """
        wanted = Scheme.parse(scheme)
        flat = module.weight.detach().permute(0, 2, 3, 1).reshape(module.out_channels, -1)
        weight = _quantize(flat, wanted, name, moments, module.groups)
        padding, outer = _paddings(module)
        made = cls(
            WeightStore(weight),
            wanted,
            module.bias,
            module.weight.dtype,
            in_channels=module.in_channels,
            kernel_size=_pair(module.kernel_size),
            stride=_pair(module.stride),
            padding=padding,
            dilation=_pair(module.dilation),
            groups=module.groups,
            outer_padding=outer,
            padding_mode=module.padding_mode,
        )
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
        return cls(
            WeightStore(weight),
            Scheme(weight.format) if scheme is None else Scheme.parse(scheme),
            bias,
            dtype or weight.dtype,
            in_channels=in_channels,
            kernel_size=as_pair("kernel_size", kernel_size),
            stride=as_pair("stride", stride),
            padding=as_pair("padding", padding),
            dilation=as_pair("dilation", dilation),
            groups=groups,
        )

    def _request(self, x_dtype: torch.dtype, training: bool) -> Conv2dRequest:
        scheme, out = self.scheme, self._out_dtype(x_dtype)
        geometry = (self.kernel_size, self.stride, self.padding, self.dilation, self.groups)
        return Conv2dRequest(
            self._store.device, x_dtype, out, self.in_channels, self.out_channels, *geometry,
            scheme.weight, scheme.activation, scheme.output, self.bias is not None, training,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer. Raises `FormatError` where x does not have ``in_channels`` channels."""
        self._check(x)
        if x.dim() == 3:
            return self._convolve(x.unsqueeze(0)).squeeze(0)
        return self._convolve(x)

    def _check_shape(self, x: Tensor) -> None:
        channels = self.in_channels
        if x.dim() not in (3, 4) or x.shape[-3] != channels:
            raise FormatError(f"x has shape {tuple(x.shape)}; it must be (B, {channels}, H, W) or ({channels}, H, W).")

    def _convolve(self, x: Tensor) -> Tensor:
        if self._outer_padding:
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x = nn.functional.pad(x, self._outer_padding, mode=mode)
        return laid_out_like(self._run_checked(x), x)

    def extra_repr(self) -> str:
        """The line that ``print(model)`` shows."""
        bound_kernel = "not bound" if self._primary is None else self._primary.name
        shape = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        shape += f", padding={self.padding}, dilation={self.dilation}, groups={self.groups}"
        return f"{shape}, scheme={self.scheme}, kernel={bound_kernel}"


def im2col(module: nn.Conv2d, x: Tensor) -> Tensor:
    """What each group of output channels multiplies: ``(groups, positions, KH*KW*IC/groups)`` from x ``(B, IC, H, W)``.

    Columns in (KH, KW, IC) order, as in the quantized weight; padded as the layer pads.
    """
    padding, outer = _paddings(module)
    if outer:
        x = nn.functional.pad(x, outer, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
    (h, w), groups = _pair(module.kernel_size), module.groups
    columns: Tensor = nn.functional.unfold(x, (h, w), _pair(module.dilation), padding, _pair(module.stride))
    # unfold gives (B, IC*KH*KW, positions).
    split = columns.view(len(x), groups, module.in_channels // groups, h * w, -1).permute(1, 0, 4, 3, 2)
    return split.reshape(groups, -1, h * w * module.in_channels // groups)


def _quantize(flat: Tensor, scheme: Scheme, name: str, moments: Tensor | None, groups: int) -> QTensor:
    """Quantize the flat weight; under moments each group of output channels by its own."""
    if moments is None:
        return quantize(flat, scheme.weight, scheme.quantizer, name=name)
    if moments.dim() != 3 or len(moments) != groups:
        raise FormatError(f"moments for {name} have shape {tuple(moments.shape)}; a convolution's are (groups, K, K).")
    pairs = zip(flat.chunk(groups), moments, strict=True)
    parts = [quantize(rows, scheme.weight, scheme.quantizer, moments=own, name=name) for rows, own in pairs]
    return parts[0] if len(parts) == 1 else QTensor.cat(parts, 0)


def _pair(value: int | tuple[int, ...]) -> Pair:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _paddings(module: nn.Conv2d) -> tuple[Pair, tuple[int, ...]]:
    """What the contract pads (zeros, both sides alike) and what must be padded before it."""
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return _pair(module.padding), ()
    if module.padding == "valid":
        return (0, 0), ()
    left, right, top, bottom = module._reversed_padding_repeated_twice  # noqa: SLF001
    if module.padding_mode == "zeros" and (left, top) == (right, bottom):
        return (top, left), ()
    return (0, 0), (left, right, top, bottom)
