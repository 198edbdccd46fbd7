"""Kernels that are wrong for unusual inputs only, or that hold what they must not: the kit finds each."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time

import pytest
import torch

import qcore
from qcore import testing
from qcore.runtime import process_state

LINEAR = {"schemes": ["w8a16"], "contracts": ["linear"], "seed": 1}
TABLE = {"schemes": ["w8a16"], "contracts": ["embedding"], "seed": 1}


def outcome(name, law, few=LINEAR):
    (result,) = [r for r in testing.run(name, select=f"{law}[", **few).laws if r.law == law]
    return result.outcome, result.reason


def before(change):
    """A method ``__call__`` that changes the arguments: ``change(x, bias)`` gives others."""

    def method(self, x, packed, bias, **given):
        return super(type(self), self).__call__(*change(x, packed, bias), **given)

    return {"__call__": method}


def after(change):
    """A method ``__call__`` that changes the right result: ``change(y, x)``."""

    def method(self, x, packed, bias, **given):
        return change(super(type(self), self).__call__(x, packed, bias, **given), x)

    return {"__call__": method}


def from_start(tensor):
    """What native code reads that takes the address of a tensor's memory, and forgets the offset."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return memory[: tensor.numel()].reshape(tensor.shape) if tensor.is_contiguous() else tensor


# pack


def holding(self, weight):
    self.held = weight.map(torch.clone)
    return super(type(self), self).pack(weight)


def holding_dtype(self, weight):
    self.dtype = weight.scale.dtype
    packed = super(type(self), self).pack(weight)
    return {**packed, "scale": packed["scale"].float()}


def unpack_in_held_dtype(self, packed):
    return super(type(self), self).unpack({**packed, "scale": packed["scale"].to(self.dtype)})


def changing(self, weight):
    packed = super(type(self), self).pack(weight)
    weight.scale.mul_(2)
    return packed


PACKS = {
    "holds": ({"pack": holding, "unpack": lambda self, packed: self.held}, "a kernel must not hold one"),
    "holds a dtype": ({"pack": holding_dtype, "unpack": unpack_in_held_dtype}, "a kernel must not hold one"),
    "changes": ({"pack": changing}, "pack changed the weight that it was given: scale differs"),
    "nothing": ({"pack": lambda self, weight: None}, "pack returned nothing (None) instead of a dict of tensors"),
    "tuple": ({"pack": lambda self, weight: (weight.data,)}, "pack returned a tuple instead of a dict of tensors"),
    "number": ({"pack": lambda self, weight: {"n": 1}}, "pack returned a int as 'n' instead of a tensor by name"),
}


CALLING = ("fake", "opcheck", "determinism", "threads", "outputs", "strides", "empty", "nan", "state", "modes")
"""Laws that call a kernel."""


@pytest.mark.parametrize("name", PACKS)
def test_a_fault_of_pack_is_found(add, name):
    methods, says = PACKS[name]
    certificate = testing.run(add(**methods), select="linear[w8a16-float32-rows-17]", **LINEAR)
    result = certificate.failures[0]
    assert result.law == "pack"
    assert says in result.reason


@pytest.mark.parametrize("law", [*CALLING, "formats"])
def test_a_pack_that_gives_nothing_is_named_by_each_law(add, law):
    state, reason = outcome(add(pack=lambda self, weight: None), law)
    assert (state, "pack returned nothing (None) instead of a dict" in reason) == ("failed", True), reason


@pytest.mark.parametrize("law", CALLING)
@pytest.mark.parametrize(("change", "says"), [(lambda y, x: None, "nothing (None)"), (lambda y, x: (y,), "a tuple")])
def test_a_result_that_is_no_tensor_is_named_by_each_law(add, law, change, says):
    state, reason = outcome(add(**after(change)), law)
    assert (state, f"returned {says} instead of a tensor" in reason) == ("failed", True), reason


@pytest.mark.parametrize("law", ["compile", "large", "decision"])
def test_a_result_that_is_nothing_fails_costly_laws(add, law):
    assert outcome(add(**after(lambda y, x: None)), law)[0] == "failed"


# x and bias


def kept_from_another_call(self, x, packed, bias, **given):
    """As with a buffer for x that all threads share."""
    self.x = x
    time.sleep(1e-4)  # on a busy machine no other thread would come between
    first = super(type(self), self).__call__(x, packed, bias, **given)
    return first if self.x is x else super(type(self), self).__call__(self.x, packed, bias, **given)


def as_if_contiguous(x):
    return x.as_strided(x.shape, x.new_empty(x.shape).stride(), x.storage_offset()) if x.dim() == 3 else x


