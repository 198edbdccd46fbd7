"""Counters: nobody shares them with a kernel that may run at the same time."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def here(monkeypatch):
    """The module, on a pretended GPU; ``capturing``, ``capture`` and ``stream`` say what the current stream is."""
    from types import SimpleNamespace

    from qcore_cuda.runtime import counters

    def take(count):
        return counters._found(count, torch.device("cpu"))

    now = SimpleNamespace(capturing=False, capture=1, stream=7, take=take)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    monkeypatch.setattr(counters, "_stream", lambda _index: now.stream)
    monkeypatch.setattr(counters, "_capture", lambda _stream: now.capture)
    for name in ("_slabs", "_streams", "_captured"):
        monkeypatch.setattr(counters, name, {})
    monkeypatch.setattr(counters, "_spent", [])
    return now


def places(tensor):
    return set(range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 4))


def test_calls_of_a_stream_share_them_and_streams_do_not(here):
    first = here.take(100)
    assert first.numel() >= 100
    assert not first.any()
    assert here.take(3).data_ptr() == first.data_ptr()
    here.stream = 8
    assert not places(here.take(100)) & places(first)


def test_calls_of_a_capture_share_them_and_captures_do_not(here):
    eager = here.take(1)
    here.capturing = True
    first = here.take(100)
    assert here.take(264).data_ptr() == first.data_ptr()
    found = [eager, first]
    for here.capture, here.stream in ((1, 8), (2, 7), (3, 8)):
        found.append(here.take(7))
    here.capture, here.stream = 1, 7
    assert here.take(7).data_ptr() == first.data_ptr()
    taken = list(map(places, found))
    assert len(set.union(*taken)) == sum(map(len, taken))


def test_captures_keep_counters_when_there_are_new_ones(here):
    from qcore_cuda.runtime import counters

    here.take(1)
    here.capturing, found = True, []
    for here.capture in range(counters._SLAB // counters._STREAM):
        found.append(here.take(5))
    assert found[-1] is None  # the last set is the stream's
    here.capturing = False
    here.take(1)
    here.capturing, here.capture = True, here.capture + 1
    again = here.take(5)
    assert not set.union(*map(places, found[:-1])) & places(again)
    assert counters._spent, "graphs have addresses of them"
    assert len(counters._captured) <= counters._CAPTURES


def test_each_captured_call_has_its_own_if_captures_look_alike(here):
    eager = here.take(1)
    here.capturing, here.capture = True, None
    captured = [here.take(count) for count in (33, 1, 5)]
    assert all(found.numel() >= count for found, count in zip(captured, (33, 1, 5), strict=True))
    taken = [places(found) for found in (eager, *captured)]
    assert len(set.union(*taken)) == sum(map(len, taken))


def test_where_there_are_none_they_are_zeroed_for_the_call(here):
    from qcore_cuda.runtime.counters import _SLAB, _STREAM, counters

    assert here.take(_STREAM + 1) is None
    here.capturing = True
    assert here.take(1) is None  # nothing ran before
    here.capturing = False
    here.take(1)
    here.capturing = True
    assert here.take(_SLAB) is None
    assert not counters(5, torch.device("cpu")).any()
