"""What is saved comes back bit for bit: in a fresh process, on meta, tied, sharded, in another dtype."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoint_zoo as zoo
import pytest
import safetensors.torch
import torch
from torch import nn

import qcore
from qcore import CheckpointError, QTensor
from qcore.checkpoint import inspect, load_, save, writing
from qcore.nn.base import QuantizedModule


def linear_model(scheme: str = "w8a16", *shape: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*(shape or (12, 7))))
    qcore.quantize_(model, scheme)
    return model


def test_a_fresh_process_computes_the_same_bits(tmp_path):
    expected = {}
    for scheme, kind in zoo.FAMILIES.items():
        model = zoo.quantized(scheme)
        save(model, tmp_path / zoo.file_name(scheme))
        with torch.no_grad():
            expected[scheme] = model(zoo.inputs(kind))
    subprocess.run([sys.executable, zoo.__file__, str(tmp_path)], check=True)
    outputs = torch.load(tmp_path / "outputs.pt")
    assert outputs.keys() == expected.keys()
    for scheme, output in outputs.items():
        assert torch.equal(output, expected[scheme]), scheme


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a8-static", "nvfp4", "wfp8afp8-static"])
@pytest.mark.parametrize("start", ["meta", "quantized", "quantized on meta"])
def test_loads_into_a_model_on_meta_or_quantized_already(tmp_path, scheme, start):
    model, kind = zoo.quantized(scheme), zoo.FAMILIES[scheme]
    save(model, tmp_path / "m.safetensors")
    if start == "quantized":
        fresh = zoo.quantized(scheme, seed=5)
    else:
        with torch.device("meta"):
            fresh = kind().eval()
        if start == "quantized on meta":
            qcore.quantize_(fresh, "w8a16")
    load_(fresh, tmp_path / "m.safetensors")
    assert not [name for name, p in fresh.named_parameters() if p.device.type == "meta"]
    assert torch.equal(fresh.eval()(zoo.inputs(kind)), model(zoo.inputs(kind)))


def test_the_report_is_that_of_the_model(tmp_path):
    model = zoo.quantized("w4a16-g32-asym")
    save(model, tmp_path / "m.safetensors")
    fresh = zoo.Text()
    report = load_(fresh, tmp_path / "m.safetensors")
    assert report.layers == qcore.report(fresh).layers
    assert {layer.state for layer in report} == {"quantized"}
    assert report.missing == report.unexpected == ()


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    model = zoo.quantized("w8a8")
    save(model, tmp_path / "m.safetensors")
    assert not [k for k in safetensors.torch.load_file(tmp_path / "m.safetensors") if k.startswith("head")]
    fresh = zoo.Text()
    fresh.head.weight = nn.Parameter(torch.randn(50, 33))  # not tied by its constructor
    load_(fresh, tmp_path / "m.safetensors")
    assert fresh.head._store is fresh.embed._store
    assert str(fresh.head.scheme) == "w8a8"
    assert fresh.embed.scheme.activation is None
    inventory = inspect(tmp_path / "m.safetensors")
    assert inventory["head.weight"].alias_of == "embed.weight"


@pytest.mark.parametrize("on_meta", [False, True])
def test_ordinary_tied_parameters_are_one_again(tmp_path, on_meta):
    first, second = nn.LayerNorm(8), nn.LayerNorm(8)
    second.weight = first.weight
    nn.init.normal_(first.weight)
    save(nn.Sequential(first, second), tmp_path / "m.safetensors")
    with torch.device("meta" if on_meta else "cpu"):
        fresh = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    load_(fresh, tmp_path / "m.safetensors")
    assert fresh[0].weight is fresh[1].weight
    assert torch.equal(fresh[0].weight, first.weight)


def test_what_the_model_ties_needs_one_name_in_the_file(tmp_path):
    model = zoo.quantized("w4a16-g32-asym")
    state = {name: t for name, t in model.state_dict().items() if not name.startswith(("head", "embed"))}
    plain = {name: t for name, t in state.items() if ".weight." not in name}
    weights = {f"{name}.weight": getattr(model, name).weight for name in ("embed", "up", "down")}
    save({**plain, **weights}, tmp_path / "m.safetensors")
    fresh = zoo.Text()
    load_(fresh, tmp_path / "m.safetensors")
    assert fresh.head._store is fresh.embed._store
    assert torch.equal(fresh(zoo.inputs(zoo.Text)), model(zoo.inputs(zoo.Text)))


def test_one_module_in_two_places_stays_one(tmp_path):
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    qcore.quantize_(model, "w8a16")
    save(model, tmp_path / "m.safetensors")
    other = nn.Linear(6, 6)
    fresh = nn.Sequential(other, nn.ReLU(), other)
    load_(fresh, tmp_path / "m.safetensors")
    x = torch.randn(2, 6)
    assert fresh[0] is fresh[2]
    assert torch.equal(fresh(x), model(x))


def test_a_state_dict_saves_the_same_file_as_its_model(tmp_path):
    model = zoo.quantized("w8a8-static")
    save(model, tmp_path / "a.safetensors")
    save(model.state_dict(), tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_a_state_that_lost_its_formats_is_refused(tmp_path):
    state = dict(zoo.quantized("w8a16").state_dict())
    with pytest.raises(CheckpointError, match=r"embed.weight.scale.*\n.*unchanged state_dict"):
        save(state, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_other_tools_read_the_file(tmp_path):
    model = zoo.quantized("w4a16-g32-asym")
    save(model, tmp_path / "m.safetensors")
    tensors = safetensors.torch.load_file(tmp_path / "m.safetensors")
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in tensors.items())
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        notes = file.metadata()
    assert notes["qcore"] == qcore.__version__
    record = json.loads(notes["qcore.tensors"])["up.weight"]
    assert record == {
        "format": "int4-g32-asym/plain",
        "shape": [40, 33],
        "quantizer": "mse",
        "scheme": "w4a16-g32-asym",
    }


def test_dtypes_of_every_kind_survive(tmp_path):
    dtypes = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float64, torch.bfloat16, torch.float16]
    dtypes += [torch.float8_e4m3fn, torch.complex64, torch.uint16]
    state = {f"t{i}": torch.arange(5).to(dtype) for i, dtype in enumerate(dtypes)}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "strided": torch.arange(6.0).view(2, 3).t()}
    state["conj"] = torch.randn(3, dtype=torch.complex64).conj()
    save(state, tmp_path / "m.safetensors")
    found = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tolist() == tensor.tolist()


@pytest.mark.parametrize("limit", [1, 2000, "3KB", None])
def test_sharded_directories(tmp_path, limit):
    model = zoo.quantized("w4a16-g32-asym")
    save(model, tmp_path / "d", max_shard_size=limit)
    files = sorted(path.name for path in (tmp_path / "d").iterdir())
    assert ("model.safetensors.index.json" in files) == (limit is not None)
    if limit == 2000:
        index = json.loads((tmp_path / "d" / "model.safetensors.index.json").read_text())
        shards = {index["weight_map"][f"up.weight.{part}"] for part in ("data", "scale", "zero")}
        assert len(shards) == 1
        assert index["metadata"]["total_size"] == inspect(tmp_path / "d").total_bytes
    fresh = zoo.Text()
    load_(fresh, tmp_path / "d")
    assert torch.equal(fresh(zoo.inputs(zoo.Text)), model(zoo.inputs(zoo.Text)))


def test_parts_of_a_weight_may_be_in_different_shards(tmp_path):
    model = linear_model("w4a16-g32-asym", 64, 8)
    save(model, tmp_path / "d", max_shard_size=1)
    directory = tmp_path / "d"
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shard = directory / index["weight_map"]["0.weight.data"]
    with safetensors.safe_open(shard, "pt") as file:
        notes, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    safetensors.torch.save_file({"0.weight.scale": tensors.pop("0.weight.scale")}, directory / "extra.safetensors")
    safetensors.torch.save_file(tensors, shard, notes)
    index["weight_map"]["0.weight.scale"] = "extra.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    fresh = nn.Sequential(nn.Linear(64, 8))
    load_(fresh, directory)
    assert torch.equal(fresh[0].weight.data, model[0].weight.data)


def test_a_directory_is_replaced_without_leftovers(tmp_path):
    target = tmp_path / "d"
    save(zoo.quantized("w8a16"), target, max_shard_size=2000)
    (target / "config.json").write_text("{}")
    save(zoo.quantized("w4a16"), target)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    save(zoo.quantized("w8a16"), target, max_shard_size=4000)
    assert "model.safetensors" not in [path.name for path in target.iterdir()]
    load_(zoo.Text(), target)


def test_dtypes_of_the_model_hold(tmp_path):
    model = zoo.quantized("w8a16")
    save(model, tmp_path / "m.safetensors")
    fresh = zoo.Text().to(torch.bfloat16)
    norm = fresh.norm.weight
    load_(fresh, tmp_path / "m.safetensors")
    assert fresh.norm.weight is norm
    assert fresh.norm.weight.dtype == fresh.up.bias.dtype == fresh(zoo.inputs(zoo.Text)).dtype == torch.bfloat16
    assert fresh.up.weight.scale.dtype == torch.float32


def test_requires_grad_hooks_and_mode_stay(tmp_path):
    save(zoo.quantized("w8a16"), tmp_path / "m.safetensors")
    with torch.device("meta"):
        fresh = zoo.Text().eval()
    fresh.norm.weight.requires_grad_(False)
    calls = []
    fresh.up.register_forward_hook(lambda *_: calls.append(1))
    load_(fresh, tmp_path / "m.safetensors")
    fresh(zoo.inputs(zoo.Text))
    assert calls == [1]
    assert not fresh.norm.weight.requires_grad
    assert fresh.norm.bias.requires_grad
    assert not fresh.up.training


def test_a_single_quantized_module(tmp_path):
    model = qcore.nn.QuantizedLinear.from_float(nn.Linear(8, 6), "w8a8")
    save(model, tmp_path / "m.safetensors")
    fresh = qcore.nn.QuantizedLinear.from_float(nn.Linear(8, 6), "w4a16")
    load_(fresh, tmp_path / "m.safetensors")
    x = torch.randn(3, 8)
    assert torch.equal(fresh(x), model(x))
    assert str(fresh.scheme) == "w8a8"
    alone = nn.Linear(8, 6)
    report = load_(alone, tmp_path / "m.safetensors")
    assert "cannot be replaced in place" in report[""].reason
    assert torch.equal(alone.weight, model.weight.dequantize())


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(3, 4, 2)
        self.gate = nn.Module()
        self.gate.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, x):
        return self.attention(x, x, x)[0]


def test_layers_without_a_counterpart_are_turned_back_to_float(tmp_path):
    model = Odd()
    columns = model.up.weight.detach().permute(0, 2, 3, 1).flatten(1)
    state = dict(model.state_dict())
    names = ("attention.out_proj.weight", "up.weight", "gate.weight")
    state |= {n: qcore.quantize(columns if n[0] == "u" else state[n], "int8") for n in names}
    save(state, tmp_path / "m.safetensors")
    fresh = Odd()
    report = load_(fresh, tmp_path / "m.safetensors")
    assert torch.equal(fresh.gate.weight, state["gate.weight"].dequantize())
    assert torch.allclose(fresh.up.weight, model.up.weight, atol=0.01)
    assert "MultiheadAttention" in report["attention.out_proj"].reason
    assert "dequantized to float" in report["up"].reason
    fresh(torch.randn(1, 4, 8))


def test_a_foreign_float_file_loads(tmp_path):
    model = zoo.Text()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    fresh = zoo.Text()
    load_(fresh, tmp_path / "m.safetensors")
    assert torch.equal(fresh(zoo.inputs(zoo.Text)), model(zoo.inputs(zoo.Text)))


# Strictness and atomicity.


def snapshot(model: nn.Module) -> dict[str, object]:
    modules = {name: id(module) for name, module in model.named_modules()}
    return {**modules, **{name: (id(p), p._version) for name, p in model.named_parameters()}}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda zoo: nn.Sequential(nn.Linear(33, 40)), "Missing in the checkpoint: 0.weight"),
        (lambda zoo: zoo.Text(width=34), r"shape \(50, 33\).*'embed' needs \(50, 34\)"),
        (lambda zoo: zoo.Image(), "Not used by the model: .*embed.weight"),
    ],
)
def test_another_model_is_left_alone(tmp_path, make, text):
    save(zoo.quantized("w8a16"), tmp_path / "m.safetensors")
    fresh = make(zoo)
    before = snapshot(fresh)
    with pytest.raises(CheckpointError, match=text):
        load_(fresh, tmp_path / "m.safetensors")
    assert snapshot(fresh) == before


def test_not_strict_lists_what_was_left_out(tmp_path):
    save(zoo.quantized("w8a16"), tmp_path / "m.safetensors")
    fresh = zoo.Text()
    fresh.extra = nn.Linear(2, 2)
    del fresh.norm
    report = load_(fresh, tmp_path / "m.safetensors", strict=False)
    assert report.missing == ("extra.weight", "extra.bias")
    assert report.unexpected == ("norm.bias", "norm.weight")
    assert "missing: extra.weight" in str(report)
    assert isinstance(fresh.up, QuantizedModule)


def test_a_layer_that_is_float_in_the_file_only_is_missing(tmp_path):
    save(nn.Sequential(nn.Linear(4, 4)), tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"0.weight.data.\nNot used by the model: 0.weight"):
        load_(linear_model("w8a16", 4, 4), tmp_path / "m.safetensors")


def test_an_error_while_binding_leaves_the_model_alone(tmp_path, monkeypatch):
    save(zoo.quantized("w8a16"), tmp_path / "m.safetensors")
    fresh = zoo.Text()
    before = snapshot(fresh)
    with qcore.using(strict=True), pytest.raises(qcore.UnsupportedError):
        load_(fresh, tmp_path / "m.safetensors")
    assert snapshot(fresh) == before


def test_a_buffer_on_meta_that_no_file_holds_is_said(tmp_path):
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].register_buffer("angles", torch.ones(3), persistent=False)
        return model

    save(make(), tmp_path / "m.safetensors")
    with torch.device("meta"):
        fresh = make()
    with pytest.raises(CheckpointError, match=r"buffer '0.angles': build the model on a real device"):
        load_(fresh, tmp_path / "m.safetensors")
    assert fresh[0].weight.device.type == "meta"


def test_ties_with_two_values_are_refused(tmp_path):
    model = zoo.Text()
    state = {**model.state_dict(), "head.weight": torch.randn(50, 33)}
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="the model ties it"):
        load_(zoo.Text(), tmp_path / "m.safetensors")
    state["head.weight"] = state["embed.weight"].clone()
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    load_(zoo.Text(), tmp_path / "m.safetensors")


def test_wrong_kinds_of_numbers_are_refused(tmp_path):
    norm = nn.BatchNorm1d(3)
    state = {**norm.state_dict(), "num_batches_tracked": torch.tensor(1.0)}
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"num_batches_tracked' is torch.float32; the model needs torch.int64"):
        load_(nn.BatchNorm1d(3), tmp_path / "m.safetensors")


# Writing.


@pytest.mark.parametrize("target", ["m.safetensors", "d", "old"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_half_written(tmp_path, monkeypatch, target, error):
    save(zoo.quantized("w8a16"), tmp_path / "old", max_shard_size=2000)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    calls = []

    def fail(tensor):
        calls.append(tensor)
        if len(calls) == 4:
            raise error
        return memoryview(bytes(tensor.numel() * tensor.element_size()))

    monkeypatch.setattr(writing, "as_bytes", fail)
    expected = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        save(zoo.quantized("w4a16"), tmp_path / target)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert "No space left" in str(caught.value) or expected is KeyboardInterrupt


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_real_full_disk_leaves_nothing(tmp_path):
    code = (
        "import resource, signal, torch, qcore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try:\n    qcore.save({'a': torch.zeros(100_000)}, 'm.safetensors')\n"
        "except qcore.CheckpointError as error:\n    print('refused:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "cannot be written" in done.stdout
    assert not list(tmp_path.iterdir())


def test_file_mode_follows_the_umask_and_links_are_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "real" / "m.safetensors")
    old = os.umask(0o022)
    try:
        save({"a": torch.zeros(1)}, tmp_path / "link.safetensors")
    finally:
        os.umask(old)
    assert (tmp_path / "link.safetensors").is_symlink()
    assert (tmp_path / "real" / "m.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a": "text"}, "it is a str"),
        ({"a": torch.empty(2, device="meta")}, "on the meta device"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "safetensors cannot store"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "safetensors cannot store"),
    ],
)
def test_what_cannot_be_saved_is_said(tmp_path, state, text):
    with pytest.raises(CheckpointError, match=text):
        save(state, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_quantized_model_on_meta_cannot_be_saved(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    qcore.quantize_(model, "w8a16")
    model[0].bias = None
    with pytest.raises(CheckpointError, match=r"0\.weight.*meta device"):
        save(model, tmp_path / "m.safetensors")


@pytest.mark.parametrize("size", ["many", 0, -1, "5 gigs", 1.5, True])
def test_bad_shard_sizes(tmp_path, size):
    with pytest.raises(CheckpointError, match="max_shard_size"):
        save({"a": torch.zeros(1)}, tmp_path / "d", max_shard_size=size)


def test_one_file_cannot_be_sharded(tmp_path):
    with pytest.raises(CheckpointError, match="one file"):
        save({"a": torch.zeros(1)}, tmp_path / "m.safetensors", max_shard_size=10)


def test_a_directory_that_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        save({"a": torch.zeros(1)}, tmp_path / "nowhere" / "m.safetensors")
    save({"a": torch.zeros(1)}, tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep" / "model.safetensors").is_file()


def test_qtensors_in_a_mapping(tmp_path):
    weight = qcore.quantize(torch.randn(6, 40), "int4-g16-fzp/plain")
    save({"w": weight, "again": weight}, tmp_path / "m.safetensors")
    info = inspect(tmp_path / "m.safetensors")
    assert info["w"].kind == "int4-g16-fzp/plain"
    assert info["again"].alias_of == "w"
    assert isinstance(weight, QTensor)


def test_loading_onto_a_device(tmp_path):
    save(linear_model(), tmp_path / "m.safetensors")
    with torch.device("meta"):
        fresh = nn.Sequential(nn.Linear(12, 7))
        load_(fresh, tmp_path / "m.safetensors", device="cpu")
    assert fresh[0].weight.device.type == "cpu"
    assert fresh[0].bias.device.type == "cpu"


def test_a_layer_keeps_the_dtype_of_its_results(tmp_path):
    save(linear_model(), tmp_path / "m.safetensors")
    fresh = linear_model("w4a16")
    fresh[0].out_dtype = torch.float16
    load_(fresh, tmp_path / "m.safetensors")
    assert fresh(torch.randn(2, 12)).dtype == torch.float16
