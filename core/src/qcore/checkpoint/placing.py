"""Transactional changes to a model: if anything raises, all of them are rolled back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.base import QuantizedModule

# ruff: noqa: SLF001 - restores the tables that torch keeps in modules

_TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class Transaction:
    """Changes a model and records how to undo each change before making it.

    ``step``: the current change, as text for errors. Use with `all_or_nothing`.
    """

    def __init__(self) -> None:
        self.step = ""
        self._undo: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Roll back all changes if the block raises anything, including KeyboardInterrupt."""
        try:
            yield
        except BaseException:
            self._roll_back()
            raise
        self._undo.clear()

    def _roll_back(self) -> None:
        """Undo the changes in reverse order. Every undo is idempotent, so that a further Ctrl-C does no harm."""
        try:
            while self._undo:
                self._undo[-1]()
                self._undo.pop()
        except KeyboardInterrupt:
            self._roll_back()
            raise

    def fill(self, name: str, slot: Tensor, value: Tensor) -> None:
        """Copy ``value`` into ``slot``, which has the same dtype; the old values are kept on the CPU for a rollback."""
        self.step = f"writing {name!r}"
        with torch.inference_mode(slot.is_inference()):
            old = slot.detach().to("cpu", copy=True)
        self._undo.append(partial(_copy, slot, old))
        _copy(slot, value)

    def put_module(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Make ``module`` the child ``name`` of ``parent``."""
        self.step = f"replacing {name!r} of {type(parent).__name__}"
        self._record(parent)
        setattr(parent, name, module)

    def put_tensor(self, module: nn.Module, key: str, old: Tensor, new: Tensor) -> None:
        """Replace the parameter or buffer ``old`` of a module by ``new``, including plain attributes that alias it."""
        self.step = f"replacing {key!r} of {type(module).__name__}"
        self._record(module)
        if type(module).__setattr__ is not nn.Module.__setattr__:
            # A custom __setattr__ may update further state: torch.nn.LSTM, for example, keeps a list of its weights.
            self._undo.append(partial(_try_to_set, module, key, old))
            _try_to_set(module, key, new)
        table = module._parameters if key in module._parameters else module._buffers
        table[key] = new  # type: ignore[assignment]
        vars(module).update({name: new for name, value in vars(module).items() if value is old})

    def become(self, root: QuantizedModule, made: QuantizedModule) -> None:
        """Move the state of ``made`` into the root of a model, which has no parent in which to replace it."""
        self.step = f"replacing the {type(root).__name__}"
        before, users = dict(vars(root)), root._store.users
        self._undo.append(partial(_restore_root, root, before, users))
        users.discard(root)
        vars(root).update(vars(made))
        root._store.users.add(root)

    def _record(self, module: nn.Module) -> None:
        tables: dict[str, Any] = {name: vars(module)[name].copy() for name in _TABLES if name in vars(module)}
        self._undo.append(partial(_restore, module, dict(vars(module)), tables))


def _copy(slot: Tensor, value: Tensor) -> None:
    # An inference tensor can be changed only under inference_mode. Detached, because some kinds of views refuse
    # in-place writes.
    with torch.inference_mode(slot.is_inference()), torch.no_grad():
        slot.detach().copy_(value)


def _try_to_set(module: nn.Module, key: str, value: Tensor) -> None:
    with contextlib.suppress(Exception):
        setattr(module, key, value)


def _restore(module: nn.Module, attributes: dict[str, Any], tables: dict[str, Any]) -> None:
    held = vars(module)
    held.update(attributes)
    for name in held.keys() - attributes.keys():
        del held[name]
    for name, content in tables.items():
        held[name].clear()
        held[name].update(content)


def _restore_root(root: QuantizedModule, attributes: dict[str, Any], users: Any) -> None:
    root._store.users.discard(root)
    held = vars(root)
    held.update(attributes)
    for name in held.keys() - attributes.keys():
        del held[name]
    users.add(root)
