"""The graph backend: what torch finds under the name ``qcore_vulkan``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from qcore.plugin_api import Compiled, GraphBackend, GraphPart, Unavailable, torch_compile_backend

from .. import probe


class VulkanGraphs(GraphBackend):
    """Each part is one recorded program: one submission per call."""

    name = "qcore_vulkan"
    defers_writes = True

    def why_not_device(self, device: torch.device) -> str:
        if device.type != "cpu":
            return f"qcore_vulkan compiles graphs of tensors on cpu, not on {device}"
        found = probe.probe()
        return found.reason if isinstance(found, Unavailable) else ""

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

    def synchronize(self, tensors: Sequence[Tensor]) -> None:
        from .states import synchronize

        synchronize(tensors)

    def synchronize_all(self) -> bool:
        from .states import synchronize_all

        return synchronize_all()


qcore_vulkan = torch_compile_backend(VulkanGraphs())
"""What `torch.compile` calls: the entry point of the group ``torch_dynamo_backends``."""
