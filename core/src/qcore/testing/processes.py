"""Run the kit in processes of their own: a kernel that ends its process, or never returns, fails one step.

The process that asks loads no plugin and uses no device, as some devices belong to one process at a time. It hands out
batches of steps, and starts another process in the place of one that has ended.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from ..errors import ConformanceError, QcoreError
from ..runtime import disk_cache
from .certificate import Certificate
from .kit import Kit
from .results import Outcome, Result

Arguments = dict[str, Any]
Progress = Callable[[int, int, str], None]
"""Called before each step with (steps done, total steps, id)."""
MOST = 10
"""After so many steps that ended their process no more are begun."""
_LOADING = 60.0
"""Seconds that loading a plugin may take, even if a step may not last as long."""
_BATCH = 8
"""Cases that a process runs at a time: neighbouring cases share compiled kernels."""
_LOADED, _BEGUN, _DONE, _IDLE, _CERTIFIED, _RAISED = range(6)
"""What a process tells."""
_GONE = (EOFError, OSError)
"""What reading from and writing to a process that has ended raises."""
_INTERRUPTED = 130
"""The status of a process that a KeyboardInterrupt has ended, as in shells."""


@dataclass
class _Worker:
    """A process that runs steps.

    **Fields:** ``loaded``: whether it has loaded the plugin; ``busy``: whether it loads, runs a batch or makes the
    certificate; ``batch``: the steps that are left of it; ``step``: the current one; ``since``: when that began, or
    loading; ``slow``: whether it took too long.
    """

    process: Any
    pipe: Connection
    loaded: bool = False
    busy: bool = True
    batch: list[str] = field(default_factory=list)
    step: str = ""
    since: float = field(default_factory=time.monotonic)
    slow: bool = False

    @classmethod
    def started(cls, arguments: Arguments, deadline: float) -> _Worker:
        context = get_context("spawn")  # a new interpreter: some devices' stacks do not survive a fork
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, arguments, deadline), name="qcore-kit")
        process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        return cls(process, mine)

    def told(self) -> Iterator[tuple[int, Any]]:
        """What it has told since."""
        while self.pipe.poll():
            yield self.pipe.recv()

    def ending(self) -> str:
        """How the process ended, in words."""
        self.process.join()
        code = self.process.exitcode
        if self.slow:
            return "it did not return in time"
        if code == _INTERRUPTED:
            return "KeyboardInterrupt was raised in it"
        if code >= 0:
            return f"it exited with status {code}"
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(-code).name}"
        return f"it was killed by signal {-code}"

    def end(self) -> None:
        """End the process; one that has nothing to do ends by itself."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(0 if self.busy else 10)
        self.kill()
        self.process.join()
        self.pipe.close()

    def kill(self) -> None:
        """Kill the process; its marks would say that its kernel has ended it, which is then used nowhere."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            disk_cache.clear_marks_of(self.process.pid)


class Supervisor:
    """The processes of one run; see `run`."""

    def __init__(
        self, arguments: Arguments, jobs: int, seconds: float | None, step_seconds: float | None, tell: Progress
    ) -> None:
        self._arguments, self._jobs, self._tell = arguments, jobs, tell
        self._seconds, self._step_seconds = seconds, step_seconds
        self._begun = time.time()
        self._deadline = self._begun + (math.inf if seconds is None else seconds)
        self._steps: dict[str, Result] = {}
        self._left: deque[list[str]] = deque()
        self._results: dict[str, Result] = {}
        self._ended: dict[str, Result] = {}
        self._lost = ""
        self._workers: list[_Worker] = []
        self._certificate: Certificate | None = None

    def run(self) -> Certificate:
        """Run all steps, and return the certificate."""
        try:
            self._start(1)  # it says which steps there are
            while any(worker.busy for worker in self._workers):
                self._hear()
                self._hand_out()
            self._tell(len(self._steps), len(self._steps), "")
            return replace(self._certified(), seconds=time.time() - self._begun)
        finally:
            for worker in self._workers:
                worker.end()

    def _start(self, count: int) -> None:
        self._workers += [_Worker.started(self._arguments, self._deadline) for _ in range(count)]

    def _divide(self) -> None:
        """Make batches: the laws of one contract and scheme share a sample."""
        laws: dict[tuple[str, str], list[str]] = {}
        cases = [step.id for step in self._steps.values() if step.law == "results"]
        for step in self._steps.values():
            if step.law != "results":
                laws.setdefault((step.contract, step.scheme or step.id), []).append(step.id)
        parts = [cases[start : start + _BATCH] for start in range(0, len(cases), _BATCH)]
        # Among several processes laws come first: they take longest.
        self._left.extend([*parts, *laws.values()] if self._jobs == 1 else [*laws.values(), *parts])

    def _hand_out(self) -> None:
        if time.time() > self._deadline or len(self._ended) >= MOST or self._lost:
            self._left.clear()
        for worker in [*self._workers]:
            if not worker.busy and self._left:
                try:
                    worker.pipe.send((_BEGUN, self._left[0]))
                except OSError:  # it has ended meanwhile
                    self._bury(worker)
                    continue
                worker.busy, worker.batch = True, self._left.popleft()
        loading = sum(not worker.loaded for worker in self._workers)
        self._start(min(self._jobs - len(self._workers), len(self._left) - loading))

    def _hear(self) -> None:
        """Take what processes tell; note those that have ended, and end those whose time is over."""
        wait([worker.pipe for worker in self._workers if worker.busy], 1.0)
        for worker in [*self._workers]:
            # Asked first, as it may tell until it ends. The pipe does not say: a child of the kernel's may hold it.
            is_alive = worker.process.is_alive()
            try:
                for kind, answer in worker.told():
                    self._note(worker, kind, answer)
            except _GONE:
                is_alive = False
            if not is_alive:
                self._bury(worker)
            elif time.monotonic() - worker.since > self._limit(worker):
                worker.slow = True
                worker.kill()

    def _limit(self, worker: _Worker) -> float:
        """Seconds that a step may last, or loading."""
        if self._step_seconds is None:
            return math.inf
        return self._step_seconds if worker.step else max(self._step_seconds, _LOADING)

    def _note(self, worker: _Worker, kind: int, answer: Any) -> None:
        if kind == _LOADED:
            self._note_loaded(worker, *answer)
        elif kind == _BEGUN:
            worker.step, worker.since = answer, time.monotonic()
            self._tell(len(self._results) + len(self._ended), len(self._steps), answer)
        elif kind == _DONE:
            self._results[answer.id] = answer
            worker.step, worker.since = "", math.inf
            worker.batch = [step for step in worker.batch if step != answer.id]
        elif kind == _IDLE:  # the batch is done, or there is no time for the rest of it
            worker.busy, worker.batch = False, []
        elif kind == _CERTIFIED:
            worker.busy, self._certificate = False, answer
        else:
            error, text = answer
            raise error or RuntimeError(f"in a process of the kit:\n{text}")

    def _note_loaded(self, worker: _Worker, why_not: str, steps: list[Result]) -> None:
        worker.loaded, worker.busy, worker.since = True, False, math.inf
        if self._steps and why_not:
            self._lost = f"not run, as the plugin is not available any more: {why_not}"
        elif not self._steps and not why_not:
            self._steps = {step.id: step for step in steps}
            self._divide()

    def _bury(self, worker: _Worker) -> None:
        """Note what has ended a process, and leave the rest of its batch to others."""
        self._workers.remove(worker)
        how, step = worker.ending(), worker.step
        worker.pipe.close()
        rest = [one for one in worker.batch if one != step]
        if rest:
            self._left.appendleft(rest)
        if not worker.loaded:
            raise ConformanceError(
                f"a process of the kit ended while it loaded the plugin: {how}.\n"
                f"'qcore doctor' tests the plugin's parts apart; --jobs 0 runs the kit without processes."
            )
        if step:
            limit = f" (the limit is {self._step_seconds:g} seconds)" if worker.slow else ""
            reason = f"its process had to be replaced: {how}{limit}. Repeat it alone with --select {step!r}."
            law = "raises" if self._steps[step].law == "results" else self._steps[step].law
            self._ended[step] = replace(self._steps[step], outcome=Outcome.FAILED, law=law, reason=reason)

    def _certified(self) -> Certificate:
        why = f"not run within the limit of {self._seconds:g} seconds" if self._seconds is not None else ""
        if len(self._ended) >= MOST:
            why = f"not run, as {len(self._ended)} steps before had ended their process"
        what = [*self._results.values()], [*self._ended.values()], [*self._steps.values()], self._lost or why
        while self._certificate is None:  # a process may end that was idle
            if not self._workers:
                self._start(1)
            if not any(worker.busy for worker in self._workers):
                worker = self._workers[0]
                with contextlib.suppress(OSError):
                    worker.pipe.send((_CERTIFIED, what))
                worker.busy = True
            self._hear()
        return self._certificate


def _work(pipe: Connection, arguments: Arguments, deadline: float) -> None:
    """Run steps in this process, as it is told."""
    try:
        _serve(pipe, arguments, deadline)
    except KeyboardInterrupt:  # by the user, who has interrupted the process that asked as well, or by a kernel
        sys.exit(_INTERRUPTED)
    except _GONE:  # the process that asked has its own message
        pass
    except BaseException as error:  # noqa: BLE001 - raised again where the run was asked for
        with contextlib.suppress(OSError):
            pipe.send((_RAISED, (error if isinstance(error, QcoreError) else None, traceback.format_exc())))


def _serve(pipe: Connection, arguments: Arguments, deadline: float) -> None:
    kit = Kit(**arguments)
    steps = kit.steps()
    status = kit.target.status
    why_not = "" if kit.target.available else status.reason or str(status.state)
    pipe.send((_LOADED, (why_not, kit.skipped(""))))
    while (order := pipe.recv()) is not None:
        kind, what = order
        if kind == _CERTIFIED:
            pipe.send((_CERTIFIED, _certificate_of(kit, *what)))
            continue
        for step in what:
            if time.time() > deadline:
                break
            pipe.send((_BEGUN, step))
            pipe.send((_DONE, steps[step]()))
        pipe.send((_IDLE, None))


def _certificate_of(
    kit: Kit, results: Iterable[Result], ended: Iterable[Result], steps: list[Result], why: str
) -> Certificate:
    kit.set_results([*results, *map(kit.apply_gaps, ended)], steps)
    return kit.finish(why, steps)
