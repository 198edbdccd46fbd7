"""What the plugin would launch for a call on a GPU that is not here, compiled for it.

    python tests/cuda/launches.py linear --target sm_90 scheme=w4a16-g128 n=4096 k=4096 m=1
    python tests/cuda/launches.py conv2d --target gfx942 scheme=w8a8 channels=256

The plugin's own host code runs on tensors without memory (meta) and picks kernels, tiles and options as it would there;
Triton is handed a driver that knows the target and nothing else, and compiles instead of launching. So what is checked
is what is shipped.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from types import FunctionType
from typing import Any, ClassVar

from compiling import Compiled, Job, facts_of, gpu_target, report, require_compiler
from workers import in_processes

MULTIPROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170}
CUS = {"gfx942": 304, "gfx90a": 208}
_LAUNCH = "qcore_cuda.runtime.launch"
"""The module whose function other modules launch by."""


@dataclass(frozen=True)
class Call:
    """A call of the plugin: ``function`` of this module, its arguments, and the GPU that it is made on."""

    function: str
    arguments: dict[str, Any]
    target: str = "sm_90"

    def __str__(self) -> str:
        return f"{self.function}({', '.join(f'{k}={v}' for k, v in self.arguments.items())}) on {self.target}"


@dataclass(frozen=True)
class Result:
    """The different kernels of a call, in order of their launches; ``error`` where it failed."""

    call: Call
    kernels: tuple[Compiled, ...] = field(default=(), repr=False)
    error: str = ""


def compile_calls(calls: Iterable[Call], workers: int = 2) -> list[Result]:
    """Every kernel of every call, compiled in clean processes; those of equal code share their figures."""
    calls = list(calls)
    answers = in_processes(f"{__file__}:answer", [asdict(call) for call in calls], workers)
    return [_result(call, answer) for call, answer in zip(calls, answers, strict=True)]


def _result(call: Call, answer: Any) -> Result:
    if isinstance(answer, dict):
        return Result(call, error=answer["error"])
    return Result(call, tuple(Compiled(Job(**job), **facts) for job, facts in answer))


# In the process that compiles.


class Driver:
    """Stands in for Triton's driver: there is no device, only what it would be."""

    def __init__(self, target: str) -> None:
        self.target = gpu_target(target)
        # Triton keeps what it compiled by device index: each target gets one of its own.
        self.index = [*MULTIPROCESSORS, *CUS].index(target)

    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_current_target(self) -> Any:
        return self.target


class Recorder:
    """Stands in for the plugin's `launch`: compiles, and keeps what came out."""

    seen: ClassVar[dict[str, dict[str, Any]]] = {}
    """Figures by Triton's hash of everything that the code depends on."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.kernels: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._mine: set[str] = set()

    def __call__(self, kernel: Any, grid: Any, *args: Any, **meta: Any) -> None:
        start = time.perf_counter()
        made = kernel.warmup(*args, grid=grid, **meta)
        if made.hash in self._mine:
            return
        self._mine.add(made.hash)
        if made.hash not in self.seen:
            facts = facts_of(made, self.target.startswith("sm_"))
            self.seen[made.hash] = {**facts, **_shared(facts, meta), "seconds": time.perf_counter() - start}
        constants = {kernel.arg_names[index[0]]: value for index, value in made.src.constants.items()}
        plain = {
            name: value if isinstance(value, int | float | str) else str(value) for name, value in constants.items()
        }
        name = f"{kernel.module}:{kernel.__name__}"
        job = Job(name, plain, self.target, made.metadata.num_warps, made.metadata.num_stages)
        self.kernels.append((asdict(job), self.seen[made.hash]))


def _shared(facts: dict[str, Any], meta: dict[str, Any]) -> dict[str, int]:
    """Shared memory with what Triton does not know of: a kernel's ring."""
    if "RING" not in meta:
        return {}
    from qcore_cuda.kernels.smem_pipeline import scratch

    own = scratch(meta["num_warps"])
    assert facts["shared"] <= own, f"Triton takes {facts['shared']} bytes of shared memory, more than {own}"
    return {"shared": own + meta["RING"]}


def answer(call: dict[str, Any]) -> list[Any]:
    """The kernels of a `Call`, as plain values."""
    require_compiler()
    with tempfile.TemporaryDirectory() as empty:  # what was tuned on this machine is not what is shipped
        os.environ["QCORE_CACHE_DIR"] = empty
        return _kernels(call)


def _kernels(call: dict[str, Any]) -> list[Any]:
    from triton.runtime.driver import driver

    recorder = Recorder(call["target"])
    driver.set_active(Driver(call["target"]))
    _pretend(call["target"], recorder)
    CALLS[call["function"]](**call["arguments"])
    return [list(pair) for pair in recorder.kernels]


