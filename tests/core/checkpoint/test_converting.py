"""`convert`: between qcore's checkpoints and those of other tools, bit for bit, or refused by layer."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from foreign_layers import frozen
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import qcore
from qcore.checkpoint import inspect, quantize_checkpoint, save
from qcore.checkpoint.records import Record, write_notes
from qcore.checkpoint.values import rounded

FOREIGN = ["gptq_4_sym_v1_g128", "gptq_4_asym_v2_desc", "gptq_4_v1_zero0", "gptq_8_asym_g64", "awq_gemm_asym_g128"]


class Net(torch.nn.Module):
    def __init__(self, n=32, k=128, scheme="w4a16-g32-asym", dtype=torch.float16, tied=False):
        super().__init__()
        torch.manual_seed(3)
        self.up = torch.nn.Linear(k, n, bias=True)
        self.down = torch.nn.Linear(n, k, bias=False)
        self.lm_head = torch.nn.Linear(k, 16, bias=False)
        if tied:
            self.head = torch.nn.Linear(k, n, bias=False)
            self.head.weight = self.up.weight
        self.to(dtype)
        if scheme:
            qcore.quantize_(self, scheme, exclude=["lm_head"])


def saved(folder, scheme, **options):
    net = Net(scheme=scheme, **options)
    qcore.save(net, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "net", "quantization_config": {"old": 1}}))
    (folder / "tokenizer.json").write_text("{}")
    return net


def reloaded(folder, **options):
    net = Net(scheme=None, **options)
    qcore.load_(net, folder)
    return net


def assert_same(one, other):
    for name in ("up", "down"):
        mine, theirs = (net.get_submodule(name).weight for net in (one, other))
        assert torch.equal(mine.dequantize(torch.float32), theirs.dequantize(torch.float32))
    assert torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert torch.equal(one.up.bias, other.up.bias)


@pytest.mark.parametrize("case", FOREIGN)
def test_other_tools_to_qcore(case, tmp_path):
    layer = frozen(case)
    done = qcore.convert(layer.write(tmp_path / "in"), tmp_path / "out")
    assert done.method == layer.config["quantization_config"]["quant_method"]
    assert done.weights == (f"{layer.layer}.weight",)
    model = layer.model()
    qcore.load_(model, tmp_path / "out")
    weight = model.get_submodule(layer.layer).weight
    assert layer.is_dense(weight.dequantize(torch.float32))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "qcore"
    assert inspect(tmp_path / "out").version


@pytest.mark.parametrize(
    ("case", "to"),
    [
        *((case, "gptq") for case in FOREIGN),
        *((case, "awq") for case in FOREIGN if case in ("gptq_4_sym_v1_g128", "gptq_4_v1_zero0", FOREIGN[-1])),
    ],
)
def test_other_tools_to_each_other(case, to, tmp_path):
    layer = frozen(case)
    qcore.convert(layer.write(tmp_path / "in"), tmp_path / "out", to)
    assert inspect(tmp_path / "out").method == to
    model = layer.model()
    qcore.load_(model, tmp_path / "out")
    assert layer.is_dense(model.get_submodule(layer.layer).weight.dequantize(torch.float32))


@pytest.mark.parametrize("case", ["gptq_4_sym_v1_g128", "gptq_8_sym_channel", "awq_gemm_asym_g128"])
def test_the_bytes_are_those_of_the_tool(case, tmp_path):
    """There and back through qcore's own format, the packed words are those that the tool wrote."""
    layer = frozen(case)
    qcore.convert(layer.write(tmp_path / "in"), tmp_path / "own")
    qcore.convert(tmp_path / "own", tmp_path / "out", layer.config["quantization_config"]["quant_method"])
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        for part in ("qweight", "qzeros", "scales"):
            name = f"{layer.layer}.{part}"
            assert torch.equal(file.get_tensor(name), layer.tensors[name]), part


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("lowest", [False, True])
def test_gptq_stores_a_zero_point_of_0_in_version_2(tmp_path, bits, lowest):
    """Version 1 stores zero points minus one: each tool reads another zero point, or other neighbours, from -1."""
    torch.manual_seed(bits)
    half = 1 << bits - 1
    codes, scale = torch.randint(-half, half, (16, 32), dtype=torch.int8), torch.rand(2, 16).half()
    zero = torch.randint(1 - half, half, (2, 16), dtype=torch.int8)
    zero[1, 3] = -half if lowest else 1 - half
    later = qcore.QTensor.from_codes(codes, scale, zero, qcore.Format(f"int{bits}", 16, qcore.ZeroPoint.INT))
    first = replace(later, zero=zero.clamp_min(1 - half))  # all layers have one version
    (tmp_path / "own").mkdir()
    save({"a.weight": first, "b.weight": later}, tmp_path / "own" / "model.safetensors")
    (tmp_path / "own" / "config.json").write_text("{}")
    for source in (tmp_path / "own", tmp_path / "gptq"):
        target = tmp_path / ("gptq" if source.name == "own" else "again")
        qcore.convert(source, target, "gptq")
        settings = json.loads((target / "config.json").read_text())["quantization_config"]
        assert settings["checkpoint_format"] == ("gptq_v2" if lowest else "gptq")
        with safe_open(target / "model.safetensors", "pt") as file:
            stored = {name: file.get_tensor(f"{name}.qzeros").contiguous().view(torch.uint8) for name in "ab"}
        for name, weight in (("a", first), ("b", later)):
            places = stored[name] if bits == 8 else torch.stack((stored[name] & 15, stored[name] >> 4), -1).flatten(1)
            assert torch.equal(places.int() + (not lowest), weight.zero.int() + half)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(32, 16, bias=False) for name in "ab"}).half()
    qcore.load_(model, tmp_path / "again")
    for name, weight in (("a", first), ("b", later)):
        assert torch.equal(model[name].weight.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("scheme", "to"),
    [
        ("w4a16-g32-asym", "gptq"),
        ("w4a16", "gptq"),
        ("w8a16-g32", "gptq"),
        ("w8a16-asym", "gptq"),
        ("w4a16-g32-asym", "awq"),
        ("w4a16-g32", "awq"),
        ("w4a16", "awq"),
    ],
)
@pytest.mark.parametrize("shard", [None, 2000])
def test_round_trip(scheme, to, shard, tmp_path):
    net = saved(tmp_path / "in", scheme)
    seen = []
    done = qcore.convert(
        tmp_path / "in", tmp_path / "out", to, max_shard_size=shard, progress=lambda *step: seen.append(step)
    )
    assert seen[-1][:2] == (done.bytes_after, done.bytes_after)
    assert_same(net, reloaded(tmp_path / "out", dtype=torch.float16))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "net"
    assert config["quantization_config"]["quant_method"] == to
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    qcore.convert(tmp_path / "out", tmp_path / "back.safetensors")
    assert_same(net, reloaded(tmp_path / "back.safetensors", dtype=torch.float16))


