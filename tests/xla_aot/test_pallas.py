"""The Pallas kernel in interpret mode, against the body that XLA alone would run."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from qcore_xla.bodies.form import Form
from qcore_xla.bodies.linear import linear
from qcore_xla.pallas import product as kernels
from qcore_xla.pallas.product import product, tiles, why_not

SHAPES = {  # M, N, slices, codes of each, groups
    "per-channel": (4, 192, 8, 128, 1),
    "groups-of-128": (5, 130, 4, 128, 4),
    "groups-of-64": (16, 64, 8, 64, 8),
    "groups-of-two-slices": (32, 64, 4, 128, 2),
    "many-tiles": (300, 600, 16, 128, 16),
}


def problem(shape, x_dtype, w_dtype):
    m, n, slices, codes, groups = SHAPES[shape]
    rng = np.random.default_rng(0)
    x = rng.integers(-128, 128, (m, slices * codes)) if x_dtype == jnp.int8 else rng.normal(size=(m, slices * codes))
    words = w_dtype == jnp.int32
    bound, size = (2**31, codes // 8) if words else (128, codes)
    data = rng.integers(-bound, bound, (slices, size, n))
    return jnp.asarray(x, x_dtype), jnp.asarray(data, w_dtype), jnp.asarray(rng.random((groups, n)), jnp.float32)


@pytest.mark.parametrize("w_dtype", [jnp.int8, jnp.int32], ids=["int8", "int4"])
@pytest.mark.parametrize("x_dtype", [jnp.int8, jnp.bfloat16], ids=["a8", "a16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_product(shape, x_dtype, w_dtype):
    x, data, scale = problem(shape, x_dtype, w_dtype)
    kind, zero, one = ("given", jnp.zeros(1), jnp.ones(1)) if x_dtype == jnp.int8 else ("float", None, None)
    sums = None if zero is None else jnp.zeros(scale.shape, jnp.int32)
    expected = linear(x, data, scale, None, None, sums, None, one, zero, form=Form(kind))
    y = product(x, data, scale, interpret=True)
    assert float(jnp.abs(y - expected).max()) <= 1e-5 * float(jnp.abs(expected).max())


def test_the_body_takes_it(monkeypatch):
    x, data, scale = problem("groups-of-128", jnp.bfloat16, jnp.int32)
    interpreted = lambda *arrays: product(*arrays, interpret=True)  # noqa: E731
    plain = linear(x, data, scale, None, None, form=Form("symmetric"))
    monkeypatch.setattr(kernels, "product", interpreted)
    y = linear(x, data, scale, None, None, form=Form("symmetric", pallas=True))
    np.testing.assert_allclose(y, plain, rtol=1e-5, atol=1e-4)


def test_what_it_has_no_tiles_for():
    assert "registers" in why_not((128, 4, 4096), 32, 128)
    with pytest.raises(ValueError, match="registers"):
        tiles(16, (128, 4, 4096), 32, 128)
    with pytest.raises(ValueError, match="registers"):
        product(jnp.zeros((4, 64), jnp.int8), jnp.zeros((2, 4, 64), jnp.int32), jnp.ones((2, 64)))
    assert isinstance(tiles(16, (3, 8, 64), 24, 3), tuple)  # all slices at once
