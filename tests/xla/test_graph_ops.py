"""Every rule of `qcore_xla.graphs` against torch: results, shapes and dtypes."""

import jax
import pytest
import torch
from graph_backends import part_of, part_of_call
from graph_cases import ALONG_NO_DIMENSION, CASES, MASKS, I, X
from graph_window_cases import CASES as WINDOWS

from qcore_xla.graphs import attention, lowering, products, program, rules


def run(function, args, dtype=None):
    """Result of the lowered function, and of the function."""
    part, tensors, called, expected = part_of_call(function, args, dtype)
    assert not [why for node in called if (why := lowering.why_not(node))]
    values = [jax.numpy.asarray(t.float().numpy(), rules.jax_dtype(t.dtype)) for t in tensors]
    (y,), _ = jax.jit(lowering.lowered(part, "cpu", {}))(values)
    return y, expected, part


def check(y, expected, tolerance):
    assert y.shape == tuple(expected.shape)
    assert y.dtype == rules.jax_dtype(expected.dtype)
    found = torch.tensor(jax.numpy.asarray(y, "float32").tolist(), dtype=torch.float64).reshape(expected.shape)
    torch.testing.assert_close(found, expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("name", "function", "args"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_rules(name, function, args):
    check(*run(function, args)[:2], 2e-5)


@pytest.mark.parametrize("index", [torch.tensor(1), torch.tensor([1])])
def test_a_number_is_one_element(index):
    check(*run(lambda x, i: x.index_copy(0, i, x[2]), (torch.randn(5), index))[:2], 0.0)


@pytest.mark.parametrize("name", ALONG_NO_DIMENSION)
def test_tensors_without_dimensions(name):
    check(*run(ALONG_NO_DIMENSION[name], (torch.tensor(0.7),))[:2], 1e-6)


def test_every_rule_has_a_case():
    found = {"qcore_graph.attention", *WINDOWS}  # below
    for _, function, args in CASES:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        rest = args[len(tensors) :]
        part = part_of(lambda *given, call=function, rest=rest: call(*given, *rest), *tensors)
        found |= {lowering.rule_name(node.target) for node in part.nodes}
    assert not sorted(set(rules.RULES) - found)


EXTREMES = {
    "amax": lambda x: x.amax(-1), "amin": lambda x: x.amin((0, 2)), "all": lambda x: x.max(),
    "least": lambda x: x.min(), "max": lambda x: x.max(1)[0], "min": lambda x: x.min(2)[0],
    "norm": lambda x: torch.linalg.vector_norm(x, torch.inf),
    "pool": lambda x: torch.nn.functional.adaptive_max_pool2d(x[None], (4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXTREMES)
def test_nan_in_large_tensors_is_kept(name):
    torch.manual_seed(0)
    x = torch.randn(16, 32, 64)  # XLA:CPU's own maximum drops NaN from 4096 numbers on
    x[3, 10, 20] = torch.nan
    y, expected, _ = run(EXTREMES[name], (x,))
    assert expected.isnan().any()
    check(y, expected, 1e-6)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_rows_that_a_mask_hides_whole(name):
    torch.manual_seed(0)
    least = torch.finfo(torch.float32).min
    mask = torch.full((11, 11), least).triu(1)
    mask[[0, 3]] = least

    def shares(q, k, mask):
        return getattr((q @ k.mT + mask) / 12**0.5, name)(-1)

    y, expected, _ = run(shares, (torch.randn(16, 11, 12), torch.randn(16, 11, 12), mask))
    check(y, expected, 2e-5)
    hidden, infinite = torch.full((3, 5), -torch.inf), torch.tensor([[1.0, torch.inf], [torch.nan, 1.0]])
    for x in (hidden, infinite, torch.empty(3, 0)):
        check(*run(lambda x: getattr(x, name)(-1), (x,))[:2], 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["exp", "silu", "_softmax", "mean", "bmm", "qcore_graph.rms_norm", "sum", "add"])
def test_half_precision(name, dtype):
    function, args = next((function, args) for found, function, args in CASES if found == name)
    check(*run(function, args, dtype)[:2], {torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype])


@pytest.mark.parametrize("factor", [0.17671, 301])
@pytest.mark.parametrize("name", ["mul", "div"])
def test_factors_are_not_rounded_to_half_precision(name, factor):
    x = torch.linspace(-3, 3, 99)
    check(*run(lambda x: getattr(x, name)(factor), (x,), torch.bfloat16)[:2], 0.0)


@pytest.mark.parametrize("function", [
    lambda x: torch.ops.qcore_graph.attention(x, x[:, :, :0], x[:, :, :0], None, False, None),
    lambda x: torch.nn.functional.group_norm(x[:0], 2),
], ids=["attention", "group_norm"])  # fmt: skip
def test_tensors_without_elements(function):
    check(*run(function, (torch.randn(2, 4, 3, 5),))[:2], 0.0)


@pytest.mark.parametrize("function", [
    lambda x, i: x.gather(1, i), lambda x, i: x.scatter(1, i, 2.0), lambda x, i: x.scatter_add(1, i, x),
    lambda x, i: x.scatter_reduce(1, i, x, "amax"),
], ids=["gather", "scatter", "scatter_add", "scatter_reduce"])  # fmt: skip
def test_places_out_of_range_are_an_error(function):
    x, places = torch.randn(2, 5), torch.tensor([[0, 4]])
    compiled = program.Program(part_of(function, x, places))
    torch.testing.assert_close(compiled([x, places])[0], function(x, places))
    for beyond in (1, -1):
        with pytest.raises(IndexError, match="out of range"):
            compiled([x, places + beyond])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention(mask, groups, scale):
    q = torch.sin(torch.arange(2 * 4 * 3 * 6.0)).view(2, 4, 3, 6)
    k = torch.cos(torch.arange(2 * groups * 5 * 6.0)).view(2, groups, 5, 6)
    v = torch.sin(3 * torch.arange(2 * groups * 5 * 8.0)).view(2, groups, 5, 8)
    args = (q, k, v, MASKS[mask], False, scale)
    check(*run(torch.ops.qcore_graph.attention, args)[:2], 1e-5)


def test_causal_attention():
    q = torch.sin(torch.arange(4 * 5 * 6.0)).view(1, 4, 5, 6)
    check(*run(torch.ops.qcore_graph.attention, (q, q.flip(2), q, None, True, None))[:2], 1e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_as_cudnn_is_asked_for_it(mask, causal):
    q = torch.sin(torch.arange(2 * 4 * 3 * 8.0)).view(2, 4, 3, 8)
    k = torch.cos(torch.arange(2 * 2 * 5 * 8.0)).view(2, 2, 5, 8)
    given = [None if x is None else jax.numpy.asarray(x.numpy()) for x in (q, k, k * 2, MASKS[mask])]
    whole = attention._whole_mask(given[3], causal, 3, 5)
    found = attention.by_cudnn(*given[:3], whole, 0.3, implementation="xla")
    check(found, torch.tensor(products.attention(*given, causal, 0.3).tolist()), 1e-5)


def test_attention_without_cudnn():
    q = jax.numpy.sin(jax.numpy.arange(2 * 64 * 8.0)).reshape(1, 2, 64, 8).astype("bfloat16")
    found = attention.attention_on_gpu(q, q, q, None, True, None)
    assert found.tolist() == products.attention(q, q, q, None, True, None).tolist()


@pytest.mark.parametrize(("function", "args", "reason"), [
    (lambda x: x.double() * 2, (X,), "float64"),
    (lambda x: torch.fft.rfft(x).real, (X,), "complex|no lowering"),
    (lambda x: x + (1 << 40), (I,), "32 bits"),
    (torch.special.i0, (X,), "i0 has no lowering"),
    (lambda x: x.view(torch.int8), (X,), "of other sizes"), (lambda x: x.view(torch.int32), (I,), "of other sizes"),
    (lambda x: x.scatter(0, I[:1] * 0, 3, reduce="multiply"), (I,), "adds or multiplies"),
])  # fmt: skip
def test_what_is_not_lowered_has_a_reason(function, args, reason):
    part = part_of(function, *args)
    found = " ".join(lowering.why_not(node) for node in part.nodes)
    assert any(word in found for word in reason.split("|")), found
