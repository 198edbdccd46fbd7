"""Descriptions of the neutral tensors of a weight that does not exist yet, for engines that allocate and shard them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import FormatError
from ..formats import Format, ZeroPoint


@dataclass(frozen=True)
class Part:
    """One neutral tensor of a quantized weight.

    **Fields:** ``name``: as in `QTensor.tensors`; ``dtype``, ``shape``; ``n_dim``, ``k_dim``: the dimension that output
    features and input features run along, None if the tensor has no such dimension (or one entry for all of K);
    ``k_unit``: input features per entry along ``k_dim``: 2 for packed nibbles, the group size for scales.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    n_dim: int | None
    k_dim: int | None
    k_unit: int = 1


def parts(format: Format, n: int, k: int, scale_dtype: torch.dtype = torch.float32) -> tuple[Part, ...]:
    """The tensors of a weight ``(n, k)`` in ``format``, in the order of `QTensor.tensors`, without its order.

    **Arguments:** ``scale_dtype``: of a `ScaleType.FLOAT` scale; other scale types have dtypes of their own.

    Raises `FormatError` for negative sizes and for a dtype that a scale cannot have.
    """
    if n < 0 or k < 0:
        raise FormatError(f"a weight cannot have shape {(n, k)}; sizes must not be negative.")
    dtypes = format.scale.dtypes
    stored = scale_dtype if len(dtypes) > 1 else dtypes[0]
    if stored not in dtypes:
        raise FormatError(f"scale_dtype is {scale_dtype}; it must be float32, bfloat16 or float16.")
    codes = torch.empty(n, k, dtype=format.element.code_dtype, device="meta")
    data = format.codec.encode(codes)
    whole = data.dim() == 2 and data.shape[0] == n
    unit = -(-k // max(1, data.shape[1])) if whole else 1
    groups, span = (format.groups(k), n), format.group(k)
    grouped = None if format.group_size is None else 0
    found = [
        Part("data", data.dtype, tuple(data.shape), 0 if whole else None, 1 if whole else None, max(1, unit)),
        Part("scale", stored, groups, 1, grouped, span),
    ]
    if format.zero is not ZeroPoint.NONE:
        dtype = torch.int8 if format.zero is ZeroPoint.INT else stored
        found.append(Part("zero", dtype, groups, 1, grouped, span))
    if format.scale.has_global:
        found.append(Part("global_scale", torch.float32, (), None, None))
    return tuple(found)
