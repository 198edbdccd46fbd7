"""The CUDA benchmark's own arithmetic, on the CPU: what it compares, judges and prints."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="tested away from the tree, which has the benchmarks")
SIZE = (256, 128)


class Stopwatch:
    """Stands in for `Replay`, which needs a device."""

    count = 1

    def __init__(self, calls):
        self.calls = calls

    def time(self):
        start = time.perf_counter()
        for call in self.calls:
            call()
        return (time.perf_counter() - start) * 1e6


@pytest.fixture
def bench(monkeypatch):
    """The benchmark's modules, looking at the CPU and at the built-in kernels."""
    monkeypatch.syspath_prepend(str(FOLDER))
    parts = {
        name: importlib.import_module(f"_cuda_{name}") for name in ("problem", "contest", "targets", "report", "extras")
    }
    monkeypatch.setattr(parts["problem"], "copies_of", lambda size: 3)
    for part in ("problem", "extras"):
        monkeypatch.setattr(parts[part], "DEVICE", "cpu")
        monkeypatch.setattr(parts[part], "OURS", "torch.")
    for part in ("contest", "extras"):
        monkeypatch.setattr(parts[part], "Replay", Stopwatch)
        monkeypatch.setattr(parts[part], "in_turns", lambda replays: [replay.time() for replay in replays])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    with torch.no_grad():
        yield parts


def test_without_a_device_it_says_so():
    run = subprocess.run([sys.executable, FOLDER / "cuda_linear.py"], capture_output=True, text=True, check=False)
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert run.returncode == 1
    assert "no CUDA device" in run.stderr


def test_every_scheme_is_measured_against_its_own_weight(bench):
    contest = bench["contest"].Contest(SIZE, [], bench["contest"].Ceilings(1e12, 1e14))
    cells = contest.cells(4)
    assert [cell.name for cell in cells] == ["bf16 F.linear", *bench["problem"].SCHEMES]
    assert not contest.notes
    assert cells[0].ratio == 1
    for cell in cells:
        assert cell.error < (2e-2 if "a8" in cell.name else 4e-3)
        assert not cell.note
        assert cell.ours == (cell.name != "bf16 F.linear")


def test_who_cannot_take_part_is_named_and_nobody_else_suffers(bench, monkeypatch):
    monkeypatch.setattr(bench["problem"], "OURS", "cuda.")
    peers = bench["contest"].PEERS
    monkeypatch.setitem(peers, "torch", ("torch", lambda problem: 1 / 0))
    contest = bench["contest"].Contest(SIZE, ["torch"], bench["contest"].Ceilings(1e12, 1e14))
    assert [cell.name for cell in contest.cells(1)] == ["bf16 F.linear"]
    assert len(contest.notes) == 1 + len(bench["problem"].SCHEMES)
    assert "ZeroDivisionError" in contest.notes[-1]
    assert "served by torch." in contest.notes[0]


def test_a_contender_with_varying_bits_is_pointed_out(bench):
    contest = bench["contest"].Contest(SIZE, [], bench["contest"].Ceilings(1e12, 1e14))
    contest.contenders[1].runs[-1] = lambda x: contest.contenders[1].runs[0](x) + 1
    assert "differ" in contest.cells(2)[1].note


def test_convolutions_are_judged_by_their_own_weight(bench):
    ratios, rows = bench["extras"].convolution(channels=8, size=6, batch=2)
    assert set(ratios) == set(bench["extras"].CONV_SCHEMES)
    assert rows[0][0] == "cuDNN bf16"
    assert all(float(row[-1]) < 2e-2 for row in rows[1:])


def test_host_time_is_taken_of_layers_and_kernels(bench):
    times = bench["extras"].host_time(bench["problem"].Problem(256, 128))
    assert all(us > 0 for us in times.values())
    assert {"bf16 F.linear", "layer w4a16-g128", "kernel w8a8"} <= set(times)


def test_a_cold_start_reports_seconds_by_rows(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench["extras"], "LLAMA_8B", ((256, 128), (4096, 16)))
    bench["extras"].cold_child("w4a16-g128")
    times = json.loads(capsys.readouterr().out)
    assert [int(m) for m in times] == list(bench["extras"].COLD_ROWS)
    assert 0 < times["1"] < times["512"]


def cell(bench, name, ratio, rows=1, size=(4096, 4096), competes=None, share=0.5):
    return bench["targets"].Cell(name, competes or name, *size, rows, 10.0 / ratio, ratio, share, 1e-3)


def test_targets_are_those_of_the_issue(bench):
    targets = bench["targets"]
    assert len(targets.TARGETS) == 24
    assert targets.goal("w4a16-g128", 1, (8192, 28672)) == 3.3
    assert targets.goal("w8a8", 2048, (4096, 4096)) == 1.65
    assert targets.goal("w8a16", 256, (1, 1)) == 0.95
    assert targets.goal("w8a16", 64, (4096, 4096)) is None


