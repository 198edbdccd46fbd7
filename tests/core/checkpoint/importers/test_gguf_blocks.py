"""Blocks of GGUF: layers that gguf 0.19.0 dequantized."""

import pytest
import torch
from foreign_layers import frozen

from qcore.checkpoint.importers.gguf_blocks import BLOCK_TYPES


@pytest.mark.parametrize("name", [name for name in BLOCK_TYPES if name != "MXFP4"])
def test_dequantizes_to_what_the_tool_computes(name):
    layer = frozen(f"gguf_{name.lower()}")
    weight = BLOCK_TYPES[name].build(layer.tensors["blk.0.attn_q.weight"])
    weight.validate()
    n, k = layer.shape
    heads = int(layer.metadata["heads"])
    assert (layer.metadata["type"], tuple(weight.shape)) == (name, (n, k))
    assert weight.scale.dtype == BLOCK_TYPES[name].scale_dtype
    # llama.cpp stores the rows of each head permuted: the halves of a rotary pair lie together.
    dense = weight.dequantize(torch.float32).view(heads, n // heads // 2, 2, k).transpose(1, 2).reshape(n, k)
    assert layer.is_dense(dense)
