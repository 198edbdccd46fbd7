"""Torch's fused transformer layers, whose ops no backend has, are captured as ops of the list."""

import pytest
import torch
from graph_backends import TorchParts
from torch import nn

from qcore.graphs import base_name

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def check(function, *args):
    """The same as in eager mode, in one part of ops of the list; returns the names of these."""
    backend = TorchParts()
    with torch.no_grad():
        expected = function(*args)
        y = backend.compiled(function)(*args)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    (part,) = backend.parts
    names = [base_name(node.target) for node in part.nodes]
    assert not [name for name in names if name.startswith(("_native_multi", "_transformer"))]
    return names


CAUSAL = torch.ones(7, 7).triu(1).bool()
PADDING = torch.arange(7) >= torch.tensor([[7], [4]])
MASKS = {"none": {}, "causal": {"src_mask": CAUSAL}, "padding": {"src_key_padding_mask": PADDING},
         "both": {"src_mask": CAUSAL, "src_key_padding_mask": PADDING}}  # fmt: skip


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(("activation", "norm_first"), [("relu", False), ("gelu", True)])
def test_encoder_layers(activation, norm_first, masks):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        20, 4, 22, activation=activation, norm_first=norm_first, layer_norm_eps=1e-3, batch_first=True
    ).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    names = check(lambda x: layer(x, **MASKS[masks]), torch.randn(2, 7, 20))
    assert names.count("dense") == 4
    assert names.count("layer_norm") == 2
    assert names.count("attention") == (masks == "none")


@pytest.mark.parametrize("shares", [False, True])
def test_multihead_attention(shares):
    torch.manual_seed(1)
    attention, x = nn.MultiheadAttention(20, 4, batch_first=True).eval(), torch.randn(2, 7, 20)
    nn.init.normal_(attention.in_proj_bias)
    for average in (False, True):
        options = {"need_weights": shares, "average_attn_weights": average}
        check(lambda x, options=options: attention(x, x, x, **options), x)
        check(lambda x, options=options: attention(x, x, x, key_padding_mask=PADDING, **options), x)


@pytest.mark.parametrize(("mask", "kind"), [(None, None), (CAUSAL, 0), (PADDING, 1)])
def test_keys_of_other_tensors(mask, kind):
    torch.manual_seed(2)
    query, key, value = torch.randn(3, 2, 7, 15)
    weight, bias = torch.randn(45, 15), torch.randn(45)

    def attended(query, key, value, weight, bias):
        own = (weight, bias, weight[:15], bias[:15])
        return torch._native_multi_head_attention(query, key, value, 15, 3, *own, mask, True, False, kind)

    check(attended, query, key, value, weight, bias)


def test_a_query_that_sees_nothing_gives_nan_as_in_torch():
    layer = nn.TransformerEncoderLayer(20, 4, 22, batch_first=True).eval()
    blind = torch.tensor([[True] * 7, [False] * 7])
    check(lambda x: layer(x, src_key_padding_mask=blind), torch.randn(2, 7, 20))


def test_ops_that_are_not_core_are_decomposed():
    torch.manual_seed(3)
    names = check(lambda x: torch.dist(x, x + 1), torch.randn(5))
    assert "dist" not in names
    names = check(lambda x: torch.addmv(x[0], x, x[1], beta=2, alpha=3), torch.randn(5, 5))
    assert "addmv" not in names