def test_float_layers_are_named_in_the_settings(tmp_path):
    saved(tmp_path / "in", "w4a16-g32-asym")
    for to in ("gptq", "awq", "compressed-tensors"):
        qcore.convert(tmp_path / "in", tmp_path / to, to)
    found = {
        to: json.loads((tmp_path / to / "config.json").read_text())["quantization_config"]
        for to in ("gptq", "awq", "compressed-tensors")
    }
    assert found["gptq"]["dynamic"] == {"-:^lm_head$": {}}
    assert found["awq"]["modules_to_not_convert"] == ["lm_head"]
    assert found["compressed-tensors"]["ignore"] == ["lm_head"]
    assert found["compressed-tensors"]["config_groups"]["group_0"]["targets"] == ["up", "down"]
    assert (found["gptq"]["bits"], found["gptq"]["group_size"], found["gptq"]["sym"]) == (4, 32, False)


def test_an_order_becomes_g_idx(tmp_path):
    layer = frozen("gptq_4_asym_v2_desc")
    qcore.convert(layer.write(tmp_path / "in"), tmp_path / "out", "gptq")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        for part in ("qweight", "g_idx"):
            name = f"{layer.layer}.{part}"
            assert torch.equal(file.get_tensor(name), layer.tensors[name])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["desc_act"] is True


