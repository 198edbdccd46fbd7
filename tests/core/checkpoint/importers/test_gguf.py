"""GGUF files: frozen ones of gguf 0.19.0 through `load_`, other architectures by the rules, damaged ones."""

import contextlib
import struct

import pytest
import torch
from foreign_layers import FOLDER, frozen, nested
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qcore
from qcore.checkpoint.opening import open_checkpoint

TYPES = ("q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0")


def model():
    """The part of a llama that the frozen files hold, on meta."""
    attention = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(256, 64, device="meta")})
    mlp = torch.nn.ModuleDict({"down_proj": torch.nn.Linear(256, 256, bias=False, device="meta")})
    return nested("model.layers.0", torch.nn.ModuleDict({"self_attn": attention, "mlp": mlp}))


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def file_of(tensors, metadata=(), *, version=3):
    """A GGUF file. ``tensors``: name to (dimensions with the fastest first, type, bytes)."""
    pairs = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in metadata)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + pairs
    offset, infos, data = 0, b"", b""
    for name, (dims, kind, raw) in tensors.items():
        infos += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        infos += struct.pack("<IQ", kind, offset)
        padded = raw + bytes(-len(raw) % 32)
        data, offset = data + padded, offset + len(padded)
    head += infos
    return head + bytes(-len(head) % 32) + data


def metadata(arch, **numbers):
    found = [("general.architecture", 8, text(arch))]
    return found + [(f"{arch}.{key.replace('__', '.')}", 4, struct.pack("<I", value)) for key, value in numbers.items()]


@pytest.mark.parametrize("kind", TYPES)
def test_loads_to_what_the_tool_computes(kind, tmp_path):
    layer, loaded = frozen(f"gguf_{kind}"), model()
    qcore.load_(loaded, FOLDER / f"gguf_{kind}.gguf")
    q_proj = loaded.get_submodule(layer.layer)
    assert layer.is_dense(q_proj.weight.dequantize(torch.float32))


def test_a_directory_with_one_file(tmp_path):
    (tmp_path / "model.gguf").write_bytes((FOLDER / "gguf_q4_k.gguf").read_bytes())
    loaded = model()
    qcore.load_(loaded, tmp_path)
    assert frozen("gguf_q4_k").is_dense(
        loaded.get_submodule(frozen("gguf_q4_k").layer).weight.dequantize(torch.float32)
    )
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(qcore.CheckpointError, match="several GGUF files"):
        qcore.load_(model(), tmp_path)


def test_inspect():
    found = qcore.checkpoint.inspect(FOLDER / "gguf_q4_k.gguf")
    kinds = {t.name: t.kind for t in found}
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == "int4-g32-fzp/plain"
    assert found.method == "gguf"


def test_mxfp4(tmp_path):
    blocks = torch.randint(0, 256, (4, 2, 17), dtype=torch.uint8)
    blocks[..., 0] = torch.randint(120, 130, (4, 2))
    raw = {"blk.0.ffn_down.weight": ((64, 4), 39, blocks.numpy().tobytes())}
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of(raw, metadata("llama")))
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), dim=-1)
    dense = (table[codes.long()] * torch.exp2(blocks[..., :1].float() - 127)).flatten(1)
    with open_checkpoint(path) as archive:
        found = archive.quantized("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(found.dequantize(torch.float32), dense)


def test_norms_of_gemma_are_stored_plus_one(tmp_path):
    values = torch.arange(4.0)
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of({"blk.0.attn_norm.weight": ((4,), 0, values.numpy().tobytes())}, metadata("gemma3")))
    with open_checkpoint(path) as archive:
        assert torch.equal(archive.read("model.layers.0.input_layernorm.weight"), values - 1)


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_experts_are_joined(arch, tmp_path):
    """Three experts of (4, 32) for gate and up, (32, 4) padded to blocks for down."""
    e, n, k = 3, 4, 32
    gate, up = (torch.randn(e, n, k).half() for _ in range(2))
    down = torch.randint(0, 256, (e, 32, 34), dtype=torch.uint8)
    down[..., :2] = torch.tensor([0.5]).half().view(torch.uint8)
    tensors = {
        "blk.1.ffn_gate_exps.weight": ((k, n, e), 1, gate.numpy().tobytes()),
        "blk.1.ffn_up_exps.weight": ((k, n, e), 1, up.numpy().tobytes()),
        "blk.1.ffn_down_exps.weight": ((32, 32, e), 8, down.numpy().tobytes()),
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of(tensors, metadata(arch)))
    with open_checkpoint(path) as archive:
        joined = archive.read("model.layers.1.mlp.experts.gate_up_proj")
        found = archive.quantized("model.layers.1.mlp.experts.down_proj.weight").dequantize(torch.float32)
    assert torch.equal(joined, torch.cat((gate, up), dim=1))
    assert torch.equal(found, down[..., 2:].view(torch.int8).float() * 0.5)