def test_a_target_is_met_only_if_the_best_peer_is_beaten(bench):
    ours = cell(bench, "w4a16-g128", 2.2)
    slow, fast = (cell(bench, f"peer {r}", r, competes="w4a16-g128-asym") for r in (2.0, 2.3))
    other = cell(bench, "fp8", 9.0, competes="w8a8")
    for peers, met in (([slow, other], True), ([slow, fast], False)):
        found = {v.what: v for v in bench["targets"].verdicts([ours, *peers], {}, {})}
        verdict = found["w4a16-g128, 4096 x 4096, M = 1"]
        assert verdict.met is met
        assert verdict.peer.startswith("peer")
    assert found["w4a16-g128, 4096 x 4096, M = 16"].met is None


def test_the_other_promises(bench):
    cells = [
        cell(bench, "w8a16", 0.9, rows=256),
        cell(bench, "w4a16-g128", 3.4, size=(8192, 28672), share=0.86),
        cell(bench, "w4a16-g128-asym", 2.9, size=(8192, 28672)),
    ]
    host = {"bf16 F.linear": 15.0, "layer w8a8": 13.0, "kernel w8a8": 20.0}
    verdicts = list(bench["targets"].verdicts(cells, host, {"w8a8": 1.1}))[len(bench["targets"].TARGETS) :]
    assert [v.met for v in verdicts] == [False, True, False, True, False]
    assert "layer w8a8" in verdicts[3].what
    assert all(len(v.row()) == 5 for v in verdicts)


def test_the_report_holds_tables_and_figures(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cuda_linear.py", "--quick"])
    report = bench["report"].Report(tmp_path / "r.md", tmp_path / "r.json")
    report.cells += [cell(bench, "bf16 F.linear", 1.0, competes="x"), cell(bench, "w4a16-g128", 2.0)]
    report.cells += [cell(bench, "w4a16-g128", 1.0, rows=256), cell(bench, "w8a16", 2.0, rows=256)]
    report.notes += ["humming: broken", "humming: broken"]
    report.section("Host time", ("call", "us"), [("a", "1")], "About it.")
    report.write()
    text = (tmp_path / "r.md").read_text()
    assert "target 2.10 **missed**" in text
    assert "target 0.95 met" in text
    assert "About it.\n\n| call | us |" in text
    assert text.count("humming: broken") == 1
    assert len(json.loads((tmp_path / "r.json").read_text())["cells"]) == 4


def test_the_sweep_counts_and_names_slow_cells(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    result = importlib.import_module("cuda_sweep").Result([1, 64, 256])
    result.times["64x32", "w8a8", 1] = 3.0, 1.5  # within 2 us
    result.times["64x32", "w8a8", 64] = 104.0, 100.0  # within 5 %
    result.times["64x32", "w8a8", 256] = 106.0, 100.0
    result.times["64x32", "w4a16", 64] = 40.0, 20.0
    assert result.line("64x32", "w8a8") == "| 64x32 w8a8 | 0.50 | 0.96 | 0.94 |"
    assert result.line("64x32", "w4a16") == "| 64x32 w4a16 |  | 0.50 |  |"
    first, schemes, *worst = result.summary().splitlines()
    assert first.startswith("2 of 4 cells are slower")
    assert schemes == "By scheme: w4a16 1, w8a8 1."
    assert worst == [
        "Worst: 0.50 64x32 w4a16 M=64: 40.0 us, bfloat16 20.0 us",
        "Worst: 0.94 64x32 w8a8 M=256: 106.0 us, bfloat16 100.0 us",
    ]
    assert result.summary() in result.text()


def test_costs_are_found_again_from_times(monkeypatch):
    """Also of a way to share tiles that few sizes have, whose other coefficients are those of whole tiles."""
    monkeypatch.syspath_prepend(str(FOLDER))
    fit = importlib.import_module("_cuda_fit")
    forms = importlib.import_module("_cuda_forms")
    from qcore_cuda.costs import Cost
    from qcore_cuda.runtime.device import Device

    device, problem = Device(90, False, 132), forms.problem_of(forms.Form(False, 4, 128), 64, 512, 1024)
    sizes = [(n, k) for n in (1024, 2048, 4096, 9728, 18944) for k in (2048, 4096, 8192)]
    truth = {
        ("gemm_hopper", (("bm", 64), ("split", 1))): (Cost(1, (3.0, 1.0, 0.5, 0.03, 0.0)), sizes),
        ("gemm_hopper", (("bm", 64), ("split", 8))): (Cost(1, (3.0, 1.0, 0.5, 0.03, 0.4)), sizes[:2]),
        ("gemm_hopper", (("bm", 64), ("split", 0))): (Cost(1, (3.0, 1.0, 0.5, 0.03, 0.7)), sizes),
        ("dense", ()): (Cost(1, (6.0, 0.0, 0.0, 1.6, 0.0)), sizes),
    }
    times = {
        config: {size: fit._estimate(device, problem, config, cost, *size) for size in those}
        for config, (cost, those) in truth.items()
    }
    times = {config: {size: us for size, us in found.items() if us < 1e9} for config, found in times.items()}
    made = fit.fits(device, problem, times, 5)
    assert made.keys() == truth.keys()
    for config, found in times.items():
        doubt = fit.EVEN if config[1][-1:] == (("split", 0),) else 1.0
        for size, us in found.items():
            assert fit._estimate(device, problem, config, made[config].cost, *size) == pytest.approx(
                doubt * us, rel=0.01
            )
