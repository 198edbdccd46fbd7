"""Plugins that are broken in one way each: at a stage of their life, by what they raise, answer or do there.

`KINDS` is the catalogue. A kind's ``fault`` is called at its stage and its answer handed on in place of the right one.
"""

from __future__ import annotations

import asyncio
import builtins
import itertools
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

import qcore
from qcore.discovery.kernels import NATIVE, Available, Kernel, Offer, Refusal, Unavailable
from qcore.discovery.registry import _Entry
from qcore.fallback import plugin as builtin

STAGES = ("import", "register", "probe", "formats", "offer", "pack", "unpack", "call", "observer")


class GoodKernel(Kernel):
    """Right: what the fallback computes."""

    def __init__(self, name: str, request: Any) -> None:
        self.name, self.request = name, request
        self.inner = getattr(builtin, f"qcore_{request.contract}")(request=request)[-1].kernel

    def pack(self, weight):
        return self.inner.pack(weight)

    def unpack(self, packed):
        return self.inner.unpack(packed)

    def __call__(self, x, packed, bias, **given):
        return self.inner(x, packed, bias, **given)


class BrokenKernel(GoodKernel):
    """Right but for one method."""

    stage = ""
    fault: Callable[[Any], Any]

    def pack(self, weight):
        right = super().pack(weight)
        return self.fault(right) if self.stage == "pack" else right

    def unpack(self, packed):
        right = super().unpack(packed)
        return self.fault(right) if self.stage == "unpack" else right

    def __call__(self, x, packed, bias, **given):
        right = super().__call__(x, packed, bias, **given)
        return self.fault(right) if self.stage == "call" else right


@dataclass(frozen=True)
class Kind:
    """One way to be broken. ``harmless``: nothing that a user must hear about, or be denied the plugin for."""

    stage: str
    name: str
    fault: Callable[[Any], Any]
    harmless: bool = False

    def __str__(self) -> str:
        return f"{self.stage}-{self.name}"

    def entry(self, version: str) -> _Entry:
        return _Entry("broken", "qcore-broken", version, self.plugin)

    def plugin(self) -> Any:
        if self.stage == "import":
            self.fault(None)
        plugin: Any = ModuleType("broken")
        plugin.qcore_probe = qcore.hookimpl(lambda: self._at("probe", Available("a device", "a driver")))
        plugin.qcore_formats = qcore.hookimpl(lambda: self._at("formats", []))
        plugin.qcore_linear = qcore.hookimpl(_taking_request(self._offer))
        plugin.qcore_decided = qcore.hookimpl(lambda decision: self._at("observer", None))
        return self._at("register", plugin)

    def _at(self, stage: str, right: Any) -> Any:
        return self.fault(right) if stage == self.stage else right

    def _offer(self, request: Any) -> Any:
        kernel = BrokenKernel("broken.kernel", request)
        kernel.stage, kernel.fault = self.stage, self.fault
        return self._at("offer", Offer(kernel, NATIVE))


