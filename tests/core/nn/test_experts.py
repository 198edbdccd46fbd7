"""Fused experts as transformers 5 has them: modules made alike, without importing it."""

import copy
import pickle

import pytest
import torch
from graph_backends import TorchParts
from torch import nn

import qcore

E, H, INNER, TOP = 6, 64, 48, 2


class Experts(nn.Module):
    """The parameters and attributes of a transformers experts module, computed expert by expert."""

    def __init__(self, *, transposed=False, biased=False, gated=True):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        up, down = ((E, 2 * INNER if gated else INNER, H), (E, H, INNER))
        name = "gate_up_proj" if gated else "up_proj"
        for which, shape in ((name, up), ("down_proj", down)):
            weight = torch.randn(shape, generator=generator) * 0.1
            weight = weight.transpose(1, 2).contiguous() if transposed else weight
            self.register_parameter(which, nn.Parameter(weight))
            if biased:
                bias = torch.randn(shape[:2], generator=generator)
                self.register_parameter(f"{which}_bias", nn.Parameter(bias))
        self.num_experts, self.is_transposed, self.has_bias, self.has_gate = E, transposed, biased, gated
        self.act_fn, self.up = nn.SiLU(), name

    def _apply_gate(self, up):
        gate, up = up[..., ::2], up[..., 1::2]
        return self.act_fn(gate) * up

    def _product(self, name, expert, x):
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        return nn.functional.linear(x, weight.t() if self.is_transposed else weight, bias)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for token, (experts, shares) in enumerate(zip(top_k_index.tolist(), top_k_weights, strict=True)):
            for expert, share in zip(experts, shares, strict=True):
                if expert < E:
                    join = self._apply_gate if self.has_gate else self.act_fn
                    gated = join(self._product(self.up, expert, hidden_states[token]))
                    result[token] += share * self._product("down_proj", expert, gated)
        return result


class Block(nn.Module):
    """A router and experts."""

    def __init__(self, **kind):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = Experts(**kind)

    def forward(self, x):
        shares, experts = self.gate(x).softmax(-1).topk(TOP)
        return self.experts(x, experts, shares)


KINDS = [{}, {"transposed": True}, {"biased": True}, {"transposed": True, "biased": True}, {"gated": False}]


def dequantized(block, quantized):
    """``block`` with the weights that ``quantized`` stands for."""
    twin = copy.deepcopy(block)
    for name, part in quantized.experts.projections().items():
        dense = part.weight.dequantize()
        getattr(twin.experts, name).data = dense.transpose(1, 2) if block.experts.is_transposed else dense
    return twin