def dry_run(payload: dict[str, str]) -> list[str]:
    """What the plugin's host code does not get through of a contract's cases on a target, launching nothing."""
    import torch
    from triton.runtime.driver import driver

    from qcore.testing.case_selection import cases

    driver.set_active(Driver(payload["target"]))
    _pretend(payload["target"], lambda *_, **__: None)
    faults = []
    for case in cases(None, [payload["contract"]]):
        problem = case.build(seed=1)
        try:
            mine = _made(problem.request)
            if mine is not None:
                packed = {name: part.to("meta") for name, part in mine.pack(problem.weight).items()}
                given = {name: part.to("meta") for name, part in problem.given.items()}
                bias = None if problem.bias is None else problem.bias.to("meta")
                y = mine(problem.x.to("meta"), packed, bias, **given)
                assert isinstance(y, torch.Tensor)
        except Exception as error:  # noqa: BLE001  all of them are wanted
            faults.append(f"{case.id}: {type(error).__name__}: {error}")
    return faults


def _made(request: Any) -> Any:
    """The plugin's kernel for a request; None where it refuses."""
    from qcore_cuda import conv2d, embedding, grouped_linear, linear
    from qcore_cuda.eligibility import _why_not_weight, why_not_dtypes

    if _why_not_weight(request) or why_not_dtypes(request):  # there is no device to ask about
        return None
    if request.contract == "conv2d" and conv2d.why_not(request):
        return None
    makers = {
        "linear": linear.kernel, "conv2d": conv2d.kernel, "embedding": embedding.CudaEmbedding,
        "grouped_linear": grouped_linear.CudaGroupedLinear,
    }  # fmt: skip
    return makers[request.contract](request)


def _pretend(target: str, recorder: Recorder) -> None:
    """Let the plugin see the target where it asks for a device, and hand its launches to ``recorder``."""
    import importlib
    import pkgutil

    import qcore_cuda

    for module in pkgutil.walk_packages(qcore_cuda.__path__, "qcore_cuda."):
        if module.name.startswith(("qcore_cuda.kernels.", "qcore_triton.")):
            continue
        loaded = importlib.import_module(module.name)
        if isinstance(getattr(loaded, "launch", None), FunctionType | Recorder) and module.name != _LAUNCH:
            loaded.launch = recorder  # type: ignore[attr-defined]
        for remembered in vars(loaded).values():  # the device is another one now
            if hasattr(remembered, "cache_clear"):
                remembered.cache_clear()
        for name in [name for name in vars(loaded) if name.startswith("op_")]:  # torch has fakes alone run on meta
            setattr(loaded, name, getattr(loaded, name.removeprefix("op_")))
    from qcore_cuda.runtime import device

    arch = int(target[3:]) if target.startswith("sm_") else 0
    here = device.Device(arch, not arch, {**MULTIPROCESSORS, **CUS}[target])
    device._device = lambda kind, index: here


def linear(
    scheme: str, n: int, k: int, m: int, dtype: str = "bfloat16", bias: bool = False, scale: str = "",
    square: bool = True,
) -> None:  # fmt: skip
    """A quantized linear layer on x ``(m, k)``; ``scale``: the dtype of scales, if it is another one than x's.

    ``square``: if blocks of the weight may have one scale, they have.
    """
    import torch

    from qcore.contracts import CONTRACTS
    from qcore_cuda.linear import kernel

    parsed, kind = _scheme(scheme), getattr(torch, dtype)
    request = CONTRACTS["linear"].request_for(parsed, torch.device("meta"), kind, n, k)
    made = kernel(request)
    x = torch.empty(m, k, dtype=kind, device="meta")
    weight = _weight(parsed, n, k, getattr(torch, scale or dtype))
    packed = made.pack(weight)
    if "blocks" in packed and not square:
        packed["blocks"] = torch.empty(0, device="meta")
    made.run(x, packed, torch.empty(n, dtype=kind, device="meta") if bias else None)


def product(kernel: str, fields: list[Any], scheme: str, n: int, k: int, m: int, **more: Any) -> None:
    """`linear` by a given kernel and configuration, whatever would be chosen."""
    from qcore_cuda import int8, weight_only
    from qcore_cuda.products.base import Choice
    from qcore_cuda.products.catalog import FLOAT_PRODUCTS, INT8_PRODUCTS

    found = next(p for p in (*FLOAT_PRODUCTS, *INT8_PRODUCTS) if p.name == kernel)
    chosen, modules = Choice(found, found.config(*fields)), (int8, weight_only)
    kept = [module.choose for module in modules]
    try:
        for module in modules:
            module.choose = lambda _device, problem: found.serves(_device, problem) and chosen  # type: ignore[attr-defined]
        linear(scheme, n, k, m, **more)
    finally:
        for module, choose in zip(modules, kept, strict=True):
            module.choose = choose  # type: ignore[attr-defined]


