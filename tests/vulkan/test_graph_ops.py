"""Every rule of `qcore_vulkan.graphs` against torch: results, shapes and dtypes."""

import pytest
import torch
from graph_backends import part_of_call
from graph_cases import ALONG_NO_DIMENSION, CASES, IMAGE, MASKS, I, X
from torch.nn import functional as F

from qcore.graphs import PartRefused
from qcore_vulkan.graphs import support
from qcore_vulkan.graphs.program import Program
from qcore_vulkan.graphs.rules import RULES, rule_name

HOST = {
    "abs": "absolute values", "cat": "without elements", "div": "integers that truncates", "empty": "without elements",
    "empty_permuted": "without elements", "linalg_vector_norm": "order 3", "mm": "torch.int32", "pow": "torch.int64",
    "slice": "without elements", "view": "bits of numbers", "_to_copy": "casts to torch.int8",
    "cumsum": "reductions of torch.uint8", "eq": "of torch.uint8 with 256", "lt": "of torch.int8 with 200",
}  # fmt: skip
"""Cases of which at least one stays on the host, and why."""
HOST_CASES = 16
ELSEWHERE = (
    "qcore_graph.attention", "qcore_graph.linear", "qcore_graph.embedding", "qcore_graph.conv2d",
    "qcore_graph.grouped_linear", "_grouped_mm", "grouped_mm_fallback", "histc",
    "_adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool2d_with_indices", "scatter_reduce",
    "as_strided", "_native_batch_norm_legit",
)  # fmt: skip
"""Rules that other tests call."""


def taken(function, args, dtype=None):
    """The part of a call, its tensors, why nodes of it stay on the host, and torch's result."""
    part, tensors, called, expected = part_of_call(function, args, dtype)
    return part, tensors, [why for node in called if (why := support.why_not(node))], expected


def check(function, args, tolerance, dtype=None):
    """Whether the device computes what torch does; false if a node stays on the host."""
    part, tensors, reasons, expected = taken(function, args, dtype)
    if reasons:
        return reasons
    (y,) = Program(part)(tensors)
    assert y.shape == expected.shape
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    return []


