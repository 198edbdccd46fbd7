"""Run the kit: `run` for one plugin, and `Kit`, which pytest and the matrix run case by case."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import os
import secrets
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .._version import __version__
from ..contracts import Case
from ..discovery.registry import registry
from ..errors import ConformanceError
from .case_selection import PreparedCase, cases, selects
from .certificate import Certificate
from .check import check_case
from .gaps import Gaps, read_gaps
from .laws import LAWS, LawItem, Samples, check_law, everywhere, law_items
from .results import Outcome, Result
from .target import Target

Progress = Callable[[int, int, str], None]
"""Called before each step with (steps done, total steps, id)."""


def fresh_seed() -> int:
    """Return a random seed, which is recorded in the certificate."""
    return secrets.randbelow(1 << 31)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable gradients, warnings and threads: warnings of a kernel must not become errors of the kit.

    One thread: for these small problems waking other threads takes longer than the computation, ten times longer on a
    busy machine. `run_watched` enables all threads if the problem is large enough.
    """
    before = torch.get_num_threads()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
            yield
    finally:
        torch.set_num_threads(before)


class Kit:
    """The cases and laws for one plugin, and their results so far."""

    def __init__(
        self,
        backend: str,
        *,
        device: str | None = None,
        seed: int | None = None,
        schemes: Iterable[str] | None = None,
        contracts: Iterable[str] | None = None,
        select: str | Iterable[str] | None = None,
        gaps: str | Path | None = None,
    ) -> None:
        self.seed = fresh_seed() if seed is None else seed
        patterns = [select] if isinstance(select, str) else select if select is None else list(select)
        with quiet():
            self.target = Target(backend, device)
            registry.load_plugins()  # the cases include the elements of every plugin
        every = cases(schemes, contracts)
        self.cases: list[Case] = [case for case in every if selects(patterns, case.id)]
        self.samples = Samples(self.target, every, self.seed)
        with quiet():
            items = law_items(LAWS, self.samples.families, self.samples.is_supported)
        self.laws: list[LawItem] = [item for item in items if selects(patterns, item.id)]
        _check_patterns(patterns, [*(case.id for case in self.cases), *(item.id for item in self.laws)])
        self.complete = all(limit is None for limit in (schemes, contracts, select))
        self.gaps = _gaps(self.target, gaps)
        self.results: list[Result] = []
        self.law_results: list[Result] = []
        self._start = time.perf_counter()

    def run_case(self, prepared: PreparedCase) -> Result:
        """Check one case."""
        with quiet():
            result = self._apply_gaps(check_case(self.target, prepared))
        self.results.append(result)
        return result

    def add_results(self, results: Iterable[Result]) -> None:
        """Add results of cases and laws from other processes; steps without one were not run."""
        by_id = {result.id: result for result in results}
        self.results += [by_id[case.id] for case in self.cases if case.id in by_id]
        self.law_results += [by_id[item.id] for item in self.laws if item.id in by_id]
        for result in by_id.values():
            if result.outcome is Outcome.GAP:
                self.gaps.used(result.id)

    def run_law(self, item: LawItem) -> Result:
        """Check one law."""
        with quiet():
            result = self._apply_gaps(check_law(self.target, self.samples, item))
        self.law_results.append(result)
        return result

    def _apply_gaps(self, result: Result) -> Result:
        """Return the result with the list of known gaps applied."""
        known = self.gaps.reason(result.id)
        if known is None or result.outcome in (Outcome.REFUSED, Outcome.SKIPPED, Outcome.INAPPLICABLE):
            return result
        self.gaps.used(result.id)
        if result.outcome is Outcome.FAILED:
            return replace(result, outcome=Outcome.GAP, reason=f"{known} ({result.reason})")
        stale = f"listed in {self.gaps.source} as a known gap, but it passes. Remove it from the list."
        return replace(result, outcome=Outcome.FAILED, law="gaps", reason=stale)

    def gaps_result(self) -> Result:
        """Return whether every gap on the list was needed, as a result."""
        ids = [result.id for result in (*self.results, *self.law_results)]
        wrong = self.gaps.unneeded(ids, complete=self.complete)
        outcome = Outcome.FAILED if wrong else Outcome.PASSED
        return Result("gaps[plugin]", "gaps", "", "", outcome, "\n".join(wrong))

    def finish(self, seconds: float | None) -> Certificate:
        """Return the certificate of a run that may have been stopped by its limit of ``seconds``.

        Steps that were not run are skipped, and one failed result says how many: such a certificate is not ok.
        """
        ran = {result.id for result in (*self.results, *self.law_results)}
        why = f"not run within the limit of {seconds:g} seconds" if seconds is not None else ""
        cases = [Result(c.id, "results", c.contract, c.scheme, Outcome.SKIPPED, why) for c in self.cases]
        laws = [Result(i.id, i.law.name, i.contract, i.scheme, Outcome.SKIPPED, why) for i in self.laws]
        missed = [result for result in (*cases, *laws) if result.id not in ran]
        if missed:
            self.results += [result for result in cases if result.id not in ran]
            self.law_results += [result for result in laws if result.id not in ran]
            text = f"{len(missed)} of {len(cases) + len(laws)} steps were {why}."
            self.law_results.append(Result("finished[plugin]", "finished", "", "", Outcome.FAILED, text))
            self.complete = False
        return self.certificate()

    def shown_result(self) -> Result:
        """Return whether every law that applies was shown somewhere, as a result; needs the results of all laws."""
        unshown = self.certificate().unshown
        text = "\n".join(f"law {law} ran nowhere: {reason}" for law, reason in unshown.items())
        return Result("shown[plugin]", "shown", "", "", Outcome.FAILED if unshown else Outcome.PASSED, text)

    def certificate(self) -> Certificate:
        """Return the certificate for the results so far."""
        status, target = self.target.status, self.target
        laws = [*everywhere(self.results), *self.law_results]
        if target.available:
            laws += [self.gaps_result()] if self.gaps.known else []
        else:
            laws = [self.status_result()] if status.broken else []
        now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        return Certificate(
            target.name, status.dist, status.version, str(status.state), status.reason, str(target.device),
            status.device, status.driver, __version__, torch.__version__, self.seed, now,
            tuple(self.results), tuple(laws), time.perf_counter() - self._start, status.broken, self.complete,
        )  # fmt: skip

    def status_result(self) -> Result:
        """Return the status of the plugin as a result; a missing device is not a failure."""
        status = self.target.status
        if self.target.available:
            return Result("status[plugin]", "status", "", "", Outcome.PASSED)
        outcome = Outcome.FAILED if status.broken else Outcome.SKIPPED
        return Result("status[plugin]", "status", "", "", outcome, f"{status.state}: {status.reason}")


