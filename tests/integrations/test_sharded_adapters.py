"""peft's LoRA over layers whose weight is parameters, as FSDP2 needs it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qcore
import qcore.adapters
from qcore.nn import NeutralLinear
from qcore.parallel import pack_, unpack_

peft = pytest.importorskip("peft")


def test_adapters_over_unpacked_layers_train():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    qcore.quantize_(base, "nf4")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))
    x = torch.randn(8, 64)
    before = model(x)
    assert len(unpack_(model)) == 2
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
    frozen = [p for name, p in model.named_parameters() if ".weight.data" in name]
    assert len(frozen) == 2
    assert not any(p.requires_grad for p in frozen)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    pack_(model)
    assert not any(isinstance(module, NeutralLinear) for module in model.modules())
