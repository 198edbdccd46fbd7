"""Quantized layers under accelerate's hooks. Runs where accelerate is installed."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import qcore

accelerate = pytest.importorskip("accelerate")

from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_submodules  # noqa: E402

SCHEMES = ["w4a16-g32", "w8a8", "w4a8-g32", "nf4", "nvfp4", "wfp8a16"]
LAYERS = ["table", "up", "down", "conv"]


class Net(nn.Module):
    """A table, a layer with and one without a bias, a convolution, and a norm that stays float."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.conv = nn.Conv2d(4, 8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.down(torch.relu(self.up(self.table(tokens)))))
        return self.conv(hidden.view(-1, 4, 8, 8)).flatten(1)


TOKENS = torch.arange(16).view(4, 4)


def net(scheme: str = "w4a16-g32") -> Net:
    torch.manual_seed(0)
    made = Net()
    qcore.quantize_(made, {"conv": "w8a16", "table": "w8a16-g32", "*": scheme})
    return made


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


SPLIT = {"table": "cpu", "up": "disk", "down": "disk", "norm": "cpu", "conv": "disk"}
WAYS = {
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, "cpu"),
    "cpu_offload of buffers": lambda model, folder: accelerate.cpu_offload(model, "cpu", offload_buffers=True),
    "disk_offload": lambda model, folder: accelerate.disk_offload(model, folder, "cpu"),
    "disk_offload of buffers": lambda model, folder: accelerate.disk_offload(model, folder, "cpu", True),
    "one device": lambda model, folder: accelerate.dispatch_model(model, {"": "cpu"}),
    "split": lambda model, folder: accelerate.dispatch_model(model, SPLIT, offload_dir=folder),
    "all on disk": lambda model, folder: accelerate.dispatch_model(
        model, dict.fromkeys(SPLIT, "disk"), main_device="cpu", offload_dir=folder
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", WAYS)
def test_computes_the_same(scheme, way, tmp_path):
    model = net(scheme)
    wanted = run(model)
    WAYS[way](model, str(tmp_path))
    for _ in range(2):
        assert torch.equal(run(model), wanted)


@pytest.mark.parametrize("way", ["disk_offload", "disk_offload of buffers", "all on disk"])
def test_weights_leave_memory_between_calls(way, tmp_path):
    model = net()
    packed = [weakref.ref(tensor) for name in LAYERS for tensor in model.get_submodule(name).buffers()]
    assert packed
    WAYS[way](model, str(tmp_path))
    for _ in range(2):
        gc.collect()
        assert not [ref for ref in packed if ref() is not None]
        assert not [b for name in LAYERS for b in model.get_submodule(name).buffers() if b.device.type != "meta"]
        assert all(model.get_submodule(name).weight.device.type == "meta" for name in LAYERS)
        run(model)


def test_only_what_the_map_sends_to_disk_is_offloaded(tmp_path):
    model = net()
    WAYS["split"](model, str(tmp_path))
    places = {name: model.get_submodule(name).weight.device.type for name in LAYERS}
    assert places == {"table": "cpu", "up": "meta", "down": "meta", "conv": "meta"}
    assert (tmp_path / "up.weight.data.dat").exists()


@pytest.mark.parametrize("way", WAYS)
def test_hooks_come_off_and_leave_the_model_as_it_was(way, tmp_path):
    model = net()
    wanted, state = run(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    WAYS[way](model, str(tmp_path))
    run(model)
    remove_hook_from_submodules(model)
    found = model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert torch.equal(run(model), wanted)
    WAYS[way](model, str(tmp_path))
    assert torch.equal(run(model), wanted)


@pytest.mark.parametrize("way", ["disk_offload", "split"])
def test_gradients_reach_the_input(way, tmp_path):
    model, x = net(), torch.randn(2, 64, requires_grad=True)
    layers = [model.up, model.down]

    def gradient() -> torch.Tensor:
        (found,) = torch.autograd.grad(layers[1](torch.relu(layers[0](x))).square().sum(), x)
        return found

    wanted = gradient()
    WAYS[way](model, str(tmp_path))
    assert torch.equal(gradient(), wanted)


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(50, 64), "norm": nn.LayerNorm(64)})
    model["head"] = nn.Linear(64, 50, bias=False)
    model["head"].weight = model["table"].weight
    qcore.quantize_(model, "w8a16-g32")
    model.forward = lambda tokens: model["head"](model["norm"](model["table"](tokens)))
    return model


def test_tied_layers_offload_apart_and_come_back_together(tmp_path):
    model = tied()
    wanted = run(model)
    where = {"table": "cpu", "norm": "cpu", "head": "disk"}
    accelerate.dispatch_model(model, where, offload_dir=str(tmp_path))
    assert torch.equal(run(model), wanted)
    assert model["table"].weight.device.type == "cpu"
    assert model["head"].weight.device.type == "meta"
    remove_hook_from_submodules(model)
    assert model["head"]._store is model["table"]._store
    assert torch.equal(run(model), wanted)


def test_another_hook_behind_the_one_that_offloads(tmp_path):
    model = net()
    wanted = run(model)
    accelerate.disk_offload(model, str(tmp_path), "cpu")
    add_hook_to_module(model.up, ModelHook(), append=True)
    assert model.up.weight.device.type == "meta"
    assert torch.equal(run(model), wanted)
    assert model.up.weight.device.type == "meta"


def test_offload_that_knows_parameters_only_leaves_the_weight():
    model = net()
    wanted = run(model)
    add_hook_to_module(model.up, AlignDevicesHook("cpu", offload=True))
    assert model.up.weight.device.type == "cpu"
    assert model.up.bias.device.type == "meta"
    assert torch.equal(run(model), wanted)


def test_weight_that_replaces_an_offloaded_one_stays(tmp_path):
    model = net()
    accelerate.disk_offload(model, str(tmp_path), "cpu")
    fresh = qcore.quantize(torch.randn(96, 64), model.up.weight.format)
    model.up.weight = fresh
    run(model)
    assert torch.equal(model.up.weight.data, fresh.data)


def test_sizes_for_device_maps_are_those_of_the_packed_weights():
    model = net()
    sizes = accelerate.utils.compute_module_sizes(model)
    assert 0 < sizes["up"] < 96 * 64 * 4 / 2
    assert set(accelerate.infer_auto_device_map(model, {"cpu": 10**9}).values()) == {"cpu"}


def test_a_deep_copy_has_hooks_of_its_own(tmp_path):
    model = net()
    wanted = run(model)
    accelerate.disk_offload(model, str(tmp_path), "cpu")
    twin = copy.deepcopy(model)
    assert torch.equal(run(twin), wanted)
    assert twin.up.weight.device.type == "meta"
    remove_hook_from_submodules(twin)
    assert twin.up.weight.device.type == "cpu"
    assert model.up.weight.device.type == "meta"
    assert torch.equal(run(model), wanted)


def test_adapters_run_over_and_merge_into_offloaded_layers(tmp_path):
    peft = pytest.importorskip("peft")
    import qcore.adapters

    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["up", "down", "conv"], init_lora_weights=False)
    model = peft.get_peft_model(net("w8a16-g32"), config)
    wanted = run(model)
    accelerate.disk_offload(model, str(tmp_path), "cpu")
    assert torch.equal(run(model), wanted)
    merged = model.merge_and_unload()
    assert isinstance(merged.up, qcore.nn.QuantizedLinear)
    assert (run(merged) - wanted).norm() < 0.05 * wanted.norm()
