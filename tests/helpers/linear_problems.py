"""Problems of the contract `linear` by the text of a scheme, for the kernels of every plugin."""

from __future__ import annotations

from dataclasses import replace

import torch

from qcore import Scheme
from qcore.contracts import LINEAR, Problem
from qcore.contracts.inputs import Draw, Shape


def linear_problem(
    scheme: str, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, bias: str = "none", seed: int = 0, **kind
) -> Problem:
    """A problem on the CPU with random numbers, x ``(m, k)``; ``bias`` and ``kind`` as `Shape` takes them."""
    draw = Draw(torch.Generator().manual_seed(seed * 1009 + m * 7 + n + k))
    filled = draw.fill(Scheme.parse(scheme))
    request = LINEAR.request_for(filled, torch.device("cpu"), dtype, n, k)
    shape = Shape("case", (m,), n, k, bias=bias, **kind)
    return draw.linear(replace(request, bias=bias != "none"), shape, filled.quantizer, dtype)


def assert_right(problem: Problem, result: torch.Tensor) -> None:
    """Hold a result against the contract."""
    verdict = LINEAR.judge(problem, result)
    assert verdict.ok, verdict.message
