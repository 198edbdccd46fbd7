"""Check a layout: codes survive a round trip bit for bit on every device, and shapes are right on ``meta``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import FormatError
from ..formats import BrokenLayoutError, Format, Layout, ZeroPoint, layout_origin, registered_layouts
from ..resolving.verification import same_bits

_SIZES = ((1, 1), (3, 5), (2, 8), (20, 77), (16, 168), (32, 256), (0, 8), (4, 0))


def layouts_of(plugin: str) -> dict[str, Layout]:
    """Return the layouts to check for a plugin: its own, and those registered without a plugin's name."""
    return {name: layout for name, (layout, owner) in registered_layouts().items() if owner in ("", plugin)}


def layout_fault(layout: Layout, device: torch.device) -> str:
    """Return the defect of a layout, or an empty string."""
    try:
        fault = next((found for dtype in layout.dtypes for found in _faults(layout, dtype, device)), "")
    except BrokenLayoutError as broken:
        return str(broken).partition("\n")[0]
    except FormatError as error:
        fault = f"raised FormatError: {error}"
    return f"layout {layout.name!r} of {layout_origin(layout)} {fault}" if fault else ""


def _faults(layout: Layout, dtype: str, device: torch.device) -> Iterator[str]:
    fmt, generator, held = Format(dtype, layout=layout), torch.Generator().manual_seed(5), 0
    for n, k in _SIZES:
        low, high = fmt.code_range
        codes = torch.randint(low, high + 1, (n, k), generator=generator).to(fmt.element.code_dtype)
        try:
            data = fmt.codec.encode(codes.clone())
        except BrokenLayoutError:
            raise
        except FormatError:  # a layout may support some sizes only
            continue
        held += 1
        yield from _size_faults(fmt, codes, data, device)
    yield from _zero_faults(fmt, generator)
    if not held:
        yield f"supports {dtype} codes of none of these sizes: {', '.join(f'{n} x {k}' for n, k in _SIZES)}"


def _size_faults(fmt: Format, codes: Tensor, data: Tensor, device: torch.device) -> Iterator[str]:
    (n, k), codec, what = codes.shape, fmt.codec, f"{fmt.dtype} codes {tuple(codes.shape)}"
    given, kept = codes.clone(), data.clone()
    again = codec.encode(given)
    codec.decode(data, k)
    codec.check(data, n, k)
    if not same_bits(given, codes) or not same_bits(data, kept):
        yield f"changes its input in place for {what}"
    if not same_bits(again, data):
        yield f"encodes {what} differently the second time"
    if device.type != "meta" and not same_bits(codec.decode(codec.encode(codes.to(device)), k).cpu(), codes):
        yield f"loses {what} on {device}"
    yield from _shape_faults(codec, codes, data, what)


def _shape_faults(codec: Layout, codes: Tensor, data: Tensor, what: str) -> Iterator[str]:
    n, k = codes.shape
    fake = codec.encode(codes.to("meta"))
    if (fake.dtype, fake.shape) != (data.dtype, data.shape) or codec.decode(fake, k).shape != codes.shape:
        yield f"returns another dtype or shape for {what} on meta"
    wrong = {"another dtype": (data.double(), n), "a missing row": (data[1:], n), "another N": (data, n + 1)}
    for name, (other, rows) in wrong.items():
        if (n or name != "a missing row") and not _refuses(codec, other, rows, k):
            yield f"lets data with {name} pass its check for {what}"


def _refuses(codec: Layout, data: Tensor, n: int, k: int) -> bool:
    try:
        codec.check(data, n, k)
    except BrokenLayoutError:
        raise
    except FormatError:
        return True
    return False


def _zero_faults(fmt: Format, generator: torch.Generator) -> Iterator[str]:
    if not fmt.element.is_integer:
        return
    low, high = fmt.code_range
    zero = torch.randint(low, high + 1, (3, 7), generator=generator).to(torch.int8)
    codec = Format(fmt.dtype, 4, ZeroPoint.INT, fmt.layout).codec
    stored = codec.encode_zero(zero.clone())
    if stored.dtype != torch.int8 or stored.shape != zero.shape:
        yield f"stores zero points of {fmt.dtype} as {stored.dtype} {tuple(stored.shape)}, not as int8 (G, N)"
