"""What a plugin's hooks answer, held to what core takes from any plugin: plain values within their bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

import qcore
from qcore.contracts import CONTRACTS
from qcore.weights.schemes import SCHEMES, TABLE_SCHEMES, Scheme

_MORE = ("w8a16-g64-fzp", "w4a8-g32-asym-token-o8t", "w8a8-static-o8", "w4a16-g20", "w8a16-g8-asym")
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


CONTRACTS_OF_PLUGINS = ("linear", "conv2d", "embedding")
"""The contracts that every plugin here has a hook for."""


def requests(device: str) -> Iterator[Any]:
    """Requests that are supported and others that are not."""
    for contract in map(CONTRACTS.__getitem__, CONTRACTS_OF_PLUGINS):
        for scheme in map(Scheme.parse, (*SCHEMES, *TABLE_SCHEMES, *_MORE)):
            if contract.name == "embedding" and scheme.activation is not None:
                continue
            if contract.name == "conv2d" and getattr(scheme.activation, "per_token", False):
                continue
            for dtype in _DTYPES:
                made = contract.request_for(scheme, torch.device(device), dtype, 16, 64)
                yield made
                yield replace(made, device=torch.device("meta"))
    yield CONTRACTS["linear"].request_for(Scheme.parse("w8a16"), torch.device(device), torch.float32, 0, 64)


def faults(plugin: Any, hook_of: Callable[[str], Any], device: str = "cpu") -> Iterator[str]:
    """What is wrong with the probe's answer and with those to `requests`; ``hook_of``: the hook of a contract."""
    yield from _of_probe(plugin.qcore_probe())
    for request in requests(device):
        answer = hook_of(request.contract)(request=request)
        yield from (f"{request}: {fault}" for fault in _of_answer(answer))


def _of_probe(found: Any) -> Iterator[str]:
    if isinstance(found, qcore.Unavailable):
        if not (_is_text(found.reason) and isinstance(found.broken, bool)):
            yield f"unavailable for {found.reason!r}, broken {found.broken!r}"
        return
    if type(found) is not qcore.Available:
        yield f"probe answered {found!r}"
        return
    if not (_is_text(found.device) and isinstance(found.driver, str)):
        yield f"device {found.device!r}, driver {found.driver!r}"
    details = {} if found.details is None else found.details
    if not isinstance(details, Mapping) or not all(isinstance(key, str) for key in details):
        yield f"details {details!r}"
    json.dumps(dict(details))


def _of_answer(answer: Any) -> Iterator[str]:
    if isinstance(answer, qcore.Refusal):
        if not _is_text(answer.reason):
            yield f"refused for {answer.reason!r}"
        return
    if type(answer) is not qcore.Offer:
        yield f"answered {answer!r}"
        return
    tier = (int(answer.rank) + 500) // 1000
    if not isinstance(answer.rank, int) or not 0 <= tier <= 3 or not isinstance(answer.note, str):
        yield f"rank {answer.rank!r}, note {answer.note!r}"
    name, packing = answer.kernel.name, answer.kernel.packing
    if not (_is_text(name) and _is_text(packing)) or (name, packing) != (answer.kernel.name, answer.kernel.packing):
        yield f"kernel {name!r}, packing {packing!r}"


def _is_text(text: Any) -> bool:
    return type(text) is str and bool(text.strip()) and text.isprintable() and text == text.encode().decode()
