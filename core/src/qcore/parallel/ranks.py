"""`Ranks`: a process group, and the collectives of tensor parallel, differentiable and traceable.

Every rank computes the same loss from replicated activations (Megatron-LM, arXiv:1909.08053, section 3). So the
gradient of a sum over ranks is passed on as it is, and the gradient of an x that every rank reads is summed.
"""

# ruff: noqa: ARG004 - the arguments of autograd functions are torch's

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UnsupportedError
from ..formats.tracing import is_transformed

if dist.is_available() and not dist.is_initialized():
    # Its functions hold the default group of their first import as a default argument. Dynamo imports it on demand; a
    # group that exists by then outlives destroy_process_group, and its threads abort a process that ends meanwhile.
    importlib.import_module("torch.distributed.nn.functional")

# Renamed in torch 2.13, where the old name warns.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

AllReduce = Callable[[Tensor], Tensor]
"""Replaces the sum over the group: a tensor in, its sum over the ranks out."""


class Ranks:
    """The ranks of a process group: ``rank``, ``size``, and collectives between them.

    **Arguments:** ``group``: a `torch.distributed.ProcessGroup`, a `DeviceMesh` of one dimension, or None for all
    ranks; ``all_reduce``: see `AllReduce`.

    Raises `UnsupportedError` without an initialized process group, for a mesh of more dimensions, and on a process that
    is not in ``group``.
    """

    def __init__(self, group: Any = None, all_reduce: AllReduce | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UnsupportedError(
                "qcore.parallel needs a process group, and none is initialized.\n"
                "Start the program with torchrun and call torch.distributed.init_process_group() first."
            )
        if getattr(group, "ndim", 1) != 1:
            raise UnsupportedError(
                f"the group is a DeviceMesh of {group.ndim} dimensions; layers are cut along one.\n"
                f"Pass that one, such as mesh['tp']."
            )
        self.group = group.get_group() if hasattr(group, "get_group") else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._all_reduce = all_reduce
        if self.rank < 0:
            raise UnsupportedError("this process is not in the process group; call qcore.parallel on its ranks only.")

    def sum(self, y: Tensor) -> Tensor:
        """The sum of ``y`` over the ranks, in its dtype; ``y`` may be overwritten."""
        if self.size == 1:
            return y
        _check_not_transformed()
        if torch.is_grad_enabled() and y.requires_grad:
            return _Sum.apply(y, self)  # type: ignore[no-any-return, no-untyped-call]
        return self.reduced(y)

    def reduced(self, y: Tensor) -> Tensor:
        """As `sum`, without gradients."""
        if self._all_reduce is not None:
            return self._all_reduce(y)
        y = y.contiguous()
        # In place here; torch.compile traces it as a functional collective.
        dist.all_reduce(y, group=self.group)
        return y

    @property
    def may_overlap(self) -> bool:
        """Whether `overlapped` can stand for `sum` here: without gradients, a compiler or another all_reduce."""
        plain = self._all_reduce is None and not torch.is_grad_enabled()
        return self.size > 1 and plain and not torch.compiler.is_compiling()

    def overlapped(self, parts: Iterable[Tensor]) -> list[Tensor]:
        """The sums of tensors over the ranks, in place; each is summed while ``parts`` computes the next one."""
        _check_not_transformed()
        found, works = [], []
        for part in parts:
            y = part.contiguous()
            works.append(dist.all_reduce(y, group=self.group, async_op=True))
            found.append(y)
        for work in works:
            work.wait()
        return found

    def max(self, values: Tensor) -> Tensor:
        """The maximum over the ranks; a NaN becomes infinity, because a reduction may drop NaN."""
        found = torch.where(values.isnan(), torch.inf, values).contiguous()
        if self.size > 1:
            _check_not_transformed()
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return found

    def shared(self, x: Tensor) -> Tensor:
        """``x``, which every rank reads: its gradient is the sum of theirs."""
        if self.size > 1:
            _check_not_transformed()
        if self.size > 1 and torch.is_grad_enabled() and x.requires_grad:
            return _Shared.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]
        return x

    def joined(self, y: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """The columns of every rank, ``(..., sum(lengths))``; ``y``: this rank's, ``(..., lengths[rank])``."""
        if self.size == 1:
            return y
        _check_not_transformed()
        if torch.is_grad_enabled() and y.requires_grad:
            return _Join.apply(y, self, lengths)  # type: ignore[no-any-return, no-untyped-call]
        return self.gathered(y, lengths)

    def gathered(self, y: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """As `joined`, without gradients."""
        longest = max(lengths)
        own = torch.nn.functional.pad(y, (0, longest - y.shape[-1])).contiguous()
        every = own.new_empty((self.size * own.numel(),))
        _all_gather(every, own.view(-1), group=self.group)
        parts = every.view(self.size, *own.shape)
        return torch.cat([parts[r][..., :length] for r, length in enumerate(lengths)], -1)

    def __deepcopy__(self, _memo: Any) -> Ranks:
        return self

    def __reduce__(self) -> Any:
        if self.group is not None or self._all_reduce is not None:
            raise UnsupportedError(
                "a layer of qcore.parallel with a process group of its own cannot be pickled.\n"
                "Save its state_dict(), one file per rank."
            )
        return Ranks, ()


def _check_not_transformed() -> None:
    """Raise `UnsupportedError` under a transform of ``torch.func`` or in forward mode.

    A collective would sum results without their derivatives.
    """
    if not torch.compiler.is_compiling() and is_transformed():
        raise UnsupportedError(
            "layers of qcore.parallel have no derivatives under transforms of torch.func and in forward mode.\n"
            "Use backward(), or compute them with the whole layers on one device."
        )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: Ranks) -> Tensor:
        return ranks.reduced(y.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.ranks.reduced(grads[0].clone()), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: Ranks, lengths: tuple[int, ...]) -> Tensor:
        ctx.start, ctx.length = sum(lengths[: ranks.rank]), lengths[ranks.rank]
        return ranks.gathered(y, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].narrow(-1, ctx.start, ctx.length), None, None
