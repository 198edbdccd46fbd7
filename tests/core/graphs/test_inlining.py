"""Regions with graphs of their own within a compiled model: checkpoints and nested compiled regions."""

import pytest
import torch
from graph_backends import TorchParts
from torch import nn
from torch.utils.checkpoint import checkpoint

import qcore
from qcore.graphs import Role, base_name

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def block():
    layer = qcore.nn.QuantizedLinear.from_float(nn.Linear(8, 8), "w8a16")
    return nn.Sequential(layer, nn.GELU(), nn.LayerNorm(8)).eval()


class Checkpointed(nn.Module):
    """Blocks within checkpoints, and a checkpoint around all of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])

    def all_blocks(self, x):
        for one in self.blocks:
            x = checkpoint(one, x, use_reentrant=False)
        return x + torch.tensor([1.0]), x[0]

    def forward(self, x):
        y, first = checkpoint(self.all_blocks, x, use_reentrant=False)
        return y * 2, first


@torch.compiler.nested_compile_region
def region(one, x):
    return one(x), x.sum()


class Nested(Checkpointed):
    """One region for all blocks."""

    def forward(self, x):
        total = x.sum()
        for one in self.blocks:
            x, other = region(one, x)
            total = total + other
        return x, total


@torch.no_grad()
@pytest.mark.parametrize("kind", [Checkpointed, Nested])
def test_regions_are_part_of_the_graph(kind):
    torch.manual_seed(0)
    model, backend = kind(), TorchParts()
    compiled = backend.compiled(model)
    for rows in (3, 2):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), model(x))
    for part in backend.parts:
        assert [one.role for one in part.inputs].count(Role.WEIGHT) == 2
        names = [base_name(node.target) for node in part.nodes]
        assert (names.count("linear"), names.count("layer_norm")) == (2, 2)


@pytest.mark.filterwarnings(
    "ignore:.*this graph runs in torch", "ignore:.*should not be instantiated:DeprecationWarning"
)
def test_checkpoints_of_calls_with_gradients_stay():
    torch.manual_seed(0)
    model = Checkpointed()
    x, other = (torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    for call, given in ((TorchParts().compiled(model), x), (model, other)):
        call(given)[0].square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


@torch.no_grad()
def test_an_op_of_higher_order_is_named():
    from qcore import graphs

    compiled = TorchParts(refused=("cond",)).compiled(
        lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
    )
    torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert "no kernel for cond" in str(graphs.explain())
