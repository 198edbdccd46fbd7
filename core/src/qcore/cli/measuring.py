"""Selects and verifies the kernels that ``bench`` and ``tune`` measure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..contracts import LinearRequest
from ..discovery.kernels import Kernel
from ..discovery.registry import PluginStatus
from ..errors import UnsupportedError
from ..resolving.explaining import plain_request
from ..resolving.offers import kernels_of, offers_for
from ..resolving.verification import check
from ..runtime.settings import current
from .arguments import MEASURED


@dataclass(frozen=True)
class Case:
    """One weight to measure: ``request`` without a row count, and every kernel that supports it."""

    scheme: str
    request: LinearRequest
    kernels: tuple[tuple[PluginStatus, Kernel], ...]
    left_out: tuple[tuple[str, str], ...]
    """(kernel, reason) of kernels that failed verification: the speed of a wrong result is meaningless."""


def cases(schemes: Sequence[str], sizes: Iterable[tuple[int, int]], device: Any, dtype: Any) -> list[Case]:
    """A case per scheme and size (N, K). Raises `UnsupportedError` if no kernel supports one of them."""
    pairs = [(scheme, n, k) for n, k in sizes for scheme in schemes or MEASURED]
    asked = [(scheme, plain_request(scheme, device=device, n=n, k=k, dtype=dtype)) for scheme, n, k in pairs]
    return [_case(scheme, cast("LinearRequest", request)) for scheme, request in asked]


def _case(scheme: str, request: LinearRequest) -> Case:
    wanted = current()
    kernels, left_out = [], []
    for status, offer in offers_for(request, wanted.disable):
        verdict = check(status, offer.kernel, request, kernels_of(status.name), wanted.verify)
        if verdict.ok:
            kernels.append((status, offer.kernel))
        else:
            left_out.append((offer.kernel.name, verdict.reason))
    if not kernels:
        see = f"For the reasons run: qcore explain {scheme} --device {request.device}"
        raise UnsupportedError(f"no kernel supports {scheme} on {request.device}.\n{see}")
    return Case(scheme, request, tuple(kernels), tuple(left_out))


def left_out_notes(measured: Iterable[Case]) -> list[str]:
    """A line for each kernel that was not measured, with the reason."""
    return [f"not measured: {name} ({why})" for case in measured for name, why in case.left_out]
