"""`qcore bench` and `qcore tune`."""

import pytest
import torch

import qcore
from qcore import QcoreError, QTensor, UnsupportedError
from qcore.checkpoint import save
from qcore.cli import measuring, timing
from qcore.cli.model_sizes import model_sizes

QUICK = ("--n", "64", "--k", "128", "--rows", "1,3", "--seconds", "0.001")


def test_bench_measures_every_kernel_at_every_row_count(run_json, add_kernel):
    add_kernel("fast")
    code, found = run_json("bench", "--scheme", "w8a16", "--dtype", "float32", *QUICK)
    assert code == 0
    assert {row["m"] for row in found["rows"]} == {1, 3}
    assert "fast.stub" in {row["kernel"] for row in found["rows"]}
    for row in found["rows"]:
        assert row["ratio"] == pytest.approx(row["dense_milliseconds"] / row["milliseconds"])
        assert row["of_bandwidth"] == pytest.approx(row["bytes_per_second"] / found["bytes_per_second"])
        assert row["weight_bytes"] >= 64 * 128


def test_bench_points_at_a_kernel_slower_than_the_fallback(run, add_kernel, monkeypatch):
    add_kernel("claims")
    add_kernel("quick")
    monkeypatch.setattr(timing, "interleaved_medians", lambda calls, *_: [1.0, *[0.14] * (len(calls) - 3), 13.0, 0.01])
    code, out, _ = run("bench", "--scheme", "w8a16", "--dtype", "float32", "--n", "64", "--k", "128", "--rows", "1")
    assert code == 0
    assert "slower than the fallback: claims.stub for w8a16, 1 rows: 13 ms, torch." in out
    assert "quick.stub for" not in out


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_sizes_for_which_there_is_no_memory(command, run):
    huge = ("--n", "999999999", "--k", "999999999", "--rows", "1", "--seconds", "0.001")
    code, out, err = run(command, "--scheme", "w8a16", *huge)
    assert (code, out) == (2, "")
    assert err == "qcore: there is not enough memory.\nUse smaller sizes, or a machine with more memory.\n"


def test_bench_takes_per_token_codes(run_json):
    code, found = run_json("bench", "--scheme", "w4a8-g32-asym-token", *QUICK)
    assert code == 0
    assert found["rows"]


def test_a_kernel_that_is_wrong_is_not_measured(run, add_kernel):
    add_kernel("bad", fault="wrong")
    code, out, _ = run("bench", "--scheme", "w8a16", *QUICK)
    assert code == 0
    assert "not measured: bad.stub (wrong result" in out


def test_nobody_to_measure(monkeypatch):
    monkeypatch.setattr(measuring, "offers_for", lambda *_: [])
    with pytest.raises(UnsupportedError, match="qcore explain w8a16 --device cpu"):
        measuring.cases(["w8a16"], [(8, 8)], torch.device("cpu"), torch.float32)


def test_bandwidth_is_a_speed(monkeypatch):
    monkeypatch.setattr(timing, "_PROBE_BYTES", 1 << 20)
    assert 1e7 < timing.bandwidth(torch.device("cpu")) < 1e13


def test_tune_changes_the_decision_and_says_so(run_json, run, add_kernel, monkeypatch):
    """The kernel that claims the higher rank is the slower one; once measured, the other serves."""
    made = add_kernel("claims", rank=3001)
    add_kernel("quick", rank=3000)
    times = {"claims.stub": 2.0, "quick.stub": 1.0}
    monkeypatch.setattr(
        "qcore.resolving.tuning._times", lambda _r, kernels, *_: [times.get(k.name, 9.0) for k in kernels]
    )
    code, found = run_json("tune", "--scheme", "w8a16", *QUICK)
    assert made
    assert code == 0
    (weight,) = found["weights"]
    assert (weight["before"], weight["after"], weight["changed"]) == ("claims.stub", "quick.stub", True)
    assert found["stored"]
    code, out, _ = run("tune", "--scheme", "w8a16", *QUICK)
    assert "quick.stub, unchanged" in out
    assert run_json("explain", "w8a16", "--n", "64", "--k", "128")[1]["plugin"] == "quick"


def test_tune_says_where_figures_are_lost(run, monkeypatch):
    monkeypatch.setenv("QCORE_CACHE_DIR", "/dev/null/nowhere")
    code, out, _ = run("tune", "--scheme", "w8a16", *QUICK)
    assert code == 1
    assert "NOT stored" in out


def test_tune_takes_sizes_from_a_checkpoint(run_json, model, monkeypatch):
    monkeypatch.chdir(model)
    assert run_json("quantize", "model.safetensors", "small.safetensors", "--scheme", "w4a16-g32")[0] == 0
    assert model_sizes(model / "small.safetensors") == {"w4a16-g32": [(64, 128), (32, 64)]}
    code, found = run_json("tune", "--model", "small.safetensors", "--rows", "1", "--seconds", "0.001")
    assert code == 0
    assert [(w["scheme"], w["n"], w["k"]) for w in found["weights"]] == [("w4a16-g32", 64, 128), ("w4a16-g32", 32, 64)]


def test_experts_in_a_checkpoint_are_left_out(tmp_path):
    one = qcore.quantize(torch.randn(8, 32), "fp4-g32-e8m0")
    save({"up": one, "experts": QTensor.stack([one, one])}, tmp_path / "m.safetensors")
    assert model_sizes(tmp_path / "m.safetensors") == {"wfp4a16-g32-e8m0": [(8, 32)]}
    save({"experts": QTensor.stack([one, one])}, tmp_path / "m.safetensors")
    with pytest.raises(QcoreError, match="no quantized weight"):
        model_sizes(tmp_path / "m.safetensors")


def test_a_float_checkpoint_has_nothing_to_tune(model):
    with pytest.raises(QcoreError, match="qcore quantize"):
        model_sizes(model / "model.safetensors")
