"""Every rule of `qcore_cpu.graphs` against torch: results, shapes and dtypes, on every instruction set."""

import pytest
import torch
from graph_backends import part_of, part_of_call
from graph_cases import CASES, MASKS, B, I, X, Y

from qcore_cpu import native

assert not native.fault()  # loads the library, whose ops the modules below look up
from qcore_cpu.graphs import program, rules, support  # noqa: E402

IN_TORCH = {"qcore_graph.dense", "qcore_graph.embedding", "qcore_graph.conv2d", "qcore_graph.grouped_linear"}
QUANTIZED = {"qcore_graph.linear"}  # tests/cpu/test_graphs.py


def is_accepted(part) -> bool:
    return not any(support.why_not(node) for node in part.nodes)


def run(function, args, dtype=None):
    """Result of the program, and of the function."""
    part, tensors, called, expected = part_of_call(function, args, dtype)
    assert not [why for node in called if (why := support.why_not(node))]
    before = [t.clone() for t in tensors]
    (y,) = program.Program(part)(tensors)
    torch.testing.assert_close(tensors, before, rtol=0, atol=0, equal_nan=True)  # inputs are not written to
    return y, expected


def check(y, expected, tolerance):
    assert y.shape == expected.shape
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


OWN = [
    *((name, getattr(torch.ops.aten, name), (B, B.flip(0))) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")),
    ("lift_fresh_copy", lambda x: torch.ops.aten.lift_fresh_copy(x) + x, (I,)),
    ("copy", torch.ops.aten.copy, (I, B)), ("abs", lambda x: abs(x) - x.neg(), (I.int(),)),
    ("maximum", lambda x: torch.maximum(x, -x), (I,)), ("where", lambda b, x: torch.where(b, x, 7), (B, I)),
]  # fmt: skip
ACCEPTED = [(f"{i}-{name}", function, args) for i, (name, function, args) in enumerate([*CASES, *OWN])
            if is_accepted(part_of_call(function, args)[0])]  # fmt: skip


@pytest.mark.parametrize(("function", "args"), [case[1:] for case in ACCEPTED], ids=[case[0] for case in ACCEPTED])
def test_rules(function, args):
    check(*run(function, args), 1e-5)


def test_every_rule_has_a_case():
    found = set()
    for _, function, args in ACCEPTED:
        found |= {rules.rule_name(node.target) for node in part_of_call(function, args)[0].nodes}
    elsewhere = QUANTIZED | (IN_TORCH - {"qcore_graph.dense"}) | {"qcore_graph.attention"}
    assert not sorted(set(rules.RULES) - found - elsewhere)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("function", "args"), [case[1:] for case in ACCEPTED], ids=[case[0] for case in ACCEPTED])
def test_half_precision(function, args, dtype):
    check(*run(function, args, dtype), {torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum", "eq", "lt", "ge"])
def test_the_same_bits_as_torch(name, dtype):
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 65504, 3e38])
    x, y = torch.cat((torch.randn(3000) * 9, special)), torch.cat((torch.randn(3000), special.flip(0)))
    op = getattr(torch.ops.aten, name)
    check(*run(op, (x, y), dtype), 0.0)
    check(*run(lambda x: op(x, 0.17671), (x,), dtype), 0.0) if name not in {"maximum", "minimum"} else None
    check(*run(op, (x.view(-1, 8)[:, None], y[:4, None].to(dtype)), dtype), 0.0)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "silu"])
def test_exponentials_over_the_whole_range(name):
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 88.72, -87.4])
    x = torch.cat((torch.linspace(-110, 95, 40001), ends))
    y, _ = run(getattr(torch.ops.aten, name), (x,))
    expected = getattr(torch.ops.aten, name)(x.double())
    usual = (expected.abs() > 1e-36) & (expected.abs() < 3.4e38)  # below, 1 + exp(-x) is infinite in torch, too
    assert ((y - expected).abs()[usual] <= 4e-7 * expected.abs()[usual]).all()
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.float().isinf())
    assert (y[expected.abs() <= 1e-36].abs() <= 1.001e-36).all()


def test_integers_wrap_around_as_in_torch():
    x = torch.tensor([2**62, -(2**63), 7, -1])
    check(*run(lambda x: x * 5 + (x - 2**62) * x, (x,)), 0)
    check(*run(lambda x: x * 70000 - 3, (x.int(),)), 0)
    check(*run(lambda x, y: torch.where(x < y, x + y, -x), (x, x.flip(0).int())), 0)


