"""Quantized layers within ``torch.vmap``: a batch is one node, where torch's own rule makes one for each element.

Compilers take minutes for the latter. Registered when the first graph backend is imported: it takes a while.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..nn import graph_ops

_ops: Any = torch.ops.qcore_graph


def _batched(op: Any, info: Any, in_dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
    """A call whose x has a further dimension; one for each element if it is not x alone that has."""
    dims = [dim if isinstance(dim, int) else None for dim in in_dims]  # of a list: one for each of its elements
    if dims[0] is None or any(dim is not None for dim in dims[1:]) or op is _ops.grouped_linear.default:
        given = zip(dims, (x, *rest), strict=True)
        each = zip(*([one] * info.batch_size if dim is None else one.unbind(dim) for dim, one in given), strict=True)
        return torch.stack([op(*args) for args in each]), 0
    x = x.movedim(dims[0], 0)
    if op is not _ops.conv2d.default:  # rows are independent of each other, as are images
        return op(x, *rest), 0
    return op(x.flatten(0, 1), *rest).unflatten(0, x.shape[:2]), 0


for _op in (_ops.linear, _ops.embedding, _ops.grouped_linear, _ops.conv2d):
    torch.library.register_vmap(_op.default, partial(_batched, _op.default), lib=graph_ops._library)  # noqa: SLF001
