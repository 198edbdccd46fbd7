"""What plugins refuse in the same words: weights without elements, dtypes without a kernel, wrong images, indices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import qcore
from qcore.contracts.conv2d import check_image
from qcore.contracts.embedding import check_indices
from qcore.contracts.refusals import FLOATS, why_not_dtypes, why_not_empty
from qcore.resolving.explaining import plain_request


def request(contract="linear", scheme="w8a16", **changes):
    return replace(plain_request(scheme, n=64, k=64, contract=contract), **changes)


@pytest.mark.parametrize("contract", ["linear", "conv2d", "embedding"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_have_kernels(contract, dtype):
    activations = {} if contract == "embedding" else {"x_dtype": dtype}
    assert not why_not_dtypes(request(contract, out_dtype=dtype, **activations))


@pytest.mark.parametrize("contract", ["linear", "conv2d", "embedding"])
def test_other_results_have_none(contract):
    assert why_not_dtypes(request(contract, out_dtype=torch.float64)).startswith("results of dtype float64")


def test_other_activations_have_none():
    assert why_not_dtypes(request(x_dtype=torch.float64)).startswith("activations of dtype float64")
    assert why_not_dtypes(request(x_dtype=torch.int8)).startswith("activations of dtype int8")


def test_codes_are_activations_where_their_parameters_are_given():
    given = qcore.StaticInt8(0.5, 3)
    assert not why_not_dtypes(request(scheme="w8a8-static", activation=given, x_dtype=torch.int8))


def test_int8_results_need_int8_activations():
    output = qcore.OutputInt8(1.0, 0)
    assert "w8a8-o8" in why_not_dtypes(request(output=output, out_dtype=torch.int8))
    assert not why_not_dtypes(request(scheme="w8a8", output=output, out_dtype=torch.int8))
    assert "is int8, not torch.bfloat16" in why_not_dtypes(request(scheme="w8a8", output=output))


def test_a_weight_without_elements():
    assert "(0, 64)" in why_not_empty(request(n=0))
    assert not why_not_empty(request())


def test_images_are_checked_in_the_name_of_the_kernel():
    asked = replace(request("conv2d"), in_channels=4, kernel_size=(3, 3))
    check_image("mine.conv2d", torch.zeros(1, 4, 3, 3), asked)
    with pytest.raises(qcore.FormatError, match=r"mine\.conv2d: x has shape \(1, 5, 3, 3\).*IC=4"):
        check_image("mine.conv2d", torch.zeros(1, 5, 3, 3), asked)
    with pytest.raises(qcore.FormatError, match=r"an image of 2 x 9 with padding .* is smaller"):
        check_image("mine.conv2d", torch.zeros(1, 4, 2, 9), asked)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("wrong", [-1, 5])
def test_indices_are_checked(dtype, wrong):
    check_indices(torch.tensor([[0, 4], [3, 3]], dtype=dtype), 5)
    check_indices(torch.empty(0, 3, dtype=dtype), 5)
    span = rf"{min(0, wrong)}\.\.{max(4, wrong)}"
    with pytest.raises(IndexError, match=rf"indices span {span}, but the table has 5 rows.\nThey must be in 0\.\.4\."):
        check_indices(torch.tensor([[0, wrong], [4, 3]], dtype=dtype), 5)


def test_indices_on_an_accelerator_are_asserted_there(monkeypatch):
    """Nothing waits for their values, of which a tensor on meta has none."""
    asserted = []
    monkeypatch.setattr(torch, "_assert_async", asserted.append)
    check_indices(torch.empty(3, dtype=torch.int64, device="meta"), 5)
    (condition,) = asserted
    assert (condition.shape, condition.dtype, condition.device.type) == ((), torch.bool, "meta")
