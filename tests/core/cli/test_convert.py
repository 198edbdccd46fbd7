"""`qcore convert`, and how `qcore inspect` shows what it wrote."""


def test_there_and_back(run, run_json, model):
    code, found = run_json("convert", model / "quantized", model / "awq", "--to", "awq", "--dtype", "fp16")
    assert code == 0
    assert (found["method"], found["to"]) == ("", "awq")
    assert found["bytes_after"] > 0
    shown = run_json("inspect", model / "awq")[1]
    assert shown["method"] == "awq"
    assert {t["name"]: t["scheme"] for t in shown["tensors"]}["layers.0.weight"] == "w4a16-g32-asym"
    code, out, _ = run("convert", model / "awq", model / "back")
    assert code == 0
    assert "2 weights, read by importer awq; " in out
    assert "written as qcore to" in out
    assert "read by importer awq" in run("inspect", model / "awq")[1]
    assert "written by qcore" in run("inspect", model / "back")[1]


def test_refusals_are_bad_input(run, model):
    code, _, err = run("convert", model / "model.safetensors", model / "out")
    assert code == 2
    assert "not quantized" in err
    code, _, err = run("convert", model / "quantized", model / "out", "--to", "gptq")
    assert code == 2
    assert "layers.1.weight: its float32 scales are not exact in float16" in err
    assert run("convert", model / "quantized", model / "out", "--to", "exl2")[0] == 2
    assert run("convert", model / "quantized", model / "quantized")[0] == 2
