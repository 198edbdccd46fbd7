"""Compile Triton kernels for GPUs that are not here, and read what came out: spills, registers, loops, SASS.

From Python, `compile_job` in this process or `compile_all` in others; from a shell:

    python tests/cuda/compiling.py qcore_cuda.kernels.gemv:kernel --target sm_90 --warps 4 --stages 4 \
        --args "x=*bf16:16 w=*u8:16 y=*bf16:16 M=i32 N=i32:16 K=i32:16 BN=32 ASYM=False DTYPE=tl.bfloat16" \
        --weights 16384 --sass gemv.sass

An argument is a Triton type (`*bf16`, `i32`, `fp32`; `:16` says that pointer or number is a multiple of 16, as Triton's
own launcher finds out) or the value of a constexpr. ``--weights``: how many weights one turn of the inner loop takes
in a whole program; then instructions are also given per weight.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from shared_buffers import overwritten_too_early
from workers import find, in_processes

WARP = 32
SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64, "gfx90a": 64}
"""KiB of shared memory that a program can have, by target."""
_TYPE = re.compile(r"(\*?(?:[iu](?:1|8|16|32|64)|bf16|fp(?:16|32|64|8\w*)))(?::(\d+))?")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.+?)\s*;", re.MULTILINE)
_OPCODE = re.compile(r"^(?:@!?U?P[T0-9]+ )?([A-Z][A-Z0-9_.]*)")
_BRANCH = re.compile(r"\bBRA\b.*?\b0x([0-9a-f]+)")


@dataclass(frozen=True)
class Job:
    """A kernel with everything that its machine code depends on.

    **Fields:** ``kernel``: ``module:name`` or ``file.py:name``; ``arguments``: a type or a constexpr for each parameter
    (strings that start with ``tl.`` or hold a ``:`` name an object); ``target``: ``sm_90``, ``gfx942``; ``options``: of
    the backend, such as ``maxnreg``.
    """

    kernel: str
    arguments: Mapping[str, Any]
    target: str = "sm_90"
    warps: int = 4
    stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = ",".join(f"{name}={value}" for name, value in self.arguments.items() if not _is_type(value))
        return f"{self.kernel.rpartition(':')[2]}[{self.target} {given} warps={self.warps} stages={self.stages}]"


@dataclass(frozen=True)
class Loop:
    """A loop of the machine code: the opcodes of one turn, in order."""

    opcodes: tuple[str, ...]

    def count(self, *prefixes: str) -> int:
        """Instructions whose opcode starts with one of ``prefixes``; all without. Padding does not count."""
        return sum(name.startswith(prefixes or ("",)) for name in self.opcodes if name != "NOP")

    @property
    def mma(self) -> int:
        """Tensor core instructions."""
        return sum("MMA" in name for name in self.opcodes)

    def summary(self) -> str:
        counts = Counter(name.partition(".")[0] for name in self.opcodes)
        return " ".join(f"{name}:{count}" for name, count in counts.most_common())


@dataclass(frozen=True)
class Compiled:
    """What became of a `Job`; ``error`` is empty where it compiled.

    **Fields:** ``spills``: instructions that reach for local memory (NVIDIA) or registers that were spilled (AMD);
    ``stack``: bytes of a thread's local memory; ``shared``: bytes of a program; ``assembly``: SASS or AMD assembly;
    ``overwritten``: see `shared_buffers`.
    """

    job: Job
    error: str = ""
    seconds: float = 0.0
    registers: int = 0
    spills: int = 0
    stack: int = 0
    shared: int = 0
    overwritten: tuple[str, ...] = ()
    assembly: str = field(default="", repr=False)

    @property
    def facts(self) -> dict[str, Any]:
        """Everything but the job, as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "job"}

    @property
    def fits(self) -> bool:
        """Whether a program gets the shared memory that it wants."""
        return self.shared <= SHARED[self.job.target] * 1024

    @cached_property
    def instructions(self) -> list[tuple[int, str]]:
        """(address, text) of the SASS."""
        return [(int(address, 16), text) for address, text in _INSTRUCTION.findall(self.assembly)]

    @cached_property
    def loops(self) -> list[Loop]:
        """Every backward branch with what it encloses, in order of their ends."""
        found = []
        for index, (address, text) in enumerate(self.instructions):
            match = _BRANCH.search(text)
            if match and (target := int(match[1], 16)) < address:
                body = [_opcode(line) for at, line in self.instructions[: index + 1] if at >= target]
                found.append(Loop(tuple(body)))
        return found

    @property
    def inner_loop(self) -> Loop:
        """The loop that does the work: the most tensor core instructions, then the shortest; else the longest."""
        if not self.loops:
            raise ValueError(f"{self.job} has no loop")
        if any(loop.mma for loop in self.loops):
            return max(self.loops, key=lambda loop: (loop.mma, -loop.count()))
        return max(self.loops, key=Loop.count)

    def loop_instructions(self) -> int:
        """Instructions of a warp for one turn of the inner loop."""
        return self.inner_loop.count()

    def per_weight(self, weights: int) -> float:
        """Instructions of a lane per weight, where one turn takes ``weights`` in the whole program.

        A loop that the compiler unrolled takes more of them per turn; compare `Loop.mma` with what is expected.
        """
        return self.loop_instructions() * self.job.warps * WARP / weights