def _taking_request(offer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # pluggy marks the function itself, and a bound method cannot be marked.
    return lambda request: offer(request)  # noqa: PLW0108


# What can be raised, at any stage.


class PanicException(BaseException):
    """As PyO3 raises where Rust panics."""


class SpeechlessError(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class _LyingError(Exception):
    @property
    def __class__(self):
        raise RuntimeError("no class")


def _recursion():
    return _recursion()


def _raiser(make: Callable[[], BaseException]) -> Callable[[Any], Any]:
    def fault(_right: Any) -> Any:
        raise make()

    return fault


RAISED: dict[str, Callable[[Any], Any]] = {
    "ValueError": _raiser(lambda: ValueError("bad maths")),
    "SystemExit": _raiser(lambda: SystemExit(3)),
    "SystemExit-speechless": _raiser(lambda: SystemExit(SpeechlessError())),
    "GeneratorExit": _raiser(GeneratorExit),
    "StopIteration": _raiser(StopIteration),
    "CancelledError": _raiser(asyncio.CancelledError),
    "PanicException": _raiser(lambda: PanicException("called `Option::unwrap()` on a `None` value")),
    "BaseExceptionGroup": _raiser(
        lambda: getattr(builtins, "BaseExceptionGroup", lambda *_: PanicException())("many", [GeneratorExit()])
    ),
    "speechless": _raiser(SpeechlessError),
    "surrogates": _raiser(lambda: RuntimeError("\udcff\ud800")),
    "long": _raiser(lambda: RuntimeError("x" * 10_000_000)),
    "lying": _raiser(_LyingError),
    "recursion": lambda _: _recursion(),
    "MemoryError": _raiser(MemoryError),
    "warning": _raiser(lambda: UserWarning("a warning")),
    "NotImplementedError": _raiser(NotImplementedError),
}


# What can be answered in place of the right thing.


class Hostile:
    """Raises when it is looked at."""

    def __getattribute__(self, name):
        raise RuntimeError(f"no {name}")

    def __repr__(self):
        raise PanicException

    __str__ = __bool__ = __iter__ = __len__ = __eq__ = __hash__ = __repr__


class HostileText(str):  # noqa: SLOT000
    def __str__(self):
        raise PanicException

    __repr__ = __len__ = __hash__ = __eq__ = __iter__ = __bool__ = __format__ = encode = strip = __str__


class HostileKey(str):  # noqa: SLOT000
    """Text that can be a key, and no more."""

    __hash__ = str.__hash__

    def __str__(self):
        raise PanicException

    __repr__ = __len__ = isidentifier = replace = __format__ = __str__


class HostileInt(int):
    def __int__(self):
        raise PanicException

    __repr__ = __str__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __add__ = __neg__ = __hash__ = __int__


class _HostileMapping(Mapping):
    def __getitem__(self, key):
        raise PanicException

    __iter__ = __len__ = __getitem__  # type: ignore[assignment]


class _EndlessList(list):
    def __iter__(self):
        return itertools.repeat(None)


def _raising_generator() -> Iterator[Any]:
    yield None
    raise PanicException


class _AvailableProperty(Available):
    device = property(_raiser(PanicException))


class _RefusalProperty(Refusal):
    reason = property(_raiser(GeneratorExit))


def _make(kind: type, **values: Any) -> Any:
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


ANSWERS: dict[str, Callable[[Any], Any]] = {
    "None": lambda _: None,
    "False": lambda _: False,
    "text": lambda _: "no",
    "number": lambda _: 5,
    "hostile": lambda _: Hostile(),
    "class": lambda _: Offer,
    "raising-generator": lambda _: _raising_generator(),
    "endless-list": lambda _: _EndlessList([1]),
}

_PROBES: dict[str, Callable[[Any], Any]] = {
    "details-text": lambda _: Available(details="text"),  # type: ignore[arg-type]
    "details-hostile": lambda _: Available(details=_HostileMapping()),
    "details-keys": lambda _: Available(details={5: 5}),  # type: ignore[dict-item]
    "device-number": lambda _: Available(5),  # type: ignore[arg-type]
    "device-hostile": lambda _: Available(Hostile()),  # type: ignore[arg-type]
    "property": lambda _: _make(_AvailableProperty, driver="", details=None),
    "unavailable-number": lambda _: Unavailable(5),  # type: ignore[arg-type]
    "unavailable-empty": lambda _: Unavailable(""),
    "unavailable-flag": lambda _: Unavailable("no", broken=Hostile()),  # type: ignore[arg-type]
}
_HARMLESS_PROBES: dict[str, Callable[[Any], Any]] = {
    "device-surrogates": lambda _: Available("\udcff device\0", "\ud800"),
    "device-hostile-text": lambda _: Available(HostileText("device")),
    "device-long": lambda _: Available("x" * 1_000_000),
    "details-odd": lambda _: Available(details={"a": Hostile(), "b": 10**5000, "c": HostileText("x"), "d": [[[[[]]]]]}),
}


def _offer(**changes: Any) -> Callable[[Any], Any]:
    return lambda right: _make(Offer, **{"kernel": right.kernel, "rank": NATIVE, "note": "", **changes})


def _kernel(**members: Any) -> Callable[[Any], Any]:
    """The right offer, of a kernel whose class has other members."""

    def fault(right: Any) -> Any:
        kernel = right.kernel
        made = type("Broken", (BrokenKernel,), {"__init__": lambda self: None, **members})()
        vars(made).update({k: v for k, v in vars(kernel).items() if k not in members})
        return _make(Offer, kernel=made, rank=NATIVE, note="")

    return fault


_counter = itertools.count()

_OFFERS: dict[str, Callable[[Any], Any]] = {
    "empty": lambda _: [],
    "no-kernel": _offer(kernel=None),
    "kernel-hostile": _offer(kernel=Hostile()),
    "kernel-class": _offer(kernel=BrokenKernel),
    "rank-huge": _offer(rank=10**400),
    "rank-large": _offer(rank=10**9),
    "rank-negative": _offer(rank=-(10**9)),
    "rank-float": _offer(rank=3000.0),
    "rank-nan": _offer(rank=float("nan")),
    "rank-true": _offer(rank=True),
    "rank-text": _offer(rank="high"),
    "note-number": _offer(note=5),
    "note-hostile": _offer(note=Hostile()),
    "refusal-number": lambda _: Refusal(5),  # type: ignore[arg-type]
    "refusal-none": lambda _: Refusal(None),  # type: ignore[arg-type]
    "refusal-empty": lambda _: Refusal(""),
    "refusal-hostile": lambda _: Refusal(Hostile()),  # type: ignore[arg-type]
    "refusal-property": lambda _: _make(_RefusalProperty),
    "refusal-listed": lambda _: [Refusal("not in a list")],
    "name-raises": _kernel(name=property(_raiser(PanicException))),
    "name-number": _kernel(name=5),
    "name-empty": _kernel(name=""),
    "packing-raises": _kernel(packing=property(_raiser(GeneratorExit))),
    "packing-number": _kernel(packing=5),
    "mixed": lambda right: [right, None],
}
_HARMLESS_OFFERS: dict[str, Callable[[Any], Any]] = {
    "note-none": _offer(note=None),
    "note-surrogates": _offer(note="\udcff\n\0"),
    "note-long": _offer(note="x" * 1_000_000),
    "rank-hostile-int": _offer(rank=HostileInt(3000)),
    "name-changes": _kernel(name=property(lambda _: f"broken.kernel{next(_counter)}")),
    "packing-changes": _kernel(packing=property(lambda _: f"broken.packing{next(_counter)}")),
    "name-hostile-text": _kernel(name=HostileText("broken.kernel")),
    "name-surrogates": _kernel(name="broken.\udcff"),
    "nbytes-raises": _kernel(nbytes=lambda self, tensor: 1 / 0),
    "nbytes-negative": _kernel(nbytes=lambda self, tensor: -5),
    "nbytes-text": _kernel(nbytes=lambda self, tensor: "many"),
    "repr-raises": _kernel(__repr__=lambda self: 1 / 0),
    "attributes": _kernel(__eq__=lambda self, other: 1 / 0, __hash__=lambda self: 1 / 0),
}


def _zeroed(tensors: Any) -> Any:
    for tensor in tensors.values():
        tensor.zero_()
    return tensors


_PACKS: dict[str, Callable[[Any], Any]] = {
    "no-tensor": lambda right: {**right, "more": 5},
    "key-number": lambda right: {**right, 5: torch.zeros(1)},
    "key-dotted": lambda right: {**right, "a.b": torch.zeros(1)},
    "mapping-hostile": lambda _: _HostileMapping(),
    "list": lambda right: list(right.values()),
    "empty": lambda _: {},
    "zeroed": _zeroed,
}
_UNPACKS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda right: right.data,
    "other-shape": lambda right: right.narrow(0, 0, 1),
    "doubled": lambda right: right.map(lambda t: t * 2 if t.is_floating_point() else t),
}
_CALLS: dict[str, Callable[[Any], Any]] = {
    "wrong": lambda right: right + 1,
    "nan": lambda right: right * float("nan"),
    "shape": lambda right: right[..., :-1],
    "dtype": lambda right: right.double(),
    "tuple": lambda right: (right,),
    "numpy": lambda right: right.numpy(),
    "meta": lambda right: right.to("meta"),
    "zero-dim": lambda right: right.sum(),
}


class _NoAttributes:
    """A plugin object that raises for every attribute that is asked, but for its hook."""

    def __dir__(self):
        return ["qcore_linear"]

    def __getattr__(self, name):
        raise PanicException


class _Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other):
        raise PanicException

    @qcore.hookimpl
    def qcore_linear(self, request):
        raise ValueError("neither")


