"""One weight, everybody who computes with it, and the cells of one row count measured in turns."""

from __future__ import annotations

import sys
from functools import partial

import torch
from _cuda_peers import PEERS, installed
from _cuda_problem import SCHEMES, Contender, Problem, UnservedError
from _cuda_targets import Cell
from _cuda_timing import Replay, in_turns
from torch import Tensor


class Ceilings:
    """What the machine can do. ``bandwidth``: bytes per second read; ``rate``: bfloat16 operations per second."""

    def __init__(self, bandwidth: float, rate: float) -> None:
        self.bandwidth, self.rate = bandwidth, rate

    def floor_us(self, who: Contender, m: int, k: int, n: int) -> float:
        """The least time: reading the weight once, or the arithmetic."""
        rate = self.rate * (2 if "a8" in who.scheme else 1)
        return max(who.nbytes / self.bandwidth, 2 * m * n * k / rate) * 1e6


def chosen(text: str) -> tuple[list[str], list[str]]:
    """The peers that a list of names (or ``all``, ``none``) asks for: those installed, and those missing."""
    names = list(PEERS) if text == "all" else [] if text == "none" else text.split(",")
    if unknown := set(names) - set(PEERS):
        sys.exit(f"There is no peer {', '.join(sorted(unknown))}; there are: {', '.join(PEERS)}, all, none")
    here = installed()
    return [name for name in names if name in here], [name for name in names if name not in here]


class Contest:
    """Builds every contender for one size and measures them. What cannot take part is noted with its reason."""

    def __init__(self, size: tuple[int, int], peers: list[str], ceilings: Ceilings) -> None:
        self.size, self.ceilings, self.notes = size, ceilings, list[str]()
        self.problem = Problem(*size)
        self.contenders = [self.problem.bfloat16()]
        for scheme in SCHEMES:
            self._join(scheme, lambda s=scheme: [self.problem.ours(s)])
        for peer in peers:
            self._join(peer, partial(PEERS[peer][1], self.problem))

    def _join(self, name: str, make: partial[list[Contender]]) -> None:
        try:
            self.contenders += make()
        except Exception as error:  # noqa: BLE001  a peer that is broken costs itself alone
            self._note(name, error)

    def _note(self, name: str, error: Exception) -> None:
        text = str(error).strip().splitlines() or [""]
        kind = "" if isinstance(error, UnservedError) else f"{type(error).__name__}: "
        self.notes.append(f"{name}, {self.size[0]} x {self.size[1]}: {kind}{text[0][:200]}")
        print(self.notes[-1], file=sys.stderr, flush=True)
        torch.cuda.synchronize()  # after an error that the device does not recover from nothing can be measured

    def cells(self, m: int) -> list[Cell]:
        """The figures of all contenders at M rows."""
        x = self.problem.x(m)
        entered = [who for who in self.contenders if who.rows(m)]
        ready = [(who, *entry) for who in entered if (entry := self._prepare(who, x)) is not None]
        times = in_turns([replay for _, replay, _, _ in ready])
        base = times[0]
        return [
            self._cell(who, m, us, base / us, error, note)
            for (who, _, error, note), us in zip(ready, times, strict=True)
        ]

    def _prepare(self, who: Contender, x: Tensor) -> tuple[Replay, float, str] | None:
        try:
            first = who.runs[0](x)
            error = self.problem.error(who, x, first)
            note = "" if torch.equal(first, who.runs[-1](x)) else "results differ from call to call"
            return Replay([partial(run, x) for run in who.runs]), error, note
        except Exception as problem:  # noqa: BLE001  likewise
            self.contenders = [other for other in self.contenders if other is not who]
            self._note(f"{who.name}, M = {len(x)}", problem)
            return None

    def _cell(self, who: Contender, m: int, us: float, ratio: float, error: float, note: str) -> Cell:
        k, n = self.size
        share = self.ceilings.floor_us(who, m, k, n) / us
        return Cell(who.name, who.scheme, k, n, m, us, ratio, share, error, note)
