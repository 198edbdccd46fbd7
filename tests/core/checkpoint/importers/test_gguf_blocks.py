"""Blocks of GGUF: layers that gguf 0.19.0 dequantized."""

import numpy as np
import pytest
import torch
from foreign_layers import frozen

from qcore.checkpoint.importers.gguf_blocks import BLOCK_TYPES, READ_TYPES


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


IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def half(block, start):
    return np.float32(block[start : start + 2].view(np.float16)[0])


def iq4_nl(block):
    return half(block, 0) * IQ4[[*(block[2:] & 15), *(block[2:] >> 4)]]


def iq4_xs(block):
    high = int(block[2:4].view(np.uint16)[0])
    for group in range(8):
        scale = (int(block[4 + group // 2]) >> 4 * (group % 2) & 15 | (high >> 2 * group & 3) << 4) - 32
        raw = block[8 + 16 * group :][:16]
        yield from half(block, 0) * np.float32(scale) * IQ4[[*(raw & 15), *(raw >> 4)]]


def tq1_0(block):
    for start, count, digits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        for digit in range(digits):
            for byte in block[start : start + count]:
                yield half(block, 52) * np.float32((int(byte) * 3**digit % 256 * 3 >> 8) - 1)


def tq2_0(block):
    for start in (0, 32):
        for shift in (0, 2, 4, 6):
            yield from half(block, 64) * (block[start : start + 32] >> shift & 3).astype(np.float32) - half(block, 64)


@pytest.mark.parametrize(
    ("name", "dense", "at"), [("IQ4_NL", iq4_nl, 0), ("IQ4_XS", iq4_xs, 0), ("TQ1_0", tq1_0, 52), ("TQ2_0", tq2_0, 64)]
)
def test_types_that_are_only_read(name, dense, at):
    """Against the formulas of llama.cpp; tests/integrations/test_gguf_types.py compares all types with gguf."""
    kind = READ_TYPES[name]
    blocks = np.random.default_rng(0).integers(0, 256, (3, 2, kind.nbytes)).astype(np.uint8)
    blocks[..., at : at + 2] = np.array([[0.5, -0.25], [0.1, 3], [-1, 0]], np.float16)[..., None].view(np.uint8)
    weight = kind.build(torch.from_numpy(blocks).flatten(1))
    weight.validate()
    expected = [[value for block in row for value in dense(block)] for row in blocks]
    assert weight.scale.dtype == kind.scale_dtype
    assert torch.equal(weight.dequantize(torch.float32), torch.tensor(np.array(expected, np.float32)))