FAULTS = {
    "x shared by threads": ({"__call__": kept_from_another_call}, "threads"),
    "offset of x ignored": (before(lambda x, packed, bias: (from_start(x), packed, bias)), "strides"),
    "offset of the bias ignored": (
        before(lambda x, packed, bias: (x, packed, bias if bias is None else from_start(bias))),
        "strides",
    ),
    "x of three dimensions read as contiguous": (
        before(lambda x, packed, bias: (as_if_contiguous(x), packed, bias)),
        "strides",
    ),
    "NaN lost": (before(lambda x, packed, bias: (x.nan_to_num(), packed, bias)), "nan"),
    "NaN in other rows": (after(lambda y, x: y + 0 * x.sum() if x.isnan().any() else y), "nan"),
    "raises under inference_mode": (after(lambda y, x: 1 / 0 if torch.is_inference_mode_enabled() else y), "modes"),
    "raises with gradients": (after(lambda y, x: 1 / 0 if torch.is_grad_enabled() else y), "modes"),
    "rounded under autocast": (
        after(lambda y, x: y.bfloat16().to(y.dtype) if torch.is_autocast_enabled("cpu") else y),
        "modes",
    ),
}


CHANGES = {
    "random numbers": lambda: torch.rand(1),
    "number of threads": lambda: torch.set_num_threads(1),
    "default dtype": lambda: torch.set_default_dtype(torch.bfloat16),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "float32 matmul precision": lambda: torch.set_float32_matmul_precision("high"),
    "working directory": lambda: os.chdir("/"),
    "signal handlers": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "default device": lambda: torch.set_default_device("cpu"),
}
"""What a kernel may do at each call, by the item of the process's state that it changes."""


@pytest.mark.parametrize("item", CHANGES)
@pytest.mark.parametrize("alone", [True, False])
def test_changes_of_the_process_are_found(add, item, alone):
    """Also where cases have run before, after which what they set may stand."""
    before = process_state.snapshot()
    name = add(**after(lambda y, x: (CHANGES[item](), y)[1]))
    select = ["state["] if alone else ["state[", "linear[w8a16-float32-rows-1"]
    (found,) = [r for r in testing.run(name, select=select, **LINEAR).laws if r.law == "state"]
    assert found.outcome == "failed"
    assert f"a call changed state of the process: {item}" in found.reason
    assert not before()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_for_unusual_inputs_is_found(add, name):
    methods, law = FAULTS[name]
    assert outcome(add(**methods), law)[0] == "failed"


# embeddings


@pytest.fixture
def table(add, loopback):
    """``table(change)``: a plugin for tables whose kernels look up ``change(indices, V)``."""

    def register(change):
        class Table(loopback.Embedding):
            def __call__(self, x, packed, bias, **given):
                return super().__call__(change(x, self.request.n), packed, bias)

        class Chip:
            @qcore.hookimpl
            def qcore_embedding(self, request):
                if request.weight.dtype != "int8":
                    return qcore.Refusal("int8 only")
                return qcore.Offer(Table(request, "toy"))

        return add("toy", Chip())

    return register


def refused(error):
    def change(x, size):
        if x.numel() and (int(x.min()) < 0 or int(x.max()) >= size):
            raise error("out of range")
        return x

    return change


INDICES = {
    "clamped": (lambda x, size: x.clamp(0, size - 1), "index -1 for 33 rows raised nothing"),
    "negative": (lambda x, size: torch.where(x < 0, x + size, x), "index -1 for 33 rows raised nothing"),
    "last": (lambda x, size: refused(IndexError)(x - (x == size).int(), size), "index 33 for 33 rows raised nothing"),
    "error": (refused(RuntimeError), "raised RuntimeError instead of IndexError: out of range"),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_out_of_range_has_to_raise(table, name):
    change, says = INDICES[name]
    state, reason = outcome(table(change), "indices", TABLE)
    assert state == "failed"
    assert says in reason


def test_an_index_that_is_refused_passes(table):
    assert outcome(table(refused(IndexError)), "indices", TABLE) == ("passed", "")


# Real sizes


def test_sums_of_a_long_k_that_differ_from_call_to_call(add, monkeypatch):
    monkeypatch.setattr("qcore.testing.laws.large._TIME_BUDGET", 120.0)
    calls = itertools.count()

    def change(y, x):
        return y * (1 + 1e-6 * (next(calls) % 3)) if x.shape[-1] > 2000 else y

    state, reason = outcome(add(**after(change)), "large")
    assert state == "failed"
    assert "two calls with the same input differ" in reason


def test_the_place_of_a_fault_at_real_sizes_is_exact(add, monkeypatch):
    monkeypatch.setattr("qcore.testing.laws.large._TIME_BUDGET", 120.0)

    def change(y, x):
        y[..., -1] = 1e4 if y.shape[-1] > 1000 else y[..., -1]
        return y

    state, reason = outcome(add(**after(change)), "large")
    size = int(re.search(r"weight of (\d+) x", reason)[1])
    place = re.search(r"sampled: at \((\d+), (\d+)\)", reason)
    assert state == "failed"
    assert int(place[2]) == size - 1


def test_what_a_kernel_raises_has_its_line(add):
    def broken(self, x, packed, bias, **given):
        return torch.matmul(x, packed["nothing"])

    name = add(__call__=broken)
    (found,) = testing.run(name, select=["linear[w8a16-float32-rows-1]"], **LINEAR).cases
    line = broken.__code__.co_firstlineno + 1
    assert found.reason.endswith(f"its call raised KeyError: 'nothing' (in broken, test_broken_inputs.py:{line})")
