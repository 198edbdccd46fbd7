"""Truncated, inconsistent and hostile files: `CheckpointError` that names file and tensor, or a correct load."""

from __future__ import annotations

import json
import pickle
import random
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_mutations import split
from torch import nn

import qcore
from qcore import CheckpointError
from qcore.checkpoint import header, inspect, load_, save


def fresh() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def build(tree: dict | str, data: bytes) -> bytes:
    text = (tree if isinstance(tree, str) else json.dumps(tree)).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    """A file with a padded int4 weight with zero points, a weight with calibrated numbers, and a norm."""
    torch.manual_seed(0)
    model = fresh()
    scheme = {"0": "w4a16-g8-asym", "2": "w8a8-static"}
    qcore.quantize_(model, scheme, calibration=[torch.randn(5, 13)])
    path = tmp_path_factory.mktemp("good") / "m.safetensors"
    save(model, path)
    return path.read_bytes()


def refused(path: Path, match: str | None = None) -> CheckpointError:
    model = fresh()
    before = [id(module) for module in model.modules()], [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointError, match=match) as caught:
        load_(model, path)
    assert [id(module) for module in model.modules()] == before[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before[1], strict=True))
    assert str(path.name) in str(caught.value)
    assert 2 <= len(str(caught.value).splitlines()) <= 5
    return caught.value


def test_the_good_file_loads(good, tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(good)
    load_(fresh(), path)


def test_truncated_at_any_byte(good, tmp_path):
    path = tmp_path / "m.safetensors"
    header = 8 + struct.unpack("<Q", good[:8])[0]
    for length in [*range(0, header, 7), *range(header - 2, len(good))]:
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match=r"m\.safetensors"):
            inspect(path)
    refused(path)
    path.write_bytes(good + b"\0")
    refused(path, "header describes")


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_are_refused_or_harmless(good, tmp_path, seed):
    generator = random.Random(seed)
    path = tmp_path / "m.safetensors"
    model = fresh()
    for _ in range(150):
        blob = bytearray(good)
        for _ in range(generator.choice((1, 1, 1, 4))):
            blob[generator.randrange(len(blob))] ^= 1 << generator.randrange(8)
        path.write_bytes(blob)
        try:
            load_(model, path)
        except CheckpointError:
            continue
        assert model(torch.zeros(1, 13)).shape == (1, 3)
        safetensors.torch.load_file(path)  # what we accept, every other tool accepts


def test_random_json_values_in_the_header(good, tmp_path):
    tree, data = split(good)
    path = tmp_path / "m.safetensors"
    values = [None, True, -1, 1.5, 2**62, 10**400, "x", [], {}, [1], [-1, 2], [2**40, 2**40], [[1]], "\ud800"]
    for name in tree:
        for key in tree[name]:
            for value in values:
                # "format" is for other tools, and any text could be a version.
                if value == tree[name][key] or (value == "x" and key in {"format", "qcore"}):
                    continue
                path.write_bytes(build({**tree, name: {**tree[name], key: value}}, data))
                with pytest.raises(CheckpointError):
                    load_(fresh(), path)


