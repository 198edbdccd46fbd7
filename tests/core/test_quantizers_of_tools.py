"""``absmax`` next to the tools that made the formats: the same scales and codes of the same weights.

The fixtures come from tests/fixtures/foreign/quantize_with_tools.py; tool and versions stand in their metadata. Weights
differ in kind: normal, skewed, with groups of zeros, with magnitudes from 1e-4 to 1e4, tiny and huge.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import qcore
from qcore.weights.activations import DynamicFP8, fp8_scale, quantize_fp8

FOLDER = Path(__file__).parents[1] / "fixtures" / "foreign"
KINDS = ["normal", "skewed", "zeros", "spread", "tiny", "huge"]
TOOLS = [
    ("compressed_tensors", "MXFP4A16", "fp4-g32-e8m0"),
    ("compressed_tensors", "MXFP8A16", "fp8-g32-e8m0"),
    ("compressed_tensors", "NVFP4A16", "fp4-g16-e4m3d"),
    ("compressed_tensors", "FP8_DYNAMIC", "fp8"),
    ("bitsandbytes", "nf4", "nf4-g64"),
    ("bitsandbytes", "fp4", "fp4_bnb-g64"),
    ("modelopt", "nvfp4", "fp4-g16-e4m3"),
]


def weight(kind):
    return load_file(FOLDER / "quantized_inputs.safetensors")[kind].float()


def made_by(tool, kind, key):
    """Scale and codes of a tool, and its global scale or None."""
    found = load_file(FOLDER / f"quantized_{tool}.safetensors")
    return tuple(found.get(f"{kind}.{key}.{part}") for part in ("scale", "codes", "global_scale"))


def grouped(qt, dense):
    return dense.unflatten(1, (-1, qt.format.group(dense.shape[1])))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tool", "key", "text"), TOOLS)
def test_scales_and_codes_are_those_of_the_tool(tool, key, text, kind):
    dense = weight(kind)
    scale, codes, factor = made_by(tool, kind, key)
    qt = qcore.quantize(dense, text, "absmax")
    used = grouped(qt, dense).abs().amax(-1) > 0  # the scale of a group of zeros means nothing
    if (tool, key, kind) == ("compressed_tensors", "NVFP4A16", "spread"):
        # The tool replaces a scale that rounds to 0 by 0.125 and thereby loses the group; modelopt and qcore keep it.
        used &= scale.float() != 0.125
    found = qt.scale.t().float()
    assert torch.equal(found[used], scale.float().view(found.shape)[used])
    assert (factor is None) == (qt.global_scale is None)
    assert factor is None or torch.equal(qt.global_scale, factor.reshape(()))
    element = qt.format.element
    mine, other = grouped(qt, element.decode(qt.codes())), grouped(qt, element.decode(codes))
    if key == "fp4":  # a table of thirds: the tool rounds the ties of its float32 numbers, qcore the exact ones
        off = [(part * qt.scales().t().unsqueeze(-1) - grouped(qt, dense)).abs() for part in (mine, other)]
        assert torch.all((off[0] - off[1]).abs() <= 1e-6 * qt.scales().t().unsqueeze(-1))
        assert int((mine != other).sum()) <= 3
    else:
        assert torch.equal(mine[used], other[used])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "activation"), [("token", DynamicFP8()), ("group128", DynamicFP8(128))])
def test_dynamic_activations_are_those_of_compressed_tensors(name, activation, kind):
    x = weight(kind)
    scale, codes, _ = made_by("compressed_tensors_activations", kind, name)
    mine = fp8_scale(activation, x).expand_as(x)
    other = scale.view(len(x), -1).repeat_interleave(x.shape[1] // scale.view(len(x), -1).shape[1], dim=1)
    groups = x.unflatten(1, (-1, activation.group or x.shape[1]))
    used = (groups.abs().amax(-1, keepdim=True) > 0).expand_as(groups).flatten(1)
    assert torch.equal(mine[used], other[used])
    assert torch.equal(quantize_fp8(x, mine).float(), codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(("tool", "key", "text"), TOOLS)
def test_groups_of_zeros_are_exactly_zero(tool, key, text):
    dense = weight("zeros")
    qt = qcore.quantize(dense, text, "absmax")
    assert torch.all(qt.dequantize(torch.float32)[dense == 0] == 0)
    assert torch.all(qt.format.element.decode(made_by(tool, "zeros", key)[1])[dense == 0] == 0)
