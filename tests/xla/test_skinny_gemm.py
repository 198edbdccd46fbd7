"""The GPU's product of a few rows with int4 weights: interpreted here, and lowered as a GPU's JAX lowers it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from grids import sampled

from qcore_xla.bodies import linear as bodies
from qcore_xla.bodies.form import Form
from qcore_xla.packing import words_of

jax = pytest.importorskip("jax")
jnp = jax.numpy

from pallas_lowering import lowered_for_gpus  # noqa: E402

from qcore_xla import calls  # noqa: E402
from qcore_xla.pallas import skinny_gemm  # noqa: E402

WEIGHTS = {  # N, G, codes of a group
    "groups-of-128": (128, 8, 128),
    "groups-of-64": (64, 8, 64),
    "groups-of-32": (64, 16, 32),
    "groups-of-8": (64, 64, 8),
    "groups-of-512": (64, 2, 512),
    "per-channel": (128, 1, 1024),
    "an-odd-number-of-steps": (64, 3, 128),
}


def problem(name, m, dtype, seed=0):
    """x, words, scales (of 16 bits next to bfloat16, else of 32), the exact product, and the same of squares."""
    n, groups, size = WEIGHTS[name]
    rng = np.random.default_rng(seed)
    codes = rng.integers(-8, 8, (n, groups, size))
    scale = (rng.uniform(0.2, 1.0, (groups, n)) * 10.0 ** rng.integers(-3, 1, (1, n))).astype(np.float32)
    scale = jnp.asarray(scale, dtype if dtype == jnp.bfloat16 else jnp.float32)
    x = jnp.asarray(rng.normal(size=(m, groups * size)), dtype)
    words = words_of(torch.from_numpy(codes).to(torch.int8)).numpy()
    w = (codes * np.asarray(scale, np.float64).T[:, :, None]).reshape(n, -1)
    wide = np.asarray(x, np.float64)
    return x, jnp.asarray(words), scale, wide @ w.T, wide**2 @ (w.T**2)


PRODUCTS = [
    *((name, jnp.bfloat16) for name in WEIGHTS), ("groups-of-128", jnp.float16), ("groups-of-32", jnp.float16),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "m"), sampled([(*p, m) for p in PRODUCTS for m in (1, 17, 64)], 8))
def test_product(name, dtype, m):
    x, words, scale, expected, squares = problem(name, m, dtype)
    cut = skinny_gemm.tiles(m, *words.shape)
    assert cut is not None
    y = skinny_gemm.product(x, words, scale, cut, interpret=True)
    assert y.shape == expected.shape
    exact = m == 1 or cut.words <= words.shape[2]
    rounding = 0 if exact else 2.0 ** (-8 if dtype == jnp.bfloat16 else -11)  # of weights, to the dtype of x
    assert (np.abs(y - expected) <= (4 * rounding + 1e-5) * np.sqrt(squares)).all()


@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize(("name", "wide"), [*((name, False) for name in WEIGHTS), ("groups-of-32", True)])
def test_it_is_lowered_for_gpus(name, m, wide):
    """Also where a program has JAX take Python's numbers for 64 bits."""
    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64  # its place in JAX 0.6
    with enable_x64(wide):
        x, words, scale, *_ = problem(name, m, jnp.bfloat16)
        cut = skinny_gemm.tiles(m, *words.shape)
        assert "triton" in lowered_for_gpus(partial(skinny_gemm.product, cut=cut), x, words, scale).as_text()


def test_what_xla_serves_better():
    assert skinny_gemm.tiles(skinny_gemm.MOST_ROWS + 1, 4096, 32, 16) is None
    assert skinny_gemm.tiles(16, 4096, 3, 8) is None  # 24 words of a row: no step of 16 or 32
    assert skinny_gemm.tiles(16, 4096, 8, 24) is None  # steps of 32 would end within groups
    assert skinny_gemm.tiles(16, 4000, 32, 16) is None


@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 11008), (16, 1536, 8960), (64, 4096, 11008), (64, 28672, 8192)])
def test_rows_are_split_whatever_their_length(m, n, k):
    """Of 43 or 35 steps as well, so that a GPU has work for its cores."""
    cut = skinny_gemm.tiles(m, n, k // 128, 16)
    assert n // cut.columns * cut.splits >= 48


@pytest.mark.parametrize("groups", [1, 3])
def test_the_last_splits_may_be_short_or_empty(groups):
    """Of 2 and 6 steps."""
    rng = np.random.default_rng(3)
    codes = rng.integers(-8, 8, (64, groups, 256))
    x = jnp.asarray(rng.normal(size=(2, groups * 256)), jnp.bfloat16)
    words = jnp.asarray(words_of(torch.from_numpy(codes).to(torch.int8)).numpy())
    cut = skinny_gemm.SkinnyTiles(64, 16, 16, 4)
    y = skinny_gemm.product(x, words, jnp.ones((groups, 64), jnp.float32), cut, interpret=True)
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ codes.reshape(64, -1).T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("kinds", "cuda", "serves"), [
    ([(9, 0)], "13.0", True), ([(8, 6), (8, 6)], "13.0", True), ([(7, 5)], "13.0", False),
    ([(9, 0), (8, 0)], "13.0", False), ([(9, 4)], None, False), ([], "13.0", False),
])  # fmt: skip
def test_which_gpus_it_serves(monkeypatch, kinds, cuda, serves):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: kinds[index])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    calls.triton.cache_clear()
    calls.form_of.cache_clear()
    gpu = torch.device("cuda")
    try:
        served = {"w4a16-g128": serves, "w8a16-g128": False, "w4a8-g128": False, "mxfp4": False}
        for scheme, wanted in served.items():
            call = calls.call_of(gpu, 64, 256, scheme, 1, torch.bfloat16)
            assert calls.form_of(call, "cuda").pallas == wanted
    finally:
        calls.triton.cache_clear()
        calls.form_of.cache_clear()


@pytest.mark.parametrize("name", ["groups-of-128", "per-channel"])
@pytest.mark.parametrize("m", [1, 5, 200])
def test_the_body_takes_it(monkeypatch, name, m):
    x, words, scale, expected, _ = problem(name, m, jnp.bfloat16)
    served = []

    def interpreted(*arrays):
        served.append(True)
        return product(*arrays, interpret=True)

    product = skinny_gemm.product
    monkeypatch.setattr(skinny_gemm, "product", interpreted)
    data = words[:, 0] if name == "per-channel" else words
    for dtype in (jnp.bfloat16, jnp.float32):
        served.clear()
        y = bodies.linear(x.astype(dtype), data, scale, None, None, form=Form(rows=True, pallas=True))
        np.testing.assert_allclose(y, expected, atol=0.02 * np.abs(expected).max())
        assert bool(served) == (m <= skinny_gemm.MOST_ROWS and dtype == jnp.bfloat16)


@pytest.mark.parametrize("pallas", [False, True])
@pytest.mark.parametrize("magnitude", [1e-7, 1e6])
def test_float16_holds_small_and_large_scales(monkeypatch, magnitude, pallas):
    x, words, scale, expected, _ = problem("groups-of-128", 8, jnp.float16)
    monkeypatch.setattr(skinny_gemm, "product", partial(skinny_gemm.product, interpret=True))
    y = bodies.linear(x, words, scale * magnitude, None, None, form=Form(rows=True, pallas=pallas))
    largest = np.abs(expected).max(0)
    assert (np.abs(y / magnitude - expected) <= 0.003 * largest).all()