def embedding(scheme: str, n: int, k: int, m: int = 7) -> None:
    """Rows of a table ``(n, k)``."""
    import torch

    from qcore.contracts import CONTRACTS
    from qcore_cuda.embedding import CudaEmbedding

    parsed = _scheme(scheme)
    request = CONTRACTS["embedding"].request_for(parsed, torch.device("meta"), torch.bfloat16, n, k)
    made = CudaEmbedding(request)
    made(torch.zeros(m, dtype=torch.int64, device="meta"), made.pack(_weight(parsed, n, k, torch.bfloat16)), None)


def conv2d(
    scheme: str, channels: int, size: int = 56, batch: int = 32, window: int = 3, dtype: str = "bfloat16",
    groups: int = 1, last: bool = True,
) -> None:  # fmt: skip
    """A square convolution of as many channels to as many, padded to keep its size; ``last``: x is channels-last."""
    from dataclasses import replace

    import torch

    from qcore.contracts import CONTRACTS
    from qcore_cuda.conv2d import kernel, why_not

    parsed, kind = _scheme(scheme), getattr(torch, dtype)
    request = CONTRACTS["conv2d"].request_for(parsed, torch.device("meta"), kind, channels, channels)
    request = replace(request, kernel_size=(window, window), padding=(window // 2, window // 2), groups=groups)
    assert not why_not(request), why_not(request)
    made = kernel(request)
    x = torch.empty(batch, channels, size, size, dtype=kind, device="meta")
    x = x.to(memory_format=torch.channels_last) if last else x
    made(x, made.pack(_weight(parsed, channels, channels // groups * window**2, kind)), None)


def grouped_linear(scheme: str, n: int, k: int, experts: int, rows: int, dtype: str = "bfloat16") -> None:
    """``experts`` quantized linear layers for ``rows`` rows in all."""
    from dataclasses import replace

    import torch

    from qcore import QTensor
    from qcore.contracts import CONTRACTS
    from qcore_cuda.grouped_linear import CudaGroupedLinear

    parsed, kind = _scheme(scheme), getattr(torch, dtype)
    request = CONTRACTS["grouped_linear"].request_for(parsed, torch.device("meta"), kind, n, k)
    made = CudaGroupedLinear(replace(request, experts=experts))
    weight = QTensor.stack([_weight(parsed, n, k, kind)] * experts)
    offsets = torch.empty(experts, dtype=torch.int32, device="meta")
    made.run(torch.empty(rows, k, dtype=kind, device="meta"), made.pack(weight), None, offsets)


CALLS: dict[str, Callable[..., None]] = {
    "linear": linear, "product": product, "embedding": embedding, "conv2d": conv2d, "grouped_linear": grouped_linear,
}  # fmt: skip


def _scheme(text: str) -> Any:
    from qcore.resolving.explaining import _with_default_scales
    from qcore.weights.schemes import Scheme

    return _with_default_scales(Scheme.parse(text))


def _weight(scheme: Any, n: int, k: int, dtype: Any) -> Any:
    """A weight without numbers; ``dtype``: of scales."""
    import torch

    from qcore import QTensor, ScaleType, ZeroPoint

    form = scheme.weight
    groups = form.groups(k)
    stored = form.scale.dtypes[0] if form.scale is not ScaleType.FLOAT else dtype
    scale = torch.empty(groups, n, dtype=stored, device="meta")
    kinds = {ZeroPoint.NONE: None, ZeroPoint.INT: torch.int8, ZeroPoint.FLOAT: dtype}
    kind = kinds[form.zero]
    zero = None if kind is None else torch.empty(groups, n, dtype=kind, device="meta")
    whole = torch.empty((), device="meta") if form.scale.has_global else None
    codes = torch.empty(n, k, dtype=form.element.code_dtype, device="meta")
    return QTensor.from_codes(codes, scale, zero, form, global_scale=whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("function", choices=CALLS)
    parser.add_argument("arguments", nargs="*", help="name=value")
    parser.add_argument("--target", default="sm_90", help="one or more, with commas")
    options = parser.parse_args()
    pairs = (argument.split("=", 1) for argument in options.arguments)
    arguments = {name: int(value) if value.isdigit() else value for name, value in pairs}
    for result in compile_calls(Call(options.function, arguments, target) for target in options.target.split(",")):
        print(f"{result.call}: {result.error or f'{len(result.kernels)} kernels'}")
        print("\n".join(report(made) for made in result.kernels))


if __name__ == "__main__":
    sys.exit(main())
