"""Every instruction set gives the same bits where sums are whole numbers, and so does every number of threads."""

from __future__ import annotations

import cpu_children
import pytest
import torch

from qcore_cpu import native

assert not native.fault()
ISAS = native.isas()


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    return cpu_children.run(tmp_path_factory.mktemp("isa") / "best.pt")


def test_portable_code_is_always_there():
    assert ISAS[-1] == "generic"
    assert native.isa() == ISAS[0]


@pytest.mark.parametrize("isa", ISAS[1:])
def test_isas_give_the_same_bits(isa, best, tmp_path):
    other = cpu_children.run(tmp_path / "other.pt", isa)
    assert best.keys() == other.keys()
    for name, result in best.items():
        # Float activations are summed in another order where bfloat16 products exist.
        exact = "fzp" not in name
        assert torch.equal(result, other[name]) if exact else torch.allclose(result, other[name], rtol=0.02), name


def test_threads_give_the_same_bits(best, tmp_path):
    other = cpu_children.run(tmp_path / "threads.pt", threads=2)
    assert all(torch.equal(result, other[name]) for name, result in best.items())


def test_unknown_isa_is_refused_with_the_list(monkeypatch):
    monkeypatch.setenv(native.ISA, "sse9")
    native.fault.cache_clear()
    try:
        assert (
            native.fault()
            == f"QCORE_CPU_ISA=sse9 names no instruction set that can be used here; choose one of: {' '.join(ISAS)}."
        )
    finally:
        native.fault.cache_clear()
