"""The graph backend: what torch finds under the name ``qcore_cpu``."""

from __future__ import annotations

import torch
from torch import fx

from qcore.plugin_api import Compiled, GraphBackend, GraphPart, torch_compile_backend

from .. import native


class CpuGraphs(GraphBackend):
    """Each part is one program of the native library."""

    name = "qcore_cpu"

    def why_not_device(self, device: torch.device) -> str:
        if device.type != "cpu":
            return f"qcore_cpu compiles graphs of tensors on cpu, not on {device}"
        return native.fault()

    def why_not(self, node: fx.Node) -> str:
        from . import support

        return support.why_not(node)

    def recognizes(self) -> frozenset[str]:
        return frozenset({"attention", "rms_norm", "rope"})

    def compile(self, part: GraphPart) -> Compiled:
        from torch.utils._python_dispatch import _disable_current_modes

        from .program import Program

        with _disable_current_modes():  # torch calls this while it traces with tensors that have no values
            return Program(part)


qcore_cpu = torch_compile_backend(CpuGraphs())
"""What `torch.compile` calls: the entry point of the group ``torch_dynamo_backends``."""
