"""The cases and laws for one plugin, which `run`, its processes, pytest and the matrix run one by one."""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from .._version import __version__
from ..contracts import Case
from ..discovery.registry import registry
from ..errors import ConformanceError
from ..runtime.process_state import snapshot
from .case_selection import PreparedCase, cases, selects
from .certificate import Certificate
from .check import check_case
from .gaps import Gaps, read_gaps
from .laws import LAWS, LawItem, Samples, check_law, everywhere, law_items
from .results import Outcome, Result
from .target import Target


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

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """What a step changes in the process is put back, so that it cannot decide the next one."""
        with quiet():
            self.target.baseline = restore = snapshot()
            try:
                yield
            finally:
                restore()

    def run_case(self, prepared: PreparedCase) -> Result:
        """Check one case."""
        with self._step():
            result = self.apply_gaps(check_case(self.target, prepared))
        self.results.append(result)
        return result

    def set_results(self, results: Iterable[Result], steps: Iterable[Result]) -> None:
        """Take the results of cases and laws from all processes, in the order of ``steps``."""
        by_id = {result.id: result for result in results}
        cases = {step.id for step in steps if step.law == "results"}
        found = [by_id[step.id] for step in steps if step.id in by_id]
        self.results = [result for result in found if result.id in cases]
        self.law_results = [result for result in found if result.id not in cases]
        for result in found:
            if result.outcome is Outcome.GAP:
                self.gaps.used(result.id)

    def run_law(self, item: LawItem) -> Result:
        """Check one law."""
        with self._step():
            result = self.apply_gaps(check_law(self.target, self.samples, item))
        self.law_results.append(result)
        return result

    def apply_gaps(self, result: Result) -> Result:
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

    def steps(self) -> dict[str, Callable[[], Result]]:
        """Return what runs each case and each law, by id; nothing if the plugin is not available."""
        if not self.target.available:
            return {}
        cases = {case.id: partial(_run_case, self, case) for case in self.cases}
        return {**cases, **{item.id: partial(self.run_law, item) for item in self.laws}}

    def skipped(self, why: str) -> list[Result]:
        """Return a result for every case and every law that says why it was not run."""
        cases = [Result(c.id, "results", c.contract, c.scheme, Outcome.SKIPPED, why) for c in self.cases]
        return [*cases, *(Result(i.id, i.law.name, i.contract, i.scheme, Outcome.SKIPPED, why) for i in self.laws)]

    def finish(self, why: str, steps: Iterable[Result] = ()) -> Certificate:
        """Return the certificate of a run in which steps may be missing because of ``why``.

        ``steps``: those that were to be run, if the plugin may not be available any more.

        They are skipped, and one failed result says how many: such a certificate is not ok.
        """
        ran = {result.id for result in (*self.results, *self.law_results)}
        every = [replace(step, reason=why) for step in steps] or (self.skipped(why) if self.target.available else [])
        missed = [result for result in every if result.id not in ran]
        if missed:
            self.results += [result for result in missed if result.law == "results"]
            self.law_results += [result for result in missed if result.law != "results"]
            text = f"{len(missed)} of {len(every)} steps were {why}."
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


def _run_case(kit: Kit, case: Case) -> Result:
    return kit.run_case(PreparedCase(case, kit.seed))