class TestRefused:
    def test_an_unknown_architecture(self, tmp_path):
        (tmp_path / "m.gguf").write_bytes(file_of({}, metadata("wavtokenizer")))
        with pytest.raises(qcore.CheckpointError, match="architecture is 'wavtokenizer'"):
            qcore.load_(model(), tmp_path / "m.gguf")

    @pytest.mark.parametrize(("kind", "name"), [(16, "IQ2_XXS"), (18, "IQ3_XXS"), (19, "IQ1_S"), (99, "number 99")])
    def test_types_by_name(self, kind, name, tmp_path):
        raw = {"blk.0.ffn_down.weight": ((256, 4), kind, bytes(256))}
        (tmp_path / "m.gguf").write_bytes(file_of(raw, metadata("llama")))
        with pytest.raises(qcore.CheckpointError, match=f"its type is {name}"):
            qcore.load_(model(), tmp_path / "m.gguf")

    def test_big_endian(self, tmp_path):
        (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(64))
        with pytest.raises(qcore.CheckpointError, match="big-endian"):
            qcore.load_(model(), tmp_path / "m.gguf")

    @pytest.mark.parametrize("heads", [4, 8])
    def test_a_key_that_is_there_twice(self, heads, tmp_path):
        """The first counts for gguf's reader, none for llama.cpp: rows of q would be in another order."""
        raw = {"blk.0.attn_q.weight": ((32, 64), 2, bytes(18 * 64))}
        twice = metadata("llama", attention__head_count=8) + metadata("llama", attention__head_count=heads)[1:]
        (tmp_path / "m.gguf").write_bytes(file_of(raw, twice))
        with pytest.raises(qcore.CheckpointError, match=r"key 'llama\.attention\.head_count' twice"):
            qcore.load_(model(), tmp_path / "m.gguf")

    def test_every_truncation(self, tmp_path):
        whole = (FOLDER / "gguf_q4_0.gguf").read_bytes()
        path = tmp_path / "m.gguf"
        for end in [*range(4, 700, 7), len(whole) // 2, len(whole) - 4000]:
            path.write_bytes(whole[:end])
            with pytest.raises(qcore.CheckpointError):
                qcore.load_(model(), path)

    @given(place=st.integers(4, 671), value=st.integers(0, 255), wide=st.booleans())
    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_byte_of_the_header(self, tmp_path, place, value, wide):
        whole = bytearray((FOLDER / "gguf_q4_0.gguf").read_bytes())
        whole[place : place + (8 if wide else 1)] = bytes([value]) * (8 if wide else 1)
        path = tmp_path / "m.gguf"
        path.write_bytes(bytes(whole))
        with contextlib.suppress(qcore.CheckpointError):
            qcore.load_(model(), path)

    def test_scales_that_are_no_numbers(self, tmp_path):
        raw = {"blk.0.ffn_down.weight": ((32, 2), 8, b"\x00\x7e" + bytes(32) + b"\x00\x7c" + bytes(32))}
        (tmp_path / "m.gguf").write_bytes(file_of(raw, metadata("llama")))
        with (
            pytest.raises(qcore.CheckpointError, match=r"down_proj\.weight"),
            open_checkpoint(tmp_path / "m.gguf") as archive,
        ):
            archive.quantized("model.layers.0.mlp.down_proj.weight")


NAMES = ("blk.0.attn_q.weight", "blk.0.attn_k.weight")


def test_tensors_cannot_share_bytes(tmp_path):
    """A small file could claim to hold any number of tensors."""
    raw = file_of({NAMES[0]: ((32, 64), 2, bytes(18 * 64)), NAMES[1]: ((32, 64), 2, b"")}, metadata("qwen2"))
    second = raw.index(NAMES[1].encode()) + len(NAMES[1]) + 4 + 16 + 4
    for start in (0, 32, 1120):
        path = tmp_path / "m.gguf"
        path.write_bytes(raw[:second] + struct.pack("<Q", start) + raw[second + 8 :] + bytes(18 * 64))
        with pytest.raises(qcore.CheckpointError, match=r"attn_k.weight'.*overlap"):
            qcore.checkpoint.inspect(path)
    path.write_bytes(raw[:second] + struct.pack("<Q", 1152) + raw[second + 8 :] + bytes(18 * 64))
    assert len(qcore.checkpoint.inspect(path)) == 2


def test_a_part_of_a_split_file(tmp_path):
    split = [("split.count", 2, struct.pack("<H", 3)), ("split.no", 2, struct.pack("<H", 0))]
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(file_of({NAMES[0]: ((32, 64), 2, bytes(18 * 64))}, metadata("qwen2") + split))
    with pytest.raises(qcore.CheckpointError, match=r"one of the 3 parts.*\n.*llama-gguf-split --merge"):
        qcore.convert(path, tmp_path / "out")


@pytest.mark.parametrize("shape", [(32, 0, 1 << 24), (0, 32, 1 << 40), (0, 0, 1 << 24), (0, 1 << 16, 1 << 16)])
def test_any_number_of_experts_that_take_no_bytes(tmp_path, shape):
    """A file of a few bytes kept whoever read it busy for minutes, or took all memory."""
    raw = {f"blk.0.ffn_{part}_exps.weight": (shape, 2, b"") for part in ("gate", "up", "down")}
    (tmp_path / "m.gguf").write_bytes(file_of(raw, metadata("qwen3moe")))
    with pytest.raises(qcore.CheckpointError, match="although it is empty"):
        qcore.convert(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize("shape", [(0, 64), (32, 0), (0, 0)])
@pytest.mark.parametrize("kind", [2, 8])
@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_weights_without_rows_or_columns(tmp_path, shape, kind, arch):
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of({NAMES[0]: (shape, kind, b"")}, metadata(arch, attention__head_count=4)))
    with open_checkpoint(path) as archive:
        (name,) = archive.records
        assert archive.quantized(name).shape == shape[::-1]
