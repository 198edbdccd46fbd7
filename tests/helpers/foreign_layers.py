"""Directories of other tools, made of the frozen layers in tests/fixtures/layers."""

import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import qcore

FOLDER = Path(__file__).parents[1] / "fixtures" / "layers"
SIDE_FILES = {"hf_quant_config": "hf_quant_config.json", "quanto_qmap": "quanto_qmap.json"}


@dataclass
class FrozenLayer:
    """One layer of a checkpoint. ``rows``: the first rows of the dense weight that the tool computes, float32."""

    layer: str
    tensors: dict
    metadata: dict
    rows: torch.Tensor

    @property
    def shape(self):
        return tuple(map(int, self.metadata["shape"].split(",")))

    @property
    def config(self):
        return json.loads(self.metadata["config"])

    def write(self, folder):
        """Write it as the tool's directory."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(self.metadata["config"])
        for key, name in SIDE_FILES.items():
            if key in self.metadata:
                (folder / name).write_text(self.metadata[key])
        save_file(self.tensors, folder / "model.safetensors", json.loads(self.metadata.get("foreign_metadata", "{}")))
        return folder

    def model(self, bias=None):
        """A model with the layer under its name, float32 on meta."""
        *_, n, k = self.shape
        has_bias = f"{self.layer}.bias" in self.tensors if bias is None else bias
        return nested(self.layer, torch.nn.Linear(k, n, bias=has_bias, device="meta"))

    def is_dense(self, dense):
        """Whether a float32 weight is that of the tool, bit for bit; -0.0 and 0.0 are equal."""
        found = (dense.float() + 0.0).contiguous()
        same = hashlib.sha256(found.numpy().tobytes()).hexdigest() == self.metadata["expected_sha256"]
        if not same:
            torch.testing.assert_close(found.flatten(0, -2)[:2], self.rows, rtol=0, atol=0)
        return same


def frozen(case):
    """The layer of a case."""
    with safe_open(FOLDER / f"{case}.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator
        metadata = file.metadata()
    rows = tensors.pop("expected_rows")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("expected")}
    return FrozenLayer(metadata["layer"], tensors, metadata, rows)


def edited(case, change):
    """The case with other settings."""
    layer = frozen(case)
    config = layer.config
    change(config["quantization_config"])
    layer.metadata["config"] = json.dumps(config)
    return layer


def nested(name, module):
    """A module of modules in which ``module`` has the name ``name``."""
    for part in reversed(name.split(".")):
        parent = torch.nn.Module()
        parent.add_module(part, module)
        module = parent
    return module


ONE_OF_EACH = {
    "gptq_4_sym_v1_g128", "gptq_4_asym_v1_desc", "gptq_8_asym_g64", "gptq_8_sym_channel", "awq_gemm_asym_g128",
    "ct_w4a16_actorder_weight", "ct_w8a8_dyn", "ao_int4", "hqq_4_axis1", "quanto_qint8", "bnb_nf4", "modelopt_nvfp4",
    "fp8_block_ragged",
}  # fmt: skip
"""Layers of as many formats, of which a plugin serves some."""


def load_layer(layer, folder):
    """The module of a layer that is written to ``folder`` and loaded from there."""
    model = layer.model()
    qcore.load_(model, layer.write(folder))
    return model.get_submodule(layer.layer)


def _result(plugins, case):
    """The layer as ``plugins`` run it, what it was frozen with, and its result."""
    with tempfile.TemporaryDirectory() as folder, qcore.using(plugins):
        layer = frozen(case)
        module = load_layer(layer, Path(folder))
        x = torch.randn(5, layer.shape[-1], generator=torch.Generator().manual_seed(0))
        return module, layer, x, module(x).detach()


def check_runs_on(plugin, case):
    """A layer of another tool gives through a plugin what torch ops and, for float x, the tool's weight give.

    Returns the decision: a plugin that refuses the format leaves it to torch ops, and says why.
    """
    module, layer, x, found = _result([plugin, "torch"], case)
    weight = module.weight.dequantize(torch.float32)
    assert layer.is_dense(weight)
    if module.scheme.activation is None:
        expected, rtol = torch.nn.functional.linear(x, weight, module.bias).detach(), 2e-3
    else:  # codes of x beside a tie may differ
        expected, rtol = _result(["torch"], case)[-1], 1e-2
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))
    return module.decision
