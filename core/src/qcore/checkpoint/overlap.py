"""Check whether tensors that overlap in memory can each hold their own value, by writing to a copy of the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .values import same_bits

Write = tuple[str, Tensor, Tensor]
"""Name, tensor to write to, and value of the same dtype and shape."""


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements of a tensor share one memory location, so that it cannot be written to."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def find_conflict(writes: Sequence[Write]) -> str:
    """Return the name of a tensor that would not hold its value after all writes, or an empty string."""
    for cluster in _clusters(writes):
        if len(cluster) > 1 or not _is_dense(cluster[0][1]):
            name = _conflicting_name(cluster)
            if name:
                return name
    return ""


def _is_dense(tensor: Tensor) -> bool:
    """Whether the strides have no gaps, which implies that no two elements share a memory location."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _clusters(writes: Sequence[Write]) -> Iterator[list[Write]]:
    """Yield groups of tensors whose memory ranges overlap."""
    spans = sorted((*_span(slot), i) for i, (_, slot, _) in enumerate(writes) if slot.numel())
    cluster: list[Write] = []
    reach: tuple[str, int] = ("", 0)
    for device, start, end, i in spans:
        if cluster and (device != reach[0] or start >= reach[1]):
            yield cluster
            cluster = []
        reach = device, max(end, reach[1]) if cluster else end
        cluster.append(writes[i])
    if cluster:
        yield cluster


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Return device, first byte and end of a tensor's memory. Memory without an address is unique to its tensor."""
    try:
        start = tensor.data_ptr()
    except RuntimeError:
        start = 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not start:
        return f"{tensor.device}, object {id(tensor)}", 0, 1
    return str(tensor.device), start, start + (last + 1) * tensor.element_size()


def _conflicting_name(cluster: Sequence[Write]) -> str:
    low = min(_span(slot)[1] for _, slot, _ in cluster)
    low -= low % 16  # alignment of the widest dtype
    high = max(_span(slot)[2] for _, slot, _ in cluster)
    memory = torch.zeros(high - low, dtype=torch.uint8).untyped_storage()
    twins = [_twin(slot, memory, _span(slot)[1] - low) for _, slot, _ in cluster]
    for twin, (_, _, value) in zip(twins, cluster, strict=True):
        twin.copy_(value)
    for twin, (name, _, value) in zip(twins, cluster, strict=True):
        if not same_bits(twin, value):
            return name
    return ""


def _twin(slot: Tensor, memory: torch.UntypedStorage, offset: int) -> Tensor:
    plain = torch.empty(0, dtype=slot.dtype)
    twin = plain.set_(memory, offset // slot.element_size(), slot.shape, slot.stride())
    twin = twin.conj() if slot.is_conj() else twin
    return torch._neg_view(twin) if slot.is_neg() else twin  # noqa: SLF001
