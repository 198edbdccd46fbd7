"""Products with float activations: from torch tensors to the kernel that `dispatch` chooses by the number of rows."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from qcore_triton import host
from qcore_triton.weights import FLOAT_ZERO, Weight

from . import few, large, replay, thirds
from .counters import counters
from .device import Device, device_of
from .dispatch import Config, Problem, bucket, choose
from .kernels.gemm import arrange_columns, gemm
from .kernels.slices import slices
from .launch import launch, options
from .replay import empty, provided


def linear(x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``x @ W^T + bias``: x ``(M, K)`` float32, bfloat16 or float16 of any strides, M >= 1, to ``(M, N)``.

    Products are accumulated in float32, the bias is added before the single rounding to ``out_dtype``.
    """
    device, problem = plan(x, weight, out_dtype)
    config = choose(device, problem) if problem.narrow else thirds.choose(device, problem)
    return run(x, weight, bias, out_dtype, device, config)


def plan(x: Tensor, weight: Weight, out_dtype: torch.dtype) -> tuple[Device, Problem]:
    """What `dispatch.choose` is asked for a call."""
    one = weight.scale.shape[0] == 1 and weight.zero_kind != FLOAT_ZERO
    return _plan(x.device, x.dtype, out_dtype, weight.bits, weight.block, weight.n, weight.k, x.shape[0], one)


@lru_cache(maxsize=8192)
def _plan(
    device: torch.device, dtype: torch.dtype, out: torch.dtype, bits: int, block: int, n: int, k: int, m: int, one: bool
) -> tuple[Device, Problem]:
    where, exact = device_of(device), dtype != torch.bfloat16 or out != dtype
    problem = Problem(bits, n, k, bucket(m), block, True, exact, one and out == dtype)
    if dtype == torch.float32:  # see `_in_thirds`: kernels for few rows see three times as many, of 16 bits
        narrow = thirds.PARTS * m <= few.ROWS and (where.asm or bits == 8)
        problem = replace(problem, rows=bucket(thirds.PARTS * m if narrow else m), narrow=narrow, whole=False)
    return where, problem


def forget() -> None:
    """Choose anew from now on: something has been measured."""
    choose.cache_clear()
    thirds.choose.cache_clear()
    replay.forget()


def run(
    x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype, device: Device, config: Config
) -> Tensor:
    """`linear` with a given configuration."""
    if config.kernel == "dense":
        return _dense(x, weight, bias, out_dtype)
    columns = weight.data.shape[1] * (weight.order or 1)
    if x.dtype == torch.float32:
        return _in_thirds(x, weight, bias, out_dtype, device, config, columns)
    x = _aligned(x, columns)
    if config.kernel == "mixed":
        return large.mixed(x, weight, bias, device, config)
    if config.kernel == "gemm":
        if _fragments(weight) and weight.bits == 8:
            x = _arranged(x, columns, device)
        return _gemm(x, x.shape[0], weight, bias, out_dtype, device, config)
    return _few(x, weight, bias, out_dtype, device, config, columns)


def _few(
    x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype, device: Device, config: Config, columns: int
) -> Tensor:
    y = empty((x.shape[0], weight.n), out_dtype, x.device)
    if config.kernel == "gemv":
        few.float_product(x, weight, bias, y, device, few.Shape.of(config))
    else:
        _slices(x, weight, bias, y, device, config, columns)
    return y


def _aligned(x: Tensor, columns: int) -> Tensor:
    """X with ``columns`` columns, rows on 16 bytes: x itself where it is so, else a copy filled up with zeros."""
    stride = x.stride()
    if x.shape[1] == columns and stride[1] == 1 and stride[0] % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    if x.shape[1] == columns:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    filled = x.new_zeros((x.shape[0], columns))
    filled[:, : x.shape[1]] = x
    return filled


