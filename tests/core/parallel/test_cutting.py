"""Cuts of weights in one process: random formats, sizes and borders give back every value, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from grids import draws

import qcore
from qcore.parallel.cutting import Share, cut_columns, cut_ordered, cut_rows, cut_values, shares

FORMATS = (
    "int4-g32", "int4-g32-asym", "int4-g24", "int4-g128-asym", "int4", "int4-g8", "int8", "int8-asym",
    "int8-g64-asym/plain", "int4-g32-fzp", "int4-g32/plain_int32", "fp8", "fp8-g32-e8m0", "fp4-g32-e8m0",
    "fp4-g16-e4m3", "fp4-g16-e4m3d", "nf4-g64",
)  # fmt: skip
WIDTHS = (1, 2, 7, 8, 24, 31, 32, 33, 40, 44, 64, 65, 96, 100, 128, 130, 200)


def drawn(number):
    """A weight, its dense values, and the shares of its columns and rows; None for shares that cannot be."""
    rng = random.Random(number)
    torch.manual_seed(number)
    n, k = rng.choice((1, 2, 5, 33)), rng.choice(WIDTHS)
    weight = qcore.quantize(torch.randn(n, k), rng.choice(FORMATS))
    if rng.random() < 0.3:
        weight = weight.derived(order=torch.randperm(k, dtype=torch.int32))
    sizes, units = (1, 2, 3, 4, 5, 7, 8), (1, 1, 1, 2, 3, 4, 8, 25, 32)
    return weight, *(tried(shares, of, rng.choice(sizes), rng.choice(units)) for of in (k, n))


def tried(call, *args):
    """The result of a call, or None if what it is asked for is unsupported."""
    try:
        return call(*args)
    except qcore.UnsupportedError:
        return None


def columns_of(weight, share):
    """The values of a share of the columns, by the way that fits the weight."""
    if weight.order is None:
        return cut_columns(weight, share).dequantize(torch.float32)
    part, picks = cut_ordered(weight, share)
    own = picks < share.length
    assert sorted(picks[own].tolist()) == list(range(share.length))
    values = torch.empty(weight.shape[0], share.length)
    values[:, picks[own]] = part.dequantize(torch.float32)[:, own]
    return values


@pytest.mark.parametrize("numbers", draws(many=4000, few=300, parts=4))
def test_cuts_give_back_every_value(numbers):
    done = 0
    for number in numbers:
        weight, columns, rows = drawn(number)
        dense = weight.dequantize(torch.float32)
        found = None if columns is None else tried(lambda w, every: [columns_of(w, s) for s in every], weight, columns)
        if found is not None:
            assert torch.equal(torch.cat(found, 1), dense), number
            done += 1
        if rows is not None:
            assert torch.equal(torch.cat([cut_rows(weight, s).dequantize(torch.float32) for s in rows]), dense), number
    assert done >= len(numbers) / 3


def test_a_part_keeps_no_memory_of_the_whole():
    weight = qcore.quantize(torch.randn(64, 256), "int4-g32-asym")
    for part in (cut_rows(weight, Share(16, 16, 64)), cut_columns(weight, Share(64, 64, 256))):
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in part.tensors().values())


def test_parts_of_rows_are_cut_each():
    weight, bias = qcore.quantize(torch.randn(12, 32), "int8"), torch.arange(12.0)
    wanted = [1, 2, 7, 8]
    share = Share(1, 2, 6)
    assert torch.equal(cut_rows(weight, share, 2).dequantize(), weight.dequantize()[wanted])
    assert torch.equal(cut_values(bias, share, 2), bias[wanted])


def test_a_border_in_a_group_names_group_and_remedy():
    with pytest.raises(qcore.UnsupportedError, match=r"(?s)groups of 32 would become groups of 2.*unit=32"):
        cut_columns(qcore.quantize(torch.randn(4, 64), "int4-g32"), Share(0, 22, 64))