def _check_patterns(patterns: Iterable[str] | None, chosen: Iterable[str]) -> None:
    """Raise `ConformanceError` for a pattern that matches nothing: the intended cases would go untested."""
    names = list(chosen)
    for pattern in patterns or ():
        if not any(selects([pattern], name) for name in names):
            raise ConformanceError(
                f"{pattern!r} selects no case and no law.\n"
                f"Ids look like linear[w4a16-bfloat16-k-odd] and compile[linear-w4a16]; pass a part or a glob."
            )


def _gaps(target: Target, given: str | Path | None) -> Gaps:
    path = Path(given) if given else target.gaps_file()
    return read_gaps(path) if path else Gaps()


def run(
    backend: str,
    *,
    device: str | None = None,
    seed: int | None = None,
    schemes: Iterable[str] | None = None,
    contracts: Iterable[str] | None = None,
    select: str | Iterable[str] | None = None,
    gaps: str | Path | None = None,
    jobs: int = 1,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Run the conformance kit for one installed plugin.

    **Arguments:**

    - ``backend``: the plugin's name.
    - ``device``: the torch device to test on; default: the device in the plugin's probe (``Available(details={"device":
      "cuda:0"})``), else the torch device of the plugin's name, else the CPU.
    - ``seed``: of the random inputs; default a fresh one, which is recorded in the certificate.
    - ``schemes``, ``contracts``: only these; default all.
    - ``select``: only cases and laws whose id matches one of these globs, or contains one of these words.
    - ``gaps``: the file of known gaps; default ``qcore_gaps.toml`` in the directory of the plugin's module.
    - ``jobs``: number of processes that share the cases and laws.
    - ``seconds``: begin no step after so many; the certificate then holds what was found, and is not ok.
    - ``progress``: called with (steps done, total steps, id of the next step).

    Raises `ConformanceError` for an unknown plugin or contract, or an unreadable list of gaps. For a plugin that is
    broken or not available here, the certificate says so.
    """
    limits = {"schemes": schemes, "contracts": contracts, "select": select}
    chosen = {name: value if isinstance(value, str) else value and tuple(value) for name, value in limits.items()}
    kit = Kit(backend, device=device, seed=seed, gaps=gaps, **chosen)
    if not kit.target.available:
        return kit.certificate()
    tell, total = progress or (lambda _done, _total, _name: None), len(kit.cases) + len(kit.laws)
    deadline = time.time() + (math.inf if seconds is None else seconds)
    if jobs > 1:
        arguments = {"backend": backend, "device": str(kit.target.device), "seed": kit.seed, "gaps": gaps, **chosen}
        kit.add_results(_run_in_processes(arguments, kit, jobs, deadline, lambda done: tell(done, total, "")))
        return kit.finish(seconds)
    steps = [*((case.id, partial(_run_case, kit, case)) for case in kit.cases)]
    steps += [(item.id, partial(kit.run_law, item)) for item in kit.laws]
    for done, (name, step) in enumerate(steps):
        if time.time() > deadline:
            break
        tell(done, total, name)
        step()
    return kit.finish(seconds)


def _run_case(kit: Kit, case: Case) -> Result:
    return kit.run_case(PreparedCase(case, kit.seed))


_BATCH = 8
"""Cases that a process runs at a time: neighbouring cases share compiled kernels."""


def _run_in_processes(
    arguments: dict[str, Any], kit: Kit, jobs: int, deadline: float, tell: Callable[[int], None]
) -> list[Result]:
    """Run cases and laws in several processes: new interpreters, because some devices' stacks do not survive a fork."""
    results: list[Result] = []
    parts = [range(start, start + _BATCH) for start in range(0, len(kit.cases), _BATCH)]
    samples: dict[tuple[str, str], list[int]] = {}  # the laws of one contract and scheme share a sample
    for index, item in enumerate(kit.laws):
        samples.setdefault((item.contract, item.scheme or item.id), []).append(index)
    others = set(active_children())
    with (
        TemporaryDirectory() as notes,
        ProcessPoolExecutor(jobs, get_context("spawn"), _start_worker, (arguments, deadline, notes)) as pool,
    ):
        try:
            # Laws are submitted first: they take longest.
            done = [pool.submit(_run_laws, indices) for indices in samples.values()]
            done += [pool.submit(_run_cases, part) for part in parts]
            children = [child for child in active_children() if child not in others]
            for part in as_completed(done):
                results += part.result()
                tell(len(results))
        except BrokenProcessPool as broken:
            pool.shutdown(cancel_futures=True)
            raise ConformanceError(_death(children, Path(notes))) from broken
        except BaseException:
            pool.shutdown(cancel_futures=True)  # do not run the steps that are still queued
            raise
    return results


