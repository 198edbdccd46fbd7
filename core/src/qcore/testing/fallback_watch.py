"""Observe a running kernel: whether it delegates its work to qcore, and which ops it dispatches.

A kernel of a plugin that calls `qcore.linear`, resolves, or runs a kernel of the built-in fallback would pass every
numerical test without computing anything itself. However it obtained those functions, a call enters their code, which a
profile function sees.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

_PACKAGE_DIR = str(Path(__file__).resolve().parents[1]) + os.sep
"""Ends with a separator, because installed wheels put ``qcore_cuda`` next to ``qcore``."""
_FORBIDDEN = (
    "functional/calls.py", "functional/torch_ops.py", "model/", "nn/", "resolving/binding.py", "resolving/resolver.py",
)  # fmt: skip
"""Modules and packages of qcore that compute a result or resolve a kernel."""
_KERNEL_METHODS = ("__call__", "run", "qcore_linear", "qcore_conv2d", "qcore_embedding")
_TORCH = frozenset((
    "_c10d_functional", "_quantized", "_test", "aten", "c10d", "c10d_functional", "cuda", "debugprims", "fsdp",
    "higher_order", "inductor", "mkl", "mkldnn", "mkldnn_prepacked", "mps", "onednn", "prim", "prims", "profiler",
    "qcore", "quantized", "quantized_decomposed", "rngprims", "sparse", "static_runtime", "streams", "symm_mem",
    "tensorexpr", "torchvision", "xnnpack",
))  # fmt: skip
"""Namespaces of ops that torch or qcore register."""


class Watch:
    """Records calls of qcore's own functions that compute results, while it is active."""

    def __init__(self, *, is_fallback: bool) -> None:
        self._is_fallback = is_fallback
        self._known: dict[CodeType, bool] = {}
        self.entered: list[str] = []

    def __enter__(self) -> Self:
        self.entered = []
        self._before = sys.getprofile()
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(self._before)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        forbidden = self._known.get(code)
        if forbidden is None:
            forbidden = self._known[code] = self._forbids(code)
        if forbidden:
            self.entered.append(f"{Path(code.co_filename).relative_to(_PACKAGE_DIR)}:{code.co_name}")

    def _forbids(self, code: CodeType) -> bool:
        if not code.co_filename.startswith(_PACKAGE_DIR):
            return False
        path = Path(code.co_filename).relative_to(_PACKAGE_DIR).as_posix()
        if path.startswith("fallback/"):
            return code.co_name in _KERNEL_METHODS and not self._is_fallback
        return path.startswith(_FORBIDDEN)


class OwnOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects calls of ops that a plugin registered, that is, ops of neither torch nor qcore."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in _TORCH:
            self.calls.setdefault(func, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def watching(self, call: Any) -> Any:
        """Wrap ``call`` so that its ops are collected whenever it runs."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return call(*args, **kwargs)

        return watched
