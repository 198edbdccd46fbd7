"""Notes of programs that nobody waits for: on GPUs; here on the CPU as if it were one."""

import pytest
import torch
from tiny_models import Decoder

from qcore_xla.graphs import notes, program
from qcore_xla.graphs.backend import qcore_xla


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(program, "LATE", {"cpu"})


def _compiled():
    torch.manual_seed(0)
    return torch.compile(Decoder().eval(), backend=qcore_xla)


@torch.no_grad()
@pytest.mark.usefixtures("late")
def test_the_next_call_raises_and_the_one_after_runs():
    compiled = _compiled()
    ids, place = torch.tensor([[1]]), torch.tensor([0])
    expected = compiled(ids, place)
    assert expected.isfinite().all()
    assert compiled(ids + (1 << 12), place).isnan().all()
    with pytest.raises(IndexError, match=r"out of range(.|\n)*earlier call of a compiled model on cpu"):
        compiled(ids, place)
    torch.testing.assert_close(compiled(ids, place), expected)


@torch.no_grad()
@pytest.mark.usefixtures("late")
def test_a_call_of_another_program_raises():
    compiled = _compiled()
    prompt = torch.tensor([[1, 2, 1 << 12]])
    assert compiled(prompt, torch.arange(3)).isnan().all()
    with pytest.raises(IndexError, match="earlier call"):
        compiled(prompt[:, :1], torch.tensor([3]))


@torch.no_grad()
@pytest.mark.usefixtures("late")
def test_integers_that_do_not_fit_are_noted_too():
    compiled = _compiled()
    ids, place = torch.tensor([[1]]), torch.tensor([0])
    compiled(ids, place)
    assert compiled(ids + (1 << 40), place).isnan().all()
    with pytest.raises((IndexError, OverflowError), match="earlier call"):
        compiled(ids, place)


@torch.no_grad()
@pytest.mark.usefixtures("late")
def test_a_program_without_states_raises_at_once():
    table = torch.nn.Embedding(9, 8)
    compiled = torch.compile(table, backend=qcore_xla)
    with pytest.raises(IndexError, match=r"out of range\.$"):
        compiled(torch.tensor([9]))


@torch.no_grad()
@pytest.mark.usefixtures("late")
def test_a_program_that_returns_integers_raises_at_once():
    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Decoder().eval()

        def forward(self, ids, place):
            return self.model(ids, place).argmax(-1)

    compiled = torch.compile(Tokens(), backend=qcore_xla)
    with pytest.raises(IndexError, match=r"out of range\.$"):
        compiled(torch.tensor([[1 << 12]]), torch.tensor([0]))


def test_each_note_is_raised_once():
    device = torch.device("cpu")
    for noted in ([False, True], [False, False], [True, False]):
        notes.note_late(device, torch.tensor(noted))
    with pytest.raises(OverflowError, match=r"32 bits(.|\n)*earlier call"):
        notes.raise_late(device)
    with pytest.raises(IndexError, match=r"out of range(.|\n)*earlier call"):
        notes.raise_late(device)
    notes.raise_late(device)
