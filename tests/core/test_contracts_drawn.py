"""Cases whose sizes are drawn: nobody chose them, so no kernel can have been written for them."""

from __future__ import annotations

import pytest
import torch

from qcore.contracts import CONTRACTS
from qcore.weights.schemes import Scheme

SEEDS = range(300)


def drawn(contract, scheme="w8a16"):
    cases = CONTRACTS[contract].cases([Scheme.parse(scheme)], [torch.float32])
    return [case for case in cases if "-any" in case.id]


def requests(contract):
    return [case.build(seed).request for case in drawn(contract) for seed in SEEDS]


@pytest.mark.parametrize("contract", CONTRACTS)
def test_each_seed_draws_other_sizes(contract):
    found = {(request.n, request.k) for request in requests(contract)}
    assert len(found) > len(SEEDS) / 2
    assert drawn(contract)[0].build(7).request == drawn(contract)[0].build(7).request


@pytest.mark.parametrize("contract", ["linear", "embedding", "grouped_linear"])
def test_every_remainder_is_drawn_in_time(contract):
    """What a kernel does with the last columns of a tile depends on it."""
    for name in ("n", "k"):
        assert {getattr(request, name) % 16 for request in requests(contract)} == set(range(16))


def test_linear_has_rows_and_batches_of_one():
    leads = {case.build(seed).x.shape[:-1] for case in drawn("linear") for seed in SEEDS}
    assert {len(lead) for lead in leads} == {1, 2}
    assert {lead.numel() for lead in leads} > set(range(1, 65))
    assert {lead.index(1) for lead in leads if len(lead) == 2 and max(lead) > 1} == {0, 1}


def test_convolutions_have_every_geometry():
    found = requests("conv2d")
    for name, values in {"stride": {1, 2}, "dilation": {1, 2, 3}, "padding": {0, 1, 2}}.items():
        assert {size for request in found for size in getattr(request, name)} == values
    kinds = {(r.groups > 1) + (r.groups == r.in_channels) for r in found}
    assert kinds == {0, 1, 2}
    assert all(min(case.build(seed).x.shape) >= 1 for case in drawn("conv2d") for seed in SEEDS)