def _misspelt(plugin: Any) -> Any:
    plugin.qcore_liner = qcore.hookimpl(lambda request: None)
    return plugin


_REGISTERS: dict[str, Callable[[Any], Any]] = {
    "misspelt": _misspelt,
    "no-hooks": lambda _: ModuleType("empty"),
    "None": lambda _: None,
    "hostile": lambda _: Hostile(),
    "attributes": lambda _: _NoAttributes(),
    "unhashable": lambda _: _Unhashable(),
}


class _HostileLayout(qcore.Layout):
    name = property(_raiser(PanicException))  # type: ignore[assignment]
    encode = decode = check = _raiser(PanicException)  # type: ignore[assignment]


_FORMATS: dict[str, Callable[[Any], Any]] = {
    "text": lambda _: "no",
    "number": lambda _: 5,
    "hostile": lambda _: Hostile(),
    "raising-generator": lambda _: _raising_generator(),
    "endless": lambda _: itertools.repeat(None),
    "layout-hostile": lambda _: [_HostileLayout()],
}


# What can be changed in the process.


def _meddling(change: Callable[[], object]) -> Callable[[Any], Any]:
    def fault(right: Any) -> Any:
        change()
        return right

    return fault


MEDDLED: dict[str, Callable[[Any], Any]] = {
    "dtype": _meddling(lambda: torch.set_default_dtype(torch.float64)),
    "device": _meddling(lambda: torch.set_default_device("meta")),
    "deterministic": _meddling(lambda: torch.use_deterministic_algorithms(True)),
    "warnings": _meddling(lambda: warnings.simplefilter("error")),
    "signals": _meddling(lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN)),
    "directory": _meddling(lambda: os.chdir("/")),
    "threads": _meddling(lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
}
SEEDED: dict[str, Callable[[Any], Any]] = {
    "torch-seed": _meddling(lambda: torch.manual_seed(5)),
    "python-seed": _meddling(lambda: random.seed(5)),
}


