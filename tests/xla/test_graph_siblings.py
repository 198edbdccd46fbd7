"""Layers of one x, which programs multiply as one weight."""

import gc

import pytest
import torch
from torch import nn

import qcore
from qcore.nn import QuantizedLinear
from qcore_xla.graphs import program
from qcore_xla.graphs.backend import qcore_xla

K = 64


class Branches(nn.Module):
    """``q``, ``k``, ``v`` of one x, of other sizes, and ``out`` of their sum."""

    def __init__(self, scheme, sizes=(128, 64, 64), ordered=False):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(self.layer(n, scheme, ordered) for n in sizes)
        self.out = self.layer(64, scheme, False)

    def layer(self, n, scheme, ordered):
        weight = qcore.quantize(
            torch.randn(n, K), qcore.Scheme.parse(scheme).weight, "minmax" if "-asym" in scheme else "absmax"
        )
        order = torch.randperm(K).to(torch.int32) if ordered else None
        return QuantizedLinear.from_qtensor(weight.derived(order=order), None, scheme)

    def forward(self, x):
        q, *rest = [branch(x) for branch in self.branches]
        return self.out(q[..., :64] * q[..., -64:] + sum(y.tanh() for y in rest))


@pytest.fixture
def joined(monkeypatch):
    """Of how many weights each joint one is that a test packs."""
    found, pack = [], program._together._make

    def noted(tensors, of):
        found.append(len(tensors))
        return pack(tensors, of)

    monkeypatch.setattr(program._together, "_make", noted)
    torch._dynamo.reset()
    return found


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "sizes", "ordered", "count"), [
    ("w4a16-g32-asym", (128, 64, 64), False, [3]), ("w8a8-aasym", (128, 64), False, [2]),
    ("w4a16-g32", (128, 64, 64), True, [3]), ("w8a16", (128, 64, 70), False, [2]), ("w8a16", (128, 70), False, []),
])  # fmt: skip
def test_branches(joined, scheme, sizes, ordered, count):
    model, x = Branches(scheme, tuple(n for n in sizes if n != 70), ordered), torch.randn(3, K)
    if 70 in sizes:
        model.branches.append(nn.Sequential(model.layer(70, scheme, False), Cropped()))
    compiled = torch.compile(model, backend=qcore_xla)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(compiled(x[:1]), model(x[:1]), rtol=1e-3, atol=1e-3)
    assert joined == count  # once for programs of all sizes


class Cropped(nn.Module):
    def forward(self, x):
        return x[..., :64]


@torch.no_grad()
def test_a_branch_gets_another_weight(joined):
    model, other, x = Branches("w8a16"), Branches("w8a16"), torch.randn(3, K)
    compiled = torch.compile(model, backend=qcore_xla)
    before = compiled(x)
    other.branches[1] = model.layer(64, "w8a16", False)
    model.load_state_dict(other.state_dict())
    after = compiled(x)
    torch.testing.assert_close(after, model(x), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(after, before)


@torch.no_grad()
def test_joint_weights_are_freed_with_the_model(joined):
    gc.collect()
    known = len(program._together._known)
    model = Branches("w8a16")
    torch.compile(model, backend=qcore_xla)(torch.randn(3, K))
    assert len(program._together._known) == known + 1
    del model
    torch._dynamo.reset()
    gc.collect()
    assert len(program._together._known) == known
