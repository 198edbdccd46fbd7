"""Every block type that qcore reads, beside the numbers that the package gguf makes of the same random bytes."""

import numpy as np
import pytest
import torch

from qcore.checkpoint.importers.gguf_blocks import READ_TYPES

gguf = pytest.importorskip("gguf")
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q6_K": (208,), "MXFP4": (), "TQ1_0": (52,), "TQ2_0": (64,)}
"""Where the float16 numbers of a block begin; at 0 in other types."""


@pytest.mark.parametrize("name", READ_TYPES)
def test_dequantizes_to_what_the_tool_computes(name):
    kind, generator = READ_TYPES[name], np.random.default_rng(0)
    blocks = generator.integers(0, 256, (64, 3, kind.nbytes)).astype(np.uint8)
    for at in HALVES.get(name, (0,)):
        blocks[..., at : at + 2] = generator.normal(0, 0.1, (64, 3, 1)).astype(np.float16).view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = blocks[..., 0].clip(90, 160)
    raw = blocks.reshape(64, -1)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert torch.equal(kind.build(torch.from_numpy(raw)).dequantize(torch.float32), torch.from_numpy(expected))
