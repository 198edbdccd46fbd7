"""The return types of plugin hooks: `Offer` with a `Kernel`, `Refusal`, `Available` and `Unavailable`."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError
from ..formats import Format
from ..weights.qtensor import QTensor

Packed = Mapping[str, Tensor]
"""A packed weight: tensors by name, on the kernel's device."""


def define_op(
    library: torch.library.Library,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    keys: Iterable[str],
) -> Any:
    """Register an op of a plugin; returns its overload, to be called.

    **Arguments:** ``library``: a fragment of the plugin's own namespace, which the plugin keeps alive as long as the
    op; ``schema``: ``"name(Tensor x, ...) -> Tensor"``; ``implementation``: registered for the dispatch ``keys``
    ("CPU", "CUDA", ...); ``fake``: same signature, returns an empty tensor like the result.
    """
    name, namespace = schema.partition("(")[0], library.ns
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    for key in keys:
        library.impl(name, implementation, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, namespace), name).default


def check_weight(name: str, weight: QTensor, format: Format, *shape: int) -> None:
    """Raise `FormatError` unless ``weight`` has ``shape``, N and K or E, N and K, and ``format``.

    ``name``: of the kernel, for the message. Call it first in `Kernel.pack`.
    """
    if weight.format != format or tuple(weight.shape) != shape:
        raise FormatError(
            f"{name} was made for {format} of shape {shape};\n"
            f"it cannot pack {weight.format} of shape {tuple(weight.shape)}."
        )


class Rank(enum.IntEnum):
    """How good an offer is. Fine-tune by adding a small number: ``Rank.NATIVE + 5``.

    Be honest: a kernel that is slower than the fallback on this machine must rank below `FALLBACK`.
    """

    EMULATED = 0
    """Runs on a software device: correct, slow, selected only on request."""
    FALLBACK = 1000
    """Torch ops."""
    OFFLOAD = 2000
    """Runs on a device other than the tensors', copying activations back and forth."""
    NATIVE = 3000
    """Runs on the device of the tensors."""


EMULATED, FALLBACK, OFFLOAD, NATIVE = Rank


class Kernel(ABC):
    """An implementation of one request. Plugins subclass it; many layers and threads may share an instance.

    A kernel holds no weight: all state of a weight is in the tensors that `pack` returns.
    """

    name: str
    """``plugin.kernel``, e.g. ``"cuda.w4a16"``. Packed tensors are shared between kernels of equal `packing`."""

    @property
    def packing(self) -> str:
        """The name of the packed layout; kernels of equal packing can read each other's packed tensors."""
        return self.name

    @abstractmethod
    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Pack ``weight``, which is in a neutral layout, into this kernel's tensors on ``weight.device``."""

    @abstractmethod
    def unpack(self, packed: Packed) -> QTensor:
        """The inverse of `pack`, bit for bit: ``unpack(pack(w)) == w`` in data, scale, zero, shape and format."""

    @abstractmethod
    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **runtime_params: Tensor) -> Tensor:
        """Compute the contract's result from x, the packed weight and the bias.

        ``runtime_params`` holds per-token parameters (``x_scale``, ``x_zero_point``, ``out_scale``, ``out_zero_point``,
        each of shape ``(tokens,)``) if the request's activation or output is ``per_token``, and the ``offsets`` of
        ``grouped_linear``; otherwise it is empty. A kernel that refuses such requests may omit it from its signature.
        An embedding kernel gets the indices as x.
        """

    def tune(self, x: Tensor, packed: Packed, bias: Tensor | None, **runtime_params: Tensor) -> None:  # noqa: B027 - optional
        """Measure the kernel's own choices (tile sizes, say) for calls like this one, and keep the best on disk.

        ``qcore tune`` calls it before it measures the kernel. Override it only if the kernel has parameters to tune.
        """

    def nbytes(self, tensor: Tensor) -> int:
        """Bytes that one packed tensor represents: its own size, unless it is a handle to memory elsewhere."""
        return tensor.numel() * tensor.element_size()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {getattr(self, 'name', '?')}>"


class RowsKernel(Kernel):
    """A `Kernel` for ``linear`` that gets x as a matrix: a subclass writes `run` and sets ``n``, ``k``, ``out_dtype``.

    Leading dimensions of x, an x without rows, a wrong K, and strides of bias and runtime parameters are handled
    here, at the cost of a few attribute reads.
    """

    n: int
    """Output features."""
    k: int
    """Input features."""
    out_dtype: torch.dtype
    """The dtype of the result."""

    @abstractmethod
    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **runtime_params: Tensor) -> Tensor:
        """The product for x ``(M, K)`` of any strides; M is at least 1 outside of a trace. Returns ``(M, N)``.

        ``bias`` and ``runtime_params`` are contiguous.
        """

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **runtime_params: Tensor) -> Tensor:
        """Run on x ``(..., K)``, giving ``(..., N)``; raises `FormatError` for another K."""
        shape = x.shape
        if not shape or shape[-1] != self.k:
            raise self._wrong_input(x)
        if not torch.compiler.is_compiling() and not x.numel() and self.k:
            return x.new_empty((*shape[:-1], self.n), dtype=self.out_dtype)
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        if runtime_params:
            runtime_params = {name: value.contiguous() for name, value in runtime_params.items()}
        if len(shape) == 2:
            return self.run(x, packed, bias, **runtime_params)
        rows = -1 if self.k else shape[:-1].numel()  # reshape cannot infer -1 if K is 0
        return self.run(x.reshape(rows, self.k), packed, bias, **runtime_params).reshape(*shape[:-1], self.n)

    def _wrong_input(self, x: Tensor) -> FormatError:
        return FormatError(
            f"{self.name}: x has shape {tuple(x.shape)}; its last dimension must be K={self.k}.\n"
            f"The weight is (N, K) = ({self.n}, {self.k})."
        )


@dataclass(frozen=True)
class Offer:
    """A plugin supports the request.

    **Fields:** ``kernel``; ``rank``: a `Rank`, fine-tuned by a small int; ``note``: a sentence for the decision table.
    """

    kernel: Kernel
    rank: int = Rank.NATIVE
    note: str = ""


@dataclass(frozen=True)
class Refusal:
    """A plugin does not support the request; ``reason`` is a sentence that a user can act on."""

    reason: str


@dataclass(frozen=True)
class Available:
    """A plugin's device is present.

    **Fields:** ``device``: its name; ``driver``: driver and toolchain versions (part of the cache key of
    verification verdicts); ``details``: further facts for ``qcore doctor``.
    """

    device: str = ""
    driver: str = ""
    details: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Unavailable:
    """A plugin's device is absent or unusable.

    **Fields:** ``reason``: a sentence with the remedy; ``broken``: True if the hardware is present but unusable
    (driver, toolchain), which is warned about once; False is silent.
    """

    reason: str
    broken: bool = False