def compile_job(job: Job) -> Compiled:
    """Compile in this process, which must not have imported Triton's interpreter."""
    require_compiler()
    import triton
    from triton.compiler import ASTSource

    start = time.perf_counter()
    kernel = find(job.kernel)
    signature, constexprs, attrs = _source(kernel.arg_names, job.arguments)
    options = {"num_warps": job.warps, "num_stages": job.stages, **job.options}
    source = ASTSource(kernel, signature, constexprs, attrs)
    made = triton.compile(source, target=gpu_target(job.target), options=options)
    return Compiled(job, seconds=time.perf_counter() - start, **facts_of(made, job.target.startswith("sm_")))


def facts_of(made: Any, nvidia: bool) -> dict[str, Any]:
    """The figures of Triton's `CompiledKernel`, by fields of `Compiled`."""
    facts = _nvidia(made.asm["cubin"]) if nvidia else _amd(made.asm["amdgcn"])
    overwritten = tuple(overwritten_too_early(made.asm.get("ttgir", "")))
    return {**facts, "shared": made.metadata.shared, "overwritten": overwritten}


def gpu_target(name: str) -> Any:
    """``sm_90`` or ``gfx942`` as Triton says it."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)


def require_compiler() -> None:
    """Raise where Triton's interpreter rules."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("TRITON_INTERPRET is set: nothing can be compiled in this process; use compile_all")


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and _TYPE.fullmatch(value) is not None


def _source(names: Iterable[str], arguments: Mapping[str, Any]) -> tuple[dict[Any, Any], ...]:
    """Signature, constexprs and attributes as `ASTSource` wants them."""
    names = list(names)
    if set(names) != set(arguments):
        missing, unknown = set(names) - set(arguments), set(arguments) - set(names)
        raise ValueError(f"arguments missing: {sorted(missing)}; not of this kernel: {sorted(unknown)}")
    signature, constexprs, attrs = {}, {}, {}
    for index, name in enumerate(names):
        match = _TYPE.fullmatch(arguments[name]) if isinstance(arguments[name], str) else None
        signature[name] = match[1] if match else "constexpr"
        if match is None:
            constexprs[index,] = _constant(arguments[name])
        elif match[2]:
            attrs[index,] = [["tt.divisibility", int(match[2])]]
    return signature, constexprs, attrs


def _constant(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("tl."):
        import triton.language as tl

        return getattr(tl, value.removeprefix("tl."))
    return find(value) if isinstance(value, str) and ":" in value else value


def _nvidia(cubin: bytes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _tool("cuobjdump", "--dump-resource-usage", path)
        sass = _tool("cuobjdump", "-sass", path)
    figures = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage))
    opcodes = [_opcode(text) for _, text in _INSTRUCTION.findall(sass)]
    spills = sum(name.startswith(("LDL", "STL")) for name in opcodes)
    return {"registers": int(figures["REG"]), "stack": int(figures["STACK"]), "spills": spills, "assembly": sass}


def _amd(text: str) -> dict[str, Any]:
    figures = {name: int(value) for name, value in re.findall(r"^\s*\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    spills = figures["vgpr_spill_count"] + figures["sgpr_spill_count"]
    stack = figures["private_segment_fixed_size"]
    return {"registers": figures["vgpr_count"], "stack": stack, "spills": spills, "assembly": text}


def _tool(name: str, *arguments: str | Path) -> str:
    """Output of a tool that Triton's package carries."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    search = os.pathsep.join([str(folder), os.environ.get("PATH", "")])  # cuobjdump looks for nvdisasm there
    command, environment = [str(folder / name), *map(str, arguments)], {**os.environ, "PATH": search}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def _opcode(text: str) -> str:
    match = _OPCODE.match(text)
    return match[1] if match else "?"


def compile_all(jobs: Iterable[Job], workers: int = 2) -> list[Compiled]:
    """Compile in clean processes, ``workers`` at a time, in order; what fails comes back with its ``error``."""
    jobs = list(jobs)
    answers = in_processes(f"{__file__}:_answer", [asdict(job) for job in jobs], workers)
    return [Compiled(job, **answer) for job, answer in zip(jobs, answers, strict=True)]


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    return compile_job(Job(**job)).facts


def _arguments(text: str) -> dict[str, Any]:
    pairs = (part.split("=", 1) for part in re.split(r"[\s,]+", text.strip()))
    return {name: _literal(value) for name, value in pairs}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def report(made: Compiled, weights: int = 0) -> str:
    """The figures of one compiled kernel, in a few lines."""
    if made.error:
        return f"{made.job}\n  failed: {made.error}"
    memory = f"{made.spills} spills, {made.stack} stack bytes, {made.shared} shared bytes"
    lines = [f"{made.job}", f"  {made.seconds:.1f} s, {made.registers} registers, {memory}, {len(made.loops)} loops"]
    if made.loops:
        loop = made.inner_loop
        each = f", {made.per_weight(weights):.2f} per weight" if weights else ""
        lines.append(f"  inner loop: {loop.count()} instructions, {loop.mma} on tensor cores{each}: {loop.summary()}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", help="module:name or file.py:name")
    parser.add_argument("--args", default="", help="name=type or name=value for each parameter")
    parser.add_argument("--target", default="sm_90", help="one or more, with commas")
    parser.add_argument("--warps", default="4", help="likewise")
    parser.add_argument("--stages", default="3", help="likewise")
    parser.add_argument("--weights", type=int, default=0)
    parser.add_argument("--sass", type=Path, help="write the assembly of the last one there")
    options = parser.parse_args()
    arguments = _arguments(options.args)
    lists = (options.target.split(","), map(int, options.warps.split(",")), map(int, options.stages.split(",")))
    made = compile_all(Job(options.kernel, arguments, *choice) for choice in itertools.product(*lists))
    print("\n".join(report(one, options.weights) for one in made))
    if options.sass:
        options.sass.write_text(made[-1].assembly)


if __name__ == "__main__":
    main()
