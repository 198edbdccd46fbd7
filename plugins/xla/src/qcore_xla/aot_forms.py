"""Linear layers as functions of JAX arrays, for `aot`: their structure on TPUs is tested and tabulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qcore import Scheme

from . import aot
from .packing import NIBBLES, plan

CHIPS = tuple(name for name in aot.TOPOLOGIES if name != "v4")
"""The generations to compile for."""
Spec = tuple[tuple[int, ...], Any]


def weight_bytes(scheme: str, n: int, k: int) -> int:
    """Bytes of the packed codes of a weight ``(n, k)``."""
    return n * k * Scheme.parse(scheme).weight.bits // 8


def specs(scheme: str, m: int, n: int, k: int) -> tuple[Spec, Spec, Spec]:
    """Shape and dtype of x ``(m, k)`` bfloat16, and of data and scale as `packing` lays out a weight ``(n, k)``."""
    import jax.numpy as jnp

    fmt = Scheme.parse(scheme).weight
    of = plan(n, k, fmt.bits, fmt.group_size)
    words, dtype = (of.length // NIBBLES, jnp.int32) if fmt.bits == 4 else (of.length, jnp.int8)
    data = ((of.slices, words, of.rows), dtype)
    return ((m, of.columns), jnp.bfloat16), data, ((of.filled, of.rows), jnp.bfloat16)


def body(scheme: str, *, pallas: bool = False) -> Callable[[Any, Any, Any], Any]:
    """``(x, data, scale) -> y`` for a scheme without zero points, dynamic if activations are int8."""
    from .bodies.form import Form
    from .bodies.linear import linear

    float_activations = Scheme.parse(scheme).activation is None
    form = Form("float" if float_activations else "symmetric", out_dtype="bfloat16", pallas=pallas)

    def call(x: Any, data: Any, scale: Any) -> Any:
        return linear(x, data, scale, None, None, form=form)

    return call


def compiled_linear(chip: str, scheme: str, m: int, n: int, k: int, *, pallas: bool = False) -> aot.Program:
    """A linear layer compiled for ``chip``."""
    return aot.compile_for(chip, body(scheme, pallas=pallas), *specs(scheme, m, n, k))
