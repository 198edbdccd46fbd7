"""The Triton product of a few rows compiles for GPUs from Ampere on: without spills, and into their shared memory.

JAX lowers it to Triton's own language; the Triton that torch brings compiles that as JAX's would. No GPU is needed.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")
triton = pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "cuda"))

import jax.numpy as jnp  # noqa: E402
from compiling import SHARED, facts_of, gpu_target  # noqa: E402
from grids import sampled  # noqa: E402
from pallas_lowering import triton_kernels  # noqa: E402

from qcore_xla.pallas import skinny_gemm  # noqa: E402

TARGETS = [name for name in SHARED if name.startswith("sm_")]
OFTEN = ("sm_86", "sm_90")
SHAPES = {  # M, N, G, words of a group
    "one-row": (1, 4096, 32, 16),
    "groups-of-128": (16, 4096, 86, 16),
    "groups-of-32": (64, 4096, 128, 4),
    "groups-of-64": (32, 4096, 64, 8),
    "per-channel": (64, 4096, 1, 512),
}


def lowered(m: int, n: int, groups: int, width: int, dtype) -> str:
    """The kernel as text."""
    spec = jax.ShapeDtypeStruct
    arrays = spec((m, 8 * groups * width), dtype), spec((n, groups, width), jnp.int32), spec((groups, n), jnp.float32)
    cut = skinny_gemm.tiles(m, n, groups, width)
    (kernel,) = triton_kernels(partial(skinny_gemm.product, cut=cut), *arrays)
    return kernel


CASES = [
    *((name, jnp.bfloat16, target) for name in ("groups-of-32", "per-channel") for target in TARGETS),
    *((name, jnp.bfloat16, target) for name in ("one-row", "groups-of-128", "groups-of-64") for target in OFTEN),
    *(("groups-of-128", jnp.float16, target) for target in OFTEN),
]


@pytest.mark.parametrize(("name", "dtype", "target"), sampled(CASES, 7))
def test_it_fits(tmp_path, name, dtype, target):
    source = tmp_path / "skinny_gemm.ttir"
    source.write_text(lowered(*SHAPES[name], dtype))
    options = {"num_warps": skinny_gemm.WARPS, "num_stages": skinny_gemm.STAGES}
    made = triton.compile(str(source), target=gpu_target(target), options=options)
    facts = facts_of(made, nvidia=True)
    assert facts["shared"] <= SHARED[target] * 1024
    assert facts["spills"] == facts["stack"] == 0
    # Not HFMA2.MMA, by which compilers also set registers to zero.
    assert any(unit in facts["assembly"] for unit in ("HMMA", "GMMA")) == (name != "one-row")
