"""`qcore.grouped_linear` and its fallback: the contract's cases are in tests/core/fallback."""

import pytest
import torch

import qcore

E, N, K = 3, 20, 64


def weight(text="int4-g16-asym/plain", seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [qcore.quantize(torch.randn(N, K, generator=generator), text) for _ in range(E)]
    return qcore.QTensor.stack(made)


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


def rows(count):
    return torch.randn(count, K, generator=torch.Generator().manual_seed(count))


def expert_by_expert(x, qt, offsets, bias=None):
    y, start = torch.zeros(x.shape[0], N), 0
    for expert, end in enumerate(offsets.tolist()):
        y[start:end] = x[start:end] @ qt[expert].dequantize().t() + (0 if bias is None else bias[expert])
        start = end
    return y


@pytest.mark.parametrize("offsets", [(2, 2, 7), (0, 0, 0), (7, 7, 7), (1, 3, 5)])
def test_each_row_meets_the_weight_of_its_expert(offsets):
    x, bias = rows(7), torch.randn(E, N)
    found = qcore.grouped_linear(x, weight(), ends(*offsets), bias)
    torch.testing.assert_close(found, expert_by_expert(x, weight(), ends(*offsets), bias))


def test_no_rows_at_all():
    assert qcore.grouped_linear(rows(0), weight(), ends(0, 0, 0)).shape == (0, N)


def test_an_order_of_each_expert_is_undone():
    orders = torch.stack([torch.randperm(K) for _ in range(E)]).int()
    qt, offsets = weight().derived(order=orders), ends(1, 2, 5)
    torch.testing.assert_close(qcore.grouped_linear(rows(7), qt, offsets), expert_by_expert(rows(7), qt, offsets))


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        (ends(3, 2, 4), "must ascend"),
        (ends(1, 2, 9), "must ascend within 0..4"),
        (ends(-1, 2, 4), "must ascend"),
        (ends(1, 2), r"must be int32 \(3,\)"),
        (torch.tensor([1, 2, 4]), "offsets are torch.int64"),
        ([1, 2, 4], "offsets must be a torch.Tensor"),
    ],
)
def test_ends_that_are_not_sorted_or_not_ends_are_refused(offsets, says):
    with pytest.raises(qcore.FormatError, match=says):
        qcore.grouped_linear(rows(4), weight(), offsets)


def test_other_shapes_are_refused():
    with pytest.raises(qcore.FormatError, match=r"\(T, K\) with K=64"):
        qcore.grouped_linear(torch.randn(4, K + 1), weight(), ends(1, 2, 4))
    with pytest.raises(qcore.FormatError, match=r"this op needs \(E, N, K\)"):
        qcore.grouped_linear(rows(4), weight()[0], ends(1, 2, 4))
    with pytest.raises(qcore.FormatError, match=r"floats \(3, 20\)"):
        qcore.grouped_linear(rows(4), weight(), ends(1, 2, 4), torch.ones(N))
    with pytest.raises(qcore.FormatError, match=r"x has dtype torch\.int32"):
        qcore.grouped_linear(rows(4).int(), weight(), ends(1, 2, 4))


def test_gradients_with_respect_to_x_and_bias():
    x, bias, offsets = rows(6).requires_grad_(), torch.zeros(E, N, requires_grad=True), ends(1, 1, 5)
    qcore.grouped_linear(x, weight(), offsets, bias).square().sum().backward()
    found = x.grad.clone(), bias.grad.clone()
    x.grad = bias.grad = None
    expert_by_expert(x, weight(), offsets, bias).square().sum().backward()
    torch.testing.assert_close(found[0], x.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], bias.grad, rtol=1e-4, atol=1e-4)


def test_a_graph_does_not_know_how_many_rows_an_expert_has():
    layer = qcore.nn.QuantizedGroupedLinear.from_qtensor(weight())
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        for offsets in ((2, 2, 7), (7, 7, 7), (0, 3, 6)):
            assert torch.equal(compiled(rows(7), ends(*offsets)), layer(rows(7), ends(*offsets)))
    exported = torch.export.export(layer, (rows(7), ends(2, 2, 7)))
    assert torch.equal(exported.module()(rows(7), ends(0, 3, 6)), layer(rows(7), ends(0, 3, 6)))


def test_explain_names_the_kernel():
    assert "torch.plain.grouped_linear" in str(qcore.explain("mxfp4", n=64, k=64, contract="grouped_linear"))


def test_other_ops_refuse_experts():
    with pytest.raises(qcore.FormatError, match="grouped_linear takes"):
        qcore.linear(rows(4), weight())
    with pytest.raises(qcore.FormatError, match="grouped_linear takes"):
        qcore.embedding(torch.tensor([1]), weight())


def test_int8_activations_go_with_integer_weights():
    with pytest.raises(qcore.FormatError, match="require integer weights"):
        qcore.linear(rows(4), weight("fp8")[0], activation=qcore.DynamicInt8())


def test_backends_may_be_named_by_contract():
    with qcore.using("grouped_linear=torch"):
        assert qcore.grouped_linear(rows(4), weight(), ends(1, 2, 4)).shape == (4, N)


def test_names_of_contracts_are_the_same_everywhere():
    from qcore.contracts import CONTRACTS
    from qcore.runtime.settings import CONTRACT_NAMES

    assert tuple(CONTRACTS) == CONTRACT_NAMES
