"""Chains: consecutive modules run as one submission, with one upload and one download.

`Sequential` is a `torch.nn.Sequential` that finds runs of modules that the device supports: quantized layers of
this plugin, and elementwise activations between them. Each run is recorded once per shape of its input as one program,
in which results stay in device memory. Results are rounded after each layer, as they are without a chain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from qcore.plugin_api import binding_of, format_table, runs_now

from .calls import largest
from .flow import Stage, StaysOnHostError, flow_of, has_hooks, stage_of
from .native import OutOfMemory
from .programs import Programs
from .recording import Recorded, device_of, record

_Leaves = list[tuple[str, nn.Module]]
_LOCAL = ("_pieces", "_bounds", "_ran")


@dataclass(frozen=True)
class Step:
    """Where one module ran: ``submission`` counts those of the device, from 1; 0 if it ran on the host."""

    name: str
    kind: str
    submission: int
    reason: str = ""

    @property
    def where(self) -> str:
        """The same in words."""
        return f"device, submission {self.submission}" if self.submission else "host"


@dataclass(frozen=True)
class Explanation:
    """Where each module of a chain ran; ``str`` of it is a table."""

    steps: tuple[Step, ...]

    @property
    def submissions(self) -> int:
        """The number of submissions to the device."""
        return len({step.submission for step in self.steps} - {0})

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __str__(self) -> str:
        if not self.steps:
            return "not called yet, or compiled: explain(input) calls it and shows where each module runs"
        rows = [(step.name, step.kind, step.where, step.reason) for step in self]
        table = format_table(("module", "kind", "where", "why"), rows)
        return "\n".join([*table, f"{_count(len(rows), 'module')}, {_count(self.submissions, 'submission')}"])


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@dataclass
class _Piece:
    """Modules that run together: ``stages`` on the device, or for a ``reason`` one module on the host."""

    stages: tuple[Stage, ...] = ()
    reason: str = ""

    @cached_property
    def recorded(self) -> Recorded:
        return record(self.stages)

    @property
    def length(self) -> int:
        """How many modules it covers."""
        return max(1, len(self.stages))

    @cached_property
    def chunks(self) -> int:
        """Chunks that the batch is split into, so that no matrix in between exceeds the device's limit."""
        most = max(flow.nbytes for stage in self.stages for flow in (stage.before, stage.after))
        device = device_of(self.stages)
        assert device is not None
        return -(-most // largest(device))


class Sequential(nn.Sequential):
    """A `torch.nn.Sequential` whose modules run together on the device if they can.

    Everything else is as in `torch.nn.Sequential`: children, ``state_dict``, copies, ``to``. If gradients are recorded,
    inside a trace or under autocast, the modules run one by one.
    """

    def __init__(self, *modules: Any) -> None:
        super().__init__(*modules)
        self._forget()

    def _forget(self) -> None:
        self._pieces: Programs[Any, _Piece] = Programs(128)
        self._bounds: list[Any] = []
        self._ran: dict[int, _Piece] = {}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that torch gives it
        """Run every module in turn on ``input``."""
        hooks: bool = _has_any_global_hook()  # type: ignore[no-untyped-call]
        if hooks or not runs_now(input) or torch.is_autocast_enabled("cpu"):
            return super().forward(input)  # type: ignore[no-any-return, no-untyped-call]
        leaves = list(_leaves("", self))
        self._notice_changes(leaves)
        self._ran = {}
        return self._run(leaves, 0, len(leaves), input)

    def explain(self, input: Tensor | None = None) -> Explanation:  # noqa: A002
        """Where each module ran in the last call or, given an ``input``, where it runs for that input.

        There are no steps before the first call; a compiled call, which runs the modules one by one, does not count.
        """
        if input is not None:
            with torch.no_grad():
                self(input)
        steps: list[Step] = []
        leaves, submission = list(_leaves("", self)), 0
        for start, piece in self._ran.items():
            submission += bool(piece.stages)
            for name, leaf in leaves[start : start + piece.length]:
                steps.append(Step(name, type(leaf).__name__, submission if piece.stages else 0, piece.reason))
        return Explanation(tuple(steps))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _LOCAL}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._forget()

    def _apply(self, fn: Any, recurse: bool = True) -> Sequential:
        self._forget()  # programs keep the weights that they were recorded with
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **kwargs)

    def _notice_changes(self, leaves: _Leaves) -> None:
        """Forget programs recorded for other modules, or for weights that have been repacked since."""
        bounds = [binding_of(leaf) for _, leaf in leaves]
        if len(bounds) != len(self._bounds) or any(a is not b for a, b in zip(bounds, self._bounds, strict=True)):
            self._forget()
            self._bounds = bounds

    def _run(self, leaves: _Leaves, start: int, stop: int, x: Tensor) -> Tensor:
        """The modules from ``start`` up to ``stop`` on x, one piece after the other."""
        while start < stop:
            piece = self._piece(leaves, start, stop, x)
            self._ran[start] = piece
            x = self._run_piece(leaves, start, piece, x) if piece.stages else leaves[start][1](x)
            start += piece.length
        return x

    def _run_piece(self, leaves: _Leaves, start: int, piece: _Piece, x: Tensor) -> Tensor:
        stop = start + piece.length
        if piece.chunks > 1:
            return torch.cat([self._run(leaves, start, stop, part) for part in x.tensor_split(piece.chunks)])
        try:
            return piece.recorded.run(x)
        except OutOfMemory:
            if x.dim() > 1 and x.shape[0] > 1:
                return torch.cat([self._run(leaves, start, stop, part) for part in x.tensor_split(2)])
            for _, leaf in leaves[start:stop]:
                x = leaf(x)
            return x

    def _piece(self, leaves: _Leaves, start: int, stop: int, x: Tensor) -> _Piece:
        key = (start, stop, x.shape, x.dtype, _modes(leaves[start:stop]))
        piece = self._pieces.get(key, lambda: _plan(leaves[start:stop], x))
        if not piece.stages:
            return piece
        if torch.is_grad_enabled() and _wants_gradients(piece.stages, x):
            return _Piece(reason="gradients are recorded; under torch.no_grad() it runs on the device")
        if "recorded" in vars(piece) and not piece.recorded.current():
            piece = _Piece(piece.stages)
            self._pieces.put(key, piece)
        return piece