@pytest.mark.parametrize(
    ("scheme", "to", "reason"),
    [
        ("w4a16-g32-fzp", "gptq", "its format is int4-g32-fzp"),
        ("w8a8", "gptq", "quantizes activations"),
        ("w8a16", "awq", "its format is int8"),
        ("mxfp4", "gptq", "its format is fp4"),
        ("w4a16-g32-fzp", "compressed-tensors", "its format is int4-g32-fzp"),
        ("nf4", "compressed-tensors", "its scheme is"),
    ],
)
def test_every_layer_that_the_format_cannot_hold_is_named(scheme, to, reason, tmp_path):
    saved(tmp_path / "in", scheme)
    with pytest.raises(qcore.CheckpointError, match=reason) as error:
        qcore.convert(tmp_path / "in", tmp_path / "out", to)
    assert "down.weight" in str(error.value)
    assert "up.weight" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_mixed_formats(tmp_path):
    saved(tmp_path / "in", {"up": "w4a16-g32", "down": "w8a16-g32"})
    with pytest.raises(qcore.CheckpointError, match="GPTQ has one format for all layers"):
        qcore.convert(tmp_path / "in", tmp_path / "out", "gptq")
    qcore.convert(tmp_path / "in", tmp_path / "out", "compressed-tensors")
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert sorted((g["weights"]["num_bits"], *g["targets"]) for g in groups.values()) == [(4, "up"), (8, "down")]


def test_scales_that_float16_does_not_hold_need_a_dtype(tmp_path):
    saved(tmp_path / "in", "w4a16-g32", dtype=torch.float32)
    with pytest.raises(qcore.CheckpointError, match=r"(?s)float32 scales are not exact in float16.*\(--dtype fp16\)"):
        qcore.convert(tmp_path / "in", tmp_path / "out", "gptq")
    qcore.convert(tmp_path / "in", tmp_path / "out", "gptq", dtype=torch.float16)
    net = reloaded(tmp_path / "out", dtype=torch.float16)
    assert net.up.weight.scale.dtype == net.lm_head.weight.dtype == torch.float16