def _death(children: Iterable[BaseProcess], notes: Path) -> str:
    """Describe how a process died, and in which step; the pool ends the others with SIGTERM then."""
    died = [child for child in children if child.exitcode not in (None, 0, -signal.SIGTERM)]
    steps = {child: notes / str(child.pid) for child in died or children}
    found = [f"{path.read_text()} (exit status {child.exitcode})" for child, path in steps.items() if path.exists()]
    where = " or ".join(found) or "an unknown step: none had begun"
    return f"a process of the kit died in {where}.\nRepeat it alone: --select with this id, and --jobs 1."


_worker: list[tuple[Kit, float, Path]] = []
"""The kit of a worker process, the time (`time.time`) after which it begins no step, and the file for its step."""


def _start_worker(arguments: dict[str, Any], deadline: float, notes: str) -> None:
    _worker[:] = [(Kit(**arguments), deadline, Path(notes, str(os.getpid())))]


def _run_cases(part: range) -> list[Result]:
    ((kit, _, _),) = _worker
    return _noted((case.id, partial(_run_case, kit, case)) for case in kit.cases[part.start : part.stop])


def _run_laws(indices: list[int]) -> list[Result]:
    ((kit, _, _),) = _worker
    return _noted((kit.laws[index].id, partial(kit.run_law, kit.laws[index])) for index in indices)


def _noted(steps: Iterable[tuple[str, Callable[[], Result]]]) -> list[Result]:
    """Run steps, and leave a note of the current one for the case that it kills this process."""
    ((_, deadline, note),) = _worker
    results = []
    for name, step in steps:
        if time.time() > deadline:
            break
        note.write_text(name)
        results.append(step())
    return results
