"""Rotary embedding and attention over strided operands, against torch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from float_steps import Runner, run
from torch import Tensor
from torch.nn import functional as F
from vulkan_problems import vulkan  # noqa: F401

from qcore.plugin_api import PluginError
from qcore_vulkan.steps.attention import attention
from qcore_vulkan.steps.gather import scatter_rows
from qcore_vulkan.steps.rope import rope, rope_rows


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


@pytest.fixture(params=["gpu", "gpu with many cores"])
def any_gpu(request, vulkan, monkeypatch):  # noqa: F811
    """The device, with the workgroups of GPUs; many cores split the keys."""
    monkeypatch.setattr(vulkan, "profile", "gpu")
    if "many" in request.param:
        limits = dataclasses.replace(vulkan.description.limits, cores=100)
        monkeypatch.setattr(vulkan, "description", dataclasses.replace(vulkan.description, limits=limits))
    return vulkan


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@pytest.mark.parametrize("size", [64, 8, 6, 2])
def test_rotary_embedding(vulkan, size):  # noqa: F811
    x = drawn(2, 5, 3 * size).view(2, 5, 3, size).transpose(1, 2)
    cos, sin = drawn(1, 5, size), drawn(1, 5, size, seed=1)
    for x_, cos_, sin_ in (
        (x, cos.unsqueeze(1), sin.unsqueeze(1)),
        (x.contiguous(), cos, sin),
        (x[:, :, :1], cos[:, :1], sin[:, :1]),
        (x[..., : size // 2 * 2], drawn(2, 1, 5, size), drawn(2, 3, 5, size)),
    ):
        assert torch.allclose(run(vulkan, rope, x_, cos_, sin_), rotated(x_, cos_, sin_), rtol=1e-6, atol=1e-6)


def test_rotary_embedding_of_many_dimensions(vulkan):  # noqa: F811
    x = drawn(2, 3, 2, 5, 4, 8).permute(3, 0, 4, 1, 2, 5)
    cos, sin = drawn(2, 1, 3, 1, 8), drawn(5, 1, 4, 1, 1, 8)
    assert torch.allclose(run(vulkan, rope, x, cos, sin), rotated(x, cos, sin), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [64, 8, 6, 2])
@pytest.mark.parametrize("strided", [False, True])
def test_rotary_embedding_into_rows_of_a_cache(vulkan, size, strided):  # noqa: F811
    x = drawn(2, 3, 4, size)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if strided else x
    cos, sin, index = drawn(1, 1, 4, size), drawn(1, 1, 4, size, seed=1), torch.tensor([6, 0, 3, 8])
    for cache in (drawn(2, 3, 9, size), drawn(2, 3, 9, size + 1)[..., :size]):
        expected = cache.index_copy(2, index, rotated(x, cos, sin))
        found = run(vulkan, into_rows, x, cos, sin, cache, 2, index)
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_rotary_embedding_into_one_row_of_a_cache(vulkan):  # noqa: F811
    x, cos, sin, cache = drawn(1, 4, 1, 64), drawn(1, 1, 1, 64), drawn(1, 1, 1, 64, seed=1), drawn(1, 4, 9, 64)
    expected = cache.index_copy(2, torch.tensor([5]), rotated(x, cos, sin))
    found = run(vulkan, rope_rows, x, cos, sin, cache, 2, torch.tensor([5]))
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


def into_rows(b, x, cos, sin, target, dim, index):
    """Whatever strides there are, as the rule of index_copy does it."""
    found = rope_rows(b, x, cos, sin, target, dim, index)
    return scatter_rows(b, target, dim, index, rope(b, x, cos, sin)) if found is None else found


def expected_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """In float64, with 0 where no key takes part."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def assert_right(device, q, k, v, mask=None, causal=False, scale=None) -> None:
    got = run(device, attention, q, k, v, mask, causal, scale).double()
    assert torch.allclose(got, expected_of(q, k, v, mask, causal, scale), rtol=1e-5, atol=3e-6)


