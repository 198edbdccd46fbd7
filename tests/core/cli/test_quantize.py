"""`qcore quantize` and `qcore inspect` on small files."""

import torch
from safetensors.torch import save_file


def test_report_names_every_tensor_and_the_totals(run, run_json, model):
    source, target = model / "model.safetensors", model / "out.safetensors"
    exclude = ("--exclude", "lm_head", "norm", "--exclude", "layers.1")
    code, found = run_json("quantize", source, target, "--scheme", "w8a16", *exclude)
    assert code == 0
    actions = {tensor["name"]: tensor["action"] for tensor in found["tensors"]}
    assert actions["layers.0.weight"] == "quantized"
    assert actions["layers.0.bias"] == "copied"
    assert actions["layers.1.weight"] == actions["lm_head.weight"] == "excluded"
    assert len(actions) == 5
    assert found["bytes_before"] > found["bytes_after"] > 0
    kinds = {t["name"]: t["scheme"] for t in run_json("inspect", target)[1]["tensors"]}
    assert kinds["layers.0.weight"] == "w8a16"
    assert not kinds["lm_head.weight"]


def test_text(run, model):
    code, out, _ = run("quantize", model / "model.safetensors", model / "o.safetensors", "--scheme", "w4a16-g32")
    assert code == 0
    assert "5 tensors: 3 quantized, 2 copied; " in out
    assert "written to" in out


def test_include_and_dtype(run_json, model):
    arguments = ("quantize", model / "folder-of-shards", model / "out", "--scheme", "w8a16", "--include", "layers.*")
    code, found = run_json(*arguments, "--dtype", "bf16", "--max-shard-size", "20KB")
    assert code == 0
    assert found["actions"]["quantized"] == 2
    assert {t["kind"] for t in run_json("inspect", model / "out")[1]["tensors"]} >= {"bfloat16"}


def test_target_that_exists(run, model):
    arguments = ("quantize", model / "model.safetensors", model / "out.safetensors", "--scheme", "w8a16")
    assert run(*arguments)[0] == 0
    code, _, err = run(*arguments)
    assert code == 2
    assert "out.safetensors" in err
    assert run(*arguments, "--overwrite")[0] == 0


def test_files_of_other_formats_are_named(run, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    code, _, err = run("quantize", tmp_path / "x.gguf", tmp_path / "out", "--scheme", "w8a16")
    assert code == 2
    assert "GGUF" in err
    assert "gguf_file=" in err
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_equal_tensors_of_many_blocks_share_a_line(run, tmp_path):
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({f"layers.{i}.up.weight": torch.randn(8, 32) for i in range(4)}, source)
    names = [f"layers.{i}.up.weight" for i in range(4)]
    quantizing = ("quantize", source, target, "--scheme", "w8a16", "--overwrite")
    for command in (quantizing, ("inspect", target)):
        text = run(*command)[1]
        assert "4 x layers.*.up.weight" in text
        assert not any(name in text for name in names)
        everything = run(*command, "--all")[1]
        assert "layers.*" not in everything
        assert all(name in everything for name in names)
