"""The functions of arrays sharded over a mesh with axes of type Explicit, in a process of its own: ``DEVICES``."""

import contextlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import qcore
import qcore_xla

WEIGHT = qcore.quantize(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)), "int4-g32")


def squares(x, weight):
    return jnp.sum(qcore_xla.linear(x, weight) ** 2)


def check(found, expected, spec):
    assert jax.typeof(found).sharding.spec == spec, jax.typeof(found)
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-4, atol=1e-3)


def check_linear(mesh, alone, context):
    x = jax.random.normal(jax.random.key(0), (2, 8, 128))
    y, dx = qcore_xla.linear(x, alone), jax.grad(squares)(x, alone)
    weight = jax.device_put(alone, NamedSharding(mesh, P()))
    cut = qcore_xla.pack(WEIGHT, "w4a16-g32", cut="row", mesh=mesh)
    for spec in (P(None, "data", None), P(None, None, "data"), P(None, None, None)):
        xs = jax.device_put(x, NamedSharding(mesh, spec))
        rows = P(*spec[:2], None)
        with context():
            check(jax.jit(qcore_xla.linear)(xs, weight), y, rows)
            check(jax.jit(qcore_xla.linear)(xs, cut), y, rows)
            check(jax.jit(jax.grad(squares))(xs, weight), dx, spec)
    with context():
        xs = jax.device_put(x, NamedSharding(mesh, P(None, "data")))
        check(qcore_xla.linear(xs, weight), y, P(None, "data", None))
        check(jax.vmap(qcore_xla.linear, (0, None))(xs, weight), y, P(None, "data", None))


def check_others(mesh, context):
    whole = NamedSharding(mesh, P())
    indices = jnp.arange(16).reshape(8, 2)
    table = qcore_xla.pack(WEIGHT, table=True)
    kernel = qcore_xla.pack(qcore.quantize(torch.randn(8, 9 * 4), "int8"))
    image = jax.random.normal(jax.random.key(1), (8, 4, 5, 5))
    experts = qcore_xla.pack(qcore.QTensor.stack([qcore.quantize(torch.randn(16, 32), "int8") for _ in range(2)]))
    rows, ends = jax.random.normal(jax.random.key(2), (8, 32)), jnp.array([3, 8])
    y = [
        qcore_xla.embedding(indices, table), qcore_xla.conv2d(image, kernel, kernel_size=3),
        qcore_xla.grouped_linear(rows, ends, experts),
    ]  # fmt: skip
    table, kernel, experts, ends = (jax.device_put(one, whole) for one in (table, kernel, experts, ends))
    indices, image, rows = (jax.device_put(one, NamedSharding(mesh, P("data"))) for one in (indices, image, rows))
    with context():
        check(qcore_xla.embedding(indices, table), y[0], P("data", None, None))
        check(qcore_xla.conv2d(image, kernel, kernel_size=3), y[1], P("data", None, None, None))
        check(qcore_xla.grouped_linear(rows, ends, experts), y[2], P("data", None))


def main(devices):
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    alone = qcore_xla.pack(WEIGHT, "w4a16-g32")
    check_linear(mesh, alone, lambda: jax.set_mesh(mesh))
    check_linear(mesh, alone, contextlib.nullcontext)
    check_others(mesh, lambda: jax.set_mesh(mesh))
    print("equal", len(jax.devices()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