@pytest.mark.parametrize(
    ("blob", "match"),
    [
        (b"", "0 bytes long"),
        (b"\0" * 7, "7 bytes long"),
        (b"\0" * 8, "not valid JSON"),
        (b"\xff" * 64, "cannot hold a header"),
        (struct.pack("<Q", 200_000_000) + b" " * 100, "cannot hold a header"),
        (build("[]", b""), "must be an object"),
        (build("{", b""), "not valid JSON"),
        (build('{"a": NaN}', b""), "not a JSON number"),
        (build('{"a": 1, "a": 2}', b""), "'a' occurs twice"),
        (build("[" * 200_000, b""), "not valid JSON"),
        (build('{"a": ' * 100_000, b""), "not valid JSON"),
        (build('{"a": ' + "9" * 5000 + "}", b""), "not valid JSON"),
        (build({"__metadata__": []}, b""), "__metadata__"),
        (build({"a": {"dtype": "F4", "shape": [], "data_offsets": [0, 0]}}, b""), "tensor 'a': dtype 'F4'"),
        (build({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"xx"), "start at"),
        (build({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}, b"x"), "needs 2 bytes"),
        (build({"a": {"dtype": "U8", "shape": [0, 2**63], "data_offsets": [0, 0]}}, b""), "impossible"),
        (build({"a": {"dtype": "U8", "shape": [1], "data_offsets": [2, 1]}}, b"x"), "needs 1 bytes"),
        (
            build({n: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for n in "ab"}, b"xx"),
            "tensor 'b': its bytes start",
        ),
        (pickle.dumps({"a": 1}) + b"\0" * 64, "pickle or zip"),
    ],
    ids=range(20),
)
def test_files_that_are_no_checkpoint(tmp_path, blob, match):
    path = tmp_path / "m.safetensors"
    path.write_bytes(blob)
    refused(path, match)


def test_a_zip_archive_of_torch_save(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "m.safetensors")
    assert "never unpickles" in str(refused(tmp_path / "m.safetensors", "pickle or zip"))


def test_paths_that_are_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        inspect(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="neither"):
        inspect(tmp_path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        inspect("/dev/null")
    for name in "ab":
        safetensors.torch.save_file({}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"several checkpoints: a\.safetensors, b"):
        inspect(tmp_path)


# The records of quantized weights.


def with_records(good: bytes, path: Path, edit) -> None:
    tree, data = split(good)
    records = json.loads(tree["__metadata__"]["qcore.tensors"])
    edit(records, tree["__metadata__"], tree)
    tree["__metadata__"]["qcore.tensors"] = json.dumps(records)
    path.write_bytes(build(tree, data))


def setting(key: str, value):
    return lambda records, _, __: records["0.weight"].update({key: value})


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (setting("format", "int3/plain"), "unknown element type 'int3'"),
        (setting("format", "int4-g8-asym/tiled"), r"unknown layout 'tiled'.*\n.*plugin.*\n((?!Upgrade).)*\Z"),
        (setting("format", 7), "cannot read the format"),
        (setting("format", "int4-g16-asym/plain"), "does not match format"),
        (setting("scheme", "w2a2"), "cannot read the scheme"),
        (setting("scheme", "w8a8"), "does not match format"),
        (setting("scheme", "w4a8-g8-asym-static(0.1,3)"), "does not match format"),
        (setting("quantizer", "x" * 100), "is not a name"),
        (setting("quantizer", 5), "is not a name"),
        (setting("shape", [4, 15]), "layout 'plain' needs"),
        (setting("shape", [4, 14]), "0.weight"),
        (setting("shape", [-4, -13]), "impossible"),
        (setting("shape", [4, 2**63]), "impossible"),
        (setting("shape", [2**47, 2**47]), "impossible"),
        (setting("shape", [4]), "impossible"),
        (setting("shape", [True, 13]), "impossible"),
        (setting("shape", "4x13"), "impossible"),
        (lambda r, _, __: r.update({"9.weight": r["0.weight"]}), "'9.weight'.*'9.weight.data' is not"),
        (lambda r, _, __: r.update({"0.weight": None}), "must hold format"),
        (lambda r, _, __: r["0.weight"].pop("scheme"), "must hold format"),
        (lambda r, _, __: r.pop("0.weight"), "Not used by the model: 0.weight.data"),
        (lambda _, m, __: m.pop("qcore"), "schema"),
        (lambda _, m, __: m.update({"qcore.schema": "3"}), "with schema 3; .*\nUpgrade"),
        (lambda _, m, __: m.update({"qcore.schema": "one"}), "schema 'one'"),
        (lambda _, m, __: m.update({"qcore": "a" * 100}), "its metadata names"),
        (lambda _, m, __: m.update({"qcore.aliases": "{"}), "not valid JSON"),
        (lambda _, m, __: m.update({"qcore.aliases": '{"a": 1}'}), "is not a name"),
        (lambda _, m, __: m.update({"qcore.aliases": '{"a": "gone"}'}), "alias of 'gone', which is not in"),
        (lambda _, m, __: m.update({"qcore.aliases": '{"a": "b", "b": "a"}'}), "an alias itself"),
        (lambda _, m, __: m.update({"qcore.aliases": '{"a": "a"}'}), "an alias itself"),
        (lambda _, m, __: m.update({"qcore.aliases": '{"1.bias": "1.weight"}'}), "stored and also an alias"),
        (lambda _, m, __: m.update({"qcore.aliases": '{"a": "0.weight"}'}), "its metadata differs"),
        (lambda _, __, t: t.update({"0.weight.zer0": t.pop("0.weight.zero")}), "'0.weight.zero' is not"),
        (lambda _, __, t: t.update({"2.input_scal": t.pop("2.input_scale")}), "'2.input_scale' is missing"),
        (lambda _, __, t: t.update({"0.weight": t.pop("1.bias")}), "has no tensor '0.weight'"),
        (lambda _, __, t: t.update({"2.weight.zero": t.pop("1.bias")}), "has no tensor"),
        (lambda r, __, t: t["0.weight.scale"].update(shape=[4, 2]), "tensor '0.weight': scale has dtype"),
    ],
    ids=range(37),
)
def test_records_that_lie(good, tmp_path, edit, match):
    path = tmp_path / "m.safetensors"
    with_records(good, path, edit)
    refused(path, match)


def test_a_newer_qcore_with_the_same_schema_is_fine(good, tmp_path):
    path = tmp_path / "m.safetensors"
    with_records(good, path, lambda _, notes, __: notes.update({"qcore": "31.1.0"}))
    load_(fresh(), path)
    assert inspect(path).version == "31.1.0"


# The values of quantized weights.


def with_value(good: bytes, path: Path, name: str, edit) -> None:
    path.write_bytes(good)
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        notes = file.metadata()
    tensors[name] = edit(tensors[name])
    safetensors.torch.save_file(tensors, path, notes)


