"""Compiled models under autocast: the layers that are kept whole compute in its dtype, as torch's own do."""

import pytest
import torch
from graph_backends import TorchParts
from torch import nn
from torch.nn import functional as F

from qcore import graphs

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.last, self.scale = (
            nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4, bias=False), nn.RMSNorm(16)
        )  # fmt: skip

    def forward(self, x, mask=None):
        y = self.scale(F.gelu(self.linear(self.norm(x))).float())
        heads = self.linear(y).view(*y.shape[:2], 2, 8).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, y.view(*y.shape[:2], 2, 8).transpose(1, 2), heads, mask)
        return mixed, self.last(mixed.transpose(1, 2).flatten(2))


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.after = Block(), nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.block(x)[1]
            with torch.autocast("cpu", enabled=False):
                z = self.after(y.float())
        return y, z, self.after(y.float())


def check(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)  # up to the order of sums: torch runs each op


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_a_model_under_autocast(dtype, masked):
    torch.manual_seed(0)
    model, x, backend = Block().eval(), torch.randn(2, 3, 16), TorchParts()
    args = (x, torch.randn(3, 3)) if masked else (x,)
    compiled = backend.compiled(model)
    for on in (True, False, True):
        with torch.autocast("cpu", dtype, enabled=on):
            check(compiled(*args), model(*args))
    assert not graphs.explain(compiled).host


@torch.no_grad()
def test_autocast_within_a_model():
    torch.manual_seed(0)
    model, x = Inside().eval(), torch.randn(2, 3, 16)
    check(TorchParts().compiled(model)(x), model(x))
