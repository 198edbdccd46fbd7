"""Whole models compiled for TPUs ahead of time, with libtpu and no TPU: what programs keep in memory and what they do.

A model on torch's meta device is enough: nothing is computed, and weights have shapes only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch import Tensor, fx, nn

from qcore.plugin_api import Compiled, GraphPart, Role, torch_compile_backend, weight_of

from .. import aot
from .backend import XlaGraphs
from .program import Program
from .quantized import Arrays
from .rules import jax_dtype


@dataclass(frozen=True)
class CompiledModel:
    """A model compiled for one core of a TPU, or for the cores of a mesh: bytes are those of each core.

    **Fields:** ``program``: see `qcore_xla.aot.Program`; bytes of its arguments as they are packed for the device:
    ``weights`` of quantized layers, ``statics`` (float parameters and buffers) and ``states`` (KV caches);
    ``aliased``: bytes of states that the program updates in place; ``layers``: how many packed weights there are;
    ``host``: the nodes that stay in torch, with the reason of each.
    """

    program: aot.Program
    weights: int
    statics: int
    states: int
    aliased: int
    layers: int
    host: tuple[str, ...]

    @property
    def written_weights(self) -> tuple[str, ...]:
        """Steps that read the codes of a weight and write as many bytes or more: copies of it, unpacked or not.

        Results of many rows are as large as small weights, so this is for programs of few rows.
        """
        codes = {at: name for at, name in self.program.parameters.items() if name.endswith("['data']")}
        sizes = self.program.argument_bytes
        return tuple(
            f"{step.name} reads {codes[at]} and writes {step.nbytes} bytes"
            for step in self.program.steps
            for at in sorted(step.reads & codes.keys())
            if step.nbytes >= sizes[at]
        )


class _Recorder(XlaGraphs):
    """Keeps the parts instead of compiling them; they return tensors without values."""

    name = "qcore_xla_ahead"

    def __init__(self) -> None:
        self.parts: list[GraphPart] = []
        self.host: list[str] = []

    def why_not(self, node: fx.Node) -> str:
        if reason := super().why_not(node):
            self.host.append(f"{node.name}: {reason}")
        return reason

    def why_not_device(self, device: torch.device) -> str:
        return "" if device.type in {"cpu", "meta"} else f"qcore_xla compiles ahead from cpu or meta, not from {device}"

    def compile(self, part: GraphPart) -> Compiled:
        self.parts.append(part)
        results = [part.outputs[i].meta["val"] for i in part.returned]
        return lambda _values: [torch.empty(y.shape, dtype=y.dtype, device=part.device) for y in results]


_MANY = 1 << 10
"""Models whose ``forward`` is the same function, in one process: Dynamo stops at 8."""


def compile_model(generation: str, model: nn.Module, *args: Any, **kwargs: Any) -> CompiledModel:
    """Compile the call ``model(*args, **kwargs)`` for one core of a TPU ``generation``, see `qcore_xla.aot`.

    After ``qcore_xla.shard_(model, qcore_xla.aot.mesh("v5e:2x4"))`` it is compiled for all cores of that mesh.
    The model is not changed, its buffers aside, whose values after the call are arbitrary: pass one on the meta device.
    Raises `ValueError` with a reason if this process cannot compile for it, or if the model is not one program.
    """
    if reason := aot.why_not(generation):
        raise ValueError(reason)
    part, host = _captured(model, args, kwargs)
    return _compiled(generation, part, host)


def _captured(model: nn.Module, args: Any, kwargs: Any) -> tuple[GraphPart, tuple[str, ...]]:
    """The one part of the model's graph, and the nodes outside of it."""
    recorder = _Recorder()
    # A backend of its own for each call: Dynamo would reuse what it captured of another model of the same shape.
    compiled = torch.compile(model, backend=torch_compile_backend(recorder), dynamic=False)
    with torch.inference_mode(False), torch.no_grad():
        model(*args, **kwargs)  # layers on the meta device bind no kernel before their first call
        with torch._dynamo.config.patch(recompile_limit=_MANY):  # noqa: SLF001 - as torch documents it
            compiled(*args, **kwargs)
    if len(recorder.parts) != 1:
        reasons = "\n".join(recorder.host) or "Dynamo breaks its graph; TORCH_LOGS=graph_breaks says where."
        raise ValueError(f"the model is not one program, but {len(recorder.parts)}:\n{reasons}")
    return recorder.parts[0], tuple(recorder.host)


def _compiled(generation: str, part: GraphPart, host: tuple[str, ...]) -> CompiledModel:
    program = Program(part, "tpu")
    states, fixed, fresh = _arguments(part, program, program.placement.whole or aot.core(generation))
    made = program.jitted.lower(states, fixed, fresh).compile()
    packed = [arrays for one in fixed if isinstance(one, list) for arrays in one]
    return CompiledModel(
        aot.program_of(generation, made),
        weights=sum(_nbytes(array) for arrays in packed for array in arrays.values()),
        statics=sum(_nbytes(one) for one in fixed if not isinstance(one, list)),
        states=sum(map(_nbytes, states)),
        aliased=int(made.memory_analysis().alias_size_in_bytes),
        layers=len(packed),
        host=host,
    )


def _arguments(part: GraphPart, program: Program, whole: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """What `Program.jitted` takes, as shapes, dtypes and places; ``whole``: the place of what is not cut."""

    def described(tensor: Tensor, place: Any = None) -> Any:
        return jax.ShapeDtypeStruct(tuple(tensor.shape), jax_dtype(tensor.dtype), sharding=place or whole)

    def packed(at: int) -> list[Arrays]:
        marker = part.inputs[at].value
        assert marker is not None
        weight = weight_of(marker).to("meta")
        places = [program.placement.parts(layer.cut) for layer in program.layers[at]]
        return [
            {name: described(array, place) for name, array in layer.pack(weight).items()}
            for layer, place in zip(program.layers[at], places, strict=True)
        ]

    roles: dict[Role, list[int]] = {role: [] for role in Role}
    for at, one in enumerate(part.inputs):
        roles[one.role].append(at)
    examples = [one.example for one in part.inputs]
    fixed = sorted(roles[Role.WEIGHT] + roles[Role.STATIC])
    return (
        [described(examples[at], program.placement.state(tuple(examples[at].shape))) for at in roles[Role.STATE]],
        [packed(at) if at in program.layers else described(examples[at]) for at in fixed],
        [described(examples[at]) for at in roles[Role.FRESH]],
    )


def _nbytes(array: Any) -> int:
    """Bytes on each core."""
    shape: tuple[int, ...] = array.sharding.shard_shape(array.shape)
    return math.prod(shape) * int(array.dtype.itemsize)
