"""What the TPU compiler makes of the bodies, generation by generation: which steps, and what each of them writes."""

from __future__ import annotations

from functools import cache, partial

import pytest

from qcore_xla import aot, aot_forms
from qcore_xla.aot_forms import CHIPS

FLOAT = ["w8a16", "w8a16-g128", "w4a16", "w4a16-g128"]
ELEMENTS = ["wfp8a16", "mxfp8", "wfp4a16-g128-e8m0", "wnf4a16-g64", "wfp8afp8", "wfp8afp8-g128"]
"""Groups of 16 and 32 codes of 4 bits have more bytes of scales than a fusion takes, in integers as well."""
M, N, K = 16, 4096, 4096


@cache
def compiled(chip, scheme, pallas=False):
    return aot_forms.compiled_linear(chip, scheme, M, N, K, pallas=pallas)


def weight_bytes(scheme):
    return aot_forms.weight_bytes(scheme, N, K)


def written_by_size(program, limit):
    return [step for step in program.steps if step.nbytes >= limit]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("scheme", FLOAT)
def test_float_activations_are_one_fusion(scheme, chip):
    program = compiled(chip, scheme)
    assert program.fusions == 1
    assert program.products == ("f32",)
    assert [step.op for step in program.readers(1)] == ["fusion"]  # reads the weight, and writes the result


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("scheme", [*FLOAT, "w8a8", "w8a8-g128"])
def test_nothing_of_the_size_of_a_weight_is_written(scheme, chip):
    """Neither a copy of the packed weight nor an unpacked one, on chip or off."""
    program = compiled(chip, scheme)
    assert not written_by_size(program, weight_bytes(scheme) // 2)
    assert program.temporary < weight_bytes(scheme) // 2


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("scheme", ELEMENTS)
def test_floats_of_8_and_4_bits_are_decoded_within_the_product(scheme, chip):
    program = compiled(chip, scheme)
    assert program.products == ("f32",)
    assert [step.op for step in program.readers(1)] == ["fusion"]
    assert not written_by_size(program, weight_bytes(scheme) // 2)
    assert program.temporary < weight_bytes(scheme) // 2


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-g128"])
def test_packed_weights_are_read_once(scheme, chip):
    assert compiled(chip, scheme).bytes_accessed < 1.6 * weight_bytes(scheme)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-g128"])
def test_int8_activations_accumulate_in_int32(scheme, chip):
    program = compiled(chip, scheme)
    assert program.products == ("s32",)
    assert len(program.readers(1)) == 1


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("scheme", ["w4a8", "w4a8-g128"])
def test_the_kernel_keeps_unpacked_int4_on_chip(scheme, chip):
    """XLA alone writes N * K bytes of int8 here."""
    program = compiled(chip, scheme, pallas=True)
    assert not written_by_size(program, weight_bytes(scheme) // 2)
    assert [step.op for step in program.readers(1)] == ["custom-call"]
    assert written_by_size(compiled("v6e", scheme), N * K)


def test_v4_multiplies_no_int8():
    assert "int8" in aot.why_not_int8("v4")
    assert "weight-only" in aot.why_not_int8("tpu7x")
    assert not any(map(aot.why_not_int8, ("v5e", "v5p", "v6e")))


def test_a_generation_that_is_none():
    with pytest.raises(ValueError, match="v5e, v5p"):
        aot.compile_for("v3", partial(sum))
