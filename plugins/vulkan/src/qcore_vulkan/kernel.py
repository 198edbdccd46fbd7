"""Common part of the kernels of the three contracts: packing into device memory, and unpacking."""

from __future__ import annotations

import torch
from torch import Tensor

from qcore import Format, Kernel, QTensor
from qcore.plugin_api import Packed, check_weight

from . import ops
from .layout import download
from .weights import find, handle


class HandleKernel(Kernel):
    """A kernel on weights in device memory: made for one `Format` and shape ``(n, k)``."""

    def __init__(self, name: str, format: Format, n: int, k: int) -> None:
        self.name, self.format, self.n, self.k = name, format, n, k

    @property
    def packing(self) -> str:
        """One layout for every contract, so tied layers share the memory."""
        return "vulkan"

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Put the weight on the device. Raises `FormatError` unless it has the kernel's format and shape."""
        check_weight(self.name, weight, self.format, self.n, self.k)
        return {"weight": handle(weight)}

    def unpack(self, packed: Packed) -> QTensor:
        weight = packed["weight"]
        if not torch.compiler.is_compiling():
            return download(find(weight).weight)
        data, scale, *zero = ops.op_unpack(weight, self.n, self.k, str(self.format))
        return QTensor(data, scale, zero[0] if zero else None, (self.n, self.k), self.format)

    def nbytes(self, tensor: Tensor) -> int:
        return find(tensor).weight.nbytes
