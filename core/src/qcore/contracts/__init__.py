"""Op contracts: the result that a quantized linear, convolution or embedding must compute, and how it is checked.

Each contract is one file: a frozen request, the semantics, a float64/int64 reference in torch ops on CPU, a
tolerance, and a generator of test cases.

May import: weights, formats and errors. Imported by: discovery, resolving, fallback, functional, nn, parallel, cli,
testing, plugin_api, `qcore`.
"""

from __future__ import annotations

from .base import GIVEN_NAMES, Case, Contract, Problem, Request, Verdict
from .conv2d import CONV2D, Conv2dRequest
from .embedding import EMBEDDING, EmbeddingRequest
from .grouped import GROUPED_LINEAR, GroupedLinearRequest
from .linear import LINEAR, LinearRequest
from .sampling import sampled

CONTRACTS: dict[str, Contract] = {contract.name: contract for contract in (LINEAR, CONV2D, EMBEDDING, GROUPED_LINEAR)}
"""Every contract by name."""


def contract_of(request: Request) -> Contract:
    """The contract that a request belongs to."""
    return CONTRACTS[request.contract]


__all__ = [
    "CONTRACTS",
    "CONV2D",
    "EMBEDDING",
    "GIVEN_NAMES",
    "GROUPED_LINEAR",
    "LINEAR",
    "Case",
    "Contract",
    "Conv2dRequest",
    "EmbeddingRequest",
    "GroupedLinearRequest",
    "LinearRequest",
    "Problem",
    "Request",
    "Verdict",
    "contract_of",
    "sampled",
]
