"""Quantized layers of every format as steps of one program, without torch in between."""

import pytest
import torch
from torch import nn

import qcore
from qcore_cpu import native

assert not native.fault()
from qcore_cpu.graphs import program  # noqa: E402 - the ops exist once the library is loaded

pytestmark = pytest.mark.usefixtures("fresh_compiler")

INDICES = (torch.tensor([3]), torch.tensor([[1, 2, 49], [0, 7, 7]], dtype=torch.int32), torch.tensor([[49]]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(50, 64), nn.Linear(64, 96), nn.Linear(96, 50)

    def forward(self, indices):
        return self.last(nn.functional.silu(self.first(self.table(indices))))


@pytest.fixture
def lowered(monkeypatch):
    """The programs that were made."""
    made, run = [], program.Lowering.run
    monkeypatch.setattr(program.Lowering, "run", lambda self: made.append(run(self)) or made[-1])
    return made


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [
    "w4a16-g32", "w4a16-g32-asym", "w4a16-g32-fzp", "w8a16", "w8a16-g64", "w8a16-g32-asym", "wnf4a16-g64", "mxfp4",
    "nvfp4", "wfp8a16", "wfp4a16-g32", "w8a8", "w8a8-aasym", "w8a8-static(0.05,3)", "w4a8-g32", "w4a8-g32-asym-aasym",
])  # fmt: skip
def test_every_format_is_one_segment(scheme, dtype, lowered):
    torch.manual_seed(0)
    model = Model().to(dtype)
    qcore.quantize_(model, scheme)
    compiled = torch.compile(model, backend="qcore_cpu")
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    for indices in INDICES:
        torch.testing.assert_close(compiled(indices), model(indices), rtol=tolerance, atol=tolerance)
    assert lowered
    assert all(isinstance(segment, tuple) for one in lowered for segment in one.segments)
    model.table.weight = qcore.quantize(torch.randn(50, 64).to(dtype), model.table.weight.format)
    model.first.weight = qcore.quantize(torch.randn(96, 64).to(dtype), model.first.weight.format)
    torch.testing.assert_close(compiled(INDICES[1]), model(INDICES[1]), rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("name", ["table", "first"])
def test_scales_of_another_dtype_are_not_misread(name):
    model = Model().to(torch.bfloat16)
    qcore.quantize_(model, "w4a16-g32")
    compiled = torch.compile(model, backend="qcore_cpu")
    compiled(INDICES[0])
    layer = getattr(model, name)
    layer.weight = qcore.quantize(torch.randn(layer.weight.shape), layer.weight.format)  # float32 scales
    with pytest.warns(qcore.QcoreWarning, match="scales of another dtype"):
        found = compiled(INDICES[0])
    torch.testing.assert_close(found, model(INDICES[0]), rtol=2e-2, atol=2e-2)


@torch.no_grad()
@pytest.mark.parametrize("index", [50, -1, 2**40])
def test_an_index_outside_the_table_is_an_error(index):
    model = Model()
    qcore.quantize_(model, "w4a16-g32-asym")
    compiled = torch.compile(model, backend="qcore_cpu")
    before = compiled(torch.tensor([3, 4]))
    with pytest.raises(IndexError, match="out of range"):
        compiled(torch.tensor([3, index]))
    assert torch.equal(compiled(torch.tensor([3, 4])), before)  # eager silu rounds otherwise
