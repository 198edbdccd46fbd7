"""`quantize_checkpoint` and `inspect`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import checkpoint_zoo as zoo
import pytest
import safetensors.torch
import torch
from foreign_layers import frozen
from torch import nn

import qcore
from qcore import CheckpointError, FormatError, QcoreWarning
from qcore.checkpoint import Inventory, inspect, load_, quantize_checkpoint, save
from qcore.checkpoint.archive import Archive


@pytest.fixture
def source(tmp_path) -> Path:
    """A sharded float directory with the files that stand beside weights."""
    torch.manual_seed(0)
    directory = tmp_path / "source"
    state = {name: t.detach() for name, t in zoo.Text().state_dict().items() if name != "head.weight"}
    save(state, directory, max_shard_size=7000)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text('"tokens"')
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text("[]")
    (directory / "pytorch_model.bin").write_text("weights")
    (directory / ".git").mkdir()
    return directory


@pytest.mark.parametrize(
    "scheme",
    [
        *("w8a16", "w4a16-g32-asym", "w4a8-g32", "w4a16-g32-fzp", "w4a16/plain_int32"),
        *("mxfp4", "nvfp4", "wfp4a16-g16-e4m3d", "nf4", "wfp8afp8", "mxfp8"),
    ],
)
def test_the_result_is_that_of_quantizing_the_model(source, tmp_path, scheme):
    quantize_checkpoint(source, tmp_path / "out", scheme, max_shard_size="3KB")
    fresh, model = zoo.Text(), zoo.Text()
    load_(fresh, tmp_path / "out")
    load_(model, source)
    qcore.quantize_(model, scheme)
    assert fresh.head._store is fresh.embed._store
    assert torch.equal(fresh(zoo.inputs(zoo.Text)), model(zoo.inputs(zoo.Text)))


def test_convolutions(tmp_path):
    model = zoo.Image().eval()
    save(model, tmp_path / "in.safetensors")
    rows = quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "w8a16-g32")
    qcore.quantize_(model, "w8a16-g32")
    fresh = zoo.Image().eval()
    load_(fresh, tmp_path / "out.safetensors")
    assert torch.equal(fresh(zoo.inputs(zoo.Image)), model(zoo.inputs(zoo.Image)))
    assert {r.name: r.shape for r in rows if r.action == "quantized"}["first.weight"] == (8, 3, 3, 3)


def test_routers_of_experts_stay_float(tmp_path):
    """As in `quantize_`, for which they are no linear layers; ``gate_proj`` is one."""
    names = ["a.experts.0.up.weight", "a.gate.weight", "a.gate_proj.weight", "b.gate.weight", "c.router.layer.weight"]
    state = {name: torch.randn(8, 32) for name in [*names, "c.experts.down.weight", "a.shared_expert_gate.weight"]}
    save(state, tmp_path / "in.safetensors")

    def floats(scheme, **options):
        rows = quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", scheme, **options)
        (tmp_path / "out.safetensors").unlink()
        return {row.name for row in rows if row.action != "quantized"}

    assert floats("w8a16") == {"a.gate.weight", "c.router.layer.weight"}
    assert floats({"a.gate": "w8a16", "*": "w4a16-g32"}) == {"c.router.layer.weight"}
    assert floats("w8a16", include=["c.router.layer", "a.gate"]) == state.keys() - {
        "a.gate.weight",
        "c.router.layer.weight",
    }


def test_files_rows_and_progress(source, tmp_path):
    seen = []
    rows = quantize_checkpoint(
        source,
        tmp_path / "out",
        "w4a16-g32",
        exclude=["embed"],
        progress=lambda *a: seen.append(a),
        max_shard_size=3000,
    )
    files = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    weights = [name for name in files if name.startswith("model")]
    assert set(files) - set(weights) == {"config.json", "tokenizer.json", "1_Pooling/config.json"}
    assert len(weights) > 2
    actions = {row.name: (row.action, row.reason) for row in rows}
    assert actions["embed.weight"] == ("excluded", "matches exclude pattern 'embed'")
    assert actions["up.weight"] == ("quantized", "w4a16-g32")
    assert actions["norm.weight"][0] == actions["up.bias"][0] == "copied"
    assert "1-D" in actions["norm.weight"][1]
    assert [name for _, _, name in seen] == [row.name for row in rows]
    total = sum(row.bytes_before for row in rows)
    assert seen[-1][:2] == (total, total)
    assert sum(row.bytes_after for row in rows) == inspect(tmp_path / "out").total_bytes < total


def test_rules_include_and_dtype(source, tmp_path):
    rows = quantize_checkpoint(
        source, tmp_path / "a", {"up": "w8a16", "*": "w4a16"}, include=["up", "down.weight"], dtype=torch.bfloat16
    )
    actions = {row.name: (row.action, row.reason) for row in rows}
    assert actions["up.weight"] == ("quantized", "w8a16")
    assert actions["down.weight"] == ("quantized", "w4a16")
    assert actions["embed.weight"] == ("excluded", "matches no include pattern")
    tensors = {info.name: info for info in inspect(tmp_path / "a")}
    assert tensors["norm.weight"].kind == tensors["embed.weight"].kind == "bfloat16"
    rows = quantize_checkpoint(source, tmp_path / "b", {"up": "w8a16"})
    assert {row.name: row.reason for row in rows}["down.weight"] == "matches no pattern of the scheme mapping"
    with pytest.warns(QcoreWarning, match=r"'dwon' matches no tensor. Did you mean 'down'"):
        quantize_checkpoint(source, tmp_path / "c", "w8a16", exclude="dwon")


def test_tensors_of_other_kinds(tmp_path):
    state = {
        "f8.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn),
        "int.weight": torch.zeros(4, 4, dtype=torch.int32),
        "empty.weight": torch.zeros(0, 4),
        "conv1d.weight": torch.zeros(2, 3, 4),
        "double.weight": torch.ones(4, 4, dtype=torch.float64),
        "table": torch.zeros(4, 4),
    }
    safetensors.torch.save_file(state, tmp_path / "in.safetensors")
    rows = {
        r.name: r for r in quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "d" / "out.safetensors", "w8a16")
    }
    assert {name: row.action for name, row in rows.items()} == {
        "f8.weight": "refused",
        "int.weight": "copied",
        "empty.weight": "refused",
        "conv1d.weight": "copied",
        "double.weight": "quantized",
        "table": "copied",
    }
    assert "without their scales" in rows["f8.weight"].reason
    found = safetensors.torch.load_file(tmp_path / "d" / "out.safetensors")
    assert found["f8.weight"].dtype == torch.float8_e4m3fn
    assert found["double.weight.scale"].dtype == torch.float32


def test_ties_of_the_source_stay(tmp_path):
    save(zoo.Text(), tmp_path / "in.safetensors")
    rows = quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "a.safetensors", "w8a16")
    assert "head.weight" not in [row.name for row in rows]
    assert inspect(tmp_path / "a.safetensors")["head.weight"].alias_of == "embed.weight"
    rows = quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "b.safetensors", "w8a16", exclude="head")
    assert {row.name: row.action for row in rows}["embed.weight"] == "excluded"
    load_(zoo.Text(), tmp_path / "b.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_a_weight_that_is_not_finite_leaves_nothing(source, tmp_path, value, target):
    shard = next(p for p in source.glob("*.safetensors") if "down.weight" in safetensors.torch.load_file(p))
    tensors = safetensors.torch.load_file(shard)
    tensors["down.weight"][3, 3] = value
    safetensors.torch.save_file(tensors, shard)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"model-.*safetensors: down.weight holds NaN or Inf"):
        quantize_checkpoint(source, tmp_path / target, "w4a16-g32")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_interrupt_leaves_nothing(source, tmp_path):
    def stop(done, total, name):
        raise KeyboardInterrupt

    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out", "w8a16", progress=stop)
    assert sorted(tmp_path.rglob("*")) == before


def test_existing_targets(source, tmp_path):
    out = tmp_path / "out"
    quantize_checkpoint(source, out, "w8a16")
    (out / "old.json").write_text("")
    with pytest.raises(CheckpointError, match="already exists"):
        quantize_checkpoint(source, out, "w4a16")
    quantize_checkpoint(source, out, "w4a16", overwrite=True)
    assert {info.scheme for info in inspect(out).quantized} == {"w4a16"}
    assert not (out / "old.json").exists()
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "thesis.txt").write_text("years")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        quantize_checkpoint(source, documents, "w4a16", overwrite=True)
    for name in (".git/config", "other/model.safetensors", "a/b/model.gguf"):
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text("years")
        with pytest.raises(CheckpointError, match="more than one checkpoint"):
            quantize_checkpoint(source, out, "w4a16", overwrite=True)
        (out / name).unlink()
        shutil.rmtree(out / Path(name).parts[0])
    quantize_checkpoint(source, out, "w8a16", overwrite=True)
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="one is a file"):
        quantize_checkpoint(source, tmp_path / "x.safetensors", "w4a16", overwrite=True)
    for target in (source, tmp_path, source / "inside"):
        with pytest.raises(CheckpointError, match="inside the source"):
            quantize_checkpoint(source, target, "w4a16", overwrite=True)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


@pytest.mark.parametrize("name", ["notes.txt", "thesis.docx", "src/train.py", "data/a.csv", ".env"])
def test_files_that_are_not_of_a_checkpoint_stay(name, source, tmp_path):
    out = tmp_path / "out"
    quantize_checkpoint(source, out, "w8a16")
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("years")
    with pytest.raises(CheckpointError, match=re.escape(f"not of a checkpoint ({name})")):
        quantize_checkpoint(source, out, "w4a16", overwrite=True)
    assert (out / name).read_text() == "years"
    assert {info.scheme for info in inspect(out).quantized} == {"w8a16"}


def test_files_of_the_source_and_of_downloads_are_replaced(source, tmp_path):
    out = tmp_path / "out"
    (source / "notes.txt").write_text("of the model")
    for _ in range(2):
        quantize_checkpoint(source, out, "w8a16", overwrite=True)
        assert (out / "notes.txt").read_text() == "of the model"
        for name in ("tokenizer.model", "modeling_own.py", "LICENSE-2.txt", ".cache/huggingface/x.lock"):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text("")


def test_what_cannot_be_done_is_said(source, tmp_path):
    for scheme in ("w8a8-static", "w8a8-o8", "w8a8-token"):
        with pytest.raises(FormatError, match="running the model"):
            quantize_checkpoint(source, tmp_path / "out", scheme)
    with pytest.raises(FormatError, match="dtype is"):
        quantize_checkpoint(source, tmp_path / "out", "w8a16", dtype=torch.int8)
    quantize_checkpoint(source, tmp_path / "out", "w8a16")
    with pytest.raises(CheckpointError, match="already quantized"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "again", "w8a16")
    assert not (tmp_path / "again").exists()


_PEAK = """
import re, sys, torch
from pathlib import Path
from qcore.checkpoint import quantize_checkpoint
def peak():  # of this program; ru_maxrss would start at that of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
torch.set_num_threads(1)
quantize_checkpoint(sys.argv[1] + "/warm", sys.argv[1] + "/warmed", "w8a16")
before = peak()
quantize_checkpoint(sys.argv[1] + "/in", sys.argv[1] + "/out", "w8a16", max_shard_size="32MB")
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux")
def test_peak_memory_is_about_one_tensor(tmp_path):
    save({"a.weight": torch.randn(64, 64)}, tmp_path / "warm")
    state = {f"l{i}.weight": torch.empty(2048, 2048).uniform_(-1, 1) for i in range(12)}  # 16 MiB each, 192 MiB
    save(state, tmp_path / "in", max_shard_size="200MB")
    del state
    done = subprocess.run([sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    peak = int(done.stdout) / 1024
    print(f"peak above the libraries: {peak:.0f} MiB for a checkpoint of 192 MiB")
    assert 4 < peak < 64
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) == 2


# inspect.


def test_an_inventory(tmp_path):
    save(zoo.quantized("w8a8"), tmp_path / "d", max_shard_size=2000)
    inventory = inspect(tmp_path / "d")
    assert isinstance(inventory, Inventory)
    info = inventory["up.weight"]
    assert (info.kind, info.shape, info.quantizer, info.scheme) == ("int8/plain", (40, 33), "absmax", "w8a8")
    assert info.nbytes == 40 * 33 + 40 * 4
    assert inventory["norm.bias"].kind == "float32"
    assert info.shard in inventory.shards
    assert len(inventory) == len(list(inventory)) == 8
    text = str(inventory)
    assert "up.weight" in text
    assert f"written by qcore {qcore.__version__}" in text
    tree = json.loads(json.dumps(inventory.to_json()))
    assert tree["quantized"] == 4
    assert tree["tensors"][0]["shape"] == [33]
    with pytest.raises(KeyError, match=r"Did you mean 'up.weight'"):
        inventory["upp.weight"]


def test_a_foreign_file(tmp_path):
    safetensors.torch.save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "m.safetensors")
    inventory = inspect(tmp_path / "m.safetensors")
    assert inventory.version == ""
    assert "not written by qcore" in str(inventory)
    assert inventory["a"].kind == "bfloat16"