def _kinds() -> Iterator[Kind]:
    for stage in STAGES:
        # An observer may raise, and answer, what it likes.
        heard = stage != "observer"
        yield from (Kind(stage, f"raises-{name}", fault, not heard) for name, fault in RAISED.items())
        # A probe runs in a thread, which has a number of threads of its own.
        own = {"threads"} if stage == "probe" else ()
        yield from (Kind(stage, f"changes-{name}", fault, name in own) for name, fault in MEDDLED.items())
        yield from (Kind(stage, f"changes-{name}", fault, True) for name, fault in SEEDED.items())
    own: dict[str, tuple[dict[str, Callable[[Any], Any]], ...]] = {
        "register": (_REGISTERS,),
        "probe": (ANSWERS, _PROBES),
        "formats": (_FORMATS,),
        "offer": (ANSWERS, _OFFERS),
        "pack": (ANSWERS, _PACKS),
        "unpack": (ANSWERS, _UNPACKS),
        "call": (ANSWERS, _CALLS),
    }
    for stage, tables in own.items():
        yield from (Kind(stage, f"gives-{name}", fault) for table in tables for name, fault in table.items())
    harmless = {
        "probe": _HARMLESS_PROBES,
        "offer": _HARMLESS_OFFERS,
        "formats": {"None": lambda _: None},
        "pack": {"key-hostile": lambda right: {**right, HostileKey("a"): torch.zeros(1)}},
    }
    for stage, table in harmless.items():
        yield from (Kind(stage, f"gives-{name}", fault, True) for name, fault in table.items())


KINDS = tuple(_kinds())
