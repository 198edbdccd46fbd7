"""Weights turned on packed words give the codes that unpacking each of them gives, at every shape of tile and band."""

import pytest
import torch

from qcore.checkpoint.importers import turning
from qcore.checkpoint.importers.turning import turned, turned_awq, turned_by_order

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
COLUMNS = (1, 2, 3, 4, 5, 16, 19, 40, 131)


def draw(*shape):
    return torch.randint(-(1 << 31), (1 << 31) - 1, shape, generator=torch.Generator().manual_seed(sum(shape))).int()


def codes_of(words, bits):
    """Unsigned codes (R * 32 / bits, C) of words (R, C) packed along the rows."""
    shifts = torch.arange(0, 32, bits).view(1, -1, 1)
    return ((words.long().unsqueeze(1) >> shifts) & ((1 << bits) - 1)).flatten(0, 1)


def bytes_of(codes, bits):
    """PLAIN of unsigned codes (K, N): uint8 (N, K * bits / 8), rounded up."""
    signed = (codes ^ (1 << (bits - 1))).t()
    if bits == 8:
        return signed.to(torch.uint8)
    signed = torch.nn.functional.pad(signed, (0, signed.shape[1] % 2))
    return (signed[:, ::2] | signed[:, 1::2] << 4).to(torch.uint8)


@pytest.fixture(params=[1 << 12, 1 << 19], ids=["many_bands", "few_bands"])
def _tiles(request, monkeypatch):
    monkeypatch.setattr(turning, "_TILE_BYTES", request.param)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_turned(rows, columns):
    words = draw(rows, columns)
    assert torch.equal(turned(words), words.t())
    flipped = turned(words, 0x88)
    assert torch.equal(
        flipped.view(torch.uint8), words.t().clone(memory_format=torch.contiguous_format).view(torch.uint8) ^ 0x88
    )


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("k", [1, 5, 8, 30, 264])
def test_awq(k, columns):
    words = draw(k, columns)
    nibbles = codes_of(words.reshape(1, -1), 4).view(8, k, columns)
    codes = torch.empty(k, columns, 8, dtype=torch.int64)
    for place, output in enumerate(AWQ_OUTPUTS):
        codes[:, :, output] = nibbles[place]
    found = turned_awq(words)
    assert found.is_contiguous()
    assert torch.equal(found, bytes_of(codes.flatten(1), 4))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(("rows", "bits"), [(1, 4), (33, 4), (2, 8), (33, 8)])
def test_by_order(rows, bits, columns):
    words = draw(rows, columns)
    order = torch.randperm(rows * 32 // bits, generator=torch.Generator().manual_seed(columns))
    found = turned_by_order(words, bits, order.int())
    assert found.is_contiguous()
    assert torch.equal(found, bytes_of(codes_of(words, bits)[order], bits))


def test_a_transposed_view_is_as_good():
    words = draw(40, 24).t()
    assert torch.equal(turned(words), words.t())
    assert torch.equal(turned_awq(words), turned_awq(words.contiguous()))
