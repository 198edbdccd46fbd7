"""Run the kit in processes of their own: a kernel that ends its process, or never returns, fails one step.

The process that asks loads no plugin and uses no device, as some devices belong to one process at a time. It hands out
batches of steps, and starts another process in the place of one that has ended.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from ..errors import ConformanceError
from .certificate import Certificate
from .kit import Kit
from .results import Outcome, Result

Arguments = dict[str, Any]
Progress = Callable[[int, int, str], None]
"""Called before each step with (steps done, total steps, id)."""
MOST = 10
"""After so many steps that ended their process no more are begun."""
_BATCH = 8
"""Cases that a process runs at a time: neighbouring cases share compiled kernels."""
_READY, _BEGUN, _DONE, _CERTIFIED, _RAISED = range(5)
"""What a process tells."""


@dataclass
class _Worker:
    """A process that runs steps.

    **Fields:** ``busy``: whether it has a batch, of which ``batch`` is left; ``step``: the current one, begun at
    ``since``; ``slow``: whether it took too long.
    """

    process: Any
    pipe: Connection
    busy: bool = False
    batch: list[str] = field(default_factory=list)
    step: str = ""
    since: float = math.inf
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
        """What it has told since; ends with `EOFError` if the process has ended."""
        while self.pipe.poll():
            yield self.pipe.recv()

    def ending(self) -> str:
        """How the process ended, in words."""
        self.process.join()
        code = self.process.exitcode
        if self.slow:
            return "it did not return in time"
        return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with status {code}"

    def end(self) -> None:
        """End the process; one that has nothing to do ends by itself."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(0 if self.busy else 10)
        self.process.kill()
        self.process.join()
        self.pipe.close()


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
        self._workers: list[_Worker] = []

    def run(self) -> Certificate:
        """Run all steps, and return the certificate."""
        try:
            self._start()
            self._divide()
            self._hand_out()
            while any(worker.busy for worker in self._workers):
                self._hear()
                self._hand_out()
            self._tell(len(self._steps), len(self._steps), "")
            return self._certificate()
        finally:
            for worker in self._workers:
                worker.end()

    def _start(self) -> _Worker:
        """A process that has loaded the plugin."""
        worker = _Worker.started(self._arguments, self._deadline)
        self._workers.append(worker)
        available, steps = self._answer(worker, _READY, "while it loaded the plugin")
        if not self._steps:
            self._steps = {step.id: step for step in steps} if available else {}
        return worker

    def _answer(self, worker: _Worker, expected: int, when: str) -> Any:
        try:
            kind, answer = worker.pipe.recv()
        except EOFError:
            raise ConformanceError(
                f"a process of the kit ended {when}: {worker.ending()}.\n"
                f"'qcore doctor' tests the plugin's parts apart; --jobs 0 runs the kit without processes."
            ) from None
        _raise_if(kind, answer)
        assert kind == expected
        return answer

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
        if time.time() > self._deadline or len(self._ended) >= MOST:
            self._left.clear()
        idle = sum(not worker.busy for worker in self._workers)
        for _ in range(min(self._jobs - len(self._workers), len(self._left) - idle)):
            self._start()
        for worker in self._workers:
            if not worker.busy and self._left:
                worker.busy, worker.batch = True, self._left.popleft()
                worker.pipe.send((_BEGUN, worker.batch))

    def _hear(self) -> None:
        """Wait for what a process tells, for its end, or for the end of its time."""
        limit = None if self._step_seconds is None else 1.0
        wait([worker.pipe for worker in self._workers if worker.busy], limit)
        for worker in [*self._workers]:
            try:
                for kind, answer in worker.told():
                    self._note(worker, kind, answer)
            except (EOFError, OSError):
                self._bury(worker)
                continue
            if self._step_seconds is not None and time.monotonic() - worker.since > self._step_seconds:
                worker.slow = True
                worker.process.kill()

    def _note(self, worker: _Worker, kind: int, answer: Any) -> None:
        _raise_if(kind, answer)
        if kind == _BEGUN:
            worker.step, worker.since = answer, time.monotonic()
            self._tell(len(self._results) + len(self._ended), len(self._steps), answer)
        elif kind == _DONE:
            self._results[answer.id] = answer
            worker.step, worker.since = "", math.inf
            worker.batch = [step for step in worker.batch if step != answer.id]
        else:  # the batch is done, or there is no time for the rest of it
            worker.busy, worker.batch = False, []

    def _bury(self, worker: _Worker) -> None:
        """Note what has ended a process, and leave the rest of its batch to others."""
        self._workers.remove(worker)
        how, step = worker.ending(), worker.step
        worker.pipe.close()
        if not step:
            raise ConformanceError(f"a process of the kit ended between two steps: {how}.")
        limit = f" (the limit is {self._step_seconds:g} seconds)" if worker.slow else ""
        reason = f"its process had to be replaced: {how}{limit}. Repeat it alone with --select {step!r}."
        law = "raises" if self._steps[step].law == "results" else self._steps[step].law
        self._ended[step] = replace(self._steps[step], outcome=Outcome.FAILED, law=law, reason=reason)
        rest = [one for one in worker.batch if one != step]
        if rest:
            self._left.appendleft(rest)

    def _certificate(self) -> Certificate:
        worker = next(iter(self._workers), None) or self._start()
        why = f"not run within the limit of {self._seconds:g} seconds" if self._seconds is not None else ""
        if len(self._ended) >= MOST:
            why = f"not run, as {len(self._ended)} steps before had ended their process"
        worker.pipe.send((_CERTIFIED, ([*self._results.values()], [*self._ended.values()], why)))
        certificate: Certificate = self._answer(worker, _CERTIFIED, "at the end")
        return replace(certificate, seconds=time.time() - self._begun)


def _raise_if(kind: int, answer: Any) -> None:
    if kind == _RAISED:
        error, text = answer
        raise error from RuntimeError(f"in a process of the kit:\n{text}")


def _work(pipe: Connection, arguments: Arguments, deadline: float) -> None:
    """Run steps in this process, as it is told."""
    try:
        _serve(pipe, arguments, deadline)
    except (KeyboardInterrupt, EOFError, BrokenPipeError):  # the process that asked has its own message
        pass
    except BaseException as error:  # noqa: BLE001 - raised again where the run was asked for
        text = traceback.format_exc()
        try:
            pipe.send((_RAISED, (error, text)))
        except Exception:  # noqa: BLE001 - it cannot be pickled
            pipe.send((_RAISED, (RuntimeError(str(error)), text)))


def _serve(pipe: Connection, arguments: Arguments, deadline: float) -> None:
    kit = Kit(**arguments)
    steps = kit.steps()
    pipe.send((_READY, (kit.target.available, kit.skipped(""))))
    while (order := pipe.recv()) is not None:
        kind, what = order
        if kind == _CERTIFIED:
            pipe.send((_CERTIFIED, _certified(kit, *what)))
            continue
        for step in what:
            if time.time() > deadline:
                break
            pipe.send((_BEGUN, step))
            pipe.send((_DONE, steps[step]()))
        pipe.send((_READY, None))


def _certified(kit: Kit, results: Iterable[Result], ended: Iterable[Result], why: str) -> Certificate:
    kit.set_results([*results, *map(kit.apply_gaps, ended)])
    return kit.finish(why)