def test_scales_of_another_dtype_that_float16_holds(tmp_path):
    net = Net(scheme=None, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in (net.up, net.down):
            layer.weight.copy_(torch.randint(-7, 8, layer.weight.shape) * 0.125)
            layer.weight[:, ::16] = 0.875
    qcore.quantize_(net, "w4a16-g32", exclude=["lm_head"])
    qcore.save(net, tmp_path / "in")
    assert inspect(tmp_path / "in")["lm_head.weight"].kind == "bfloat16"
    qcore.convert(tmp_path / "in", tmp_path / "out", "gptq")
    assert_same(net, reloaded(tmp_path / "out", dtype=torch.bfloat16))


def test_a_dtype_that_overflows(tmp_path):
    net = Net(scheme=None, dtype=torch.float32)
    with torch.no_grad():
        net.up.weight[0, 0] = 1e30
    qcore.quantize_(net, "w4a16-g32", exclude=["lm_head"])
    qcore.save(net, tmp_path / "in")
    with pytest.raises(qcore.CheckpointError, match="not finite in torch"):
        qcore.convert(tmp_path / "in", tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()


def test_a_dtype_in_which_zero_points_overflow(tmp_path):
    scale, zero = torch.ones(2, 16), torch.full((2, 16), 7e4)
    weight = qcore.QTensor.from_codes(
        torch.ones(16, 64, dtype=torch.int8), scale, zero, qcore.Format.parse("int8-g32-fzp")
    )
    qcore.save({"up.weight": weight}, tmp_path / "in")
    with pytest.raises(qcore.CheckpointError, match=r"'up\.weight': its zero points are not finite in torch.float16"):
        qcore.convert(tmp_path / "in", tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["qcore", "gptq"])
@pytest.mark.parametrize(("size", "loss"), [(1e-9, "100%"), (1e-7, "19%"), (1e-3, None), (0.0, None)])
def test_a_dtype_in_which_scales_vanish(to, size, loss, tmp_path):
    """One tiny group beside others costs nothing; scales that are all too small cost the whole weight."""
    scale = torch.full((2, 16), size)
    scale[0, 0] = size / 1e5
    weight = qcore.QTensor.from_codes(torch.ones(16, 64, dtype=torch.int8), scale, None, qcore.Format.parse("int8-g32"))
    qcore.save({"up.weight": weight}, tmp_path / "in")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        qcore.convert(tmp_path / "in", tmp_path / "out", to, dtype=torch.float16)
    assert len(said) == (loss is not None)
    assert loss is None or f"scales of 'up.weight' by up to {loss}" in str(said[0].message)


@pytest.mark.parametrize("to", ["qcore", "gptq"])
def test_tied_weights(to, tmp_path):
    net = saved(tmp_path / "in", "w4a16-g32", tied=True)
    qcore.convert(tmp_path / "in", tmp_path / "out", to)
    again = reloaded(tmp_path / "out", tied=True)
    assert_same(net, again)
    assert torch.equal(again.head.weight.dequantize(torch.float32), net.up.weight.dequantize(torch.float32))


def test_names_that_do_not_fit_the_format(tmp_path):
    with pytest.raises(qcore.CheckpointError, match=r"out: GGUF is written as one file.*\nPass 'out\.gguf'"):
        qcore.convert(tmp_path / "in", tmp_path / "out", "gguf")
    with pytest.raises(qcore.CheckpointError, match=r"named like a GGUF file, and to is 'awq'.*\n.*to='gguf'"):
        qcore.convert(tmp_path / "in", tmp_path / "out.gguf", "awq")
    with pytest.raises(qcore.CheckpointError, match=r"ONNX is written in float32.*\nLeave dtype"):
        qcore.convert(tmp_path / "in", tmp_path / "out", "onnx", dtype=torch.float16)


def test_what_cannot_be_converted(tmp_path):
    save_file({"a.weight": torch.ones(8, 8)}, tmp_path / "float.safetensors")
    with pytest.raises(qcore.CheckpointError, match="not quantized"):
        qcore.convert(tmp_path / "float.safetensors", tmp_path / "out")
    saved(tmp_path / "in", "w4a16-g32")
    with pytest.raises(qcore.CheckpointError, match="Did you mean 'gptq'"):
        qcore.convert(tmp_path / "in", tmp_path / "out", "gptk")
    with pytest.raises(qcore.CheckpointError, match="Pass a directory"):
        qcore.convert(tmp_path / "in", tmp_path / "out.safetensors", "gptq")
    with pytest.raises(qcore.CheckpointError, match="float32, bfloat16 or float16"):
        qcore.convert(tmp_path / "in", tmp_path / "out", dtype=torch.int8)
    with pytest.raises(qcore.CheckpointError, match="inside the source"):
        qcore.convert(tmp_path / "in", tmp_path / "in" / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_target_is_replaced_only_if_asked(tmp_path):
    saved(tmp_path / "in", "w4a16-g32")
    qcore.convert(tmp_path / "in", tmp_path / "out", "awq")
    with pytest.raises(qcore.CheckpointError, match="already exists"):
        qcore.convert(tmp_path / "in", tmp_path / "out", "gptq")
    qcore.convert(tmp_path / "in", tmp_path / "out", "gptq", overwrite=True)
    assert inspect(tmp_path / "out").method == "gptq"


def test_a_damaged_source_leaves_nothing_behind(tmp_path):
    layer = frozen("awq_gemm_asym_g128")
    layer.tensors[f"{layer.layer}.scales"][0, 0] = float("nan")
    source = layer.write(tmp_path / "in")
    for to in ("qcore", "awq"):
        with pytest.raises(qcore.CheckpointError):
            qcore.convert(source, tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_experts_stay_one_weight_or_are_refused(tmp_path):
    one = qcore.quantize(torch.randn(16, 64).half(), "int4-g32")
    weight = qcore.QTensor.stack([one, one])
    tensors = {f"mlp.weight.{part}": tensor for part, tensor in weight.tensors().items()}
    save_file(tensors, tmp_path / "in.safetensors", write_notes([Record.of("mlp.weight", weight)], {}))
    qcore.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert inspect(tmp_path / "out.safetensors")["mlp.weight"].shape == (2, 16, 64)
    for to in ("gptq", "awq", "compressed-tensors"):
        with pytest.raises(qcore.CheckpointError, match="several experts"):
            qcore.convert(tmp_path / "in.safetensors", tmp_path / "out", to)


@pytest.mark.parametrize("k", [1, 7, 16])
def test_fp4_of_few_columns_is_refused(tmp_path, k):
    for format in ("fp4-g32-e8m0", "fp4-g16-e4m3d"):
        qcore.save({"a.weight": qcore.quantize(torch.randn(3, k), format)}, tmp_path / "in.safetensors")
        if k % qcore.Format.parse(format).group_size == 0:
            continue
        with pytest.raises(qcore.CheckpointError, match="must be a multiple of"):
            qcore.convert(tmp_path / "in.safetensors", tmp_path / "out", "compressed-tensors")


def test_numbers_that_a_dtype_cannot_represent(tmp_path):
    norm = torch.tensor([1e6, float("inf"), 1.0])
    qcore.save({"a.weight": qcore.quantize(torch.randn(8, 64), "int8"), "norm": norm}, tmp_path / "q.safetensors")
    qcore.save({"a.weight": torch.randn(8, 64), "norm": norm}, tmp_path / "f.safetensors")
    with pytest.warns(qcore.QcoreWarning, match=r"tensor 'norm'.*float16 cannot represent: they become Inf"):
        qcore.convert(tmp_path / "q.safetensors", tmp_path / "a.safetensors", dtype=torch.float16)
    with pytest.warns(qcore.QcoreWarning, match=r"tensor 'norm'.*float16 cannot represent: they become Inf"):
        quantize_checkpoint(tmp_path / "f.safetensors", tmp_path / "b.safetensors", "w8a16", dtype=torch.float16)
    for path in ("q", "f"):  # without a warning: bfloat16 can represent them, and Inf was there before
        out = tmp_path / f"{path}.out.safetensors"
        convert = (
            qcore.convert if path == "q" else lambda *given, **kwargs: quantize_checkpoint(*given, "w8a16", **kwargs)
        )
        convert(tmp_path / f"{path}.safetensors", out, dtype=torch.bfloat16)
        assert load_file(out)["norm"].tolist()[1:] == [float("inf"), 1.0]


@pytest.mark.parametrize("numbers", [[1e6, float("nan")], [float("nan"), -1e6], [float("-inf"), 1.0, -1e6]])
def test_numbers_beside_nan_and_inf_that_become_inf(numbers):
    with pytest.warns(qcore.QcoreWarning, match="they become Inf"):
        rounded(torch.tensor(numbers), torch.float16, "a")


@pytest.mark.parametrize("numbers", [[], [float("inf"), 1.0], [float("nan"), 6e4], [-6e4, 6e4]])
def test_numbers_that_stay_what_they_are(numbers):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rounded(torch.tensor(numbers), torch.float16, "a").tolist() == pytest.approx(numbers, nan_ok=True)