@pytest.mark.parametrize(("name", "function", "args"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_rules(name, function, args):
    reasons = check(function, args, 2e-5)
    assert all(HOST.get(name, "nothing") in why for why in reasons)


@pytest.mark.parametrize("name", ALONG_NO_DIMENSION)
def test_tensors_without_dimensions(name):
    reasons = check(ALONG_NO_DIMENSION[name], (torch.tensor(0.7),), 1e-6)
    assert all("without dimensions" in why for why in reasons)


def test_every_rule_has_a_case_and_few_are_refused():
    found, refused = {*ELSEWHERE}, 0
    for _, function, args in CASES:
        part, _, reasons, _ = taken(function, args)
        found |= {rule_name(node.target) for node in part.nodes}
        refused += bool(reasons)
    # Ops that are decomposed before, unless a backend asks for them.
    assert not sorted(set(RULES) - found - {"alias", "detach", "_unsafe_view"})
    assert refused == HOST_CASES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["exp", "silu", "_softmax", "mean", "bmm", "qcore_graph.rms_norm", "sum", "add"])
def test_half_precision(name, dtype):
    function, args = next((function, args) for found, function, args in CASES if found == name)
    assert not check(function, args, {torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype], dtype)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention(mask, groups, scale):
    q = torch.sin(torch.arange(2 * 4 * 3 * 6.0)).view(2, 4, 3, 6)
    k = torch.cos(torch.arange(2 * groups * 5 * 6.0)).view(2, groups, 5, 6)
    v = torch.sin(3 * torch.arange(2 * groups * 5 * 8.0)).view(2, groups, 5, 8)
    assert not check(torch.ops.qcore_graph.attention, (q, k, v, MASKS[mask], False, scale), 1e-5)


def test_causal_attention():
    q = torch.sin(torch.arange(4 * 5 * 6.0)).view(1, 4, 5, 6)
    assert not check(torch.ops.qcore_graph.attention, (q, q.flip(2), q, None, True, None), 1e-5)


@pytest.mark.parametrize(("function", "args", "reason"), [
    (lambda x: x.double() * 2, (X,), "float64"),
    (lambda x: F.conv3d(x[None], x[None, :, :1, :2, :2]), (IMAGE,), "convolution"),
    (lambda x: x + (1 << 40), (I,), "32 bits"),
    (lambda x: x.to(torch.uint8) + 1, (I,), "casts to torch.uint8"),
    (lambda x: x + 1, (I.to(torch.int8),), "arithmetic on torch.int8"),
    (lambda x: x[x > 0], (X,), "mask"),
    (lambda x, i: x[i, :, i], (X, I[0, 0] * 0), "not adjacent"),
    (torch.special.i0, (X,), "i0 has no kernel"),
    (torch.rand_like, (X,), "rand_like has no kernel|rand has no kernel"),
])  # fmt: skip
def test_what_stays_on_the_host_has_a_reason(function, args, reason):
    # The size of what a mask takes depends on values, so it is no function to trace.
    reasons = [support.why_not(masked_node())] if reason == "mask" else taken(function, args)[2]
    assert any(word in why for word in reason.split("|") for why in reasons), reasons


def masked_node():
    graph = torch.fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    node = graph.call_function(torch.ops.aten.index.Tensor, (x, [mask]))
    x.meta["val"], mask.meta["val"], node.meta["val"] = X, X > 0, X[X > 0]
    return node


def test_numbers_that_do_not_fit_are_refused_at_the_call():
    part, tensors, reasons, _ = taken(lambda x: x + 1, (I,))
    assert not reasons
    with pytest.raises(PartRefused, match="32 bits"):
        Program(part)([tensors[0] + (1 << 40)])


@pytest.mark.parametrize("function", [
    lambda x: F.silu(x) * x.exp(), lambda x: x[:, :1] * F.gelu(x), lambda x: F.gelu(x, approximate="tanh") * F.silu(x),
    lambda x: F.silu(x) * F.silu(x), lambda x: F.silu(x).mul(3), lambda x: F.silu(x[0]) * I,
    lambda x: F.silu(x.bfloat16()) * x,
])  # fmt: skip
def test_gates_are_computed_in_products(function):
    assert not check(function, (X,), 2e-2 if "bfloat16" in function.__code__.co_names else 2e-5)


LARGE = torch.tensor([1 << 30, -(1 << 30), 3, -(1 << 31)])


@pytest.mark.parametrize("function", [
    lambda x: x + x, lambda x: x - (1 << 30), lambda x: x * 2, lambda x: x * x, lambda x: 5 - x, lambda x: -x,
    lambda x: (x.float() * 1.5).long(), lambda x: (x.float() * -3).long(),
])  # fmt: skip
def test_results_of_64_bits_that_do_not_fit_are_an_error(function):
    for number in LARGE:
        part, tensors, reasons, expected = taken(function, (number[None],))
        assert not reasons
        if -(1 << 31) <= int(expected) < 1 << 31:
            assert torch.equal(Program(part)(tensors)[0], expected)
        else:
            with pytest.raises(PartRefused, match="32 bits"):
                Program(part)(tensors)


def test_infinite_integers_are_no_error():
    x = torch.arange(9)  # the buckets of T5: where the logarithm is infinite, its integer is not taken
    assert not check(lambda x: torch.where(x > 3, 1 + (x - 3).relu().float().log2().long(), x), (x,), 0)


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
@pytest.mark.parametrize("function", [
    lambda x: x.sum(), lambda x: x.sum(1), lambda x: x.sum(0), lambda x: x.cumsum(0), lambda x: x.cumsum(1),
])  # fmt: skip
def test_sums_of_integers_are_exact_or_an_error(device, monkeypatch, profile, function):
    monkeypatch.setattr(device, "profile", profile)
    x = torch.randint(-(1 << 20), 1 << 20, (60, 70), generator=torch.Generator().manual_seed(0))
    assert not check(function, (x,), 0)
    assert not check(function, (x.int(),), 0)
    x[7, 9:12] = 1 << 30
    part, tensors, _, expected = taken(function, (x,))
    if expected.abs().max() < 1 << 31:
        assert torch.equal(Program(part)(tensors)[0], expected)
    else:
        with pytest.raises(PartRefused, match="32 bits"):
            Program(part)(tensors)


def test_sums_that_leave_32_bits_on_the_way():
    large = torch.full((3, 4), (1 << 31) - 1)
    x = torch.cat((large, -large, large[:1, :1].expand(1, 4)))
    assert not check(lambda x: x.sum(0), (x,), 0)
    part, tensors, _, _ = taken(lambda x: x.cumsum(0), (x,))
    with pytest.raises(PartRefused, match="32 bits"):
        Program(part)(tensors)


@pytest.mark.parametrize(
    ("size", "stride", "offset"), [((2, 12), (12, 1), 0), ((3, 2), (4, 8), 5), ((4, 3), (2, 1), 1)]
)
def test_views_by_strides(size, stride, offset):
    assert not check(lambda x: torch.as_strided(x * 2, size, stride, offset), (X,), 0)
    assert not check(lambda x: torch.as_strided(x.mT.contiguous(), size, stride, offset) + 1, (X,), 0)


def test_32_bits_wrap_around_as_in_torch():
    x = LARGE.to(torch.int32)
    assert not check(lambda x: x + x - 5 * x, (x,), 0)
    assert not check(lambda x: x.sum(0, dtype=torch.int32) + x.cumsum(0, dtype=torch.int32), (x,), 0)


def test_results_own_their_memory():
    part, tensors, _, _ = taken(lambda x: x * 2, (X,))
    program = Program(part)
    first, second = program(tensors)[0], program([X + 1])[0]
    assert torch.equal(first, X * 2)
    assert torch.equal(second, (X + 1) * 2)