def _slices(
    x: Tensor, weight: Weight, bias: Tensor | None, y: Tensor, device: Device, config: Config, columns: int
) -> None:
    scale, zero = weight.scale, weight.zero
    grid = (-(-weight.n // config.bn), -(-x.shape[0] // config.bm))
    launch(
        slices, grid, x, weight.data, scale, scale if zero is None else zero, scale if bias is None else bias, y,
        x.shape[0], weight.n, weight.data.shape[0], weight.k, columns // 32, weight.group, x.stride(0) // 8,
        BK=weight.block, ZERO=weight.zero_kind, BIAS=bias is not None,
        ONE_GROUP=scale.shape[0] == 1, BN=config.bn, BM=config.bm, NW=config.warps, STAGES=config.stages,
        WIDE=device.interpreted, num_stages=config.stages, **options(device, config.warps),
    )  # fmt: skip


def _fragments(weight: Weight) -> bool:
    """Whether `gemm` unpacks codes into the tensor core's registers where they are."""
    return weight.bits == 4 or weight.block == 64


def _gemm(
    x: Tensor, m: int, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype, device: Device, config: Config
) -> Tensor:
    """x: one or more matrices of m rows, whose sum is multiplied; columns in the order of `_arranged`."""
    scale, zero, columns = weight.scale, weight.zero, x.shape[1]
    n, bn, bm, block = weight.n, config.bn, config.bm, weight.block
    one = scale.shape[0] == 1
    blocks = -(-weight.k // block)
    per = blocks if one else weight.group // block
    # Blocks of a step are of one group, or each of another one where scales meet the weight.
    unroll, each = math.gcd(blocks, max(1, (64 if device.hip else 128) * config.unroll // block)), False
    if per > 1 or unroll == 1 or not config.scaled:
        unroll = math.gcd(unroll, per)
    else:
        each, per = True, unroll
    tiles, steps = -(-n // bn) * -(-m // bm), blocks // unroll
    waves, share, programs = large.spread(tiles, steps, config, device)
    y = empty((m, n), out_dtype, x.device)
    left = tiles - waves * programs
    if left:
        parts = empty(((programs + left) * bn * bm,), torch.float32, x.device)
        counts = provided(counters, left, x.device)
    else:  # never touched
        parts, counts = x[:1, :8].view(torch.float32), x[:1, :8].view(torch.int32)
    limit = {"maxnreg": config.registers} if config.registers and device.asm else {}
    scales = 2 if one and weight.zero_kind != FLOAT_ZERO else int(config.scaled)
    launch(
        gemm, (programs,),
        x, weight.data, scale, scale if zero is None else zero, scale if bias is None else bias, y, parts, counts,
        m, n, weight.data.shape[0] * (16 if weight.bits == 4 else 1), steps, per // unroll, x.stride(0) // 8,
        columns // 32, waves, share,
        BITS=weight.bits, P=block, U=unroll, ZERO=weight.zero_kind, BIAS=bias is not None, BN=bn, BM=bm,
        NW=min(config.warps, bn // 16), STAGES=config.stages, FRAG=_fragments(weight),
        SCALES=scales, EACH=each, PARTS=x.shape[0] // m, ALIGNED=n % 8 == 0, GROUP_M=16,
        ASM=device.asm, HOPPER=device.arch == 90, WIDE=device.interpreted,
        num_stages=config.stages, **limit, **options(device, config.warps),
    )  # fmt: skip
    return y


def _arranged(x: Tensor, columns: int, device: Device) -> Tensor:
    """X with its columns in the order in which `gemm` meets them in rows16."""
    m = x.shape[0]
    out = empty((m, columns), x.dtype, x.device)
    launch(
        arrange_columns, (-(-m * columns // 2048),), x, out, m, columns // 2, x.stride(0) // 8,
        B=1024, **options(device, 4),
    )  # fmt: skip
    return out


def _in_thirds(
    x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype, device: Device, config: Config, columns: int
) -> Tensor:
    """Float32 x as the sum of three matrices whose products with codes are exact: added up in `gemm`, else after."""
    if config.kernel == "gemm":
        parts = thirds.split(x, columns, device, arranged=_fragments(weight) and weight.bits == 8)
        return _gemm(parts, x.shape[0], weight, bias, out_dtype, device, config)
    parts = _few(thirds.split(x, columns, device), weight, None, torch.float32, device, config, columns)
    return thirds.add(parts, bias, out_dtype, device)


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The dequantized weight ``(N, K)``: computed in float32, rounded once."""
    return host.dense(launch, weight, dtype, num_warps=4)


def _dense(x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    w = dense(weight, x.dtype)
    if bias is None or bias.dtype == x.dtype:
        return F.linear(x, w, bias)
    return (torch.mm(x, w.t(), out_dtype=torch.float32) + bias.float()).to(out_dtype)
