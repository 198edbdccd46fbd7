"""Kernels for steps of one token on GPUs: interpreted here, against float64, and within a program against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import Decoder

import qcore
from qcore.plugin_api import Role
from qcore_xla import calls
from qcore_xla.engines.crossing import array_of_bytes
from qcore_xla.graphs import ahead, program

jax = pytest.importorskip("jax")
jnp = jax.numpy

from qcore_xla.pallas import decode, norm, skinny_gemm  # noqa: E402


@pytest.fixture
def gpu(monkeypatch):
    """Programs are traced as for a GPU; its kernels are interpreted, and their names listed."""
    names = []

    def noted(module, name):
        function = getattr(module, name)

        def run(*given, **options):
            names.append(name)
            return function(*given, **{**options, "interpret": True})

        monkeypatch.setattr(module, name, run)

    for module, name in ((norm, "rms_norm"), (decode, "attention"), (skinny_gemm, "partial_sums")):
        noted(module, name)
    monkeypatch.setattr(calls, "triton", lambda: True)
    calls.form_of.cache_clear()
    torch._dynamo.reset()
    yield names
    calls.form_of.cache_clear()
    torch._dynamo.reset()


def wide(x):
    return np.asarray(x, np.float64)


def rounded(x, dtype):
    return wide(jnp.asarray(x, dtype))


def rotated(x, cos, sin, dtype):
    half = x.shape[-1] // 2
    turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
    return rounded(rounded(x * wide(cos), dtype) + rounded(turned * wide(sin), dtype), dtype)


CACHES = [(32, 8, 2112, 128, 8, 700), (4, 2, 48, 64, 3, 47), (6, 6, 160, 64, 1, 0), (5, 1, 64, 64, 2, 31)]


@pytest.mark.parametrize(("heads", "groups", "places", "size", "splits", "place"), CACHES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_attention(heads, groups, places, size, splits, place, dtype):
    rng = np.random.default_rng(place)
    keys, values = (jnp.asarray(rng.normal(size=(groups, places, size)), dtype) for _ in range(2))
    # What lay at the new token's place, and places that are not seen, must not count.
    keys, values = keys.at[:, place].set(100), values.at[:, place].set(jnp.inf)
    parts = jnp.asarray(rng.normal(size=(splits, (heads + 2 * groups) * size)), jnp.float32)
    angles = np.tile(rng.uniform(0, 6, size // 2), 2)
    cos, sin = jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)
    bias = jnp.where(jnp.arange(places) <= place, 0.0, -jnp.inf)
    cut = decode.cut_of(heads, keys.shape, keys.dtype)
    layers = jnp.asarray([0, place, 0], jnp.int32)
    given = (parts, cos, sin, keys, values, layers, bias, heads, size**-0.5, cut, 1)
    y, new_keys, new_values = decode.attention(*given, interpret=True)

    token = rounded(wide(parts).sum(0), dtype).reshape(-1, size)
    q, k = (rotated(one, cos, sin, dtype) for one in (token[:heads], token[heads : heads + groups]))
    expected_keys, expected_values = np.array(wide(keys)), np.array(wide(values))
    expected_keys[:, place], expected_values[:, place] = k, token[heads + groups :]
    tolerance = 2.0 ** (-7 if dtype == jnp.bfloat16 else -10)
    np.testing.assert_allclose(wide(new_keys), expected_keys, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(wide(new_values), expected_values, rtol=tolerance, atol=tolerance)
    for head in range(heads):
        own = head // (heads // groups)
        scores = expected_keys[own] @ q[head] * size**-0.5 + wide(bias)
        shares = np.exp(scores - scores.max())
        expected = shares / shares.sum() @ expected_values[own]
        np.testing.assert_allclose(wide(y[head]), expected, atol=2 * tolerance * np.abs(expected_values).max())


def test_attention_that_xla_computes():
    assert decode.cut_of(4, (2, 33, 64), jnp.bfloat16) is None
    assert decode.cut_of(4, (2, 32, 80), jnp.bfloat16) is None
    assert decode.cut_of(4, (2, 32, 64), jnp.float32) is None
    assert decode.cut_of(80, (1, 32, 64), jnp.bfloat16) is None


@pytest.mark.parametrize(("n", "splits", "scaled"), [(4096, 8, True), (576, 3, True), (96, 0, True), (5120, 1, False)])
def test_norm(n, splits, scaled):
    rng = np.random.default_rng(n)
    x, weight = (jnp.asarray(rng.normal(size=n), jnp.bfloat16) for _ in range(2))
    parts = jnp.asarray(rng.normal(size=(splits, n)), jnp.float32) if splits else None
    h, y = norm.rms_norm(x, parts, weight if scaled else None, 1e-5, interpret=True)
    added = rounded(wide(parts).sum(0), jnp.bfloat16) if splits else 0
    expected = rounded(wide(x) + added, jnp.bfloat16)
    np.testing.assert_allclose(wide(h), expected, rtol=2.0**-7, atol=2.0**-9)
    normed = wide(h) / np.sqrt((wide(h) ** 2).mean() + 1e-5) * (wide(weight) if scaled else 1)
    np.testing.assert_allclose(wide(y), normed, rtol=2.0**-7, atol=1e-6)


def test_rows_that_xla_normalizes():
    assert not norm.chunk(4097)
    assert not norm.chunk(1 << 16)


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "kv_heads", "served"), [
    ("w4a16-g32", 2, {"rms_norm": 3, "attention": 1, "partial_sums": 4}), ("w8a16", 4, {"rms_norm": 3}),
])  # fmt: skip
def test_a_step_of_a_decoder(gpu, scheme, kv_heads, served):
    torch.manual_seed(0)
    model = Decoder(width=256, heads=4, kv_heads=kv_heads, inner=256, layers=1, length=48).eval()
    qcore.quantize_(model, scheme, include="layers.*")
    model = model.to(torch.bfloat16)
    model(torch.randint(0, 96, (1, 7)), torch.arange(7))
    ids, at = torch.tensor([[11]]), torch.tensor([7])
    caches = [cache for layer in model.layers for cache in (layer.attention.keys, layer.attention.values)]
    before = [cache.clone() for cache in caches]
    part, host = ahead._captured(model, (ids, at), {})
    assert not host
    for cache, value in zip(caches, before, strict=True):
        cache.copy_(value)
    made = program.Program(part, "cuda")
    values = [one.value if one.role is not Role.FRESH else {2: ids, 1: at}[one.example.dim()] for one in part.inputs]
    fixed = [made._fixed_array(i, values) for i in made._fixed]
    states = [jnp.array(array_of_bytes(values[i]), copy=True) for i in made._states]
    updates, results, bad = jax.jit(made._whole)(states, fixed, [array_of_bytes(values[i]) for i in made._fresh])
    assert {name: gpu.count(name) for name in set(gpu)} == served
    expected = wide(model(ids, at).float())
    assert not np.asarray(bad).any()
    y = wide(results[0].astype(jnp.float32))
    assert np.linalg.norm(y - expected) <= 2e-2 * np.linalg.norm(expected)
    for i, new in zip(made._states, updates, strict=True):
        after = wide(values[i].float())
        assert np.abs(after[:, :, 7]).max() > 0
        assert np.linalg.norm(wide(new.astype(jnp.float32)) - after) <= 2e-2 * np.linalg.norm(after)
