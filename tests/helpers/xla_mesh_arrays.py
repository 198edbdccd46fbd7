"""Packed weights cut over a mesh of simulated devices, for users of JAX; run in a process of its own: ``DEVICES``."""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

import qcore
import qcore_xla


def close(y, expected):
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3)


def main(devices):
    torch.manual_seed(0)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    first, second = torch.randn(32 * devices, 64), torch.randn(24, 32 * devices)
    for scheme in ("w4a16-g64-asym", "w8a8", "w8a8-aasym"):
        weights = [qcore.quantize(dense, qcore.Scheme.parse(scheme).weight) for dense in (first, second)]
        whole = [qcore_xla.pack(weight, scheme) for weight in weights]
        cuts = [
            qcore_xla.pack(w, scheme, cut=cut, mesh=mesh) for w, cut in zip(weights, ("column", "row"), strict=True)
        ]
        x, bias = jnp.asarray(torch.randn(3, 64).numpy()), jnp.asarray(torch.randn(24).numpy())

        def mlp(weights, x):
            return qcore_xla.linear(jax.nn.relu(qcore_xla.linear(x, weights[0])), weights[1], bias)  # noqa: B023

        close(jax.jit(mlp)(cuts, x), mlp(whole, x))
        if not scheme.startswith("w8a8"):  # rounded codes may be neighbours
            loss = [jax.jit(jax.grad(lambda x, w=w: mlp(w, x).sum()))(x) for w in (cuts, whole)]
            close(*loss)
        assert cuts[0].arrays["data"].sharding.spec == PartitionSpec("x")

        def inside(weights, x):
            y = qcore_xla.linear(x, weights[0].part)
            return qcore_xla.linear(jax.nn.relu(y), weights[1].part, bias)  # noqa: B023

        specs = (PartitionSpec("x"), PartitionSpec())
        rows = jnp.tile(x, (devices, 1))
        everywhere = jax.device_put(whole, NamedSharding(mesh, PartitionSpec()))
        for checked in (False, True):
            own = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=checked)
            close(jax.jit(own)(cuts, x), mlp(whole, x))
            over_rows = jax.shard_map(mlp, mesh=mesh, in_specs=specs[::-1], out_specs=specs[0], check_vma=checked)
            close(over_rows(everywhere, rows), mlp(whole, rows))
            loss = [jax.jit(jax.grad(lambda x, f=f, w=w: f(w, x).sum())) for f, w in ((own, cuts), (mlp, whole))]
            if not scheme.startswith("w8a8"):
                close(*[gradient(x) for gradient in loss])
    for scheme in ("wfp8afp8", "wfp8afp8-g64", "wfp8afp8-g128", "w4afp8-g128-asym"):
        check_parts_of_unlike_sizes(scheme, mesh)
    for scheme in ("w8a8", "w8a8-aasym", "wfp8afp8"):
        check_nan_of_one_device(scheme, mesh)
        check_number_of_all_reduces(scheme, mesh)
    for rows in (5, 30):
        check_experts_in_shard_map(rows, mesh)
    print("equal", len(jax.devices()))


def check_parts_of_unlike_sizes(scheme, mesh):
    """Each device's columns of x, one group of 128, have scales of their own."""
    k = 128 * mesh.size
    weight = qcore.quantize(torch.randn(24, k), qcore.Scheme.parse(scheme).weight)
    sizes = torch.logspace(-2, 2, mesh.size).repeat_interleave(128)
    x = jnp.asarray((torch.randn(3, k) * sizes).numpy())
    cut = qcore_xla.pack(weight, scheme, cut="row", mesh=mesh)
    expected = qcore_xla.linear(x, qcore_xla.pack(weight, scheme))
    np.testing.assert_allclose(
        jax.jit(qcore_xla.linear)(x, cut), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
    )


def check_number_of_all_reduces(scheme, mesh):
    """One of each token's range, one of the products."""
    cut = qcore_xla.pack(
        qcore.quantize(torch.randn(24, 128), qcore.Scheme.parse(scheme).weight), scheme, cut="row", mesh=mesh
    )
    program = jax.jit(qcore_xla.linear).lower(jnp.ones((3, 128)), cut).compile().as_text()
    assert program.count(" all-reduce(") + program.count(" all-reduce-start(") == 2, (scheme, program)


def check_nan_of_one_device(scheme, mesh):
    """A token that holds NaN on one device gives NaN; those beside it do not."""
    k = 128 * mesh.size
    weight = qcore.quantize(torch.randn(24, k), qcore.Scheme.parse(scheme).weight)
    x = torch.randn(20, k)
    x[7, 130] = torch.nan
    cut = qcore_xla.pack(weight, scheme, cut="row", mesh=mesh)
    found = np.isnan(jax.jit(qcore_xla.linear)(jnp.asarray(x.numpy()), cut))
    assert found[7].all(), scheme
    assert found.sum() == 24, scheme


def check_experts_in_shard_map(rows, mesh):
    """Each device's rows and ends, with JAX's check of what varies over the mesh, its default."""
    weight = qcore_xla.pack(qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 8, 40), "w4a16-g32").weight)
    x, ends = torch.randn(mesh.size, rows, 40).numpy(), np.array([[2, 2, rows - 1]] * mesh.size, np.int32)
    everywhere = jax.device_put(weight, NamedSharding(mesh, PartitionSpec()))
    specs = (PartitionSpec("x"), PartitionSpec("x"), PartitionSpec())
    one = jax.shard_map(
        lambda x, ends, weight: qcore_xla.grouped_linear(x[0], ends[0], weight)[None],
        mesh=mesh, in_specs=specs, out_specs=specs[0],
    )  # fmt: skip
    for found, own, end in zip(jax.jit(one)(x, ends, everywhere), x, ends, strict=True):
        close(found, qcore_xla.grouped_linear(own, end, weight))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(int(sys.argv[1]))
