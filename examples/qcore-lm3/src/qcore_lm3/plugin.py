"""The hooks of the plugin ``lm3``."""

from __future__ import annotations

from collections.abc import Sequence

import qcore
from qcore.plugin_api import (
    FLOATS,
    Element,
    Layout,
    LinearRequest,
    Offer,
    Quantizer,
    Refusal,
    why_not_empty,
    why_not_encoding,
)

from .format import LM3, Dense3
from .quantizer import LLOYD


@qcore.hookimpl
def qcore_elements() -> Sequence[Element]:
    return [LM3]


@qcore.hookimpl
def qcore_formats() -> Sequence[Layout]:
    return [Dense3()]


@qcore.hookimpl
def qcore_quantizers() -> Sequence[Quantizer]:
    return [LLOYD]


@qcore.hookimpl
def qcore_probe() -> qcore.Available:
    return qcore.Available("CPU, 3-bit weights", "lm3 1.0", {"device": "cpu"})


@qcore.hookimpl
def qcore_linear(request: LinearRequest) -> Offer | Refusal:
    if request.activation is not None or request.output is not None or request.x_dtype not in FLOATS:
        return Refusal("lm3 multiplies float activations; use a scheme with a16, such as wlm3a16-g64.")
    if request.device.type != "cpu":
        return Refusal(f"lm3 runs on the CPU; the tensors are on {request.device}.")
    if reason := why_not_encoding(request, (LM3.name,)) or why_not_empty(request):
        return Refusal(reason)
    from .kernel import Linear

    return Offer(Linear(request), qcore.NATIVE, "3 bits per weight, four values per look-up")
