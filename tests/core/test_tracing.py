"""What is known of the state of torch's dispatcher."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qcore.formats.tracing import runs_now


class TestRunsNow:
    def test_a_plain_call(self):
        assert runs_now(torch.zeros(1))

    def test_whoever_wants_the_op_gets_it(self):
        x, seen = torch.zeros(1), []
        assert not runs_now(torch.nn.Parameter(x))
        with TorchDispatchMode():
            assert not runs_now(x)
        torch.vmap(lambda row: (seen.append(runs_now(x)), row)[1])(torch.zeros(2))
        assert seen == [False]
        assert torch.compile(lambda x: x + runs_now(x), fullgraph=True, backend="eager")(x) == 0

    def test_a_negative_bit_goes_by_the_op(self):
        c = torch.randn(2, 3, dtype=torch.complex64)
        assert runs_now(c.imag)
        assert not runs_now(c.conj().imag)  # what a kernel would read at its address is the opposite