def test_headers_only(tmp_path):
    """A sparse file of 64 GiB is listed at once."""
    shape = [1 << 17, 1 << 17]
    text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 << 34]}}).encode()
    with (tmp_path / "m.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (4 << 34))
    assert inspect(tmp_path / "m.safetensors").total_bytes == 4 << 34


def test_a_directory_with_another_name_for_its_file(tmp_path):
    save({"a": torch.zeros(2)}, tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").rename(tmp_path / "d" / "other.safetensors")
    assert inspect(tmp_path / "d").shards == ("other.safetensors",)
    load_(nn.Identity(), tmp_path / "d", strict=False)


@pytest.mark.parametrize("case", ["gptq_4_sym_v1_g128", "ct_fp8_dyn", "bnb_nf4", "fp8_block_ragged", "ao_int8wo"])
def test_a_checkpoint_of_another_tool_is_quantized_already(tmp_path, case):
    """Copying its codes and replacing its settings would make it unreadable."""
    layer = frozen(case)
    layer.tensors["lm_head.weight"] = torch.randn(8, 64)
    source = layer.write(tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"already quantized by .*\n.*qcore convert"):
        quantize_checkpoint(source, tmp_path / "out", "w8a16")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_configuration_with_infinity(source, tmp_path):
    """Python's json writes it, and so does transformers for models such as Mamba 2."""
    folder = tmp_path / "in"
    quantize_checkpoint(source, folder, "w8a16", exclude="*")
    (folder / "config.json").write_text('{"model_type": "mamba2", "time_step_limit": [0.0, Infinity], "x": NaN}')
    quantize_checkpoint(folder, tmp_path / "out", "w8a16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["time_step_limit"] == [0.0, float("inf")]
    assert config["quantization_config"]["quant_method"] == "qcore"


@pytest.mark.parametrize("part", ["data", "scale", "zero", "order"])
@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_names_that_belong_to_a_quantized_weight(tmp_path, part, target):
    """Both would be written under one name, or a tensor be read as a part of the weight."""
    tensors = {"w.weight": torch.randn(4, 8), f"w.weight.{part}": torch.randn(3)}
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match=rf"'w.weight.{part}': the name belongs to 'w.weight'"):
        quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / target, "w4a16")
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]
    quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / target, "w4a16", exclude="w")
    with Archive.open(tmp_path / target) as archive:
        assert all(torch.equal(archive.read(name), tensor) for name, tensor in tensors.items())


