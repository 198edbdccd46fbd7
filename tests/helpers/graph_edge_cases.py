"""Functions of numbers at the ends of their range, by name, and what a graph backend makes of them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

import qcore
from qcore import graphs

_INF, _NAN = float("inf"), float("nan")
ENDS = torch.tensor([_NAN, _INF, -_INF, 0.0, 0.5, -0.5, 2.5, -2.5, 1e4, -1e4, 3e38, -3e38])
HALVES = torch.tensor([0.3, 0.1, -2.6, 7.7, 88.0])
PLACES = torch.tensor([-3, -2, -1, 0, 1, 2, 3, 5])
_generator = torch.Generator().manual_seed(0)
FAR = torch.randn(500, generator=_generator).double().mul(2.0 ** torch.arange(-20, 105, 0.25)).float()
NEAR = torch.randn(500, generator=_generator).mul(2.0 ** torch.arange(-10, 15, 0.05))
"""With quotients up to 2^125."""


def _exact(function):
    """A function of float32 that torch computes exactly only from float64."""
    return lambda x, y: (
        function(x.double(), y.double()).float() if not torch.compiler.is_compiling() else function(x, y)
    )


EDGES = {
    "sign": (torch.sign, (ENDS,)), "sgn": (torch.sgn, (ENDS,)),
    "roots": (lambda x: (x**0.5, x**-0.5, x**2, x**0), (ENDS,)),
    "clamp": (lambda x: (x.clamp(min=_NAN), x.clamp(0.0, _NAN), x.clamp(-1, 2), F.hardtanh(x)), (ENDS,)),
    "floor_divide": (lambda x: (x // _INF, x // -_INF, x // 0.0, x // -0.25), (ENDS,)),
    "fmod": (_exact(torch.fmod), (FAR, NEAR)), "remainder": (_exact(torch.remainder), (FAR, NEAR)),
    "remainders": (lambda x: (torch.fmod(x, 0.3), x % 0.3, x % -0.7), (HALVES.bfloat16(),)),
    "compared": (lambda x: (x > 0.3, x == 0.3, x == 0.1, x != 0.1, x <= 7.7, x < -2.6), (HALVES.bfloat16(),)),
    "compared_half": (lambda x: (x > 0.3, x == 0.3, x == 0.1, x != 0.1, x >= 7.7), (HALVES.half(),)),
    "index_fill": (
        lambda x, i: (
            x.index_fill(0, i, 3), x.index_fill(1, i, _NAN), x.index_fill(-1, i[1], x[0, 0]),
            x[0, 1].index_fill(0, i[:1], 2), x[0, 1].index_fill(0, i[:0], 2), (x > 2).index_fill(0, i, True),
        ),
        (torch.arange(12.0).view(3, 4), torch.tensor([-1, 0, -3])),
    ),
    "negative_view": (lambda x: x * 2, (torch.view_as_complex(torch.ones(3, 2)).conj().imag,)),
}  # fmt: skip


def check_edge(backend, function, args, tolerance=1e-6):
    """A compiled call gives torch's numbers and dtypes, and no whole graph or part runs in torch for it."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", qcore.QcoreWarning)
        found, expected = torch.compile(function, backend=backend)(*args), function(*args)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0.0, equal_nan=True)
    assert not graphs.explain().refused


class Sums(torch.nn.Module):
    """Of integers, and of integers with a buffer, by which `explain` finds the model."""

    def __init__(self):
        super().__init__()
        self.register_buffer("zero", torch.zeros(1))

    def forward(self, x):
        return x + x, x * 2.5 + self.zero


class Bounded(torch.nn.Module):
    """Positions below a limit that is a buffer of int64."""

    def __init__(self, limit):
        super().__init__()
        self.register_buffer("limit", torch.tensor([limit]))

    def forward(self, x):
        return torch.where(x < self.limit, x + 1, x), (x < 2**40).float()


def check_large_integers(backend):
    """Calls with integers that do not fit run in torch, one by one."""
    small, large = torch.tensor([1, 5, 9]), torch.tensor([1, 1 << 40, -(1 << 35)])
    sums = torch.tensor([1 << 30, 1 << 30, 1 << 30])
    compiled = torch.compile(Sums(), backend=backend)
    for x, once in ((small, False), (large, True), (small, False), (sums, True), (small, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for one, other in zip(compiled(x), (x + x, x * 2.5), strict=True):
                torch.testing.assert_close(one, other)
        assert [str(one.message).count("for a call: an integer does not fit") for one in caught] == [1] * once
    (report,) = graphs.explain(compiled).reports
    assert list(report.calls.values()) == [2]


def check_large_constants(backend):
    """A buffer that does not fit leaves its part or graph to torch, with a warning."""
    model = Bounded(2**62)
    compiled, x = torch.compile(model, backend=backend), torch.tensor([1, 7])
    with pytest.warns(qcore.QcoreWarning, match="32 bits"):
        compiled(x)
    for one, other in zip(compiled(x), model(x), strict=True):
        torch.testing.assert_close(one, other)
    assert "32 bits" in str(graphs.explain(compiled))
