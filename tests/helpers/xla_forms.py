"""Linear layers of qcore-xla as functions of JAX arrays: for the tests of their structure on TPUs, and its table."""

from __future__ import annotations

from qcore import Scheme
from qcore_xla import aot

CHIPS = ("v5e", "v5p", "v6e", "tpu7x")
M, N, K = 16, 4096, 4096


def weight_bytes(scheme, n=N, k=K):
    """Bytes of the packed codes."""
    return n * k * Scheme.parse(scheme).weight.bits // 8


def specs(scheme, m=M, n=N, k=K):
    """Shape and dtype of x, data and scale, the weight as `qcore_xla.packing` packs it."""
    import jax.numpy as jnp

    from qcore_xla.packing import plan

    fmt = Scheme.parse(scheme).weight
    of = plan(n, k, fmt.bits, fmt.group_size)
    words, dtype = (of.length // 8, jnp.int32) if fmt.bits == 4 else (of.length, jnp.int8)
    return ((m, k), jnp.bfloat16), ((of.slices, words, of.rows), dtype), ((of.filled, of.rows), jnp.bfloat16)


def body(scheme, *, pallas=False):
    """``(x, data, scale) -> y`` for a scheme without zero points."""
    from qcore_xla.bodies.form import Form
    from qcore_xla.bodies.linear import linear

    kind = "float" if Scheme.parse(scheme).activation is None else "symmetric"
    form = Form(kind, out_dtype="bfloat16", pallas=pallas)

    def call(x, data, scale):
        return linear(x, data, scale, None, None, form=form)

    return call


def compiled_linear(chip, scheme, *, pallas=False, m=M):
    """The `qcore_xla.aot.Program` of a linear layer."""
    return aot.compile_for(chip, body(scheme, pallas=pallas), *specs(scheme, m))


__all__ = ["CHIPS", "K", "M", "N", "body", "compiled_linear", "specs", "weight_bytes"]
