"""The types of laws, and how they are applied to samples.

Some laws are checked with every case (`EVERYWHERE`), some once per contract and scheme on a sample case (`laws.kernel`,
`laws.large`), some once per plugin (`laws.plugin`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...contracts import CONTRACTS, Case, Problem
from ...contracts.base import FLOAT_DTYPES
from ...contracts.inputs import Draw
from ...discovery.kernels import Kernel
from ...discovery.registry import Guarded
from ...errors import FormatError
from ...formats import registered_elements
from ...weights.schemes import Scheme
from ..case_selection import PreparedCase
from ..check import BrokenLawError, described, described_error, guarded, inputs_unchanged, pack_and_check
from ..results import Outcome, Result
from ..target import Target

EVERYWHERE = {
    "results": "results are within the tolerance of the contract",
    "raises": "pack, unpack and calls raise nothing for a request that was offered",
    "pack": "unpack(pack(w)) equals w, bit for bit, also after another weight was packed, and w is unchanged",
    "inputs": "x, bias and packed weight are unchanged, and so is the memory between their strides",
    "no-fallback": "the plugin's own kernel computes the result, and hands nothing back to qcore",
    "origin": "kernels come from the plugin and carry its name",
    "refusals": "unsupported requests are refused with a reason",
}

_ORDINARY = (32, 256)
"""N and K of the weight for which a plugin must offer a kernel to count as supporting a scheme."""
_PREFERRED = ("rows-17-bias", "rows-17", "3x3", "batched", "k-aligned-16", "rows-1", "1x1", "one")


class SkippedLawError(Exception):
    """A law cannot be tested here; the text says why."""

    outcome = Outcome.SKIPPED


class RefusedError(SkippedLawError):
    """The plugin refuses every request with which the law could be tested."""

    outcome = Outcome.REFUSED


class InapplicableError(SkippedLawError):
    """The law has no subject here; the text names the missing subject. Not for laws that could not be tested."""

    outcome = Outcome.INAPPLICABLE


@dataclass(frozen=True)
class Sample:
    """An offered case of one contract and scheme, ready to run: ``packs`` holds a packed weight per kernel."""

    prepared: PreparedCase
    here: Problem
    kernels: Sequence[Kernel]
    packs: Sequence[dict[str, Tensor]]


def run_kernel(law: str, what: str, kernel: Kernel, here: Problem, packed: dict[str, Tensor]) -> Tensor:
    """Call a kernel. Raises `BrokenLawError` if it raises, changes an input or returns something else than a tensor."""
    with inputs_unchanged(here, packed, f"{what} "):
        result = guarded(law, what, lambda: kernel(here.x, packed, here.bias, **here.given))
    return checked(law, what, result)


def checked(law: str, what: str, result: Any) -> Tensor:
    """Return the result of a call, which has to be a tensor."""
    if not isinstance(result, Tensor):
        raise BrokenLawError(law, f"{what} returned {described(result)} instead of a tensor")
    return result


KernelLaw = Callable[[Target, Sample, Kernel, dict[str, Tensor]], None]
SchemeLaw = Callable[[Target, Sample], None]
PluginLaw = Callable[[Target, "Samples"], None]


@dataclass(frozen=True)
class Law:
    """One law: ``statement`` in words, and one check, which raises `BrokenLawError` or `SkippedLawError`.

    ``sparse``: the check is costly and runs on one scheme per element type and kind of activation; the built-in tables
    count as one element type. ``each_dtype``: it runs on a sample of each dtype, all others on one.
    """

    name: str
    statement: str
    kernel: KernelLaw | None = None
    scheme: SchemeLaw | None = None
    plugin: PluginLaw | None = None
    sparse: bool = False
    each_dtype: bool = False


@dataclass(frozen=True)
class LawItem:
    """A law to check on one contract and scheme, or on the plugin as a whole."""

    law: Law
    contract: str = ""
    scheme: str = ""

    @property
    def id(self) -> str:
        return f"{self.law.name}[{self.contract}-{self.scheme}]" if self.contract else f"{self.law.name}[plugin]"


class Samples:
    """One sample per contract and scheme, and one of each dtype for some laws, built on first use."""

    def __init__(self, target: Target, cases: Iterable[Case], seed: int) -> None:
        self._target, self._seed = target, seed
        self._families: dict[tuple[str, str], list[Case]] = {}
        for case in cases:
            self._families.setdefault((case.contract, case.scheme), []).append(case)
        self._found: dict[tuple[str, str], Sample | str] = {}

    @property
    def families(self) -> list[tuple[str, str]]:
        """Every (contract, scheme) with cases."""
        return list(self._families)

    def get(self, contract: str, scheme: str) -> Sample:
        """Return the sample. Raises `RefusedError` if every case is refused, `BrokenLawError` if packing fails."""
        key = (contract, scheme)
        if key not in self._found:
            self._found[key] = self._best(self._families.get(key, ()))
        found = self._found[key]
        if isinstance(found, str):
            raise RefusedError(found)
        return found

    def in_each_dtype(self, contract: str, scheme: str) -> Iterator[Sample]:
        """Yield a sample of each dtype that the plugin supports, built anew. Raises as `get` does."""
        first = self.get(contract, scheme)
        yield first
        cases = self._families[contract, scheme]
        for dtype in FLOAT_DTYPES:
            part = f"-{str(dtype).removeprefix('torch.')}-"
            if part not in first.prepared.case.id:
                found = self._best(case for case in cases if part in case.id)
                if isinstance(found, Sample):
                    yield found

    def is_supported(self, contract: str, scheme: str) -> bool:
        """Whether the plugin offers a kernel for an ordinary weight in any dtype; builds no inputs."""
        if not self._target.available:
            return False
        filled = Draw(torch.Generator().manual_seed(0)).fill(Scheme.parse(scheme))
        request_for = partial(CONTRACTS[contract].request_for, filled, self._target.device)
        with contextlib.suppress(FormatError):
            return any(self._target.ask(request_for(dtype, *_ORDINARY)).kernels for dtype in FLOAT_DTYPES)
        return False

    def any(self) -> Sample:
        """Return any sample. Raises `SkippedLawError` if the plugin offers no kernel."""
        for family in self._families:
            with contextlib.suppress(SkippedLawError):
                return self.get(*family)
        raise SkippedLawError("the plugin offers no kernel for any case")

    def _best(self, cases: Iterable[Case]) -> Sample | str:
        reason = "there are no cases of it"
        for case in sorted(cases, key=_preference):
            prepared = PreparedCase(case, self._seed)
            answer = self._target.ask(prepared.on(self._target.device).request)
            if answer.kernels:
                here = prepared.on(self._target.device).to(self._target.device)
                return Sample(prepared, here, answer.kernels, [pack_and_check(k, here) for k in answer.kernels])
            reason = answer.reason
        return f"the plugin refuses it: {reason}"


def _preference(case: Case) -> int:
    shape = case.id.rstrip("]")
    return next((i for i, name in enumerate(_PREFERRED) if shape.endswith(f"-{name}")), len(_PREFERRED))


def law_items(
    laws: Iterable[Law], families: Iterable[tuple[str, str]], is_supported: Callable[[str, str], bool]
) -> list[LawItem]:
    """Return all checks of these laws; ``is_supported``: whether the plugin supports a contract and scheme.

    A costly law is checked on one scheme of each kind, on the last supported one if there is any.
    """
    families = list(families)
    kinds: dict[tuple[object, ...], list[tuple[str, str]]] = {}
    for family in families:
        kinds.setdefault(_kind(*family), []).append(family)
    representatives = [next((f for f in reversed(kind) if is_supported(*f)), kind[-1]) for kind in kinds.values()]
    items = []
    for law in laws:
        chosen = representatives if law.sparse else families
        items += [LawItem(law)] if law.plugin else [LawItem(law, *family) for family in chosen]
    return items


def _kind(contract: str, text: str) -> tuple[object, ...]:
    scheme = Scheme.parse(text)
    per_token = getattr(scheme.activation, "per_token", None)
    name = scheme.weight.dtype
    _, owner = registered_elements()[name]
    return (
        contract,
        name if owner or scheme.weight.element.is_integer else "table",
        type(scheme.activation),
        per_token,
        getattr(scheme.activation, "symmetric", None),
    )


def check_law(target: Target, samples: Samples, item: LawItem) -> Result:
    """Return the result of one check, before known gaps are applied."""
    start, outcome, reason = time.perf_counter(), Outcome.PASSED, ""
    try:
        _apply(target, samples, item)
    except SkippedLawError as skip:
        outcome, reason = skip.outcome, str(skip)
    except BrokenLawError as broken:
        outcome, reason = Outcome.FAILED, broken.fault.text
    except Guarded as error:  # an accelerator may report an error only when its result is fetched
        outcome, reason = Outcome.FAILED, f"raised {described_error(error)}"
    seconds = time.perf_counter() - start
    return Result(item.id, item.law.name, item.contract, item.scheme, outcome, reason, seconds=seconds)


def _apply(target: Target, samples: Samples, item: LawItem) -> None:
    law = item.law
    if law.plugin is not None:
        law.plugin(target, samples)
        return
    every = samples.in_each_dtype if law.each_dtype else lambda *family: [samples.get(*family)]
    for sample in every(item.contract, item.scheme):
        if law.scheme is not None:
            law.scheme(target, sample)
        if law.kernel is not None:
            _apply_to_kernels(target, sample, law.kernel)


def _apply_to_kernels(target: Target, sample: Sample, check: KernelLaw) -> None:
    """Check every kernel; the law is skipped only if none of them can be tested."""
    skipped = [
        _skipped(partial(check, target, sample, *pair)) for pair in zip(sample.kernels, sample.packs, strict=True)
    ]
    if skipped and all(skipped):
        raise next(skip for skip in skipped if skip)


def _skipped(check: Callable[[], None]) -> SkippedLawError | None:
    try:
        check()
    except SkippedLawError as skip:
        return skip
    return None


def everywhere(results: Sequence[Result]) -> list[Result]:
    """Summarize the results of all cases for the laws that are checked with each case."""
    ran = [result for result in results if result.outcome in (Outcome.PASSED, Outcome.FAILED, Outcome.GAP)]
    return [_together(name, ran) for name in EVERYWHERE if results]


def _together(law: str, ran: Sequence[Result]) -> Result:
    if not ran:
        return Result(f"{law}[every case]", law, "", "", Outcome.REFUSED, "the plugin refuses every case")
    broken = [result for result in ran if result.outcome is Outcome.FAILED and result.law == law]
    if not broken:
        return Result(f"{law}[every case]", law, "", "", Outcome.PASSED)
    text = f"broken in {len(broken)} of {len(ran)} cases, first in {broken[0].id}: {broken[0].reason}"
    return Result(f"{law}[every case]", law, "", "", Outcome.FAILED, text)
