"""The GPU's product of a few rows with int4 weights: interpreted here, and lowered as a GPU's JAX lowers it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from qcore_xla.bodies import linear as bodies
from qcore_xla.bodies.form import Form
from qcore_xla.packing import words_of

jax = pytest.importorskip("jax")
jnp = jax.numpy
few = pytest.importorskip("qcore_xla.pallas.few")

WEIGHTS = {  # N, G, codes of a group
    "groups-of-128": (128, 8, 128),
    "groups-of-64": (64, 8, 64),
    "groups-of-32": (64, 16, 32),
    "groups-of-512": (64, 2, 512),
    "per-channel": (128, 1, 1024),
    "an-odd-number-of-steps": (64, 3, 128),
}


def problem(name, m, dtype, seed=0):
    """x, words, scales, the exact product, and the same of squares."""
    n, groups, size = WEIGHTS[name]
    rng = np.random.default_rng(seed)
    codes = rng.integers(-8, 8, (n, groups, size))
    scale = (rng.uniform(0.2, 1.0, (groups, n)) * 10.0 ** rng.integers(-3, 1, (1, n))).astype(np.float32)
    x = jnp.asarray(rng.normal(size=(m, groups * size)), dtype)
    words = words_of(torch.from_numpy(codes).to(torch.int8)).numpy()
    w = (codes * scale.T[:, :, None].astype(np.float64)).reshape(n, -1)
    wide = np.asarray(x, np.float64)
    return x, jnp.asarray(words), jnp.asarray(scale), wide @ w.T, wide**2 @ (w.T**2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 2, 16, 33, 128])
@pytest.mark.parametrize("name", WEIGHTS)
def test_product(name, m, dtype):
    x, words, scale, expected, squares = problem(name, m, dtype)
    cut = few.tiles(m, *words.shape)
    assert cut is not None
    y = few.product(x, words, scale, cut, interpret=True)
    assert y.shape == expected.shape
    rounding = 0 if m == 1 else 2.0 ** (-8 if dtype == jnp.bfloat16 else -11)  # of weights, to the dtype of x
    assert (np.abs(y - expected) <= (4 * rounding + 1e-5) * np.sqrt(squares)).all()


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize("name", WEIGHTS)
def test_it_is_lowered_for_gpus(name, m):
    x, words, scale, *_ = problem(name, m, jnp.bfloat16)
    cut = few.tiles(m, *words.shape)
    lowered = jax.jit(partial(few.product, cut=cut)).trace(x, words, scale).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text()


def test_what_xla_serves_better():
    assert few.tiles(few.MOST_ROWS + 1, 4096, 32, 16) is None
    assert few.tiles(16, 4096, 3, 8) is None  # 24 words of a row: no step of 16 or 32
    assert few.tiles(16, 4096, 8, 24) is None  # steps of 32 would end within groups
    assert few.tiles(16, 4000, 32, 16) is None


@pytest.mark.parametrize("name", ["groups-of-128", "per-channel"])
@pytest.mark.parametrize("m", [1, 5, 200])
def test_the_body_takes_it(monkeypatch, name, m):
    x, words, scale, expected, _ = problem(name, m, jnp.bfloat16)
    served = []

    def interpreted(*arrays):
        served.append(True)
        return product(*arrays, interpret=True)

    product = few.product
    monkeypatch.setattr(few, "product", interpreted)
    data = words[:, 0] if name == "per-channel" else words
    for dtype in (jnp.bfloat16, jnp.float32):
        served.clear()
        y = bodies.linear(x.astype(dtype), data, scale, None, None, form=Form(rows=True, pallas=True))
        np.testing.assert_allclose(y, expected, atol=0.02 * np.abs(expected).max())
        assert bool(served) == (m <= few.MOST_ROWS and dtype == jnp.bfloat16)


@pytest.mark.parametrize("pallas", [False, True])
@pytest.mark.parametrize("magnitude", [1e-7, 1e6])
def test_float16_holds_small_and_large_scales(monkeypatch, magnitude, pallas):
    x, words, scale, expected, _ = problem("groups-of-128", 8, jnp.float16)
    monkeypatch.setattr(few, "product", partial(few.product, interpret=True))
    y = bodies.linear(x, words, scale * magnitude, None, None, form=Form(rows=True, pallas=pallas))
    largest = np.abs(expected).max(0)
    assert (np.abs(y / magnitude - expected) <= 0.003 * largest).all()
