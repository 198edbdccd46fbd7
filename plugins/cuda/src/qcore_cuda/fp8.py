"""Products with e4m3 activations: quantization, and one of five ways to multiply.

On GPUs whose tensor cores take e4m3, many rows are multiplied by `kernels.fp8_hopper` (sm_90), with scales per row or
per 128 columns, or by torch's scaled product (sm_89 and later), with scales per row. The codes of int4 weights are
exact in e4m3, too, and are written as such for each product of many rows. Few rows, and everything else,
take the kernels for float activations: codes with one scale per row are exact in 16-bit floats, and their float32 sums
are scaled by the kernels for few rows and for Hopper, elsewhere afterwards; with scales per group of columns, sums of
blocks are scaled by the kernel for few rows; for the one for Hopper the quantized activations are float16 numbers, in
units of a power of two of each row, which loses less than the sums of e4m3; elsewhere they are float32 numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from qcore_triton import host
from qcore_triton.geometry import power_of_two
from qcore_triton.host import CODE_ROWS
from qcore_triton.weights import INTEGER, TABLE, Weight

from . import weight_only
from .kernels import fp8
from .problem import Form, GemmProblem, float_problem, form_of
from .products.aligned import finished, result
from .products.base import Choice
from .products.chunks import GEMV_CHUNKS, GemvChunks
from .products.gemm_hopper import GEMM_HOPPER, GEMM_HOPPER_64, GemmHopper
from .products.gemv import GEMV, Gemv
from .products.quantized import rows_in_memory
from .products.skinny_gemm import ROWS
from .runtime import hopper
from .runtime.device import Device, device_of
from .runtime.launch import launch, options
from .runtime.replay import empty
from .selection import choose_among, estimated

BLOCK = 128
"""Columns that share a scale where e4m3 is multiplied by e4m3, if a row has several."""
TWO_LEVEL, SCALED, TOKENS, SUMS, NUMBERS = "fp8_hopper", "scaled", "tokens", "sums", "numbers"
"""The ways: the kernel for Hopper; torch's product; codes in float16, whose kernel scales sums by token; the same in
bfloat16 and two kernels; float32 activations."""
NARROW = 2
"""Bytes of a result that the kernel for Hopper stores."""
_EXPANDED = {NUMBERS: 128, SUMS: 256, TOKENS: 1024}
"""The most rows for which int4 codes are not written as e4m3, which holds them exactly, by the way that they take."""
_FEW = 8
"""The most rows for which other ways are faster than `kernels.fp8_hopper` with a scale per row; otherwise `ROWS`."""
_TOKENS = 128
"""Tokens of a tile of `kernels.fp8_hopper`."""
_TILE_TIMES = {256: 1.0, 128: 0.55, 64: 0.4}
"""Relative time of a tile of `kernels.fp8_hopper` by its rows of the weight."""
_START, _STEP = 1.0, 0.24
"""Microseconds of `kernels.fp8_hopper` at all, and for 128 columns of a tile of 64 rows, while half of all
multiprocessors have none (as measured on an H200)."""
_COLUMNS = 2048
_HARDWARE = 89
"""The first architecture with e4m3."""


def product(
    x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype, group: int, static: float | None,
    squares: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``A(x) @ W^T + bias``: x ``(M, K)`` of any strides, M >= 1, to ``(M, N)`` of ``out_dtype``.

    ``group``: columns of x that share a scale, 0 for one scale per row; ``static``: the scale of all x, if given;
    ``squares``: `packing.blocks_of` the weight's scales, or None.
    """
    device = device_of(x.device)
    way = way_of(device, form_of(weight), x.shape[0], group, out_dtype, None if bias is None else bias.dtype)
    if way == NUMBERS:
        values, _ = _by_group(x, x.shape[1], group, torch.float32, device)
        return weight_only.linear(values, weight, bias, out_dtype)
    if way == TOKENS:
        return _by_tokens(x, weight, bias, out_dtype, group, static, device)
    if way == SUMS:
        codes, scale = _by_row(x, weight.columns, torch.bfloat16, static, device)
        return _finish(weight_only.linear(codes, weight, None, torch.float32), scale, bias, out_dtype, device)
    if weight.bits == 4:
        codes = host.dense(launch, empty, weight, torch.float8_e4m3fn, scaled=False, num_warps=4)
        weight = weight._replace(data=codes.view(torch.int8), bits=8)
    columns = weight.data.shape[1]
    if group:
        codes, scale = _by_group(x, columns, group, torch.uint8, device)
    else:
        blocks = weight.scale.shape[0]
        codes, scale = _by_row(x, columns, torch.uint8, static, device, blocks if blocks > 1 else 0)
    if way == TWO_LEVEL:
        return two_level(codes, scale, weight, bias, out_dtype, squares)
    return scaled(codes, scale, weight, bias, out_dtype)


