"""Settings: backends, order, strictness, verification. Argument beats `using` beats `configure` beats environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import QcoreError, did_you_mean

CONTRACT_NAMES = ("linear", "conv2d", "embedding", "grouped_linear")
"""The names of `qcore.contracts.CONTRACTS`, which is above this package; a test checks that they are equal."""
_VERIFY_MODES = ("off", "once", "always")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")

Names = tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """The settings in force.

    **Fields:** ``backends``: pairs of a contract or ``"*"`` and its plugin names in order of preference; ``disable``:
    plugins that are neither imported nor called; ``strict``: a fallback to torch ops is an error; ``verify``: ``off``,
    ``once`` (per kernel, version, device and driver; kept on disk) or ``always`` (once per process).
    """

    backends: tuple[tuple[str, Names], ...] = ()
    disable: frozenset[str] = frozenset()
    strict: bool = False
    verify: str = "once"

    def order(self, contract: str) -> Names:
        """The user's order of plugins for ``contract``."""
        table = dict(self.backends)
        return table.get(contract, table.get("*", ()))

    def named(self) -> set[str]:
        """Every plugin name in ``backends`` and ``disable``."""
        return {name for _, names in self.backends for name in names} | set(self.disable)


def parse_backends(value: str | Iterable[str]) -> tuple[tuple[str, Names], ...]:
    """Read ``"cuda,torch"``, ``"linear=xla;*=torch"`` or names. Raises `QcoreError` for an unknown contract."""
    if isinstance(value, Mapping):
        raise QcoreError(
            "backends is a mapping; write rules as text, such as 'linear=xla;*=torch', or a list of names."
        )
    if not isinstance(value, str):
        return (("*", _names(value)),)
    rules = []
    for rule in filter(None, (piece.strip() for piece in value.split(";"))):
        contract, _, names = rule.rpartition("=")
        contract = contract.strip() or "*"
        if contract not in (*CONTRACT_NAMES, "*"):
            raise QcoreError(
                f"backends {value!r}: unknown contract {contract!r}.{did_you_mean(contract, CONTRACT_NAMES)}\n"
                f"Write names such as 'cuda,torch', or rules such as 'linear=xla;*=torch'."
            )
        rules.append((contract, _names(names)))
    return tuple(rules)


def _names(text: str | Iterable[str]) -> Names:
    names = text.split(",") if isinstance(text, str) else text
    return tuple(name.strip() for name in names if name.strip())


def parse_flag(name: str, text: str) -> bool:
    """A strict boolean: ``bool("0")`` would be True. Raises `QcoreError` for any other text."""
    word = text.strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise QcoreError(f"{name}={text!r} is not a boolean.\nWrite one of {', '.join(_TRUE + _FALSE[:-1])}.")
    return word in _TRUE


def _changes(
    backends: str | Iterable[str] | None = None,
    disable: str | Iterable[str] | None = None,
    strict: bool | None = None,
    verify: str | None = None,
) -> dict[str, Any]:
    """Only the arguments that were given, converted to the fields of `Settings`."""
    given = {
        "backends": None if backends is None else parse_backends(backends),
        "disable": None if disable is None else frozenset(_names(disable)),
        "strict": None if strict is None else _flag(strict),
        "verify": None if verify is None else _mode("verify", verify),
    }
    return {name: value for name, value in given.items() if value is not None}


def _flag(value: object) -> bool:
    # "0" is a true value: a text that reaches an argument must not turn strict on.
    if not isinstance(value, bool):
        raise QcoreError(f"strict is {value!r}; it must be True or False.")
    return value


def _mode(name: str, value: str) -> str:
    if value not in _VERIFY_MODES:
        raise QcoreError(
            f"{name} is {value!r}; it must be one of {', '.join(_VERIFY_MODES)}.{did_you_mean(value, _VERIFY_MODES)}"
        )
    return value


_ENVIRONMENT = ("QCORE_BACKENDS", "QCORE_DISABLE", "QCORE_STRICT", "QCORE_VERIFY")


def _environment() -> dict[str, Any]:
    return _read(tuple(map(os.environ.get, _ENVIRONMENT)))


@lru_cache(maxsize=8)
def _read(texts: tuple[str | None, ...]) -> dict[str, Any]:
    """The settings from the environment; an empty variable counts as unset. Callers must not mutate the result."""
    backends, disable, strict, verify = (text or None for text in texts)
    flag = None if strict is None else parse_flag("QCORE_STRICT", strict)
    return _changes(backends, disable, flag, None if verify is None else _mode("QCORE_VERIFY", verify))


_configured: dict[str, Any] = {}
_context: ContextVar[Mapping[str, Any] | None] = ContextVar("qcore_settings", default=None)


def current(**arguments: Any) -> Settings:
    """The settings in force here; ``arguments`` are those of `using` and take precedence."""
    context = _context.get()
    if not (arguments or context or _configured):
        return _merged(tuple(_environment().items()))
    given = {**_environment(), **_configured, **(context or {}), **_changes(**arguments)}
    return _merged(tuple(given.items()))


@lru_cache(maxsize=256)
def _merged(given: tuple[tuple[str, Any], ...]) -> Settings:
    return Settings(**dict(given))


def configure(
    *,
    backends: str | Iterable[str] | None = None,
    disable: str | Iterable[str] | None = None,
    strict: bool | None = None,
    verify: str | None = None,
) -> None:
    """Set defaults for the process; beats the environment. Omitted arguments stay unchanged."""
    _configured.update(_changes(backends, disable, strict, verify))


@contextlib.contextmanager
def using(
    backends: str | Iterable[str] | None = None,
    *,
    disable: str | Iterable[str] | None = None,
    strict: bool | None = None,
    verify: str | None = None,
) -> Iterator[Settings]:
    """Settings for a block, in this thread or task only; blocks nest.

    ``backends``: plugin names in order of preference, e.g. ``"vulkan"``, ``"cuda,torch"``, ``"linear=xla;*=torch"``;
    other plugins follow by rank. Layers that are already bound keep their kernels.
    """
    with _overridden({**(_context.get() or {}), **_changes(backends, disable, strict, verify)}):
        yield current()


def in_force(settings: Settings) -> contextlib.AbstractContextManager[None]:
    """Exactly these settings for a block; used to bind a layer again under the settings that it was created with."""
    return _overridden(vars(settings))


@contextlib.contextmanager
def _overridden(values: Mapping[str, Any]) -> Iterator[None]:
    token = _context.set(values)
    try:
        yield
    finally:
        _context.reset(token)