def tokens(count=9):
    return torch.randn(count, H, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g16-asym", "mxfp4", "nvfp4"])
def test_quantized_experts_compute_their_dequantized_weights(kind, scheme):
    block = Block(**kind)
    quantized = copy.deepcopy(block)
    report = qcore.quantize_(quantized, scheme, exclude="gate")
    assert {row.name: row.state for row in report} == {
        "gate": "excluded",
        f"experts.{block.experts.up}": "quantized",
        "experts.down_proj": "quantized",
    }
    for count in (1, 9, 40):
        x = tokens(count)
        torch.testing.assert_close(quantized(x), dequantized(block, quantized)(x), rtol=1e-4, atol=1e-4)


def test_tokens_of_no_expert_give_zero():
    block = Block()
    experts = qcore.nn.QuantizedExperts.from_float(block.experts, "w8a16")
    index = torch.tensor([[0, E], [E, E], [5, 0]])
    shares = torch.full((3, 2), float("nan")).where(index == E, torch.tensor(0.5))
    found = experts(tokens(3), index, shares)
    assert torch.isfinite(found).all()
    assert not found[1].any()
    torch.testing.assert_close(found[:1], experts(tokens(3)[:1], index[:1], shares[:1]))


def test_arguments_may_have_the_names_of_gpt_oss():
    experts = qcore.nn.QuantizedExperts.from_float(Block().experts, "w8a16")
    index, shares = torch.tensor([[0, 1]]), torch.ones(1, 2)
    named = experts(tokens(1), router_indices=index, routing_weights=shares)
    assert torch.equal(named, experts(tokens(1), index, shares))


def test_reports_count_the_bytes_of_both_weights():
    block = Block()
    before = sum(p.numel() * 4 for p in block.experts.parameters())
    qcore.quantize_(block, "w8a16", exclude="gate")
    rows = [row for row in qcore.report(block) if row.name.startswith("experts.")]
    assert [row.kind for row in rows] == ["QuantizedGroupedLinear"] * 2
    assert sum(row.bytes_before for row in rows) == before
    assert before / 4 < sum(row.bytes_after for row in rows) < before / 3


def test_a_failure_changes_nothing_in_the_float_module():
    block = Block()
    kept = {name: p.clone() for name, p in block.named_parameters()}
    qcore.nn.QuantizedExperts.from_float(block.experts, "w8a16")
    assert all(torch.equal(p, kept[name]) for name, p in block.named_parameters())
    block.experts.down_proj.data[2, 1, 3] = float("nan")
    with pytest.raises(qcore.FormatError, match=r"experts\.down_proj\[2\]"):
        qcore.quantize_(block, "w8a16")
    assert isinstance(block.experts, Experts)
    assert isinstance(block.gate, nn.Linear)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: setattr(m, "has_post_expert_norm", True), "normalizes the result"),
        (lambda m: m.register_parameter("norm", nn.Parameter(torch.ones(E, H))), "does not support: norm"),
    ],
)
def test_experts_of_another_kind_are_refused_with_the_reason(change, says):
    block = Block()
    change(block.experts)
    report = qcore.quantize_(block, "w8a16")
    assert report["experts"].state == "refused"
    assert says in report["experts"].reason
    assert isinstance(block.experts, Experts)


@pytest.mark.parametrize("scheme", ["w4a16-g16@gptq", "w8a8-static"])
def test_schemes_that_need_inputs_of_each_expert_are_refused(scheme):
    block = Block()
    report = qcore.quantize_(block, scheme, calibration=[tokens()])
    assert report["gate"].state == "quantized"
    assert "inputs of each expert, which are not collected" in report["experts"].reason


def test_gradients_reach_the_tokens():
    block = Block()
    quantized = copy.deepcopy(block)
    qcore.quantize_(quantized, "w8a16", exclude="gate")
    twin, found = dequantized(block, quantized), []
    for model in (quantized, twin):
        x = tokens().requires_grad_()
        model(x).square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_copies_pickles_and_state_dicts():
    block = Block(biased=True)
    qcore.quantize_(block, "nvfp4", exclude="gate")
    expected = block(tokens())
    assert torch.equal(copy.deepcopy(block)(tokens()), expected)
    assert torch.equal(pickle.loads(pickle.dumps(block))(tokens()), expected)
    other = Block(biased=True)
    other.experts.gate_up_proj.data.mul_(2)
    qcore.quantize_(other, "nvfp4", exclude="gate")
    other.load_state_dict(block.state_dict())
    assert torch.equal(other(tokens()), expected)


def test_one_graph_for_any_number_of_tokens():
    block = Block()
    qcore.quantize_(block, "w4a16-g16", exclude="gate")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for count in (11, 5, 3):
            torch.testing.assert_close(compiled(tokens(count)), block(tokens(count)))


@torch.no_grad()
def test_rows_are_counted_alike_in_a_captured_graph():
    torch.manual_seed(0)
    experts = qcore.nn.QuantizedExperts.from_float(Block().experts, "w8a16")
    backend = TorchParts(refused=("searchsorted",))
    torch._dynamo.reset()
    compiled, shares = backend.compiled(experts), torch.rand(5, TOP)
    for index in (torch.randint(0, E, (5, TOP)), torch.full((5, TOP), E), torch.full((5, TOP), 2)):  # E: no expert
        torch.testing.assert_close(compiled(tokens(5), index, shares), experts(tokens(5), index, shares))
    assert not qcore.graphs.explain(experts).host
    torch._dynamo.reset()
