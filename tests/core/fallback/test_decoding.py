"""The quick ways of decoding tables give the values of `Element.decode`, for every code."""

import pytest
import torch

import qcore
from qcore.fallback.decoding import fp8_values, pair_values
from qcore.formats import find_element


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_every_fp8_code(name):
    element = find_element(name)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[torch.isfinite(element.decode(codes))]
    found, expected = fp8_values(codes, element), element.decode(codes)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("name", ["fp4", "nf4", "fp4_bnb"])
def test_every_pair_of_nibbles(name):
    element = find_element(name)
    data = torch.arange(256, dtype=torch.uint8).view(4, 64)
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(1)
    assert torch.equal(pair_values(data, element), element.decode(codes))


def test_a_table_of_fewer_bits():
    element = qcore.Element.table("t3", [-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 8.0])
    data = torch.tensor([[0x70, 0x13]], dtype=torch.uint8)
    assert pair_values(data, element).tolist() == [[-4.0, 8.0, 0.0, -2.0]]
