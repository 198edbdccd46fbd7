"""Decodes tables quickly with torch ops, whose own float8 conversion and lookups handle one code at a time."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..formats import Element

_E4M3, _E5M2 = "fp8", "fp8_e5m2"


def has_fast_values(element: Element) -> bool:
    """Whether `fp8_values` decodes the element."""
    return element.name in (_E4M3, _E5M2)


def fp8_values(codes: Tensor, element: Element) -> Tensor:
    """Decode valid fp8 codes, uint8 of any shape, to exact float32 values. Codes of NaN and Inf give other numbers.

    The bits of e5m2 are the upper half of a float16. Those of e4m3, moved to the same positions, give the float16 whose
    exponent is 8 too small (the biases are 7 and 15), subnormal numbers included.
    """
    bits = codes.to(torch.int16).bitwise_left_shift_(8)
    if element.name == _E5M2:
        return bits.view(torch.float16).float()
    # An arithmetic shift keeps the sign bit and copies it to the bits below, which are then cleared.
    bits = bits.bitwise_right_shift_(1).bitwise_and_(~0x4000)
    return bits.view(torch.float16).float().mul_(2.0**8)


def pair_values(data: Tensor, element: Element) -> Tensor:
    """Decode packed nibbles, uint8 ``(rows, K/2)``, to float32 ``(rows, K)``, with one lookup for two codes."""
    pairs = _pair_table(element, data.device).index_select(0, data.reshape(-1).long())
    return pairs.view(torch.float32).view(data.shape[0], 2 * data.shape[1])


@lru_cache(maxsize=64)
def _pair_table(element: Element, device: torch.device) -> Tensor:
    """The two float32 values of each byte, as one int64; ``(256,)``."""
    single = torch.zeros(1 << 4)
    values = torch.tensor(element.values, dtype=torch.float32)
    single[: len(values)] = values
    byte = torch.arange(256)
    pairs = torch.stack((single[byte & 15], single[byte >> 4]), dim=-1)
    return pairs.contiguous().view(torch.int64).view(256).to(device)
