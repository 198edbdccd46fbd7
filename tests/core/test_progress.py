"""Progress of long work: functions are called in order, and a bar is drawn where it is wanted."""

import io
import sys

import pytest
import torch
from torch import nn

import qcore
from qcore import checkpoint


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 32), nn.Linear(32, 8))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run_quantize(tmp_path, progress):
    qcore.quantize_(model(), "w8a16", progress=progress)


def run_load(tmp_path, progress):
    made = model()
    qcore.quantize_(made, "w8a16", exclude="2", progress=False)
    qcore.save(made, tmp_path / "m.safetensors")
    qcore.load_(model(), tmp_path / "m.safetensors", progress=progress)


def run_checkpoint(tmp_path, progress):
    qcore.save(model(), tmp_path / "float.safetensors")
    checkpoint.quantize_checkpoint(
        tmp_path / "float.safetensors", tmp_path / "small.safetensors", "w8a16", progress=progress
    )


EVERY = pytest.mark.parametrize("work", [run_quantize, run_load, run_checkpoint])


@EVERY
def test_a_function_hears_every_step_up_to_the_total(work, tmp_path):
    calls = []
    work(tmp_path, lambda *call: calls.append(call))
    done, totals, names = zip(*calls, strict=True)
    assert list(done) == sorted(done)
    assert len(set(totals)) == 1
    assert done[-1] == totals[0]
    assert len(calls) >= 3
    assert any("1" in name for name in names)


@EVERY
@pytest.mark.parametrize(
    ("progress", "stream", "drawn"),
    [(None, io.StringIO, False), (None, Terminal, True), (True, io.StringIO, True), (False, Terminal, False)],
)
def test_a_bar_is_drawn_on_standard_error_where_it_is_wanted(work, progress, stream, drawn, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", stream())
    work(tmp_path, progress)
    text = sys.stderr.getvalue()
    assert ("quantizing" in text or "loading" in text) == drawn, text


def test_an_error_of_the_function_stops_the_work():
    def broken(_done, _total, _name):
        raise RuntimeError("the window was closed")

    net = model()
    with pytest.raises(RuntimeError, match="the window was closed"):
        qcore.quantize_(net, "w8a16", progress=broken)
    assert type(net[0]) is nn.Embedding


class Unsized:
    """Batches of unknown number, as a loader of a stream has them: its length raises."""

    def __iter__(self):
        return iter([torch.randn(4, 32), torch.randn(4, 32)])

    def __len__(self):
        raise TypeError("a stream has no length")


@pytest.mark.parametrize(("batches", "drawn"), [([torch.randn(4, 32)] * 2, True), (Unsized(), False)])
def test_calibration_counts_its_batches_if_their_number_is_known(batches, drawn, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", Terminal())
    net = nn.Sequential(nn.Linear(32, 32))
    qcore.quantize_(net, "w8a8-static", calibration=batches)
    assert type(net[0]) is qcore.nn.QuantizedLinear
    assert ("calibrating" in sys.stderr.getvalue()) == drawn
