"""Checkpoints of weights with other elements, scale types, orders and three dimensions; fp8 activations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_mutations import join, split
from torch import Tensor, nn

import qcore
from qcore import CheckpointError, Format, FormatError, QTensor
from qcore.checkpoint import inspect, load_, save
from qcore.checkpoint.archive import Archive
from qcore.checkpoint.values import same_bits
from qcore.formats import elements, layouts

FORMATS = (
    *("fp8/plain", "fp8-g16/plain", "fp8_e5m2/plain", "fp8-g32-e8m0/plain", "fp4-g32-e8m0/plain", "fp4-g16-e4m3/plain"),
    *("fp4-g16-e4m3d/plain", "nf4-g64/plain", "fp4_bnb-g64/plain", "nf4-g16-fzp/plain", "int4-g8-asym/plain_int32"),
)


def weight(format: str, *, order: bool = False, n: int = 6, k: int = 37, seed: int = 0) -> QTensor:
    generator = torch.Generator().manual_seed(seed)
    made = qcore.quantize(torch.randn(n, k, generator=generator), format)
    return made.derived(order=torch.randperm(k, generator=generator).int()) if order else made


def experts(format: str, *, order: bool = False, e: int = 3) -> QTensor:
    return QTensor.stack([weight(format, order=order, seed=seed) for seed in range(e)])


def same(one: QTensor, other: QTensor) -> bool:
    mine, theirs = one.tensors(), other.tensors()
    equal = mine.keys() == theirs.keys() and all(mine[p].dtype == theirs[p].dtype for p in mine)
    known = (one.shape, one.format, one.quantizer) == (other.shape, other.format, other.quantizer)
    return known and equal and all(same_bits(mine[p], theirs[p]) for p in mine)


def stored(path: Path, name: str) -> QTensor:
    with Archive.open(path) as archive:
        return archive.quantized(name)


def linear(held: QTensor, scheme: str = "w8a16") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(held.shape[1], held.shape[0]))
    qcore.quantize_(model, scheme)
    model[0].weight = held
    return model


# Saved and loaded.


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_every_tensor_comes_back_bit_for_bit(tmp_path, format, order, stacked):
    held = (experts if stacked else weight)(format, order=order)
    save({"w": held, "b": torch.ones(3)}, tmp_path / "m.safetensors")
    save({"w": held, "b": torch.ones(3)}, tmp_path / "d", max_shard_size=8)
    for path in (tmp_path / "m.safetensors", tmp_path / "d"):
        assert same(stored(path, "w"), held)
        info = inspect(path)["w"]
        assert (info.kind, info.shape, info.order) == (format, tuple(held.shape), order)
        assert info.nbytes == held.nbytes
    tensors = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert tensors.keys() == {"b", *(f"w.{part}" for part in held.tensors())}


def test_an_order_goes_with_its_layer(tmp_path):
    model = linear(weight("int4-g8-asym/plain", order=True))
    save(model, tmp_path / "m.safetensors")
    save(model.state_dict(), tmp_path / "state.safetensors")
    x = torch.randn(3, 37)
    for file in ("m.safetensors", "state.safetensors"):
        for device in ("cpu", "meta"):
            with torch.device(device):
                fresh = nn.Sequential(nn.Linear(37, 6))
            load_(fresh, tmp_path / file)
            assert same(fresh[0].weight, model[0].weight)
            assert torch.equal(fresh(x), model(x))
    assert "ordered" in str(inspect(tmp_path / "m.safetensors"))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("format", [f for f in FORMATS if "fzp" not in f])
def test_state_dicts(format, assign):
    model = linear(weight(format, order=True))
    fresh = linear(weight(format, seed=1))
    fresh.load_state_dict(model.state_dict(), assign=assign)
    assert same(fresh[0].weight, model[0].weight)


def test_a_state_dict_without_an_order_changes_nothing():
    model = linear(weight("int4-g8/plain", order=True))
    before, state = model[0].weight.tensors(), linear(weight("int4-g8/plain", seed=1)).state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.weight\.order"'):
        model.load_state_dict(state)
    model.load_state_dict(state, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in model[0].weight.tensors().items())


def test_a_state_dict_that_lost_its_order_is_not_saved(tmp_path):
    state = linear(weight("int4-g8/plain", order=True)).state_dict()
    del state["0.weight.order"]
    with pytest.raises(CheckpointError, match=r"0\.weight.*order"):
        save(state, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_tensor_cannot_have_the_name_of_a_part(tmp_path):
    for part in ("order", "global_scale"):
        with pytest.raises(CheckpointError, match=rf"cannot save 'w\.{part}'"):
            save({"w": weight("fp8/plain"), f"w.{part}": torch.ones(1)}, tmp_path / "m.safetensors")


def test_ties_of_ordered_weights(tmp_path):
    held = weight("fp4-g16-e4m3/plain", order=True)
    model = nn.Sequential(*linear(held), *linear(held))
    model[1].weight = model[0].weight
    save(model, tmp_path / "m.safetensors")
    assert inspect(tmp_path / "m.safetensors")["1.weight"].alias_of == "0.weight"
    fresh = nn.Sequential(nn.Linear(37, 6), nn.Linear(37, 6))
    load_(fresh, tmp_path / "m.safetensors")
    assert fresh[0]._store is fresh[1]._store
    assert same(fresh[1].weight, held)


def test_files_without_new_features_keep_the_schema_of_26_11(tmp_path):
    for held, schema in (
        (weight("fp4-g16-e4m3/plain"), "1"),
        (weight("int8/plain", order=True), "2"),
        (experts("int8/plain"), "2"),
    ):
        save({"w": held}, tmp_path / "m.safetensors")
        with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
            assert file.metadata()["qcore.schema"] == schema
            assert ("order" in file.metadata()["qcore.tensors"]) == (held.order is not None)


# Experts in one tensor.


class Experts(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(shape))


def test_experts_load_into_a_parameter_of_three_dimensions(tmp_path):
    held = experts("fp4-g32-e8m0/plain", order=True)
    save({"experts.up": held}, tmp_path / "m.safetensors")
    model = nn.Module()
    model.experts = Experts(3, 6, 37)
    report = load_(model, tmp_path / "m.safetensors")
    assert torch.equal(model.experts.up, held.dequantize(torch.float32))
    assert report["experts"].reason == "dequantized to float: Experts reads 'up' directly"


@pytest.mark.parametrize("shape", [(3, 37, 6), (2, 6, 37), (18, 37), (3, 222)])
def test_experts_of_another_shape(tmp_path, shape):
    save({"experts.up": experts("fp8/plain")}, tmp_path / "m.safetensors")
    model = nn.Module()
    model.experts = Experts(*shape)
    with pytest.raises(CheckpointError, match=r"'experts\.up' has shape \(3, 6, 37\); the model needs"):
        load_(model, tmp_path / "m.safetensors")
    assert not model.experts.up.any()


def test_experts_do_not_fit_a_linear_layer(tmp_path):
    save({"0.weight": experts("fp8/plain"), "0.bias": torch.ones(6)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"'0\.weight' has shape \(3, 6, 37\); '0' needs \(6, 37\)"):
        load_(nn.Sequential(nn.Linear(37, 6)), tmp_path / "m.safetensors")


# fp8 activations.


def static() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 6))
    qcore.quantize_(model, "wfp8afp8-static", calibration=[torch.randn(4, 37)])
    return model


def test_static_fp8_activations_have_a_scale_and_no_zero_point(tmp_path):
    model = static()
    save(model, tmp_path / "m.safetensors")
    assert set(model.state_dict()) == {"0.weight.data", "0.weight.scale", "0.bias", "0.input_scale"}
    fresh = nn.Sequential(nn.Linear(37, 6))
    load_(fresh, tmp_path / "m.safetensors")
    assert fresh[0].scheme == model[0].scheme
    other = nn.Sequential(nn.Linear(37, 6))
    qcore.quantize_(other, "wfp8afp8-static(1.0)")
    other.load_state_dict(model.state_dict())
    assert other[0].scheme == model[0].scheme
    assert str(inspect(tmp_path / "m.safetensors")["0.weight"].scheme) == "wfp8afp8-static"


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.pop("0.input_scale"), r"'0\.input_scale' is missing"),
        (lambda t: t["0.input_scale"].fill_(0), r"0\.input_scale.*must be positive"),
        (lambda t: t["0.input_scale"].fill_(float("nan")), r"0\.input_scale.*scale is nan"),
        (lambda t: t.update({"0.input_scale": torch.ones(1)}), r"of shape \(1,\)"),
        (lambda t: t.update({"0.input_zero_point": torch.zeros((), dtype=torch.int32)}), "Not used.*input_zero_point"),
    ],
    ids=range(5),
)
def test_static_fp8_numbers_that_are_wrong(tmp_path, edit, match):
    save(static(), tmp_path / "m.safetensors")
    edited(tmp_path / "m.safetensors", edit)
    refused(tmp_path / "m.safetensors", match)


# Hostile files.


def edited(path: Path, edit) -> None:
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        notes = file.metadata()
    edit(tensors)
    safetensors.torch.save_file(tensors, path, notes)


def refused(path: Path, match: str) -> None:
    model = nn.Sequential(nn.Linear(37, 6))
    layer, before = model[0], [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointError, match=match) as caught:
        load_(model, path)
    assert model[0] is layer
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert 2 <= len(str(caught.value).splitlines()) <= 5


def put(name: str, index: object, value: object):
    def edit(tensors: dict[str, Tensor]) -> None:
        raw = tensors[name].view(torch.uint8) if tensors[name].dtype.itemsize == 1 else tensors[name]
        raw[index] = value

    return edit


def changed(name: str, change):
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


ORDER, SCALE, GLOBAL, DATA = (f"0.weight.{part}" for part in ("order", "scale", "global_scale", "data"))


@pytest.mark.parametrize(
    ("format", "order", "edit", "match"),
    [
        ("int4-g8/plain", True, put(ORDER, 0, 1), "order must hold each"),
        ("int4-g8/plain", True, put(ORDER, 0, -1), "order must hold each"),
        ("int4-g8/plain", True, put(ORDER, 0, 37), "order must hold each"),
        ("int4-g8/plain", True, put(ORDER, 0, 2**31 - 1), "order must hold each"),
        ("int4-g8/plain", True, changed(ORDER, lambda t: t.long()), "order has dtype torch.int64"),
        ("int4-g8/plain", True, changed(ORDER, lambda t: t.float()), "order has dtype torch.float32"),
        ("int4-g8/plain", True, changed(ORDER, lambda t: t[:-1]), r"order has dtype .*shape \(36,\)"),
        ("int4-g8/plain", True, changed(ORDER, lambda t: t[None]), r"order has dtype .*shape \(1, 37\)"),
        ("int4-g8/plain", True, lambda t: t.pop(ORDER), r"'0\.weight\.order' is not"),
        ("int4-g8/plain", False, lambda t: t.update({ORDER: torch.arange(37)}), r"without an order has no tensor"),
        ("fp8/plain", False, put(DATA, (0, 0), 0x7F), "codes hold 0x7f, which is NaN in fp8"),
        ("fp8/plain", False, put(DATA, (5, 36), 0xFF), "codes hold 0xff, which is NaN in fp8"),
        ("fp8_e5m2/plain", False, put(DATA, (0, 0), 0x7C), "codes hold 0x7c, which is Inf in fp8_e5m2"),
        ("fp8/plain", False, changed(DATA, lambda t: t.view(torch.float8_e4m3fn)), "data has dtype torch.float8"),
        ("fp8/plain", False, changed(DATA, lambda t: t.view(torch.int8)), "data has dtype torch.int8"),
        ("fp8/plain", False, put(SCALE, (0, 0), float("inf")), "scale holds NaN or Inf"),
        ("fp8/plain", False, lambda t: t.update({GLOBAL: torch.ones(())}), "has no tensor '0.weight.global_scale'"),
        ("fp4-g32-e8m0/plain", False, put(SCALE, (0, 0), 255), "scale holds the e8m0 code 255"),
        ("fp4-g32-e8m0/plain", False, changed(SCALE, lambda t: t.view(torch.int8)), "scale has dtype torch.int8"),
        ("fp4-g32-e8m0/plain", False, changed(SCALE, lambda t: t.view(torch.float8_e8m0fnu)), "scale has dtype"),
        ("fp4-g32-e8m0/plain", False, changed(SCALE, lambda t: t.float()), "scale has dtype torch.float32"),
        ("fp4-g16-e4m3/plain", False, put(SCALE, (0, 0), 0x7F), "scale holds NaN or Inf"),
        ("fp4-g16-e4m3/plain", False, changed(SCALE, lambda t: t.view(torch.uint8)), "scale has dtype torch.uint8"),
        ("fp4-g16-e4m3/plain", False, lambda t: t.pop(GLOBAL), r"'0\.weight\.global_scale' is not"),
        ("fp4-g16-e4m3/plain", False, put(GLOBAL, (), float("nan")), "global_scale must be finite"),
        ("fp4-g16-e4m3/plain", False, put(GLOBAL, (), 3e38), "global_scale must be finite"),
        ("fp4-g16-e4m3d/plain", False, put(GLOBAL, (), 0.0), "global_scale must be finite"),
        ("fp4-g16-e4m3/plain", False, changed(GLOBAL, lambda t: t.double()), "global_scale has dtype torch.float64"),
        ("fp4-g16-e4m3/plain", False, changed(GLOBAL, lambda t: t.reshape(1)), "global_scale has dtype"),
        ("fp4-g16-e4m3/plain", False, changed(GLOBAL, lambda t: t.expand(2)), "global_scale has dtype"),
        ("nf4-g64/plain", False, put(DATA, (0, -1), 0x77), "padding"),
    ],
    ids=range(31),
)
def test_values_and_tensors_that_no_format_allows(tmp_path, format, order, edit, match):
    path = tmp_path / "m.safetensors"
    save(linear(weight(format, order=order)), path)
    edited(path, edit)
    refused(path, f"(?s){match}")
    refused(path, r"m\.safetensors: tensor '0\.weight'")


def with_record(path: Path, **changes: object) -> None:
    tree, data = split(path.read_bytes())
    records = json.loads(tree["__metadata__"]["qcore.tensors"])
    records["0.weight"].update(changes)
    tree["__metadata__"]["qcore.tensors"] = json.dumps(records)
    path.write_bytes(join(tree, data))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"order": False}, "without an order has no tensor"),
        ({"order": 1}, "order is 1; it must be true or omitted"),
        ({"order": None}, "order is None"),
        ({"order": [0]}, "order is"),
        ({"shape": [1, 6, 37]}, r"tensor '0\.weight'"),
        ({"shape": [6, 1, 37]}, r"tensor '0\.weight'"),
        ({"shape": [2, 3, 37]}, r"tensor '0\.weight'"),
        ({"shape": [0, 6, 37]}, r"tensor '0\.weight'"),
        ({"shape": [1, 1, 6, 37]}, "impossible"),
        ({"format": "fp8-g16-e4m3/plain", "scheme": "wfp8a16-g16-e4m3"}, "global_scale' is not"),
        ({"format": "fp8_e5m2/plain", "scheme": "wfp8_e5m2a16"}, "which is (NaN|Inf) in fp8_e5m2"),
        ({"format": "fp9/plain"}, "unknown element type 'fp9'"),
        ({"format": "nf4/plain", "scheme": "wnf4a16"}, "layout 'plain' needs"),
        ({"format": "fp8-asym/plain"}, "an integer zero point"),
        ({"format": "fp8-fzp-e8m0/plain"}, "a float zero point"),
        ({"scheme": "w8a16"}, "does not match format"),
        ({"scheme": "wfp8afp8-static(1.0)"}, "does not match format"),
    ],
    ids=range(17),
)
def test_records_that_lie(tmp_path, changes, match):
    held = weight("fp8/plain", order=True)
    raw = held.data.clone()
    raw[0, 0] = 0x7C  # a number in e4m3fn, Inf in e5m2
    path = tmp_path / "m.safetensors"
    save(linear(held.derived(data=raw)), path)
    with_record(path, **changes)
    refused(path, match)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (changed("w.data", lambda t: t[:2]), "data has shape"),
        (changed("w.data", lambda t: t[:, :5]), r"needs torch.uint8 and \(6, 19\)"),
        (changed("w.data", lambda t: t.flatten(0, 1)), "data has shape"),
        (changed("w.scale", lambda t: t[:2]), r"\(E, G, N\) = \(3, 3, 6\)"),
        (changed("w.scale", lambda t: t.transpose(1, 2)), r"\(E, G, N\)"),
        (changed("w.global_scale", lambda t: t[:2]), r"\(E,\) = \(3,\)"),
        (changed("w.global_scale", lambda t: t[0]), r"\(E,\) = \(3,\)"),
        (changed("w.order", lambda t: t[0]), r"\(E, K\) = \(3, 37\)"),
        (put("w.order", (2, 0), 99), "order must hold each"),
        (put("w.global_scale", 1, float("nan")), "global_scale must be finite"),
        (put("w.scale", (2, 0, 0), 0x7F), "scale holds NaN or Inf"),
        (put("w.data", (1, 0, -1), 0x77), "padding"),
        (lambda t: t.pop("w.global_scale"), "'w.global_scale' is not"),
    ],
    ids=range(13),
)
def test_experts_that_are_damaged(tmp_path, edit, match):
    path = tmp_path / "m.safetensors"
    save({"w": experts("fp4-g16-e4m3/plain", order=True)}, path)
    edited(path, edit)
    with pytest.raises(CheckpointError, match=f"(?s)tensor 'w'.*{match}"):
        stored(path, "w")


def test_no_experts_at_all(tmp_path):
    held = experts("fp4-g16-e4m3/plain", order=True)
    none = held.experts(slice(0, 0))
    save({"w": none}, tmp_path / "m.safetensors")
    assert same(stored(tmp_path / "m.safetensors", "w"), none)


@pytest.mark.parametrize("values", [(-2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 2.0), tuple(map(float, range(32)))])
def test_codes_beyond_the_range_of_a_third_party_element(tmp_path, monkeypatch, values):
    # A nibble has room for codes that a table of eight values does not have, a byte for those of 32 values.
    monkeypatch.setattr(elements, "_ELEMENTS", dict(elements._ELEMENTS))
    monkeypatch.setattr(layouts, "_PLAIN_CODECS", dict(layouts._PLAIN_CODECS))
    elements.register_element(elements.Element.table("odd", values))
    format = Format("odd", 16)
    codes = torch.randint(0, len(values), (6, 36), dtype=torch.uint8)
    save({"w": QTensor.from_codes(codes, torch.ones(3, 6), None, format)}, tmp_path / "m.safetensors")
    assert torch.equal(stored(tmp_path / "m.safetensors", "w").codes(), codes)
    edited(tmp_path / "m.safetensors", put("w.data", (0, 0), 0xFF))
    with pytest.raises(CheckpointError, match="tensor 'w': codes span"):
        stored(tmp_path / "m.safetensors", "w")


def test_a_layer_refuses_a_bad_state_dict_and_keeps_its_weight():
    model = linear(weight("fp4-g16-e4m3/plain"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for part, value in (("global_scale", torch.tensor(float("nan"))), ("order", torch.zeros(37, dtype=torch.int32))):
        state = {**model.state_dict(), f"0.weight.{part}": value}
        with pytest.raises(RuntimeError, match=part):
            model.load_state_dict(state)
    state = model.state_dict()
    del state["0.weight.global_scale"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.weight\.global_scale"'):
        model.load_state_dict(state)
    assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_weight_on_meta_has_no_values_to_save(tmp_path):
    with pytest.raises((CheckpointError, FormatError), match="meta"):
        save({"w": weight("fp4-g16-e4m3/plain").to("meta")}, tmp_path / "m.safetensors")
