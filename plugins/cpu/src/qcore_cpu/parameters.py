"""Parts of a weight in forms that the library reads, for every layout: codes, scales, zero points, tables, bias."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import Format, QTensor, ZeroPoint
from qcore.plugin_api import FLOATS, Element, Packed

from .kinds import Kind


def signed_codes(raw: Tensor, element: Element) -> Tensor:
    """Codes of an element from their bits, uint8, in the same memory: those of integers become int8."""
    if not element.is_integer:
        return raw
    return raw.bitwise_xor_(8).view(torch.int8).sub_(8) if element.container_bits == 4 else raw.view(torch.int8)


def readable_scale(scale: Tensor) -> Tensor:
    """Scales in a dtype that the library reads: float16 holds every e4m3 number."""
    return scale.to(torch.float16) if scale.dtype == torch.float8_e4m3fn else scale


def original_scale(scale: Tensor, format: Format) -> Tensor:
    """Scales as the format has them, from readable ones."""
    return scale.to(torch.float8_e4m3fn) if format.scale.has_global else scale


def constants_of(weight: QTensor, kind: Kind) -> dict[str, Tensor]:
    """``table``, float32 of 16 or 256 numbers, and ``global_scale``, float32 ``(1,)``, if the format has them."""
    constants = {}
    if not weight.format.element.is_integer:
        values = weight.format.element.lookup(torch.device("cpu"), torch.float32)
        constants["table"] = pad(values, (0, (1 << kind.bits) - values.numel()))
    if weight.global_scale is not None:
        constants["global_scale"] = weight.global_scale.float().reshape(1)
    return constants


def global_scale_of(packed: Packed) -> Tensor | None:
    """The global scale of a `QTensor`, a 0-dim tensor."""
    factor = packed.get("global_scale")
    return None if factor is None else factor.reshape(())


def integer_and_float_zeros(packed: Packed, format: Format) -> tuple[Tensor | None, Tensor | None]:
    """``zero`` and ``added`` of the library's ops."""
    zero = packed.get("zero")
    return (None, zero) if format.zero is ZeroPoint.FLOAT else (zero, None)


def readable_bias(bias: Tensor | None) -> Tensor | None:
    """Bias ``(N,)`` in a dtype that the library reads, contiguous."""
    if bias is None:
        return None
    return (bias if bias.dtype in FLOATS else bias.float()).contiguous()
