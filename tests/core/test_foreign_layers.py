"""Weights of other tools, bit for bit: their bytes as a `QTensor` dequantize to the tool's own dense weight.

The fixtures are layers cut by tests/fixtures/foreign/cut.py; tool and versions stand in their metadata.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import qcore
from qcore.formats.bits import interleave, unpack_unsigned_nibbles

FOLDER = Path(__file__).parents[1] / "fixtures" / "foreign"
K = 256


def layer(case):
    """The tensors of a case by the last part of their names, and the dense weight that the tool computes."""
    found = load_file(FOLDER / f"{case}.safetensors")
    expected = found.pop("expected")
    return {name.rpartition(".")[2]: tensor for name, tensor in found.items()}, expected


def nibbles(data):
    """Packed bytes ``(rows, K/2)``, low nibble first, to codes 0..15 ``(rows, K)``."""
    return interleave(*unpack_unsigned_nibbles(data))


def words(packed, dim):
    """int32 words of eight nibbles, unpacked along ``dim``."""
    shifts = torch.arange(0, 32, 4)
    codes = (packed.unsqueeze(-1) >> shifts) & 15
    return codes.flatten(1) if dim == 1 else codes.movedim(-1, 1).flatten(0, 1)


def weight(codes, scale, text, zero=None, **more):
    return qcore.QTensor.from_codes(codes, scale.contiguous(), zero, qcore.Format.parse(text), **more)


def fp8(tensors, scale, text="fp8"):
    return weight(tensors.view(torch.uint8), scale, text)


def per_row(scale, n):
    return scale.reshape(1, -1).expand(1, n)


def ct_fp8_dyn(t):
    return fp8(t["weight"], t["weight_scale"].t())


def ct_fp8_static(t):
    return fp8(t["weight"], per_row(t["weight_scale"], len(t["weight"])))


def ao_fp8wo(t):
    return fp8(t["_weight_qdata"], t["_weight_scale"].t())


def ct_fp8_block(t):
    # One row of blocks of 128; the eight rows that are kept lie in it.
    return fp8(t["weight"], t["weight_scale"].t().expand(-1, len(t["weight"])), "fp8-g128")


def fp8_block_ragged(t):
    # Rows 124 to 131 of blocks of 128: four in each of the two rows of blocks.
    return fp8(t["weight"], t["weight_scale_inv"].repeat_interleave(4, dim=0).t(), "fp8-g128")


def ct_mxfp8(t):
    return fp8(t["weight"], t["weight_scale"].t(), "fp8-g32-e8m0")


def mxfp4(t):
    return weight(nibbles(t["weight_packed"]), t["weight_scale"].t(), "fp4-g32-e8m0")


def ct_nvfp4(t):
    scale = t["weight_scale"].t()
    return weight(nibbles(t["weight_packed"]), scale, "fp4-g16-e4m3d", global_scale=t["weight_global_scale"])


def modelopt_nvfp4(t):
    scale = t["weight_scale"].t()
    return weight(nibbles(t["weight"]), scale, "fp4-g16-e4m3", global_scale=t["weight_scale_2"])


def gptoss_mxfp4_experts(t):
    experts = [
        weight(nibbles(blocks.flatten(1)), scales.t(), "fp4-g32-e8m0")
        for blocks, scales in zip(t["gate_up_proj_blocks"], t["gate_up_proj_scales"], strict=True)
    ]
    return qcore.QTensor.stack(experts)


def bnb(t, element):
    # The high nibble comes first; blocks of 64 lie along the rows.
    high_first = nibbles(t["weight"].reshape(-1, K // 2)).unflatten(1, (-1, 2)).flip(-1).flatten(1)
    absmax = t["absmax"]
    if absmax.dtype == torch.uint8:  # double quantization: blocks of 256 scales share one
        absmax = t["nested_quant_map"][absmax.long()] * t["nested_absmax"][0] + offset(t)
    return weight(high_first, absmax.view(-1, K // 64).t(), f"{element}-g64")


def offset(t):
    import json

    (state,) = (tensor for name, tensor in t.items() if name.startswith("bitsandbytes__"))
    return json.loads(bytes(state.tolist()))["nested_offset"]


def bnb_nf4(t):
    return bnb(t, "nf4")


def bnb_fp4(t):
    return bnb(t, "fp4_bnb")


def sorted_by_group(codes, groups, scale, zero):
    """Columns in the order of their groups, and that order."""
    order = torch.argsort(groups, stable=True)
    return weight(codes[:, order], scale, "int4-g128-asym", zero, order=order.int())


def gptq_4_asym_v2_desc(t):
    codes, zeros = words(t["qweight"], 0).t(), words(t["qzeros"], 1)
    return sorted_by_group((codes - 8).to(torch.int8), t["g_idx"], t["scales"], (zeros - 8).to(torch.int8))


def gptq_4_asym_v1_desc(t):
    # Version 1 stores zero points less one: added to whole words, as a zero point of 0 borrows from its neighbour.
    return gptq_4_asym_v2_desc({**t, "qzeros": t["qzeros"] + 0x11111111})


def ct_w4a16_actorder_group(t):
    codes, zeros = words(t["weight_packed"], 1), words(t["weight_zero_point"], 0).t()
    scale = t["weight_scale"].t()
    return sorted_by_group(
        (codes - 8).to(torch.int8), t["weight_g_idx"], scale, (zeros - 8).to(torch.int8).contiguous()
    )


def gguf_q4_0(t):
    blocks = t["weight"].view(-1, K // 32, 18)
    scale = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    data = blocks[..., 2:]
    codes = torch.cat((data & 15, data >> 4), dim=-1).flatten(1).to(torch.int8) - 8
    return weight(codes, scale.t(), "int4-g32")


def gguf_q8_0(t):
    blocks = t["weight"].view(-1, K // 32, 34)
    scale = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    return weight(blocks[..., 2:].flatten(1).view(torch.int8), scale.t(), "int8-g32")


def hqq_4_axis1(t):
    # High nibbles hold the groups of the first half of the rows, low nibbles those of the second.
    unsigned = torch.cat((t["W_q"] >> 4, t["W_q"] & 15)).view(-1, K)
    scale = t["scale"].float().view(-1, K // 64).t()
    zero = (8 - t["zero"].float().view(-1, K // 64).t()) * scale  # HQQ's is a float in units of codes
    return weight(unsigned.to(torch.int8) - 8, scale, "int4-g64-fzp", zero)


READERS = {
    "ct_fp8_dyn": ct_fp8_dyn,
    "ct_fp8_static": ct_fp8_static,
    "ct_fp8_block": ct_fp8_block,
    "ao_fp8wo": ao_fp8wo,
    "fp8_block_ragged": fp8_block_ragged,
    "ct_mxfp8": ct_mxfp8,
    "ct_mxfp4": mxfp4,
    "ct_mxfp4a16": mxfp4,
    "ct_nvfp4": ct_nvfp4,
    "ct_nvfp4a16": ct_nvfp4,
    "modelopt_nvfp4": modelopt_nvfp4,
    "gptoss_mxfp4_experts": gptoss_mxfp4_experts,
    "bnb_nf4": bnb_nf4,
    "bnb_nf4_dq": bnb_nf4,
    "bnb_fp4": bnb_fp4,
    "bnb_fp4_dq": bnb_fp4,
    "gptq_4_asym_v1_desc": gptq_4_asym_v1_desc,
    "gptq_4_asym_v2_desc": gptq_4_asym_v2_desc,
    "ct_w4a16_actorder_group": ct_w4a16_actorder_group,
    "gguf_q8_0": gguf_q8_0,
    "hqq_4_axis1": hqq_4_axis1,
}


@pytest.mark.parametrize("case", READERS)
def test_dequantized_as_the_tool_does(case):
    tensors, expected = layer(case)
    found = READERS[case](tensors).dequantize(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("case", READERS)
def test_results_are_those_of_the_dense_weight(case):
    tensors, expected = layer(case)
    qt = READERS[case](tensors)
    x = torch.randn(6, expected.shape[-1], generator=torch.Generator().manual_seed(1))
    if qt.dim() == 3:
        ends = torch.tensor([2, 4, 6], dtype=torch.int32)
        found = qcore.grouped_linear(x, qt, ends)
        dense = torch.cat([x[2 * e : 2 * e + 2] @ expected[e].t() for e in range(3)])
    else:
        found, dense = qcore.linear(x, qt), x @ expected.t()
    torch.testing.assert_close(found, dense, rtol=1e-4, atol=1e-4 * float(dense.abs().max()))


def test_scales_of_either_sign():
    tensors, expected = layer("gguf_q4_0")
    qt = gguf_q4_0(tensors)
    assert bool((qt.scale < 0).any())
    # llama.cpp stores the rows of each head permuted: the halves of a rotary pair lie together.
    n, heads = expected.shape[0], 2
    found = qt.dequantize(torch.float32).view(heads, n // heads // 2, 2, K).transpose(1, 2).reshape(n, K)
    assert torch.equal(found, expected)
