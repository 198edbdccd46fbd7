"""`explain`: the decision for a plain request, without a model."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import Any, SupportsIndex, cast

import torch

from ..contracts import CONTRACTS, Request
from ..contracts.base import FLOAT_DTYPES
from ..errors import FormatError, did_you_mean
from ..runtime import settings
from ..weights.schemes import Scheme
from .decision import Decision
from .hints import dtype_hint
from .resolver import decide


def explain(
    scheme: str | Scheme,
    *,
    device: str | torch.device = "cpu",
    n: int = 4096,
    k: int = 4096,
    contract: str = "linear",
    dtype: torch.dtype = torch.bfloat16,
    rows: int | None = None,
    **arguments: Any,
) -> Decision:
    """Which kernel would be selected, and for every other plugin why not; print the result to see the table.

    **Arguments:** ``scheme``: e.g. ``"w4a16-g128"``; ``device``; ``n``, ``k``: output and input features (for
    ``embedding``: rows and dimension, for ``conv2d``: output and input channels of a 1x1 kernel); ``contract``;
    ``dtype``: of the activations; ``rows``: M if it is known. The rest are the settings that `using` takes.

    Does not raise if no kernel supports the request: ``decision.kernel`` is then None.
    """
    request = plain_request(scheme, device=device, n=n, k=k, contract=contract, dtype=dtype, rows=rows)
    wanted = replace(settings.current(**arguments), strict=False)
    decision = decide(request, wanted)
    hint = dtype_hint(decision, wanted)
    return replace(decision, hints=(*decision.hints, hint)) if hint else decision


def plain_request(
    scheme: str | Scheme,
    *,
    device: str | torch.device = "cpu",
    n: int = 4096,
    k: int = 4096,
    contract: str = "linear",
    dtype: torch.dtype = torch.bfloat16,
    rows: int | None = None,
) -> Request:
    """The request that `explain` resolves; a static activation without parameters gets scale 1."""
    if contract not in CONTRACTS:
        known = f"known: {', '.join(CONTRACTS)}.{did_you_mean(contract, CONTRACTS)}"
        raise FormatError(f"unknown contract {contract!r}; {known}")
    place = _checked_device(device)
    _check_arguments(dtype, n=n, k=k, rows=rows)
    parsed = _with_default_scales(Scheme.parse(scheme))
    request = CONTRACTS[contract].request_for(parsed, place, dtype, n, k)
    return replace(request, rows=rows) if rows is not None and contract == "linear" else request  # type: ignore[no-any-return]


def _checked_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise FormatError(f"device is {device!r}; it must be one of torch's, such as 'cpu' or 'cuda:0'.") from None


def _check_arguments(dtype: object, **sizes: object) -> None:
    """Raise `FormatError` for what no layer has: its error would count as one of the kernels."""
    if not isinstance(dtype, torch.dtype) or dtype not in (*FLOAT_DTYPES, torch.float64):
        raise FormatError(f"dtype is {dtype!r}; it must be a torch.dtype of floats, such as torch.bfloat16.")
    for name, size in sizes.items():
        if size is None and name == "rows":
            continue
        try:
            wrong = isinstance(size, bool) or index(cast(SupportsIndex, size)) < 0
        except TypeError:
            wrong = True
        if wrong:
            raise FormatError(f"{name} is {size!r}; it must be an integer from 0 on.")


def _with_default_scales(scheme: Scheme) -> Scheme:
    specs = {"activation": scheme.activation, "output": scheme.output}
    missing = {n: s for n, s in specs.items() if s is not None and not getattr(s, "is_given", True)}
    return replace(scheme, **{n: replace(s, scale=1.0) for n, s in missing.items()})  # type: ignore[arg-type]