def put(index, value):
    def edit(tensor):
        tensor[index] = value
        return tensor

    return edit


@pytest.mark.parametrize(
    ("name", "edit", "match"),
    [
        ("0.weight.scale", put((0, 0), float("nan")), "tensor '0.weight': scale holds NaN or Inf"),
        ("2.weight.scale", put((0, 0), float("inf")), "tensor '2.weight': scale holds NaN or Inf"),
        ("0.weight.zero", put((0, 0), 9), "zero points span"),
        ("0.weight.data", put((0, -1), 0x10), "padding"),
        ("0.weight.scale", lambda t: t.double(), "scale has dtype torch.float64"),
        ("0.weight.data", lambda t: t.view(torch.int8), "data has dtype torch.int8"),
        ("2.input_scale", put((), float("nan")), "2.input_scale.*scale is nan"),
        ("2.input_scale", put((), 0.0), "must be positive"),
        ("2.input_scale", lambda _: torch.ones(2).double(), r"of shape \(2,\)"),
        ("2.input_zero_point", put((), 500), "zero_point is 500"),
    ],
)
def test_values_that_no_format_allows(good, tmp_path, name, edit, match):
    path = tmp_path / "m.safetensors"
    with_value(good, path, name, edit)
    refused(path, match)


def test_padding_of_plain_int32(tmp_path):
    model = nn.Sequential(nn.Linear(13, 4))
    qcore.quantize_(model, "w4a16/plain_int32")
    save(model, tmp_path / "good.safetensors")
    path = tmp_path / "m.safetensors"
    with_value((tmp_path / "good.safetensors").read_bytes(), path, "0.weight.data", lambda t: t ^ (1 << 30))
    with pytest.raises(CheckpointError, match="padding"):
        load_(nn.Sequential(nn.Linear(13, 4)), path)


# Sharded directories.


@pytest.fixture
def sharded(tmp_path) -> Path:
    torch.manual_seed(0)
    model = fresh()
    qcore.quantize_(model, "w8a16")
    save(model, tmp_path / "d", max_shard_size=60)
    return tmp_path / "d"


def edit_index(directory: Path, edit) -> None:
    path = directory / "model.safetensors.index.json"
    tree = json.loads(path.read_text())
    edit(tree["weight_map"])
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    "shard",
    [
        *("../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "C:x.safetensors"),
        *("x\0.safetensors", "m.bin", "..", "", 5, None),
    ],
)
def test_an_index_cannot_point_outside(sharded, shard):
    (sharded.parent / "x.safetensors").write_bytes(b"")
    edit_index(sharded, lambda m: m.update({"1.bias": shard}))
    with pytest.raises(CheckpointError, match=r"index.json: tensor '1.bias'.*not a file name in this directory"):
        load_(fresh(), sharded)


def shards_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda d: shards_of(d)[1].unlink(), "is not in the directory"),
        (lambda d: shards_of(d)[1].write_bytes(shards_of(d)[1].read_bytes()[:-1]), "header describes"),
        (lambda d: shards_of(d)[1].write_bytes(shards_of(d)[0].read_bytes()), "a tensor must be stored only once"),
        (lambda d: edit_index(d, lambda m: m.update({"more": shards_of(d)[0].name})), "'more': not in"),
        (lambda d: edit_index(d, lambda m: m.pop("1.bias")), "'1.bias'.*the index does not name it"),
        (lambda d: edit_index(d, lambda m: m.update({"1.bias": m["0.weight.data"]})), "according to the index"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
        (lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": []}'), "no weight_map"),
        (lambda d: (d / "model.safetensors.index.json").write_bytes(b"\xff\xfe"), "not valid JSON"),
    ],
    ids=range(9),
)
def test_shards_that_do_not_belong_together(sharded, edit, match):
    edit(sharded)
    with pytest.raises(CheckpointError, match=match):
        load_(fresh(), sharded)


def test_shards_with_different_records(sharded):
    first, second = (shard for shard in shards_of(sharded) if b"weight.data" in shard.read_bytes())
    tree, _ = split(first.read_bytes())
    records = json.loads(tree["__metadata__"]["qcore.tensors"])
    name = next(iter(records))
    records[name]["quantizer"] = "mse"
    other, other_data = split(second.read_bytes())
    other["__metadata__"]["qcore.tensors"] = json.dumps(records)
    second.write_bytes(build(other, other_data))
    with pytest.raises(CheckpointError, match="differs from that in another shard"):
        load_(fresh(), sharded)


def test_files_that_cannot_be_opened(sharded, monkeypatch):
    def fail(self, *_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(CheckpointError, match=r"cannot be read: Permission denied"):
        inspect(sharded)


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    save(nn.Linear(300, 300), path)
    checked = header._check_layout

    def shrink(*given):
        checked(*given)
        path.write_bytes(path.read_bytes()[:-40])

    monkeypatch.setattr(header, "_check_layout", shrink)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        load_(nn.Linear(300, 300), path)
