"""The graph backend: what torch finds under the name ``qcore_xla``."""

from __future__ import annotations

import torch
from torch import fx

from qcore.plugin_api import Compiled, GraphBackend, GraphPart, torch_compile_backend

from .. import environment


class XlaGraphs(GraphBackend):
    """Each part is one program of XLA, which fuses by itself."""

    name = "qcore_xla"
    counts_writes = True

    def why_not_device(self, device: torch.device) -> str:
        if device.type not in {"cpu", "cuda"}:
            return f"qcore_xla compiles graphs of tensors on cpu and cuda, not on {device}"
        return environment.why_not(device.type)

    def why_not(self, node: fx.Node) -> str:
        from . import lowering

        return lowering.why_not(node)

    def recognizes(self) -> frozenset[str]:
        # Keys of grouped heads are read once; norms and rotations have kernels for one token; XLA fuses the rest.
        return frozenset({"attention", "rms_norm", "rope"})

    def compile(self, part: GraphPart) -> Compiled:
        from .by_cuts import ByCuts

        return ByCuts(part)


qcore_xla = torch_compile_backend(XlaGraphs())
"""What `torch.compile` calls: the entry point of the group ``torch_dynamo_backends``."""
