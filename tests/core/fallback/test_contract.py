"""Every kernel that the fallback offers, not only the best one, against the cases of its contract."""

from __future__ import annotations

import zlib

import pytest
import torch
from grids import sampled

from qcore.contracts import CONTRACTS
from qcore.contracts.linear import _TOKEN_SCHEMES
from qcore.weights.schemes import SCHEMES, TABLE_SCHEMES, Scheme

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAMPLED = "torch.cpu."
"""oneDNN compiles code for every new shape: its kernels see one case in `EVERY` here, all in the conformance kit."""
EVERY = 9


def cases(contract, scheme):
    text = str(Scheme.parse(scheme).blank())
    return [case for case in CONTRACTS[contract].cases([Scheme.parse(scheme)], DTYPES) if case.scheme == text]


def chosen(kernel, case, seed):
    return not kernel.startswith(SAMPLED) or zlib.crc32(f"{case.id}{seed}".encode()) % EVERY == 0


def run(tools, contract, scheme, seed):
    seen = set()
    for case in cases(contract, scheme):
        problem = case.build(seed)
        for name, kernel in tools.offers(problem.request).items():
            if chosen(name, case, seed):
                packed = kernel.pack(problem.weight)
                assert tools.same(kernel.unpack(packed), problem.weight), f"{name} loses bits: {case.id}"
                tools.check(kernel, problem, packed)
                seen.add(name)
    return seen


@pytest.mark.parametrize("scheme", sampled([*SCHEMES, *_TOKEN_SCHEMES], 13))
@pytest.mark.parametrize("seed", sampled([11, 12], 1))
def test_linear(tools, scheme, seed):
    assert "torch.plain.linear" in run(tools, "linear", scheme, seed)


@pytest.mark.parametrize("scheme", TABLE_SCHEMES)
def test_linear_of_other_elements(tools, scheme):
    assert run(tools, "linear", scheme, 11) == {"torch.plain.linear"}


@pytest.mark.parametrize("scheme", sampled([*SCHEMES, *TABLE_SCHEMES], 9))
def test_grouped_linear(tools, scheme):
    found = run(tools, "grouped_linear", scheme, 11)
    assert found == (set() if "o8" in scheme else {"torch.plain.grouped_linear"})


@pytest.mark.parametrize("scheme", sampled([*SCHEMES, *TABLE_SCHEMES], 15))
def test_conv2d(tools, scheme):
    run(tools, "conv2d", scheme, 11)


@pytest.mark.parametrize("scheme", [s for s in (*SCHEMES, *TABLE_SCHEMES) if "a16" in s])
def test_embedding(tools, scheme):
    assert run(tools, "embedding", scheme, 11) == {"torch.plain.embedding"}


@pytest.mark.parametrize("scheme", ["w8a8-g64-asym-aasym", "w4a8-g32-fzp", "w8a8-g32-fzp-aasym", "w8a8-asym-static-o8"])
def test_schemes_outside_the_table_are_served_too(tools, scheme):
    run(tools, "linear", scheme, 13)


@pytest.mark.parametrize("layout", ["plain_int32"])
@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w4a8-g32-asym", "w4a16"])
def test_other_layouts(tools, scheme, layout):
    run(tools, "linear", f"{scheme}/{layout}", 14)
