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
    # Rounding to bfloat16 carries: the largest bits of a NaN would become -0.
    fmt, k = qcore.Format.parse("int4-g32"), 32 * 35
    kernel = CpuEmbedding(qcore.EmbeddingRequest(torch.device("cpu"), dtype, 5, k, fmt))
    packed = kernel.pack(qcore.quantize(torch.randn(5, k), fmt, "absmax"))
    nans = torch.tensor((-1, 0x7FBFFFFF, 0x7F800001, -0x400001, 0x7FC00000), dtype=torch.int32)
    packed["scale"].copy_(nans.view(torch.float32).unsqueeze(1))
    assert kernel(torch.arange(5), packed).isnan().all()