@pytest.mark.parametrize("function", [
    lambda x: x.transpose(1, 2) + 1, lambda x: x.permute(2, 0, 1).reshape(4, 6) * x.reshape(4, 6),
    lambda x: (x.transpose(0, 2)[:, 1:] * 2).flatten(), lambda x: x[..., ::3] - x[..., 1:3],
    lambda x: torch.cat((x.mT, x.mT[:, ::2]), 1), lambda x: x[:, None].expand(2, 5, 3, 4).reshape(2, 15, 4) + 0.5,
    lambda x: torch.ops.aten.index_copy(x.mT, 1, torch.tensor([2, 0]), x.mT[:, 1:3]),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_and_strides(function, dtype):
    check(*run(function, (X,), dtype), 0.0)
    check(*run(function, (X.mT.contiguous().mT,), dtype), 0.0)


def test_large_tensors_and_threads():
    torch.manual_seed(0)
    x, y = torch.randn(37, 5, 1031), torch.randn(5, 1031)
    check(*run(lambda x, y: torch.nn.functional.silu(x) * y + x.transpose(0, 1).reshape(37, 5, 1031), (x, y)), 1e-6)
    check(*run(lambda x: torch.ops.qcore_graph.rms_norm(x, x[0, 0], 1e-6), (x,)), 1e-5)


def heads(*shape, dtype=torch.float32, by=1.0):
    return torch.sin(by * torch.arange(float(torch.Size(shape).numel()))).view(shape).to(dtype)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention(mask, groups, scale, dtype):
    q, k = heads(2, 4, 3, 6, dtype=dtype), heads(2, groups, 5, 6, dtype=dtype, by=1.7)
    v = heads(2, groups, 5, 11, dtype=dtype, by=3.0)
    args = (q, k, v, MASKS[mask], False, scale)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    check(*run(torch.ops.qcore_graph.attention, args, dtype), tolerance)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("positions", [1, 127, 128, 129, 1500])
def test_attention_over_many_positions(positions, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(positions)
        q, k, v = torch.randn(1, 6, 2, 64) * 3, torch.randn(1, 3, positions, 64), torch.randn(1, 3, positions, 64)
        mask = torch.rand(1, 1, 2, positions) < 0.7
        mask[..., -1:] = True
        check(*run(torch.ops.qcore_graph.attention, (q, k, v, mask, False, None)), 2e-5)
        check(*run(torch.ops.qcore_graph.attention, (q, k, v.mT.contiguous().mT, None, True, None)), 2e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("width", [8, 20, 64, 72, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_of_some_positions(width, dtype, rows):
    """Masks of each head, whole stretches hidden from all, which are not finite: against float64."""
    torch.manual_seed(width + rows)
    q, k, v = (torch.randn(2, h, n, w).to(dtype) for h, n, w in ((6, rows, width), (2, 150, width), (2, 150, 40)))
    seen = torch.rand(2, 6, rows, 150) < 0.6
    seen[..., 70:93], seen[..., -1:] = False, True
    float_mask = torch.where(seen, torch.randn(seen.shape).to(dtype), -torch.inf).to(dtype)
    wide = [t.double().repeat_interleave(3, 1) for t in (k, v)]
    k[:, :, 70:93], v[:, :, 70:93] = torch.nan, torch.inf
    attention = torch.ops.qcore_graph.attention
    for mask in (seen, float_mask):
        added = mask.double() if mask.is_floating_point() else torch.where(mask, 0.0, -torch.inf).double()
        wanted = ((q.double() @ wide[0].mT) / width**0.5 + added).softmax(-1) @ wide[1]
        part = part_of(lambda q, k, v, mask: attention(q, k, v, mask, False, None), q, k, v, mask)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        check(program.Program(part)([q, k, v, mask])[0].double(), wanted, tolerance)


def test_hidden_positions_are_not_read():
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    mask = torch.arange(9) < 5
    wanted = torch.ops.qcore_graph.attention(q, k[:, :, :5], v[:, :, :5], None, False, None)
    k[:, :, 5:], v[:, :, 5:] = torch.nan, torch.inf
    attention = torch.ops.qcore_graph.attention
    part = part_of(lambda q, k, v: attention(q, k, v, mask.view(1, 1, 1, 9), False, None), q, k, v)
    torch.testing.assert_close(program.Program(part)([q, k, v])[0], wanted)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(value):
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 9, 8)
    q[0, 1, 2, 3] = value
    y, expected = run(torch.ops.qcore_graph.attention, (q, k, k, None, False, None))
    assert y[0, 1, 2].isnan().all()  # torch says 0 here on AVX-512, NaN elsewhere
    y[0, 1, 2] = expected[0, 1, 2] = 0
    check(y, expected, 1e-5)


def test_many_rows_of_attention_are_torch():
    q = heads(1, 4, rules.FEW_ROWS + 1, 6)
    part, tensors, _, expected = part_of_call(torch.ops.qcore_graph.attention, (q, q, q, None, True, None))
    made = program.Program(part)
    assert [type(one).__name__ for one in made._lowered.segments] == ["InTorch", "tuple"]
    check(made(tensors)[0], expected, 1e-6)


def test_an_index_out_of_range_is_an_error():
    args = (X, torch.tensor([2, 0]), Y[:, :2].contiguous())
    part = part_of(lambda x, i, y: x.index_copy(1, i, y), *args)
    compiled = program.Program(part)
    for beyond in (3, -1):
        with pytest.raises(IndexError, match="out of range"):
            compiled([X, torch.tensor([2, beyond]), args[2]])
    torch.testing.assert_close(compiled(list(args))[0], X.index_copy(1, *args[1:]))


@pytest.mark.parametrize(("function", "args", "reason"), [
    (lambda x: x.double() * 2, (X,), "float64"), (lambda x: x.to(torch.int8) + 1, (X,), "this form|int8"),
    (lambda x: x.cumsum(0), (X,), "cumsum has no kernel"), (lambda x: x + x, (B,), "this form"),
    (lambda x: x.pow(3), (I,), "this form"), (lambda x: x.to(torch.int32), (X,), "this form"),
    (torch.ops.aten.eq, (X, Y.to(torch.bfloat16)), "this form"),
    (lambda x: x[:, :0] * 2, (X,), "without elements"),
    (lambda x: torch.ops.qcore_graph.rope(x, x[0, :, :1], x[0, :, :1]), (X,), "this form"),
])  # fmt: skip
def test_what_is_refused_has_a_reason(function, args, reason):
    found = " ".join(support.why_not(node) for node in part_of(function, *args).nodes)
    assert any(one in found for one in reason.split("|"))
