"""Linear layers as functions of JAX arrays, for `aot`: their structure on TPUs is tested and tabulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from qcore import Scheme

from . import aot
from .calls import Call, call_of, form_of
from .packing import NIBBLE_BITS, NIBBLES

CHIPS = tuple(name for name in aot.TOPOLOGIES if name != "v4")
"""The generations to compile for."""
Spec = tuple[tuple[int, ...], Any]


def weight_bytes(scheme: str, n: int, k: int) -> int:
    """Bytes of the packed codes of a weight ``(n, k)``."""
    return n * k * Scheme.parse(scheme).weight.element.container_bits // 8


def specs(scheme: str, m: int, n: int, k: int) -> tuple[Spec, ...]:
    """Shape and dtype of x ``(m, k)`` bfloat16, and of data, scale and factor as a weight ``(n, k)`` is packed."""
    import jax.numpy as jnp

    of = _call(scheme, n, k)
    plan = of.plan
    words, dtype = (plan.length // NIBBLES, jnp.int32) if plan.bits == NIBBLE_BITS else (plan.length, jnp.int8)
    found = (
        ((m, plan.columns), jnp.bfloat16),
        ((plan.slices, words, plan.rows), dtype),
        ((plan.filled, plan.rows), jnp.bfloat16),
    )
    return (*found, ((1, plan.rows), jnp.float32)) if of.format.scale.has_global else found


def _call(scheme: str, n: int, k: int) -> Call:
    return call_of(torch.device("xla"), n, k, scheme, 1, torch.bfloat16)


def body(scheme: str, *, pallas: bool = False) -> Callable[..., Any]:
    """``(x, data, scale, factor=None) -> y`` for a scheme without zero points, activations dynamic or floats."""
    from .bodies.linear import linear

    form = replace(form_of(_call(scheme, 1, 1), "tpu"), pallas=pallas)

    def call(x: Any, data: Any, scale: Any, factor: Any = None) -> Any:
        return linear(x, data, scale, None, None, factor=factor, form=form)

    return call


def compiled_linear(chip: str, scheme: str, m: int, n: int, k: int, *, pallas: bool = False) -> aot.Program:
    """A linear layer compiled for ``chip``."""
    return aot.compile_for(chip, body(scheme, pallas=pallas), *specs(scheme, m, n, k))
