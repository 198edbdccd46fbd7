"""Packed weights: the bytes that ``native/problem.h`` describes, and back, bit for bit."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

import qcore
from qcore_cpu import native

assert not native.fault()

from qcore_cpu import ops  # noqa: E402 - the ops exist once the library is loaded
from qcore_cpu.geometry import Geometry  # noqa: E402
from qcore_cpu.layout import WeightLayout  # noqa: E402

KS = (1, 3, 7, 8, 15, 31, 32, 33, 77, 128, 129, 168, 200, 300, 576, 1000, 4096, 4100)


def column_of(at, packed):
    wide = at.blocks * at.block
    group, inside = divmod(packed, wide)
    column = group * at.group + inside
    return column if inside < at.group and column < at.k else None


@pytest.mark.parametrize("group", [None, 1, 5, 16, 32, 48, 100, 128, 192, 200])
def test_geometry_holds_each_column_once(group):
    for k in KS:
        at = Geometry.of(k, group or k)
        found = [c for c in (column_of(at, p) for p in range(at.packed)) if c is not None]
        assert found == list(range(k))
        assert at.block % 8 == 0
        assert at.block <= 128
        assert at.blocks * at.block % at.fold == 0


def _huge_bytes(tensor):
    """Bytes of huge pages in the mappings that hold a tensor; the system's own account of this process."""
    begin, end, inside, found = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, False, 0
    for line in Path("/proc/self/smaps").read_text("ascii").splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            inside = int(head[1], 16) < end and begin < int(head[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_large_weights_lie_in_huge_pages():
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    anonymous = mmap.mmap(-1, 4 << 20, flags=private)  # whether this system makes any, of memory that was written
    anonymous.write(bytes(4 << 20))
    try:
        anonymous.madvise(25)  # MADV_COLLAPSE
    except OSError as error:
        pytest.skip(f"no huge pages here: {error}")
    weight = qcore.quantize(torch.randn(4096, 4096), qcore.Format.parse("int8"))
    layout = WeightLayout(weight.format, 4096, 4096, sums=False)
    packed = native.settled(layout.pack(weight))
    assert _huge_bytes(packed["data"]) >= packed["data"].nbytes - (4 << 20)  # but the ends
    assert torch.equal(layout.unpack(packed).codes(), weight.codes())


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_are_those_of_the_description(bits):
    n, k, group = 35, 77, 32
    offset = 1 << (bits - 1)
    codes = torch.randint(-offset, offset, (n, k), dtype=torch.int8)
    packed = ops.pack(codes.view(torch.uint8), group, bits, offset)
    at, step = Geometry.of(k, group), 8 if bits == 4 else 4
    assert packed.shape == (2, at.packed // step, 128)
    for row in range(n):
        for p in range(at.packed):
            column = column_of(at, p)
            byte = int(packed[row // 32, p // step, row % 32 * 4 + p % 4])
            stored = byte if bits == 8 else byte >> 4 if p % 8 >= 4 else byte & 15
            assert stored - offset == (0 if column is None else int(codes[row, column]))


@pytest.mark.parametrize(
    "text",
    [
        "int4", "int4-g32", "int4-g32-asym", "int4-g128-fzp", "int8", "int8-asym", "int8-g64-asym", "int8-g5-fzp",
        "fp8", "fp8_e5m2-g128", "fp4-g32-e8m0", "fp4-g16-e4m3", "fp4-g16-e4m3d", "nf4-g64", "fp4_bnb-g64",
    ],
)  # fmt: skip
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 77), (64, 256), (7, 1040)])
def test_weights_come_back_bit_for_bit(text, n, k):
    fmt = qcore.Format.parse(text)
    weight = qcore.quantize(torch.randn(n, k) + 0.1, fmt, "absmax" if fmt.zero is qcore.ZeroPoint.NONE else "minmax")
    layout = WeightLayout(weight.format, n, k, sums=True)
    back = layout.unpack(layout.pack(weight))
    assert back.tensors().keys() == weight.tensors().keys()
    for name, tensor in weight.tensors().items():
        assert tensor.dtype == back.tensors()[name].dtype
        assert torch.equal(
            tensor.view(torch.uint8) if tensor.dim() else tensor,
            back.tensors()[name].view(torch.uint8) if tensor.dim() else back.tensors()[name],
        )