def test_names_that_belong_to_a_weight_of_another_tool(tmp_path):
    state = {"w.weight": qcore.quantize(torch.randn(16, 32).half(), "int4-g32-asym"), "w.qweight": torch.randn(3)}
    (tmp_path / "in").mkdir()
    save(state, tmp_path / "in" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'w\.qweight': the name belongs to"):
        qcore.convert(tmp_path / "in", tmp_path / "out", "gptq")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("config", "name", "shape", "assumed"), [
    (None, "h.0.attn.c_proj.weight", (64, 64), True), (None, "weight", (64, 64), True),
    (None, "h.0.attn.c_proj.weight", (64, 96), False), (None, "up.weight", (64, 64), False),
    ({"model_type": "llama"}, "weight", (64, 64), False), ({"model_type": "gpt2"}, "c_fc.weight", (64, 64), False),
])  # fmt: skip
def test_a_square_weight_that_may_be_turned_is_noted(tmp_path, config, name, shape, assumed):
    """That of a Conv1D is (K, N), which neither a square shape nor a file without a configuration says."""
    save({name: torch.randn(shape)}, tmp_path / "source")
    if config:
        (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    (row,) = quantize_checkpoint(tmp_path / "source", tmp_path / "out", "w8a16")
    assert row.action == "quantized"
    assert row.reason.startswith("w8a16")
    assert ("taken as (N, K)" in row.reason) == assumed
