"""Compile JAX functions for TPUs ahead of time, with libtpu and no TPU, and inspect the compiled programs.

libtpu reads `ENVIRONMENT` when it is loaded, so a process that compiles here sets it before its first use of JAX;
this module does not set it. Bytes and steps are facts of the program. Times are not: the compiler's own
estimates (``optimal_seconds``) count bytes twice and can be negative, so they are left out.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # runs here; the TPU is only a compilation target
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise a second process aborts on libtpu's lock file
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask for a topology
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
}
"""The environment variables that libtpu needs on a machine without a TPU."""

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""The smallest topology of each generation, as libtpu writes it."""

NO_INT8 = frozenset({"v4", "tpu7x"})
"""Generations whose matrix units do not support int8 (JAX's ``TpuInfo``): here, weight-only quantization pays off."""

_PREFETCH = {"copy-start", "copy-done", "slice-start", "slice-done"}
_JOINED = 'custom_call_target="ConcatBitcast"'  # slices that were prefetched one by one
_VIEWS = {"bitcast", "get-tuple-element", "tuple", "parameter", "constant"}
_BITS = {
    "pred": 8,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "bf16": 16,
    "f16": 16,
    "s16": 16,
    "u16": 16,
    "s64": 64,
    "f64": 64,
}
_ENTRY = re.compile(r"^ENTRY .*?^}", re.DOTALL | re.MULTILINE)
_STEP = re.compile(r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
_PRODUCT = re.compile(r"= ([a-z0-9]+)\[[^=]* (?:dot|convolution)\(")
_FACTORS = re.compile(r" (?:dot|convolution)\(%([\w.\-]+), %([\w.\-]+)\)")
_DEFINED = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = ([a-z0-9]+)\[", re.MULTILINE)
_NAMED = re.compile(r" parameter\((\d+)\),.*metadata=\{op_name=\"([^\"]*)\"")
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def why_not(generation: str) -> str:
    """Why this process cannot compile for ``generation``; empty if it can."""
    if generation not in TOPOLOGIES:
        return f"unknown TPU generation {generation!r}; choose one of {', '.join(TOPOLOGIES)}."
    missing = [f"{name}={value}" for name, value in ENVIRONMENT.items() if name not in os.environ]
    if missing:
        return "without a TPU, libtpu needs these environment variables, set before JAX is used:\n" + " ".join(missing)
    return ""


def why_not_int8(generation: str) -> str:
    """Why int8 activations are refused on a generation; empty if its matrix units support them."""
    if generation not in NO_INT8:
        return ""
    return (
        f"the matrix units of TPU {generation} do not support int8 (v5e, v5p and v6e do), so int8 activations would "
        f"only be slower; use a weight-only scheme such as w8a16 or w4a16-g128."
    )


@dataclass(frozen=True)
class Step:
    """One operation of a compiled program that is not a view.

    **Fields:** ``op``: e.g. ``"fusion"``; ``nbytes``: of its result; ``reads``: numbers of the parameters that it
    reads, also through views and prefetches; ``reads_steps``: whether it reads anything that another step has written.
    """

    name: str
    op: str
    nbytes: int
    reads: frozenset[int]
    reads_steps: bool


@dataclass(frozen=True)
class Program:
    """A compiled function.

    **Fields:** ``steps``, except for prefetches into on-chip memory and steps without inputs; ``products``: the
    element type of each dot's result; ``bytes_accessed`` as the compiler counts them; ``temporary``: bytes of memory
    in addition to arguments and results; ``text``: the program.
    """

    generation: str
    steps: tuple[Step, ...]
    products: tuple[str, ...]
    bytes_accessed: int
    temporary: int
    text: str

    @property
    def fusions(self) -> int:
        """How many steps are fusions or kernels of our own."""
        return sum(step.op in {"fusion", "custom-call"} for step in self.steps)

    @property
    def parameters(self) -> dict[int, str]:
        """What the function calls its arguments, by number: ``"fixed[3][0]['data']"``."""
        entry = _ENTRY.search(self.text)
        found = _NAMED.findall(entry.group(0) if entry else "")
        return {int(number): name.replace("\\'", "'") for number, name in found}

    @property
    def argument_bytes(self) -> dict[int, int]:
        """Bytes of the arguments by number."""
        entry = _ENTRY.search(self.text)
        found = [line for line in map(_STEP.match, entry.group(0).splitlines() if entry else []) if line]
        return {int(one["rest"].split(")")[0]): _nbytes(one["type"]) for one in found if one["op"] == "parameter"}

    @property
    def factors(self) -> tuple[tuple[str, str], ...]:
        """The element types that each dot multiplies: ``("s8", "s8")`` on a matrix unit for int8."""
        types = dict(_DEFINED.findall(self.text))
        return tuple((types[x], types[w]) for x, w in _FACTORS.findall(self.text))

    @property
    def collectives(self) -> dict[str, int]:
        """How many collectives of each kind there are: ``{"all-reduce": 2}``."""
        return dict(Counter(_COLLECTIVE.findall(self.text)))

    def readers(self, parameter: int) -> list[Step]:
        """The steps that read a parameter from memory."""
        return [step for step in self.steps if parameter in step.reads]

    def largest(self) -> int:
        """Bytes of the largest result of any step, on chip or off."""
        return max((step.nbytes for step in self.steps), default=0)


def compile_for(generation: str, function: Callable[..., Any], *specs: tuple[Sequence[int], Any]) -> Program:
    """Compile ``function`` of arrays ``(shape, dtype)`` for one core of a TPU generation.

    Raises `ValueError` with a reason if this process cannot; errors of the compiler itself are passed on.
    """
    if reason := why_not(generation):
        raise ValueError(reason)
    import jax

    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=core(generation)) for shape, dtype in specs]
    return program_of(generation, jax.jit(function, keep_unused=True).lower(*arguments).compile())


