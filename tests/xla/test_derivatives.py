"""Derivatives of the pure functions in forward mode and of higher order, against those of dense weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import qcore
import qcore_xla


def packed(*shape, scheme="w4a16-g32-asym"):
    torch.manual_seed(0)
    weight = qcore.quantize(torch.randn(*shape), qcore.Scheme.parse(scheme).weight)
    return jnp.asarray(weight.dequantize(torch.float32).numpy()), qcore_xla.pack(weight, scheme)


def close(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected)


def energy(x, linear):
    return jnp.sum(jnp.tanh(linear(x)) ** 2)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32-asym", "nvfp4"])
def test_forward_mode(scheme):
    dense, weight = packed(20, 80, scheme=scheme)
    x, dx, bias, db = normal(3, 80), normal(3, 80)[::-1], normal(20), normal(20)[::-1]
    close(jax.jvp(lambda x: qcore_xla.linear(x, weight), (x,), (dx,))[1], dx @ dense.T)
    close(jax.jvp(lambda x, b: qcore_xla.linear(x, weight, b), (x, bias), (dx, db))[1], dx @ dense.T + db)
    close(jax.jvp(lambda b: qcore_xla.linear(x, weight, b), (bias,), (db,))[1], jnp.tile(db, (3, 1)))
    close(jax.jacfwd(lambda x: qcore_xla.linear(x, weight))(x[0]), dense)


def test_forward_mode_lets_quantized_activations_through():
    dense, weight = packed(20, 80, scheme="w8a8")
    x, dx = normal(3, 80), normal(3, 80)[::-1]
    close(jax.jvp(lambda x: qcore_xla.linear(x, weight), (x,), (dx,))[1], dx @ dense.T)


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_hessians(outer, inner):
    dense, weight = packed(12, 48)
    x = normal(2, 48)
    expected = jax.hessian(lambda x: energy(x, lambda x: x @ dense.T))(x)
    close(jax.jit(outer(inner(lambda x: energy(x, lambda x: qcore_xla.linear(x, weight)))))(x), expected)


def test_hessians_over_weights_that_are_stacked():
    (dense, a), (_, b) = packed(12, 48), packed(12, 48)
    b = jax.tree.map(lambda one: one[..., ::-1] if one.dtype == jnp.float32 else one, b)
    stacked, x = jax.tree.map(lambda *parts: jnp.stack(parts), a, b), normal(48)

    def hessian(x, weight):
        return jax.hessian(lambda x: energy(x, lambda x: qcore_xla.linear(x, weight)))(x)

    found = jax.jit(jax.vmap(hessian, in_axes=(None, 0)))(x, stacked)
    for one, weight in zip(found, (a, b), strict=True):
        close(one, hessian(x, weight))
    close(found[0], jax.hessian(lambda x: energy(x, lambda x: x @ dense.T))(x))

    def total(x):  # its gradient sums over the weights
        return jax.vmap(lambda weight: energy(x, lambda x: qcore_xla.linear(x, weight)))(stacked).sum()

    each = [jax.grad(lambda x, w=w: energy(x, lambda x: qcore_xla.linear(x, w)))(x) for w in (a, b)]
    close(jax.grad(total)(x), sum(each))


@pytest.mark.parametrize("rows", [5, 30])
def test_products_of_hessians_of_experts_and_convolutions(rows):
    torch.manual_seed(0)
    experts = qcore_xla.pack(qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 8, 40), "w4a16-g32").weight)
    _, kernel = packed(6, 36)
    ends = jnp.asarray([2, 2, rows - 1])
    functions = [
        (lambda x: jnp.sum(qcore_xla.grouped_linear(x, ends, experts) ** 2), normal(rows, 40)),
        (lambda x: jnp.sum(qcore_xla.conv2d(x, kernel, kernel_size=3) ** 2), normal(2, 4, 6, 5)),
    ]
    for quadratic, x in functions:  # of which H x is the gradient at x
        close(jax.jit(lambda x, f=quadratic: jax.jvp(jax.grad(f), (x,), (x,))[1])(x), jax.grad(quadratic)(x))


def test_a_program_that_forbids_rank_promotion():
    dense, weight = packed(12, 48)
    with jax.numpy_rank_promotion("raise"):
        found = jax.hessian(lambda x: energy(x, lambda x: qcore_xla.linear(x, weight)))(normal(48))
    close(found, jax.hessian(lambda x: energy(x, lambda x: x @ dense.T))(normal(48)))


def test_a_bfloat16_gradient_of_the_bias_is_summed_in_float32():
    _, weight = packed(20, 80)
    x, bias = jnp.zeros((4096, 80), jnp.bfloat16), jnp.zeros(20, jnp.bfloat16)
    found = jax.jit(jax.grad(lambda bias: qcore_xla.linear(x, weight, bias).astype(jnp.float32).sum()))(bias)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), 4096)


def test_a_hessian_keeps_no_dequantized_weight():
    _, weight = packed(1024, 1024, scheme="w4a16-g128")

    def along(x, dx, weight):
        return jax.jvp(jax.grad(lambda x: energy(x, lambda x: qcore_xla.linear(x, weight))), (x,), (dx,))[1]

    x = jax.ShapeDtypeStruct((2, 1024), jnp.float32)
    made = jax.jit(along).lower(x, x, weight).compile()
    assert made.memory_analysis().temp_size_in_bytes < 1024 * 1024 * 4 / 2
