"""The kernels for steps of one token compile for GPUs from Ampere on, as in `test_skinny_gemm_compiles`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")
triton = pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "cuda"))

import jax.numpy as jnp  # noqa: E402
from compiling import SHARED, facts_of, gpu_target  # noqa: E402
from pallas_lowering import triton_kernels  # noqa: E402

from qcore_xla.pallas import decode, norm  # noqa: E402

spec = jax.ShapeDtypeStruct


def compiled(tmp_path, texts, target, warps, stages):
    for number, (text, count) in enumerate(zip(texts, warps, strict=True)):
        source = tmp_path / f"{number}.ttir"
        source.write_text(text)
        options = {"num_warps": count, "num_stages": stages}
        facts = facts_of(triton.compile(str(source), target=gpu_target(target), options=options), nvidia=True)
        assert facts["shared"] <= SHARED[target] * 1024
        assert facts["spills"] == facts["stack"] == 0


@pytest.mark.parametrize("target", ["sm_86", "sm_90"])
@pytest.mark.parametrize(("heads", "groups", "size"), [(32, 8, 128), (9, 3, 64)])
def test_attention(tmp_path, target, heads, groups, size):
    row, caches = spec((size,), jnp.bfloat16), [spec((groups, 2112, size), jnp.bfloat16)] * 2
    cut = decode.cut_of(heads, caches[0].shape, jnp.bfloat16)

    def attend(*given):
        return decode.attention(*given, heads, 0.1, cut)

    parts, place = spec((8, (heads + 2 * groups) * size), jnp.float32), spec((1,), jnp.int32)
    texts = triton_kernels(attend, parts, row, row, *caches, place, spec((2112,), jnp.float32))
    compiled(tmp_path, texts, target, decode.WARPS, decode.STAGES)


@pytest.mark.parametrize("target", ["sm_86", "sm_90"])
@pytest.mark.parametrize("n", [4096, 576, 8192])
def test_norm(tmp_path, target, n):
    row = spec((n,), jnp.bfloat16)
    texts = triton_kernels(lambda *given: norm.rms_norm(*given, 1e-5), row, spec((8, n), jnp.float32), row)
    compiled(tmp_path, texts, target, [norm.WARPS], 1)
