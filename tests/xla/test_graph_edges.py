"""Compiled models and numbers at the ends of their range."""

import pytest
import torch
from graph_edge_cases import EDGES, ENDS, HALVES, PLACES, check_edge, check_large_constants, check_large_integers
from torch.nn import functional as F

from qcore_xla.graphs.backend import qcore_xla

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SHORT = torch.tensor([-2, -1, 0, 1, 2], dtype=torch.int8).repeat_interleave(4)
POWERS = torch.tensor([100, 101, 3, 0], dtype=torch.int16).repeat(5)
OWN = {
    **{f"pow_{dtype}": (
        lambda x: (x**2, x**0, x**9, torch.pow(2, x.abs()), torch.pow(-1, x), x ** x.abs()), (PLACES.to(dtype),)
    ) for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)},
    "pow_negative": (lambda x, y: (x**y, torch.pow(-1, y)), (PLACES, torch.tensor([3, 2, -3, 0, -7, -1, -2, 4]))),
    "pow_promoted": (lambda x, y: (x**y, y ** x.abs()), (SHORT, POWERS)),
    "softplus": (lambda x: F.softplus(x, 2.0, 5.0), (ENDS,)),
    "var": (lambda x: (x.var(0, correction=10), x.std(0, correction=3), x.var(1)), (ENDS[3:9].view(2, 3),)),
    "casts": (
        lambda x: (x.to(torch.uint8), x.to(torch.int8), x.to(torch.int16), x.half().to(torch.uint8)),
        (torch.tensor([-1.0, -6.5, 255.0, 300.0, -129.0, 0.9]),),
    ),
    "div": (lambda x: (x / 300, 300 / x, x / -7, x.bool() / 2), (torch.tensor([1, 2, 255], dtype=torch.uint8),)),
    "prod": (lambda x: x.prod(dtype=torch.float32), (torch.tensor([100, 200, 300, 400, 500], dtype=torch.int32),)),
    "compared_with_one": (
        lambda x, y: (x > y, x == y, y <= x, x % y), (HALVES.bfloat16()[:3], torch.tensor(0.3)),
    ),
    "flip": (lambda x: x.flip(0) * 2, (torch.tensor(3.0),)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("name", [*EDGES, *OWN])
def test_numbers_at_the_ends(name):
    check_edge(qcore_xla, *{**EDGES, **OWN}[name])


@torch.no_grad()
def test_large_integers_run_in_torch():
    check_large_integers(qcore_xla)


@torch.no_grad()
def test_large_constants_run_in_torch():
    check_large_constants(qcore_xla)