def scaled(codes: Tensor, scale: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The scaled product of torch, of bytes ``(M, KQ)`` with scales ``(M,)``."""
    kind = torch.float8_e4m3fn
    return torch._scaled_mm(  # noqa: SLF001 - the versions supported have no public name for it
        codes.view(kind), weight.data[: weight.n].view(kind).t(), scale.view(-1, 1),
        weight.scale[:, : weight.n].float(), bias, out_dtype=out_dtype, use_fast_accum=False,
    )  # fmt: skip


def two_level(
    codes: Tensor, scale: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype, squares: Tensor | None
) -> Tensor:
    """The product of bytes ``(M, KQ)`` by `kernels.fp8_hopper`; scales ``(M,)`` or, of blocks, ``(KQ / 128, M)``."""
    from .kernels.fp8_hopper import fp8_hopper

    (m, wide), n, device, rows = codes.shape, weight.n, device_of(codes.device), _TOKENS
    blocks = scale.dim() == 2
    bn = _rows_of_tile(device, m, n, blocks=blocks)
    by_row = weight.scale if squares is None else squares
    y = result(m, n, out_dtype, codes.device)
    x = codes.as_strided((rows_in_memory(codes), wide), codes.stride()).view(torch.float8_e4m3fn)
    stages = (hopper.ROOM - 4 * 64 * 64 * 2) // ((rows + bn) * 128)
    tiles = -(-n // bn) * -(-m // rows)
    launch(
        fp8_hopper, (min(tiles, device.sms),), hopper.descriptor(x, (rows, 128)), scale,
        hopper.descriptor(weight.data.view(torch.float8_e4m3fn), (bn, 128)), by_row,
        by_row if bias is None else bias, y, hopper.descriptor(y, (64, 64)), m, n, -(-wide // 128),
        BM=rows, BN=bn, STAGES=stages, GROUP_M=16, BLOCKS=blocks,
        SQUARE=squares is not None, ALIGNED=n % 16 == 0, HAS_BIAS=bias is not None,
        **options(device, 4),
    )  # fmt: skip
    return finished(y, n, device)


def _rows_of_tile(device: Device, m: int, n: int, *, blocks: bool) -> int:
    """Rows of the weight in a tile of `kernels.fp8_hopper`: those for which programs have the least to do.

    ``blocks``: with scales of blocks, which take registers, too.
    """

    def cost(size: int) -> float:
        tiles = -(-n // size) * -(-m // _TOKENS)
        return -(-tiles // device.sms) * _TILE_TIMES[size]

    return min((size for size in _TILE_TIMES if not (blocks and size > BLOCK)), key=cost)


@lru_cache(maxsize=8192)
def way_of(device: Device, form: Form, m: int, group: int, out_dtype: torch.dtype, bias: torch.dtype | None) -> str:
    """How a product of m rows is computed."""
    scaled_there, on_hopper = _by_token(device, form, m, group, out_dtype) is not None, hopper.fits(device, BLOCK)
    own = TOKENS if scaled_there else NUMBERS if group else SUMS
    by_row, by_block = group == 0 and form.groups == 1, group in {0, BLOCK} and form.group == BLOCK
    int4 = form.element == INTEGER and form.bits == 4 and form.k % BLOCK == 0 and m > _EXPANDED[own]
    fp8 = form.element == "e4m3" and m > (_FEW if by_row and on_hopper else ROWS)
    fits = form.zero is None and not form.factor and form.scale.is_floating_point and (by_row or by_block)
    if not fits or not (int4 or fp8) or out_dtype.itemsize != NARROW:
        return own
    if on_hopper:
        return own if own == TOKENS and _is_slow(device, form, m) else TWO_LEVEL
    torchs = device.arch >= _HARDWARE and out_dtype == torch.bfloat16 and bias in (None, out_dtype)
    return SCALED if by_row and torchs and form.n % 16 == 0 else own


def _is_slow(device: Device, form: Form, m: int) -> bool:
    """Whether so few tiles of `kernels.fp8_hopper` have so many columns that the way `TOKENS` is faster."""
    tiles = -(-form.n // 64) * -(-m // _TOKENS)
    if 2 * tiles > device.sms:
        return False
    found, names = float_problem(form, m, torch.float16, torch.float16), _names(m)
    other = next((us for us, choice in estimated(device, found) if choice.product.name in names), math.inf)
    return other < _START + _STEP * -(-form.k // BLOCK)


def _names(m: int) -> tuple[str, ...]:
    """The kernels that scale sums by token, for m rows."""
    return (GEMV.name,) if m <= ROWS else (GEMM_HOPPER.name, GEMM_HOPPER_64.name, GEMV_CHUNKS.name)


def _by_token(
    device: Device, form: Form, m: int, group: int, out_dtype: torch.dtype
) -> tuple[GemmProblem, Choice] | None:
    """The product of m rows of codes in float16 by a kernel that scales sums by token, if one is exact enough.

    Integer codes times scales of groups are rounded to float16, whose 11 bits are three more than sums of e4m3 need.
    """
    if out_dtype.itemsize != NARROW or form.element.startswith(TABLE):
        return None
    problem = float_problem(form, m, torch.float16, torch.float16)
    if group and m <= ROWS and (group % problem.block or problem.halves):
        return None
    if m > ROWS and not GEMM_HOPPER.serves(device, problem):
        return None
    choice = choose_among(device, problem, _names(m))
    return None if choice is None else (replace(problem, out_dtype=out_dtype), choice)


def _by_tokens(
    x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype, group: int, static: float | None,
    device: Device,
) -> Tensor:  # fmt: skip
    """The product by the way `TOKENS`."""
    found = _by_token(device, form_of(weight), x.shape[0], group, out_dtype)
    assert found is not None
    problem, (product, config) = found
    columns = -(-problem.k // 8) * 8
    if group and isinstance(product, Gemv):
        codes, scale = _by_group(x, columns, group, torch.float16, device)
        return product.multiply(codes, weight, bias, device, problem, config, scale, group)
    if group:
        codes, scale = _numbers(x, columns, group, device)
        return cast("GemvChunks | GemmHopper", product).multiply(codes, weight, bias, device, problem, config, scale)
    codes, scale = _by_row(x, weight.columns, torch.float16, static, device)
    return cast("Gemv | GemvChunks | GemmHopper", product).multiply(codes, weight, bias, device, problem, config, scale)


def _by_row(
    x: Tensor, columns: int, dtype: torch.dtype, static: float | None, device: Device, copies: int = 0
) -> tuple[Tensor, Tensor]:
    """Codes ``(M, columns)``, bytes or numbers of ``dtype``, 0 behind K, and scales ``(M,)`` or ``(copies, M)``."""
    m, k = x.shape
    codes = _codes(m, columns, dtype, x.device)
    scale = empty((copies, m) if copies else (m,), torch.float32, x.device)
    block = min(power_of_two(columns), 4 * _COLUMNS)
    launch(
        fp8.quantize_rows, (m,), x, codes, scale, 0.0 if static is None else static, max(1, copies), m, k, columns,
        *x.stride(),
        STATIC=static is not None, BLOCK=block, LOOP=columns > block, HARDWARE=device.arch >= _HARDWARE,
        **options(device, max(1, min(8, block // 512))),
    )  # fmt: skip
    return codes, scale


def _codes(m: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized codes ``(m, columns)``; memory of bytes has room for whole tiles of rows, see `rows_in_memory`."""
    rows = -(-m // CODE_ROWS) * CODE_ROWS if dtype.itemsize == 1 and m > _FEW else m
    return empty((rows, columns), dtype, device)[:m]


def _groups_of_program(groups: int, group: int) -> tuple[int, int]:
    """Columns of a group, and how many groups a program quantizes at a time: powers of two."""
    block = power_of_two(group)
    return block, min(power_of_two(groups), max(1, _COLUMNS // block))


def _by_group(x: Tensor, columns: int, group: int, dtype: torch.dtype, device: Device) -> tuple[Tensor, Tensor]:
    """Codes ``(M, columns)``, or numbers times their scales if ``dtype`` is float32, and scales ``(G, M)``."""
    m, k = x.shape
    groups = -(-k // group)
    block, together = _groups_of_program(groups, group)
    codes, scale = _codes(m, columns, dtype, x.device), empty((groups, m), torch.float32, x.device)
    launch(
        fp8.quantize_groups, (m, -(-groups // together)), x, codes, scale, m, k, columns, groups, group, *x.stride(),
        R=together, BLOCK=block, HARDWARE=device.arch >= _HARDWARE, **options(device, 4),
    )  # fmt: skip
    return codes, scale


def _numbers(x: Tensor, columns: int, group: int, device: Device) -> tuple[Tensor, Tensor]:
    """Quantized numbers float16 ``(M, columns)`` in units of their rows, and these units, float32 ``(M,)``."""
    m, k = x.shape
    groups = -(-columns // group)
    block, together = _groups_of_program(groups, group)
    numbers, unit = empty((m, columns), torch.float16, x.device), empty((m,), torch.float32, x.device)
    launch(
        fp8.quantize_numbers, (m,), x, numbers, unit, k, columns, groups, group, *x.stride(),
        R=together, BLOCK=block, HARDWARE=device.arch >= _HARDWARE, **options(device, 4),
    )  # fmt: skip
    return numbers, unit


def _finish(sums: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype, device: Device) -> Tensor:
    m, n = sums.shape
    y = empty((m, n), out_dtype, sums.device)
    launch(
        fp8.finish, (m, -(-n // _COLUMNS)), sums, scale, scale if bias is None else bias, y, m, n,
        BIAS=bias is not None, B=_COLUMNS, **options(device, 4),
    )  # fmt: skip
    return y