def program_of(generation: str, compiled: Any) -> Program:
    """What a program compiled by JAX consists of."""
    text = str(compiled.as_text())
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    counted = int((cost or {}).get("bytes accessed", 0))
    return Program(generation, steps_of(text), products_of(text), counted, _temporary(memory), text)


@cache
def core(generation: str) -> Any:
    """The sharding of arrays on one core of a TPU generation, for JAX's ahead-of-time compiler."""
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    description = topologies.get_topology_desc(topology_name=TOPOLOGIES[generation], platform="tpu")
    return SingleDeviceSharding(description.devices[0])


@cache
def mesh(topology: str, axis: str = "model") -> Any:
    """A mesh of all chips of a topology, such as ``"v5e:2x4"``, with one axis, for JAX's ahead-of-time compiler."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    return Mesh(np.array(devices), (axis,))


def _temporary(memory: Any) -> int:
    return 0 if memory is None else int(memory.temp_size_in_bytes)


def products_of(text: str) -> tuple[str, ...]:
    """The element type of every dot or convolution in a program's text, e.g. ``("s32",)``."""
    return tuple(_PRODUCT.findall(text))


def steps_of(text: str) -> tuple[Step, ...]:
    """The steps of the entry computation of a program, in order; see `Program`."""
    entry = _ENTRY.search(text)
    return tuple(_steps(entry.group(0).splitlines()[1:-1])) if entry else ()


def _steps(lines: list[str]) -> Iterator[Step]:
    sources: dict[str, frozenset[int]] = {}  # parameters seen through views and prefetches
    written: dict[str, bool] = {}  # whether it depends on another step
    for line in lines:
        found = _STEP.match(line)
        if not found:
            continue
        name, op = found["name"], found["op"]
        operands = _operands(found["rest"])
        reads = frozenset().union(*(sources.get(operand, frozenset()) for operand in operands))
        of_steps = any(written.get(operand, False) for operand in operands)
        if op == "parameter":
            reads = frozenset({int(found["rest"].split(")")[0])})
        if op in _VIEWS or op in _PREFETCH or _JOINED in found["rest"]:
            sources[name], written[name] = reads, of_steps
            continue
        # A result without inputs (a table of shifts, zeros) counts as a constant.
        written[name] = bool(reads) or of_steps
        if written[name]:
            yield Step(name, op, _nbytes(found["type"]), reads, of_steps)


def _operands(rest: str) -> list[str]:
    """Names inside the parentheses of a call, from the text after the opening one."""
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            return re.findall(r"%([\w.\-]+)", rest[:i])
    return []


def _nbytes(type_text: str) -> int:
    total = 0
    for dtype, dimensions in _ARRAY.findall(type_text):
        count = 1
        for dimension in filter(None, dimensions.split(",")):
            count *= int(dimension)
        total += count * _BITS.get(dtype, 32) // 8
    return total
