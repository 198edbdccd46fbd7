"""Changes to a model that are all made or all taken back, whatever raises in between."""

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
    """Changes a model and notes how to undo each change, before it is made. ``step``: the change under way, in words.

    Use as a context: where the block raises, whatever it is, the model gets back all that was there.
    """

    def __init__(self) -> None:
        self.step = ""
        self._undo: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Take everything back where the block raises."""
        try:
            yield
        except BaseException:
            self._roll_back()
            raise
        self._undo.clear()

    def _roll_back(self) -> None:
        """Undo from the last to the first. Each undo may run twice, so an impatient Ctrl-C changes nothing."""
        try:
            while self._undo:
                self._undo[-1]()
                self._undo.pop()
        except KeyboardInterrupt:
            self._roll_back()
            raise

    def fill(self, name: str, slot: Tensor, value: Tensor) -> None:
        """Copy ``value`` into ``slot``, which has its dtype; what was in it waits on the CPU."""
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
        """Put ``new`` where a module has the parameter or buffer ``old``, also where it goes by other names there."""
        self.step = f"replacing {key!r} of {type(module).__name__}"
        self._record(module)
        if type(module).__setattr__ is not nn.Module.__setattr__:
            # torch.nn.LSTM, for one, keeps a list of its weights.
            self._undo.append(partial(_try_to_set, module, key, old))
            _try_to_set(module, key, new)
        table = module._parameters if key in module._parameters else module._buffers
        table[key] = new  # type: ignore[assignment]
        vars(module).update({name: new for name, value in vars(module).items() if value is old})

    def become(self, root: QuantizedModule, made: QuantizedModule) -> None:
        """Give the root of a model, which nothing holds that could hold another, all that ``made`` has."""
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
    # A tensor made under inference_mode changes only there. Detached, as views of some kinds refuse to be written.
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
