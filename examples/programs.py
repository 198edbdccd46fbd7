"""Sentence models as whole programs of XLA: batches are padded to a few sizes, and compilations are counted."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from qcore import graphs

COMPILED = "/jax/core/compile/backend_compile_duration"
"""What JAX calls the event of one compilation."""
MANY = 64
"""Graphs that Dynamo keeps of one class: three sizes for each of the demo's models. Its own limit is 8."""


class WholeProgram(nn.Module):
    """An encoder of transformers that XLA runs as one program for each size that batches are padded to.

    ``compilations``: how many its calls needed so far, small programs beside the model's included.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.compilations = model, 0
        # A full graph, so that nothing runs layer by layer in silence.
        self._compiled = torch.compile(model.forward, backend="qcore_xla", fullgraph=True)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        tensors: list[Tensor] = list(self.model.state_dict().values())
        return tensors[0].device

    def forward(self, **tokens: Tensor) -> Any:
        """The ``last_hidden_state`` ``(B, L, features)`` of ids and masks ``(B, L)``, run at the next larger sizes.

        What is added has 0 in the attention mask, and its results are dropped.
        """
        rows, length = tokens["input_ids"].shape
        more = (0, graphs.bucket(length) - length, 0, graphs.bucket(rows, least=1) - rows)
        so_far = len(_compilations())
        padded = {name: nn.functional.pad(ids, more) for name, ids in tokens.items()}
        with torch._dynamo.config.patch(recompile_limit=MANY):  # noqa: SLF001 - as torch documents it
            found = self._compiled(**padded)
        self.compilations += len(_compilations()) - so_far
        return SimpleNamespace(last_hidden_state=found.last_hidden_state[:rows, :length])


@functools.cache
def _compilations() -> list[float]:
    """The seconds of each of JAX's compilations since the first call; the list grows with them."""
    from jax import monitoring

    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            seconds.append(duration_secs)

    monitoring.register_event_duration_secs_listener(listen)
    return seconds
