"""Arguments of the pure functions: wrong ones raise and say what is needed, odd ones give the values JAX would give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import qcore
import qcore_xla


def packed(*shape, scheme="w4a16-g32", **options):
    torch.manual_seed(0)
    weight = qcore.quantize(torch.randn(*shape), qcore.Scheme.parse(scheme).weight)
    return weight.dequantize(torch.float32).numpy(), qcore_xla.pack(weight, **options)


@pytest.mark.parametrize("shape", [(), (1,), (19,), (21,), (64,), (1, 20)])
def test_a_bias_of_another_shape_is_refused(shape):
    _, weight = packed(20, 64)  # a bias would be cropped, or padded with 0
    with pytest.raises(qcore.FormatError, match=r"needs \(20,\)"):
        qcore_xla.linear(jnp.ones((2, 64)), weight, jnp.ones(shape))


def test_arguments_that_are_no_arrays_of_jax():
    dense, weight = packed(20, 64)
    y = qcore_xla.linear([1.0] * 64, weight, [2.0] * 20)
    np.testing.assert_allclose(y, dense.sum(1) + 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_indices_count_from_the_end_as_in_jax(dtype):
    rows, weight = packed(200, 96, table=True)
    indices = np.asarray([0, 120, 127] if dtype[0] == "u" else [0, 120, -1, -128], dtype)
    np.testing.assert_allclose(qcore_xla.embedding(indices, weight), rows[indices], atol=1e-6)


@pytest.mark.parametrize(("index", "row"), [(200, 199), (2**31 - 1, 199), (-201, 0), (-(2**31), 0)])
def test_an_index_out_of_range_takes_the_nearest_row(index, row):
    rows, weight = packed(200, 96, table=True)
    np.testing.assert_allclose(qcore_xla.embedding(jnp.int32(index), weight), rows[row], atol=1e-6)


def test_indices_beyond_32_bits():
    rows, weight = packed(200, 96, table=True)
    unsigned = qcore_xla.embedding(jnp.uint32(2**32 - 1), weight)
    np.testing.assert_allclose(unsigned, rows[-1], atol=1e-6)
    with jax.enable_x64(True):
        found = qcore_xla.embedding(jnp.asarray([2**32, -(2**40), -1], jnp.int64), weight)
    np.testing.assert_allclose(found, rows[[-1, 0, -1]], atol=1e-6)


@pytest.mark.parametrize("width", [96, 80])  # the second in groups that are padded
def test_no_indices(width):
    _, weight = packed(50, width, scheme="w4a16-g20", table=True)
    assert qcore_xla.embedding(jnp.zeros((0, 3), jnp.int32), weight).shape == (0, 3, width)


@pytest.mark.parametrize("indices", [jnp.ones(3), jnp.ones(3, bool)])
def test_indices_that_are_no_integers(indices):
    with pytest.raises(qcore.FormatError, match="must be integers"):
        qcore_xla.embedding(indices, packed(50, 96, table=True)[1])


def test_a_dtype_of_torch():
    with pytest.raises(qcore.FormatError, match=r"jax\.numpy"):
        qcore_xla.embedding(jnp.ones(3, jnp.int32), packed(50, 96, table=True)[1], dtype=torch.float32)


@pytest.mark.parametrize(
    ("x", "offsets", "bias", "message"),
    [
        ((5, 40), [2, 2], None, "3 experts need integers"),
        ((5, 40), [2, 2, 4, 5], None, "3 experts need integers"),
        ((5, 40), [2.0, 2.0, 4.0], None, "3 experts need integers"),
        ((2, 5, 40), [2, 2, 4], None, r"rows \(T, 40\)"),
        ((40,), [2, 2, 4], None, r"rows \(T, 40\)"),
        ((5, 40), [2, 2, 4], (8,), r"needs \(3, 8\)"),
        ((5, 40), [2, 2, 4], (3, 7), r"needs \(3, 8\)"),
    ],
)
def test_experts_that_do_not_fit(x, offsets, bias, message):
    weight = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 8, 40), "w4a16-g32").weight
    with pytest.raises(qcore.FormatError, match=message):
        qcore_xla.grouped_linear(
            jnp.ones(x), jnp.asarray(offsets), qcore_xla.pack(weight), None if bias is None else jnp.ones(bias)
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stride": 0}, "must be positive"),
        ({"dilation": (1, 0)}, "must be positive"),
        ({"padding": -1}, "must be positive"),
        ({"dilation": (1, 3)}, "5 wide .* spans 7"),
        ({"bias": jnp.ones(7)}, r"needs \(6,\)"),
    ],
)
def test_a_convolution_that_does_not_fit(given, message):
    with pytest.raises(qcore.FormatError, match=message):
        qcore_xla.conv2d(jnp.ones((1, 4, 6, 5)), packed(6, 36)[1], kernel_size=3, **given)


def test_pairs_may_be_lists():
    _, weight = packed(6, 36)
    x = jnp.ones((1, 4, 6, 5))
    found = qcore_xla.conv2d(x, weight, kernel_size=[3, 3], padding=[1, 0])
    np.testing.assert_array_equal(found, qcore_xla.conv2d(x, weight, kernel_size=3, padding=(1, 0)))


@pytest.mark.parametrize("table", [False, True])
def test_stacked_weights_without_vmap(table):
    _, weight = packed(64, 64, table=table)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), weight)
    with pytest.raises(qcore.FormatError, match=r"jax\.vmap"):
        (qcore_xla.embedding if table else qcore_xla.linear)(jnp.ones((2, 64), int if table else None), stacked)


def test_a_platform_without_a_layout():
    with pytest.raises(qcore.FormatError, match="'cpu', 'gpu' or 'tpu'"):
        packed(64, 64, platform="metal")
