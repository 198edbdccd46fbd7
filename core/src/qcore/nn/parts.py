"""Tensors of a state dict that are one rank's part of a whole: no tool may take those of all ranks for copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..weights.qtensor import WEIGHT_TENSORS

_MARK, NOTE = "_qcore_part", "qcore_part"
_KEPT = {"clone", "contiguous", "cpu", "cuda", "detach", "new_empty", "pin_memory", "to", "__deepcopy__"}
"""Methods whose results are parts, too: tools copy a state dict before they write it."""

Place = tuple[int, int]
"""A rank, and the number of ranks."""


class Part(Tensor):
    """A tensor of which each rank of a group has its own part under the same name.

    It is used, copied and pickled as the tensor itself. torch.distributed.checkpoint would keep one rank's alone, so
    these methods, which it looks for, raise `UnsupportedError`.
    """

    _qcore_part: Place

    @staticmethod
    def of(tensor: Tensor, place: Place) -> Part:
        """The same memory, marked as the part of ``place``."""
        made: Part = tensor.as_subclass(Part)
        made._qcore_part = place
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            found = func(*args, **(kwargs or {}))
        place = getattr(args[0], _MARK, None) if args else None
        if place is not None and type(found) is Tensor and getattr(func, "__name__", "") in _KEPT:
            return Part.of(found, place)
        return found

    def __deepcopy__(self, memo: Any) -> Part:
        return Part.of(plain(self).__deepcopy__(memo), self._qcore_part)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __create_write_items__(self, fqn: str, object: Any) -> NoReturn:  # noqa: A002 - torch's name
        raise _refusal(f"save {fqn!r}", self._qcore_part)

    def __create_chunk_list__(self) -> NoReturn:
        raise _refusal("load tensors", self._qcore_part)


def _refusal(what: str, place: Place) -> UnsupportedError:
    return UnsupportedError(
        f"torch.distributed.checkpoint cannot {what} of a model that qcore.parallel has cut: it keeps one of the "
        f"tensors that have\none name on every rank, and this one is the part of {described(place)}.\n"
        f"Pass qcore.parallel.named_by_rank(state_dict), or write model.state_dict() to one file per rank."
    )


def plain(value: Any) -> Any:
    """The tensor itself, in the same memory, of a `Part`; any other value as it is."""
    return value.as_subclass(Tensor) if isinstance(value, Part) else value


def described(place: Place) -> str:
    """The place for messages and metadata."""
    return f"rank {place[0]} of {place[1]}"


def place_of(value: Any) -> Place | None:
    """The rank, and the number of ranks, of a tensor of a state dict, or of a module, that is a part."""
    found: Place | None = getattr(value, _MARK, None)
    return found


def place_in(model: nn.Module) -> Place | None:
    """The rank, and the number of ranks, over which layers of a model are cut."""
    return next((place for module in model.modules() if (place := place_of(module)) is not None), None)


def mark_part(module: nn.Module, rank: int, size: int) -> None:
    """Have the tensors of ``module`` itself, not of its children, leave it as parts."""
    if size == 1 or place_of(module) is not None:
        return
    object.__setattr__(module, _MARK, (rank, size))
    module.register_state_dict_post_hook(_mark_tensors)  # type: ignore[no-untyped-call]
    if type(module)._load_from_state_dict is nn.Module._load_from_state_dict:  # noqa: SLF001
        module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]


def named_by_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state dict, parts under a name that ends in their rank and the number of ranks."""
    return {_name(key, place_of(value)): plain(value) for key, value in state.items()}


def _name(key: str, place: Place | None) -> str:
    return key if place is None else f"{key}@{place[0]}of{place[1]}"


def _names(module: nn.Module, prefix: str) -> Iterator[str]:
    own = (*module._parameters, *module._buffers, *(f"weight.{part}" for part in WEIGHT_TENSORS))  # noqa: SLF001
    yield from (prefix + name for name in own)


def _mark_tensors(module: nn.Module, state: Any, prefix: str, notes: Any) -> None:
    place = place_of(module)
    assert place is not None
    for key in _names(module, prefix):
        value = state.get(key)
        if type(value) is Tensor:
            state[key] = Part.of(value, place)
        elif isinstance(value, Tensor) and not isinstance(value, (nn.Parameter, Part)):
            setattr(value, _MARK, place)  # a DTensor, made for this state dict: a part that FSDP2 has sharded
    if notes is not None:
        notes[NOTE] = place


def _before_loading(module: nn.Module, state: Any, prefix: str, notes: Any, *lists: Any) -> None:
    take_parts(module, state, prefix, notes, lists[-1])


def take_parts(module: nn.Module, state: Any, prefix: str, notes: Any, errors: list[str]) -> None:
    """Use tensors under the names of `named_by_rank`, and refuse those that another rank has written."""
    place = place_of(module)
    if place is None:
        return
    for key in list(_names(module, prefix)):
        value = state.pop(_name(key, place), None)
        value = state.get(key) if value is None else value
        if value is not None:
            state[key] = plain(value)
    given = notes.get(NOTE) if notes else None
    if given is not None and tuple(given) != place:
        errors.append(
            f"{prefix[:-1]}: the state dict holds the part of {described(given)}, and this is {described(place)}; "
            f"load the file of the same rank, or shard a whole model again."
        )
