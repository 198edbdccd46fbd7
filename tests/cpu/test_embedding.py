"""``cpu.embedding`` beyond the kit: scales of a row are read in vectors, and those that are left over one by one."""

from __future__ import annotations

import pytest
import torch

import qcore
from qcore_cpu import native

assert not native.fault()

from qcore_cpu.embedding import CpuEmbedding  # noqa: E402 - its ops exist once the library is loaded


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_powers_of_two_hold_at_both_ends(scheme, dtype):
    # The least is subnormal and 255 is NaN, which a weight refuses but memory may hold.
    fmt = qcore.Scheme.parse(scheme).weight
    k = 32 * 19
    weight = qcore.quantize(torch.randn(3, k), fmt, "absmax")
    kernel = CpuEmbedding(qcore.EmbeddingRequest(torch.device("cpu"), dtype, 3, k, fmt))
    packed = kernel.pack(weight)
    numbers = fmt.element.lookup(torch.device("cpu"), torch.float32)[weight.codes().long()]
    for code, scale in ((0, 2.0**-127), (1, 2.0**-126), (254, 2.0**127), (255, float("nan"))):
        packed["scale"].fill_(code)
        found = kernel(torch.arange(3), packed)
        torch.testing.assert_close(found, (numbers * scale).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_nan_among_scales_stays_nan(dtype):
    """Also among zero points that are added. Rounding to bfloat16 carries: the largest bits would become -0."""
    fmt, k = qcore.Format.parse("int4-g32"), 32 * 35
    kernel = CpuEmbedding(qcore.EmbeddingRequest(torch.device("cpu"), dtype, 5, k, fmt))
    packed = kernel.pack(qcore.quantize(torch.randn(5, k), fmt, "absmax"))
    nans = torch.tensor((-1, 0x7FBFFFFF, 0x7F800001, -0x400001, 0x7FC00000), dtype=torch.int32)
    packed["scale"].copy_(nans.view(torch.float32).unsqueeze(1))
    assert kernel(torch.arange(5), packed).isnan().all()
    for text in ("int4-g32-fzp", "int8-g32-fzp", "int8-g48-fzp", "fp8-g32"):
        fmt = qcore.Format.parse(text)
        kernel = CpuEmbedding(qcore.EmbeddingRequest(torch.device("cpu"), dtype, 5, k, fmt))
        packed = kernel.pack(qcore.quantize(torch.randn(5, k), fmt, "absmax" if "fp8" in text else "minmax"))
        packed["zero" if "fzp" in text else "scale"].copy_(nans.view(torch.float32).unsqueeze(1))
        assert kernel(torch.arange(5), packed).isnan().all(), text


@pytest.mark.parametrize("k", [32, 48, 64, 96, 144, 250, 2048])
@pytest.mark.parametrize(
    "text",
    [
        "fp4-g16-e4m3", "fp4-g8", "nf4-g48", "int4-g16-asym", "int4-g48", "int8-asym", "int8-g64-asym", "int8-g32-fzp",
        "fp8", "fp8_e5m2", "fp8-g32", "fp8-g16",
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_products_rounded_once(text, k, dtype):
    """Vectors may run over the end of a group, but not over that of a row."""
    torch.manual_seed(k)
    fmt = qcore.Format.parse(text)
    weight = qcore.quantize(torch.randn(9, k), fmt, "absmax" if fmt.zero is qcore.ZeroPoint.NONE else "minmax")
    kernel = CpuEmbedding(qcore.EmbeddingRequest(torch.device("cpu"), dtype, 9, k, fmt))
    rows = torch.tensor([8, 0, 3, 3, 7])
    found = kernel(rows, kernel.pack(weight))
    torch.testing.assert_close(found, weight.dequantize(torch.float32)[rows].to(dtype), rtol=0, atol=0)
