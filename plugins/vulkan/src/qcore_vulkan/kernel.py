"""Common part of the kernels of all contracts: packing into device memory, and unpacking."""

from __future__ import annotations

import torch
from torch import Tensor

from qcore import Format, Kernel, QTensor, ZeroPoint
from qcore.plugin_api import Activation, Packed, check_weight

from . import ops
from .layout import download
from .weights import find, handle


def precision(weight: Format, activation: Activation | None) -> str:
    """The part of a kernel's name that tells its numbers, such as w4a16."""
    element = weight.element
    return f"w{element.bits if element.is_integer else element.name}a{16 if activation is None else 8}"


class HandleKernel(Kernel):
    """A kernel on weights in device memory: made for one `Format` and shape, ``(n, k)`` or ``(experts, n, k)``."""

    def __init__(self, name: str, format: Format, *shape: int) -> None:
        self.name, self.format, self.shape = name, format, shape
        self.n, self.k = shape[-2:]

    @property
    def packing(self) -> str:
        """One layout for every contract, so tied layers share the memory."""
        return "vulkan" if len(self.shape) == 2 else "vulkan.experts"

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Put the weight on the device. Raises `FormatError` unless it has the kernel's format and shape."""
        check_weight(self.name, weight, self.format, *self.shape)
        return {"weight": handle(weight)}

    def unpack(self, packed: Packed) -> QTensor:
        weight = packed["weight"]
        if not torch.compiler.is_compiling():
            return download(find(weight).weight)
        data, scale, *rest = ops.op_unpack(weight, self.shape, str(self.format))
        zero = None if self.format.zero is ZeroPoint.NONE else rest.pop(0)
        return QTensor(data, scale, zero, self.shape, self.format, global_scale=rest[0] if rest else None)

    def nbytes(self, tensor: Tensor) -> int:
        return find(tensor).weight.nbytes
