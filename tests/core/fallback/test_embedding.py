"""The embedding kernel beyond its contract's cases."""

from __future__ import annotations

import pytest
import torch

import qcore
from qcore.formats import PLAIN_INT32, Format, ZeroPoint


@pytest.mark.parametrize("indices", [[0, 20], [-1, 3], [5, 10**9]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_index_outside_the_table_is_an_error(table, indices, dtype):
    kernel, packed, _ = table(Format("int4", 32))
    with pytest.raises(IndexError, match=rf"span {min(indices)}..{max(indices)}, but the table has 20 rows"):
        kernel(torch.tensor(indices, dtype=dtype), packed)


@pytest.mark.parametrize("zero", list(ZeroPoint))
def test_every_layout_is_gathered_by_row(table, zero):
    kernel, packed, weight = table(Format("int4", 32, zero, PLAIN_INT32), torch.bfloat16)
    index = torch.tensor([[3, 3], [19, 0]], dtype=torch.int32)
    assert torch.equal(kernel(index, packed), weight.dequantize(torch.bfloat16)[index.long()])


def test_no_indices_and_meta(table):
    kernel, packed, _ = table(Format("int8"))
    assert kernel(torch.empty(0, 4, dtype=torch.int64), packed).shape == (0, 4, 96)
    meta = {name: tensor.to("meta") for name, tensor in packed.items()}
    assert kernel(torch.empty(5, dtype=torch.int64, device="meta"), meta).shape == (5, 96)


@pytest.mark.parametrize("text", ["int4-g64", "int8-g64-asym", "nf4-g64", "fp4-g64-e8m0", "fp4-g16-e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_ragged_last_group_can_be_viewed(text, dtype):
    weight = qcore.quantize(torch.randn(7, 100), text)
    with qcore.using("torch"):
        layer = qcore.nn.QuantizedEmbedding.from_qtensor(weight, dtype=dtype)
        assert layer(torch.tensor([[1, 2], [6, 0]])).view(-1).shape == (400,)