def _leaves(prefix: str, container: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """The modules that run one after the other, with their names, including those of nested plain containers."""
    for name, module in container._modules.items():  # noqa: SLF001 - named_children skips modules that occur twice
        assert module is not None
        if type(module) in (nn.Sequential, Sequential) and not has_hooks(module):
            yield from _leaves(f"{prefix}{name}.", module)  # type: ignore[arg-type]
        else:
            yield f"{prefix}{name}", module


def _modes(leaves: _Leaves) -> tuple[int, ...]:
    """Further state that a plan depends on: dropout runs in training, hooks may be added or removed."""
    return tuple(leaf.training + 2 * has_hooks(leaf) for _, leaf in leaves)


def _plan(leaves: _Leaves, x: Tensor) -> _Piece:
    """The longest run of modules from the first one on, if it pays off: if it has a weight."""
    try:
        flow = flow_of(x, leaves[0][1])
    except StaysOnHostError as error:
        return _Piece(reason=str(error))
    stages: list[Stage] = []
    reason = ""
    for _, leaf in leaves:
        try:
            stage = stage_of(leaf, flow)
        except StaysOnHostError as error:
            reason = str(error)
            break
        if stage.bound and device_of([*stages, stage]) is not device_of([stage]):
            break
        stages.append(stage)
        flow = stage.after
    if device_of(stages) is None:
        return _Piece(reason=reason if not stages else "no quantized layer that runs on the device follows")
    piece, first = _Piece(tuple(stages)), stages[0].before.shape
    if piece.chunks > (first[0] if len(first) > 1 else 1):
        return _Piece(reason="a single row of the batch is too large for one program: each layer splits it by itself")
    return piece


def _wants_gradients(stages: tuple[Stage, ...], x: Tensor) -> bool:
    biases = (stage.module._parameters.get("bias") for stage in stages if stage.bound)  # noqa: SLF001 - cheaper
    return x.requires_grad or any(bias is not None and bias.requires_grad for bias in biases)


def sequential(*modules: nn.Module) -> Sequential:
    """A `Sequential` of these modules or, given one `torch.nn.Sequential`, of its modules under the same names."""
    if len(modules) == 1 and isinstance(modules[0], nn.Sequential):
        made = Sequential(OrderedDict(modules[0]._modules))  # noqa: SLF001 - named_children skips modules that occur twice
        return made.train(modules[0].training)
    return Sequential(*modules)
