"""What qcore-xpu would launch for a call, compiled for a GPU that is not here.

The plugin's own host code runs on tensors without memory (meta) and picks kernels, tiles and options as it does for a
GPU; Triton is handed a driver that knows the target and nothing else, and compiles instead of launching. So what is
checked is what is shipped. `answer` runs in a process of its own, without the interpreter: see tests/cuda/workers.py.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cuda"))  # the tools that compile without a GPU

INTEL = {
    "architecture": 0x0301_4000_0000_0000, "name": "Intel(R) Arc(TM) B580 Graphics", "vendor": "Intel(R) Corporation",
    "sub_group_sizes": [16, 32], "max_work_group_size": 1024, "max_num_sub_groups": 64, "has_fp64": True,
    "has_subgroup_matrix_multiply_accumulate": True, "has_subgroup_matrix_multiply_accumulate_tensor_float32": True,
    "has_subgroup_2d_block_io": True, "has_2d_block_io": True, "has_bfloat16_conversion": True,
    "has_bfloat16_conversions": True, "has_16bit_atomics": True, "__intel_already_queried_extensions__": True,
}  # fmt: skip
"""A device as Triton's part for Intel GPUs describes one to itself; names that a release does not know it ignores."""


def target(name: str) -> Any:
    """``sm_90``, ``gfx942`` or ``xpu`` as Triton says it."""
    from compiling import gpu_target
    from triton.backends.compiler import GPUTarget

    return GPUTarget("xpu", INTEL, 32) if name == "xpu" else gpu_target(name)


class Driver:
    """Stands in for Triton's driver: there is no device, only what it would be."""

    def __init__(self, name: str) -> None:
        self.target = target(name)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_current_target(self) -> Any:
        return self.target


class Recorder:
    """Stands in for the plugin's `launch`: compiles, and keeps what came out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kernels: dict[str, dict[str, Any]] = {}

    def __call__(self, kernel: Any, grid: Any, *args: Any, **meta: Any) -> None:
        made = kernel.warmup(*args, grid=grid, **meta)
        constants = {kernel.arg_names[index[0]]: value for index, value in made.src.constants.items()}
        plain = {key: value for key, value in constants.items() if isinstance(value, int | float | str)}
        facts = {"kernel": kernel.__name__, "constants": plain, "warps": meta["num_warps"], **self._facts(made)}
        self.kernels.setdefault(made.hash, facts)

    def _facts(self, made: Any) -> dict[str, Any]:
        if self.name == "xpu":  # SPIR-V, which the driver compiles
            return {"bytes": len(made.asm["spv"]), "text": made.asm.get("ttgir", "")}
        from compiling import facts_of

        facts = facts_of(made, self.name.startswith("sm_"))
        return {key: facts[key] for key in ("registers", "spills", "shared")} | {"text": facts["assembly"]}


def answer(call: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels of a call: a function of this module, its arguments, and the target."""
    from compiling import require_compiler
    from triton.runtime.driver import driver

    require_compiler()
    recorder = Recorder(call["target"])
    driver.set_active(Driver(call["target"]))
    with tempfile.TemporaryDirectory():
        _pretend(recorder)
        {"linear": linear, "conv2d": conv2d, "embedding": embedding}[call["function"]](**call["arguments"])
    return list(recorder.kernels.values())


def _pretend(recorder: Recorder) -> None:
    """Let the plugin launch by ``recorder``, as if Triton had its part for Intel GPUs."""
    from qcore_xpu import columns, dense, device, gathering, quantizing, tiles, triton_linear, triton_ops

    for module in (columns, dense, device, gathering, quantizing, tiles):
        module.launch = recorder
    for module in (device, quantizing, triton_linear):
        module.why_not_triton = lambda: ""
    triton_ops.device_guard = lambda _x: contextlib.nullcontext()  # meta is no device that one could switch to


def linear(scheme: str, n: int, k: int, m: int, dtype: str = "bfloat16", bias: bool = False) -> None:
    """A quantized linear layer on x ``(m, k)``."""
    import torch

    from qcore.contracts import CONTRACTS
    from qcore_xpu.triton_linear import kernel

    parsed, kind = _scheme(scheme), getattr(torch, dtype)
    made = kernel(CONTRACTS["linear"].request_for(parsed, torch.device("meta"), kind, n, k))
    _run(made, torch.empty(m, k, dtype=kind, device="meta"), parsed, n, k, bias)


def conv2d(scheme: str, channels: int, size: int = 56, batch: int = 8, window: int = 3, groups: int = 1) -> None:
    """A square convolution of as many channels to as many, padded to keep its size."""
    from dataclasses import replace

    import torch

    from qcore.contracts import CONTRACTS
    from qcore_xpu.conv2d import kernel

    parsed, kind = _scheme(scheme), torch.bfloat16
    request = CONTRACTS["conv2d"].request_for(parsed, torch.device("meta"), kind, channels, channels)
    request = replace(request, kernel_size=(window, window), padding=(window // 2, window // 2), groups=groups)
    x = torch.empty(batch, channels, size, size, dtype=kind, device="meta").to(memory_format=torch.channels_last)
    _run(kernel(request), x, parsed, channels, request.k, bias=True)


def embedding(scheme: str, n: int, k: int, m: int = 7) -> None:
    """Rows of a table ``(n, k)``."""
    import torch

    from qcore.contracts import CONTRACTS
    from qcore_xpu.embedding import kernel

    parsed = _scheme(scheme)
    made = kernel(CONTRACTS["embedding"].request_for(parsed, torch.device("meta"), torch.bfloat16, n, k))
    _run(made, torch.zeros(m, dtype=torch.int64, device="meta"), parsed, n, k, bias=False)


def _run(kernel: Any, x: Any, scheme: Any, n: int, k: int, bias: bool) -> None:
    import torch

    kernel(x, kernel.pack(_weight(scheme, n, k)), torch.empty(n, device="meta") if bias else None)


def _scheme(text: str) -> Any:
    from qcore.resolving.explaining import _with_default_scales
    from qcore.weights.schemes import Scheme

    return _with_default_scales(Scheme.parse(text))


def _weight(scheme: Any, n: int, k: int) -> Any:
    """A weight without numbers."""
    import torch

    from qcore import QTensor, ZeroPoint

    form = scheme.weight
    shape = (form.groups(k), n)
    scale = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    kinds = {ZeroPoint.NONE: None, ZeroPoint.INT: torch.int8, ZeroPoint.FLOAT: torch.bfloat16}
    kind = kinds[form.zero]
    zero = None if kind is None else torch.empty(shape, dtype=kind, device="meta")
    return QTensor.from_codes(torch.empty(n, k, dtype=torch.int8, device="meta"), scale, zero, form)
