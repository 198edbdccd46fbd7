"""Everything that runs on a TPU compiles for every generation, whatever the form of a call."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from qcore_xla.aot import compile_for
from qcore_xla.aot_forms import CHIPS
from qcore_xla.bodies.embedding import embedding
from qcore_xla.bodies.form import Form
from qcore_xla.bodies.linear import grouped, linear
from qcore_xla.pallas.product import product

BF16, F32, S8, S32 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.int32
M, N, S, B = 32, 512, 8, 128
X, DATA, SCALE = ((M, S * B), BF16), ((S, B // 8, N), S32), ((S, N), BF16)


@pytest.mark.parametrize("chip", CHIPS)
def test_zero_points_and_requantized_results(chip):
    form = Form("asymmetric", requantize=True)

    def call(x, data, scale, zero, bias, sums, out_scale, out_zero):
        return linear(x, data, scale, zero, bias, sums, None, None, None, out_scale, out_zero, form=form)

    token = ((M,), F32)
    program = compile_for(chip, call, X, DATA, SCALE, ((S, N), S8), ((N,), F32), ((S, N), S32), token, token)
    assert "s32" in program.products


@pytest.mark.parametrize("chip", CHIPS)
def test_channel_groups_of_a_convolution(chip):
    def call(x, data, scale):
        return grouped(x, data, scale, None, None, form=Form("symmetric", out_dtype="bfloat16"))

    program = compile_for(chip, call, ((4, M, 72), BF16), ((4, 1, 9, 16), S32), ((4, 1, 16), BF16))
    assert program.products == ("s32",)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("dtype", [S8, S32], ids=["int8", "int4"])
def test_embedding_never_unpacks_the_table(dtype, count, chip):
    rows, width = 32768, 1024 if dtype == S8 else 128

    def call(indices, data, scale):
        return embedding(indices, data, scale, None, form=Form(out_dtype="bfloat16"))

    program = compile_for(chip, call, ((count,), S32), ((rows, width), dtype), ((rows, 1), BF16))
    assert program.largest() < rows * 128


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("x_dtype", [F32, BF16, S8], ids=["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("codes", "groups"), [(128, 1), (64, 16), (128, 4)])
def test_the_kernel(codes, groups, x_dtype, chip):
    slices = S * B // codes
    compile_for(chip, product, ((M, S * B), x_dtype), ((slices, codes // 8, N), S32), ((groups, N), BF16))
