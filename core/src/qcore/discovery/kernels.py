"""What a plugin answers with: `Kernel`, and `Offer` or `Refusal`."""

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

# Dispatch is asked for its state, for which torch has no public way.
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_transforms = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
_traced = torch._C._is_tracing  # noqa: SLF001


def runs_now(x: Tensor) -> bool:
    """Whether a call on x is what it looks like: no trace, no fake tensor, no mode or transform that wants the op.

    A kernel may then call what is behind its op, which saves the 3 to 4 microseconds that torch takes to get there.
    An x with the negative bit (``c.conj().imag``) goes by the op, too: memory holds ``-x``, and dispatch negates it.
    """
    compiling = torch.compiler.is_compiling()
    return not (compiling or type(x) is not Tensor or x.is_neg() or _modes() or is_traced())


def is_traced() -> bool:
    """Whether ``torch.jit.trace`` or a transform of ``torch.func`` is at work."""
    return _transforms() is not None or _traced()


def define_op(
    library: torch.library.Library,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    keys: Iterable[str],
) -> Any:
    """Register an op of a plugin; returns its overload, to be called.

    **Arguments:** ``library``: a fragment of the plugin's own namespace, kept by the plugin as long as the op shall
    live; ``schema``: ``"name(Tensor x, ...) -> Tensor"``; ``implementation`` serves the dispatch ``keys`` ("CPU",
    "CUDA", ...); ``fake``: of the same signature, gives shape, dtype and device of the result without computing it.
    """
    name, namespace = schema.partition("(")[0], library.ns
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    for key in keys:
        library.impl(name, implementation, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, namespace), name).default


def check_weight(name: str, weight: QTensor, format: Format, n: int, k: int) -> None:
    """Raise `FormatError`, in the name of a kernel, unless ``weight`` is what it was made for.

    That is a weight ``(n, k)`` in ``format``. What a kernel's `pack` asks first.
    """
    if weight.format != format or tuple(weight.shape) != (n, k):
        raise FormatError(
            f"{name} was made for {format} of shape {(n, k)};\n"
            f"it cannot pack {weight.format} of shape {tuple(weight.shape)}."
        )


class Rank(enum.IntEnum):
    """How good an offer is. Fine-tune by adding a small number: ``Rank.NATIVE + 5``.

    Be honest: a kernel that is slower than the fallback on this machine offers below `FALLBACK`.
    """

    EMULATED = 0
    """Runs on a software device: right, slow, only on request."""
    FALLBACK = 1000
    """Torch ops."""
    OFFLOAD = 2000
    """Runs on a device other than the tensors', copying activations back and forth."""
    NATIVE = 3000
    """Runs where the tensors are."""


EMULATED, FALLBACK, OFFLOAD, NATIVE = Rank


class Kernel(ABC):
    """One way to serve one request. A plugin subclasses this; an instance may be shared by many layers and threads.

    A kernel keeps no weight: what it needs of one is in the tensors that `pack` returns.
    """

    name: str
    """``plugin.kernel``, e.g. ``"cuda.w4a16"``. Packed tensors are shared between kernels of equal `packing`."""

    @property
    def packing(self) -> str:
        """What `pack` produces; kernels that say the same here can read each other's packed tensors."""
        return self.name

    @abstractmethod
    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """The weight as this kernel wants it, as tensors on ``weight.device``; ``weight`` is in a neutral layout."""

    @abstractmethod
    def unpack(self, packed: Packed) -> QTensor:
        """The inverse of `pack`, bit for bit: ``unpack(pack(w)) == w`` in data, scale, zero, shape and format."""

    @abstractmethod
    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        """Run it: x, packed weight and bias to the contract's result.

        ``given`` holds per-token parameters (``x_scale``, ``x_zero_point``, ``out_scale``, ``out_zero_point``, each of
        shape ``(tokens,)``) and is empty unless the request's activation or output says ``per_token``; a kernel that
        refuses such requests may leave it out of its signature. An embedding kernel gets the indices as x.
        """

    def tune(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> None:  # noqa: B027 - optional
        """Measure the kernel's own choices (tile sizes, say) for calls like this one, and keep the best on disk.

        ``qcore tune`` calls it before it measures the kernel. A kernel that has nothing to choose leaves it as it is.
        """

    def nbytes(self, tensor: Tensor) -> int:
        """Bytes that one packed tensor stands for: its own, unless it is a handle on memory elsewhere."""
        return tensor.numel() * tensor.element_size()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {getattr(self, 'name', '?')}>"


class RowsKernel(Kernel):
    """A `Kernel` for ``linear`` that sees x as a matrix: a subclass writes `run` and sets ``n``, ``k``, ``out_dtype``.

    Leading dimensions of x, an x without rows, a wrong K, and strides of bias and given parameters are dealt with
    here, at the price of a few attribute reads.
    """

    n: int
    """Output features."""
    k: int
    """Input features."""
    out_dtype: torch.dtype
    """The dtype of the result."""

    @abstractmethod
    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        """The product for x ``(M, K)`` of any strides; M is at least 1 outside of a trace. Returns ``(M, N)``.

        ``bias`` and ``given`` are contiguous.
        """

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        """Run on x ``(..., K)``, giving ``(..., N)``; raises `FormatError` for another K."""
        shape = x.shape
        if not shape or shape[-1] != self.k:
            raise self._wrong_input(x)
        if not torch.compiler.is_compiling() and not x.numel() and self.k:
            return x.new_empty((*shape[:-1], self.n), dtype=self.out_dtype)
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        if given:
            given = {name: value.contiguous() for name, value in given.items()}
        if len(shape) == 2:
            return self.run(x, packed, bias, **given)
        rows = -1 if self.k else shape[:-1].numel()  # nothing says how many rows of no columns there are
        return self.run(x.reshape(rows, self.k), packed, bias, **given).reshape(*shape[:-1], self.n)

    def _wrong_input(self, x: Tensor) -> FormatError:
        return FormatError(
            f"{self.name}: x has shape {tuple(x.shape)}; its last dimension must be K={self.k}.\n"
            f"The weight is (N, K) = ({self.n}, {self.k})."
        )


@dataclass(frozen=True)
class Offer:
    """A plugin can serve the request.

    **Fields:** ``kernel``; ``rank``: a `Rank`, fine-tuned by a small int; ``note``: a sentence for the decision table.
    """

    kernel: Kernel
    rank: int = Rank.NATIVE
    note: str = ""


@dataclass(frozen=True)
class Refusal:
    """A plugin cannot serve the request; ``reason`` is a sentence that a user can act on."""

    reason: str


@dataclass(frozen=True)
class Available:
    """A plugin's device is here.

    **Fields:** ``device``: what it is, in words; ``driver``: driver and toolchain versions (part of the key under which
    verdicts on kernels are kept); ``details``: anything else ``qcore doctor`` should show.
    """

    device: str = ""
    driver: str = ""
    details: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Unavailable:
    """A plugin's device is not here, or cannot be used.

    **Fields:** ``reason``: a sentence with the remedy; ``broken``: True where the hardware is present but something is
    wrong with it (driver, toolchain), which is worth one warning; False is silent.
    """

    reason: str
    broken: bool = False
