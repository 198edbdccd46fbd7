"""What `qcore.convert` writes, read back by the tools themselves."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import qcore

SCHEMES = [
    "w4a16-g32",
    "w4a16-g32-asym",
    "w8a16",
    "w8a16-g32-asym",
    "w8a8",
    "wfp8a16",
    "wfp8afp8",
    "mxfp4",
    "wfp4a16-g16-e4m3d",
]


def exported(folder, scheme, to, dtype=torch.float32):
    """The weight, its tensors as written, and the settings."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False, dtype=dtype))
    qcore.quantize_(model, scheme)
    qcore.save(model, folder / "in")
    qcore.convert(folder / "in", folder / "out", to)
    with safe_open(folder / "out" / "model.safetensors", "pt") as file:
        tensors = {name.removeprefix("0."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator
    config = json.loads((folder / "out" / "config.json").read_text())
    return model[0].weight, tensors, config["quantization_config"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_reads_the_weight(scheme, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    weight, tensors, settings = exported(tmp_path, scheme, "compressed-tensors")
    config = QuantizationConfig.model_validate(settings)
    group = config.config_groups["group_0"]
    assert group.targets == ["0"]
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    found = compressor.decompress(tensors, group)["weight"]
    # The tool returns nvfp4 in bfloat16, whatever the model's dtype.
    assert torch.equal(found, weight.dequantize(torch.float32).to(found.dtype))


@pytest.fixture
def gptq_reader(monkeypatch):
    """auto-round's reader of GPTQ version 1; its package would import all that quantizes."""
    package = importlib.util.find_spec("auto_round")
    if package is None:
        pytest.skip("pip install --no-deps auto-round")
    for name, folder in (("auto_round", ""), ("auto_round.utils", "utils")):
        module = types.ModuleType(name)
        module.__path__ = [str(Path(package.origin).parent / folder)]
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["auto_round.utils"].get_packing_device = lambda _=None: torch.device("cpu")
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    return QuantLinear


@pytest.mark.parametrize("scheme", ["w4a16-g64", "w4a16-g64-asym", "w8a16", "w8a16-g64-asym"])
def test_auto_round_reads_gptq(scheme, gptq_reader, tmp_path):
    weight, tensors, settings = exported(tmp_path, scheme, "gptq", torch.float16)
    k, n = weight.shape[1], weight.shape[0]
    layer = gptq_reader(settings["bits"], settings["group_size"], k, n, False)
    for name in ("qweight", "qzeros", "scales"):
        setattr(layer, name, tensors[name])
    layer.post_init()
    found = layer(torch.eye(k, dtype=torch.float16)).t()
    assert torch.equal(found, weight.dequantize(torch.float32).half())
