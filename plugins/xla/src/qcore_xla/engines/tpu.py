"""Tensors on the device ``tpu`` of torch_tpu: bodies as ops that its `torch.tpu.pallas.jax_op` makes.

torch_tpu exports such a function for the TPU, compiles it and calls it, so JAX only traces here. Each body and form
becomes one op of ours, ``qcore_xla::tpu_...``: a list of tensors to a tensor, with a fake that supports symbolic
shapes, unlike torch_tpu's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import environment
from ..packing import NIBBLES

_numbers = count()


class TpuEngine:
    """See `qcore_xla.engines.base.Engine`."""

    name = "tpu"

    def why_not(self, device: torch.device) -> str:
        """Checks torch_tpu's files, the environment and package metadata only."""
        return environment.why_not_jax() or _why_not_backend(device) or _why_not_platform()

    def run(self, function: Callable[..., Any], form: Any, tensors: Sequence[Tensor | None], *_: Any) -> Tensor:
        """Calls the op for this body and form. The rest is ignored: nothing is converted."""
        given = tuple(tensor is not None for tensor in tensors)
        result: Tensor = op(function, form, given)([tensor for tensor in tensors if tensor is not None])
        return result


def _why_not_backend(device: torch.device) -> str:
    found = find_spec("torch_tpu")
    places = found.submodule_search_locations if found else None
    # Another project, for other chips, installs a module of the same name; it has no Pallas.
    if not any((Path(place) / "_internal" / "pallas").is_dir() for place in places or ()):
        return f"tensors on {device} need Google's torch_tpu: pip install torch_tpu"
    return ""


def _why_not_platform() -> str:
    chosen = environment.platforms()
    if environment.initialised() or (chosen and "tpu" not in chosen):
        return ""
    return (
        f"JAX would take the TPU away from torch_tpu at its first use; "
        f"set {environment.PLATFORMS}=cpu before the process starts."
    )


@lru_cache(maxsize=4096)
def op(function: Callable[..., Any], form: Any, given: tuple[bool, ...]) -> Callable[[list[Tensor]], Tensor]:
    """The op for a body and a form; ``given``: which of the body's arguments are in the list, the others are None."""
    import jax

    def call(arrays: Any) -> Any:
        left = iter(arrays)
        return function(*(next(left) if there else None for there in given), form=form)

    # torch_tpu reads the op's schema from these; as strings they would have to be names in this module.
    call.__annotations__ = {"arrays": Sequence[jax.Array], "return": jax.Array}
    name = getattr(function, "__name__", "body")
    made = _jax_op()(f"qcore_xla::tpu_{name}_{next(_numbers)}", call)
    made.register_fake(lambda arrays: fake(name, form, arrays))
    return made  # type: ignore[no-any-return]


def _jax_op() -> Any:
    return torch.tpu.pallas.jax_op  # type: ignore[attr-defined]


def fake(name: str, form: Any, arrays: Sequence[Tensor]) -> Tensor:
    """An empty tensor like the result of a body, for tensors of any shapes, including symbolic ones."""
    x, data, scale = arrays[:3]
    columns = scale.shape[-1]
    if name == "embedding":
        columns = data.shape[1] * (NIBBLES if data.dtype == torch.int32 else 1)
        return x.new_empty((x.shape[0], columns), dtype=getattr(torch, form.out_dtype))
    return x.new_empty(
        (*x.shape[:-1], columns), dtype=torch.int8 if form.requantize else getattr(torch, form.out_dtype)
    )


ENGINE = TpuEngine()
