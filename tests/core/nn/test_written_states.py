"""What is written in place to the tensors of a state dict reaches the layer, as it does with a float layer."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import qcore
from qcore.nn import QuantizedConv2d, QuantizedEmbedding, QuantizedGroupedLinear, QuantizedLinear


def linear(seed=0, **kind):
    torch.manual_seed(seed)
    return QuantizedLinear.from_float(nn.Linear(64, 48).bfloat16(), "w4a16-g32@absmax", **kind)


def relative(a, b):
    return ((a - b).float().norm() / b.float().norm()).item()


def test_kernel_has_packed_the_weight():
    """Otherwise the tests below show nothing."""
    layer = linear()
    packed = {t.untyped_storage().data_ptr() for t in layer._primary.packed.values()}
    assert layer.state_dict()["weight.data"].untyped_storage().data_ptr() not in packed


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("dropped", [False, True])
def test_checkpoint_loaded_in_place_is_seen(tmp_path, dropped):
    first, second = linear(1), linear(2)
    x = torch.randn(3, 64).bfloat16()
    dcp.save(first.state_dict(), checkpoint_id=tmp_path / "c", no_dist=True)
    state = second.state_dict()
    assert relative(second(x), first(x)) > 0.5
    dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    if dropped:
        del state
        gc.collect()
    assert torch.equal(second(x), first(x))
    assert torch.equal(second.weight.data, first.weight.data)


def test_both_of_two_loads_into_one_state_are_seen():
    layer, states = linear(1), [linear(seed).state_dict() for seed in (2, 3)]
    own = layer.state_dict()
    x = torch.randn(3, 64).bfloat16()
    for seed, state in zip((2, 3), states, strict=True):
        for name, tensor in own.items():
            tensor.copy_(state[name])
        assert torch.equal(layer(x), linear(seed)(x))


def test_weight_loaded_afterwards_wins_over_what_was_written():
    layer, other = linear(1), linear(2)
    state = layer.state_dict()
    state["weight.scale"].zero_()
    layer.load_state_dict(other.state_dict())
    del state
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(layer(x), other(x))


def test_reading_changes_nothing_and_leaves_nothing_behind():
    layer = linear()
    before = layer._primary
    state = layer.state_dict()
    x = torch.randn(2, 64).bfloat16()
    layer(x)
    {name: tensor.clone().mul_(2) for name, tensor in state.items()}
    layer(x)
    assert layer._primary is before
    assert layer._store.watch.handed
    del state
    gc.collect()
    assert not layer._store.watch.handed


def test_invalid_values_are_refused_where_the_layer_is_called():
    layer = linear()
    state = layer.state_dict()
    state["weight.scale"].fill_(float("nan"))
    with pytest.raises(qcore.FormatError, match="scale"):
        layer(torch.randn(2, 64).bfloat16())


def test_siblings_see_rows_that_were_written(stub):
    pair = nn.ModuleDict({"gate_proj": linear(1), "up_proj": linear(2)})
    assert qcore.fuse_(pair)
    state, other = pair["up_proj"].state_dict(), linear(3)
    with torch.no_grad():
        for name, tensor in other.state_dict().items():
            state[name].copy_(tensor)
    x = torch.randn(2, 64).bfloat16()
    assert torch.equal(pair["gate_proj"](x), linear(1)(x))
    assert torch.equal(pair["up_proj"](x), other(x))


def test_every_kind_of_layer_sees_it(add_kernel):
    """Under a kernel that packs into bytes of its own."""
    add_kernel("packing")
    table = QuantizedEmbedding.from_float(nn.Embedding(10, 32), "w8a16")
    conv = QuantizedConv2d.from_float(nn.Conv2d(4, 4, 3), "w8a16")
    calls = {table: torch.arange(4), conv: torch.randn(1, 4, 5, 5)}
    for layer, x in calls.items():
        assert layer.decision.plugin == "packing"
        want = layer(x) * 2 - (0 if layer.bias is None else layer.bias.detach().view(1, -1, 1, 1))
        layer.state_dict()["weight.scale"].mul_(2)
        torch.testing.assert_close(layer(x), want)


def test_experts_see_it():
    experts = QuantizedGroupedLinear.from_float(torch.randn(2, 8, 32), "w8a16")
    x, ends = torch.randn(4, 32), torch.tensor([2, 4], dtype=torch.int32)
    want = experts(x, ends) * 2
    experts.state_dict()["weight.scale"].mul_(2)
    torch.testing.assert_close(experts(x, ends), want)