CASES = {  # B, H, Hk, L, S, E, Ev
    "decode": (1, 6, 2, 1, 200, 64, 64),
    "one head": (1, 1, 1, 1, 1, 8, 8),
    "prefill": (2, 4, 2, 37, 37, 32, 32),
    "long": (1, 2, 2, 5, 300, 16, 16),
    "odd": (2, 3, 3, 7, 13, 5, 7),
    "wide": (1, 2, 1, 3, 70, 256, 128),
    "wider values": (1, 2, 2, 9, 40, 80, 96),
}


@pytest.mark.parametrize("mask", [None, "float", "bool", "causal"])
@pytest.mark.parametrize("case", CASES)
def test_attention(vulkan, case, mask):  # noqa: F811
    assert_right_case(vulkan, case, mask)


@pytest.mark.parametrize(
    ("case", "mask"), [("decode", "bool"), ("prefill", "causal"), ("odd", "float"), ("wide", None)]
)
def test_attention_of_gpus(any_gpu, case, mask):
    """Their shaders take long to compile on a CPU."""
    assert_right_case(any_gpu, case, mask)


def assert_right_case(device, case: str, mask: str | None) -> None:
    batch, heads, key_heads, queries, keys, columns, width = CASES[case]
    q, k = drawn(batch, heads, queries, columns), drawn(batch, key_heads, keys, columns)
    v = drawn(batch, key_heads, keys, width, seed=2)
    seen = drawn(batch, 1, queries, keys) > 0
    seen[..., 0] = True
    given = {"float": drawn(queries, keys).masked_fill(~seen[0, 0], -math.inf), "bool": seen}.get(mask or "")
    assert_right(device, q, k, v, given, mask == "causal")


