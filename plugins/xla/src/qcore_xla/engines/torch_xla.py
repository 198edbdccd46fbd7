"""XLA tensors of torch_xla: a body is lowered by JAX to HLO, which torch_xla compiles as part of its own graphs.

torch_xla's own ways to call JAX need packages that it does not install; a serialized HLO module needs none, and JAX
only traces here: it never runs anything and never sees a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import environment

Spec = tuple[tuple[int, ...], torch.dtype] | None
_PLATFORMS = {"CPU": "cpu", "TPU": "tpu", "CUDA": "cuda"}


class TorchXlaEngine:
    """See `qcore_xla.engines.base.Engine`."""

    name = "torch_xla"

    def why_not(self, device: torch.device) -> str:
        """Tensors on ``xla`` exist only if torch_xla has been imported, so it is not imported here."""
        if "torch_xla" not in sys.modules:
            return f"tensors on {device} need torch_xla; import torch_xla before using qcore on them."
        return environment.why_not_jax() or self._why_not_tpu()

    def _why_not_tpu(self) -> str:
        chosen = environment.platforms()
        if environment.initialised() or not environment.tpu() or (chosen and "tpu" not in chosen):
            return ""
        return (
            f"JAX, which lowers the kernels, would take the TPU away from torch_xla; "
            f"set {environment.PLATFORMS}=cpu before the process starts."
        )

    def run(self, function: Callable[..., Any], form: Any, tensors: Sequence[Tensor | None], *_: Any) -> Tensor:
        """Adds the function to the graph that torch_xla collects. The rest is ignored: nothing is converted."""
        specs = tuple(None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        name, computation = _computation(function, form, specs, _platform())
        given = [tensor for tensor in tensors if tensor is not None]
        result: Tensor = _native()(name, given, computation)[0]
        return result


def _native() -> Any:
    # Private, but torch_xla's own Python code calls it, and there is no public equivalent.
    return sys.modules["torch_xla"]._XLAC._xla_user_computation  # noqa: SLF001


@lru_cache(maxsize=1)
def _platform() -> str:
    """The platform to lower for, by JAX's name: HLO for a TPU keeps products of mixed types, which a CPU cannot run."""
    from torch_xla import runtime

    return _PLATFORMS.get(runtime.device_type(), "cpu")


@lru_cache(maxsize=4096)
def _computation(function: Callable[..., Any], form: Any, specs: tuple[Spec, ...], platform: str) -> tuple[str, Any]:
    """The name and the computation of a body for arguments of these shapes and dtypes; None if there is none."""
    from torch_xla.core import xla_builder

    name = f"qcore_{getattr(function, '__name__', 'body')}"
    proto = hlo(function, form, specs, platform)
    return f"xla::{name}", xla_builder.computation_from_module_proto(name, proto)


def hlo(function: Callable[..., Any], form: Any, specs: tuple[Spec, ...], platform: str) -> bytes:
    """A serialized HLO module of a body for one platform."""
    import jax

    present = [spec for spec in specs if spec is not None]

    def call(*arrays: Any) -> Any:
        left = iter(arrays)
        return function(*(None if spec is None else next(left) for spec in specs), form=form)

    arguments = [jax.ShapeDtypeStruct(shape, _jax_dtype(dtype)) for shape, dtype in present]
    # Keep unused arguments: torch_xla counts them.
    lowered = jax.jit(call, keep_unused=True).trace(*arguments).lower(lowering_platforms=(platform,))
    module: bytes = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    return module


def _jax_dtype(dtype: torch.dtype) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(str(dtype).removeprefix("torch."))


ENGINE = TorchXlaEngine()