@pytest.mark.parametrize("case", ["decode", "prefill", "odd", "long"])
def test_rows_that_the_least_float_hides(vulkan, case):  # noqa: F811
    """They take the mean of these keys; other rows do not see them, and nothing sees those that -inf hides."""
    batch, heads, key_heads, queries, keys, columns, width = CASES[case]
    q, k = drawn(batch, heads, queries, columns), drawn(batch, key_heads, keys, columns)
    v = drawn(batch, key_heads, keys, width, seed=2)
    mask = torch.where(drawn(batch, 1, queries, keys, seed=3) > 1, 0.0, torch.finfo(torch.float32).min)
    assert_right(vulkan, q, k, v, mask)
    mask[:, :, queries // 2] = torch.finfo(torch.float32).min
    assert_right(vulkan, q, k, v, mask)
    mask[..., keys // 2 :] = -math.inf
    assert_right(vulkan, q, k, v, mask)


@pytest.mark.parametrize("width", [16, 6])
def test_strided_operands_and_a_scale(vulkan, width):  # noqa: F811
    """Queries and keys as views of a projection, keys and values in caches of which a part is valid."""
    q = drawn(2, 5, 4 * width).view(2, 5, 4, width).transpose(1, 2)
    cache = drawn(2, 2, 70, 2 * width)
    k, v = cache[..., :width], cache[..., width:]
    seen = (torch.arange(70) <= torch.tensor([20, 21, 22, 23, 24]).unsqueeze(1)).view(1, 1, 5, 70)
    assert_right(vulkan, q, k, v, seen, scale=0.3)
    assert_right(vulkan, q, k[:, :, :30], v[:, :, :30], torch.where(seen, 0.0, -math.inf)[..., :30], scale=0.3)
    transposed = drawn(2, 2, width, 70).transpose(2, 3)  # is copied first
    assert_right(vulkan, q, transposed, transposed, seen)


def test_rows_that_see_no_key_are_0(any_gpu):
    q, k = drawn(1, 2, 3, 8), drawn(1, 2, 130, 8)
    seen = torch.ones(3, 130, dtype=torch.bool)
    seen[1] = False
    seen[2, :100] = False
    assert_right(any_gpu, q, k, k, seen)
    assert not run(any_gpu, attention, q, k, k, seen, False, None)[:, :, 1].any()


def chained(b, q, k, other):
    """Three attentions one after the other; the second has more heads of keys."""
    y = attention(b, q, k, k, None, False, None)
    y = attention(b, y, other, other, None, False, None)
    return attention(b, y, k, k, None, False, None)


def test_splits_are_joined_by_the_last_workgroup(any_gpu):
    q, k, other = drawn(1, 4, 2, 8), drawn(1, 2, 400, 8), drawn(1, 4, 400, 8)
    expected = expected_of(q, k, k, None, False, None)
    expected = expected_of(expected, other, other, None, False, None)
    expected = expected_of(expected, k, k, None, False, None)
    runner = Runner(any_gpu)
    y = chained(runner.b, *map(runner.operand, (q, k, other)))
    for _ in range(2):
        assert torch.allclose(runner.read(y)[0].double(), expected, rtol=1e-5, atol=3e-6)
    names = [step.name for step in runner.b.described()]
    assert (names.count("attention_joined"), names.count("fill")) == (3, 1)


def test_large_scores(vulkan):  # noqa: F811
    q, k = drawn(1, 2, 3, 8) * 100, drawn(1, 2, 150, 8) * 10
    got = run(vulkan, attention, q, k, k, None, False, None)
    assert torch.allclose(got, expected_of(q, k, k, None, False, None).float(), rtol=1e-3, atol=1e-3)


def test_what_is_hidden_is_not_read(vulkan):  # noqa: F811
    q, k = drawn(1, 2, 2, 8), drawn(1, 1, 90, 8)
    seen = torch.arange(90) < 40
    k[:, :, 40:] = math.nan
    got = run(vulkan, attention, q, k, k, seen, False, None)
    assert torch.allclose(
        got, F.scaled_dot_product_attention(q, k[:, :, :40], k[:, :, :40], enable_gqa=True), atol=3e-6
    )


def test_results_in_given_memory(vulkan):  # noqa: F811
    q, k = drawn(1, 3, 4, 8), drawn(1, 3, 9, 8)
    expected = expected_of(q, k, k, None, False, None)
    for dims in ((0, 1, 2, 3), (3, 1, 0, 2)):
        runner = Runner(vulkan)
        shape = tuple(q.shape[d] for d in dims)
        out = runner.output(shape, torch.float32).permute([dims.index(d) for d in range(4)])
        attention(runner.b, runner.operand(q), runner.operand(k), runner.operand(k), None, False, None, out)
        assert torch.allclose(runner.read(out)[0].double(), expected, atol=3e-6)


def test_what_the_shader_does_not_take_is_refused(vulkan):  # noqa: F811
    runner = Runner(vulkan)
    q, k, wide = (runner.operand(drawn(*shape)) for shape in ((1, 4, 2, 8), (1, 3, 5, 8), (1, 1, 2, 300)))
    with pytest.raises(ValueError, match="must divide"):
        attention(runner.b, q, k, k, None, False, None)
    with pytest.raises(ValueError, match="takes up to 256"):
        attention(runner.b, wide, wide, wide, None, False, None)


def test_little_shared_memory_takes_smaller_tiles(any_gpu, monkeypatch):
    q, k = drawn(1, 2, 20, 64), drawn(1, 2, 30, 64)
    for nbytes in (16384, 8192):
        limits = dataclasses.replace(any_gpu.description.limits, shared_memory=nbytes)
        monkeypatch.setattr(any_gpu, "description", dataclasses.replace(any_gpu.description, limits=limits))
        assert_right(any_gpu, q, k, k)
    wide = drawn(1, 1, 20, 256)
    with pytest.raises(PluginError, match="more shared memory than 8192 bytes"):
        run(any_gpu, attention, wide, wide, wide, None, False, None)
