"""Products with int8 activations: quantize x, multiply codes, one epilogue."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcore_triton import host
from qcore_triton.codes import SYMMETRIC, TENSOR, Codes, Given, Mode, columns_of_codes, mode_of
from qcore_triton.geometry import power_of_two
from qcore_triton.host import End, blocking, end_of, operands, steps
from qcore_triton.kernels.int8_gemm import tiles, unpack
from qcore_triton.weights import INT_ZERO, Weight

from . import few, hopper, large, replay
from .device import Device, device_of
from .dispatch import bucket
from .int8_config import Config, Problem, choose
from .kernels.int8_persistent import persistent
from .kernels.int8_slices import slices
from .launch import launch, options
from .replay import empty

_IN_REGISTERS = 32768
"""Rows up to this K are read once."""


def quantize_rows(x: Tensor, *, symmetric: bool, total: bool = False, order: int = 0) -> Codes:
    """Quantize x ``(M, K)`` of any strides, each token by parameters of its own.

    ``total``: also sum the codes; ``order``: as `Weight.order` of the weight that they meet.
    """
    return _quantize(x, mode_of(x, symmetric, None), total, order)


def quantize_given(
    x: Tensor, scale: Tensor | float, zero: Tensor | float, *, total: bool = False, order: int = 0
) -> Codes:
    """Quantize x ``(M, K)`` with given numbers, or tensors ``(M,)`` per token. An int8 x is taken as codes."""
    return _quantize(x, mode_of(x, True, Given(scale, zero)), total, order)


def _quantize(x: Tensor, mode: Mode, total: bool, order: int) -> Codes:
    m, k = x.shape
    block = min(_IN_REGISTERS, max(512, power_of_two(columns_of_codes(k))))
    meta = options(device_of(x.device), max(1, min(16, block // 512 if m <= 256 else block // 1024)))
    return host.quantize_rows(launch, empty, x, mode, total=total, order=order, block=block, **meta)


def product(
    x: Tensor,
    weight: Weight,
    sums: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    symmetric: bool = True,
    given: Given | None = None,
    out: Given | None = None,
    config: Config | None = None,
) -> Tensor:
    """Quantize x ``(M, K)``, multiply and end: ``(M, N)``. See `quantize_rows`, `quantize_given` and `linear`.

    One row is quantized by the kernel that multiplies it, where that can be.
    """
    device = device_of(x.device)
    if config is None:
        config = choose(device, problem_of(weight, x.shape[0]))
    order = weight.order
    if config.kernel == "fours":
        if large.computes_fours(weight, out_dtype, out and out.scale):
            order = large.FOURS_ORDER
        else:
            config = choose(device, problem_of(weight, x.shape[0]), specialized=False)
    mode = kind, scale, zero = mode_of(x, symmetric, given)
    if config.kernel == "gemv" and few.quantizes_itself(x, weight, device):
        if kind == TENSOR:
            activations = few.Activations(x, None, None, (scale, zero), kind, True)
        else:
            activations = few.Activations(x, scale, zero, (0.0, 0.0), kind, kind != SYMMETRIC)
        y = empty((1, weight.n), out_dtype, x.device)
        return _few(activations, weight, sums, end_of(bias, out, y), y, device, config)
    # A zero point per channel meets the sum of a whole row of codes, which quantizing gives on the side.
    total = host.totals_needed(weight) and config.kernel not in {"gemv", "fours"}
    codes = _quantize(x, mode, total, order)
    scale, zero = out or (None, None)
    return linear(codes, weight, sums, bias, out_dtype, scale, zero, config)


def _few(
    activations: few.Activations, weight: Weight, sums: Tensor | None, end: End, y: Tensor, device: Device, c: Config
) -> Tensor:
    few.int8_product(activations, weight, sums, end, y, device, few.Shape.of(c), blocking(weight)[1])
    return y


def problem_of(weight: Weight, m: int) -> Problem:
    """What `choose` is asked for a product of m rows."""
    inner, grouped, _ = blocking(weight)
    return Problem(weight.bits, weight.n, weight.k, bucket(m), grouped, inner)


def linear(
    codes: Codes,
    weight: Weight,
    sums: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out_scale: Tensor | float | None = None,
    out_zero: Tensor | float | None = None,
    config: Config | None = None,
) -> Tensor:
    """``(M, N)`` of ``out_dtype``: codes times a packed weight, scaled, plus bias, rounded once.

    ``sums``: int32 ``(G, N)``, needed where the codes have a zero point. ``out_scale``, ``out_zero``: for int8 results,
    numbers or tensors ``(M,)``. ``config``: another than the default.
    """
    m, device = codes.q.shape[0], device_of(codes.q.device)
    y = empty((m, weight.n), out_dtype, codes.q.device)
    if m == 0 or weight.n == 0:
        return y
    p, grouped, per = blocking(weight)
    if config is None:
        fitting = weight.bits == 8 or codes.order == large.FOURS_ORDER
        config = choose(device, problem_of(weight, m), specialized=fitting)
    if config.kernel == "specialized" and not hopper.computes(weight, grouped, codes.zero, out_dtype, out_scale):
        config = choose(device, problem_of(weight, m), specialized=False)
    end = end_of(bias, None if out_scale is None else Given(out_scale, 0.0 if out_zero is None else out_zero), y)
    if config.kernel == "gemv":
        activations = few.Activations(codes.q, codes.scale, codes.zero, (0.0, 0.0), -1, codes.zero is not None)
        return _few(activations, weight, sums, end, y, device, config)
    w_zero = weight.zero_kind
    if config.unpack and weight.bits == 4:
        weight, w_zero = unpacked(weight, codes.q.shape[1], p, per, device), 0 if w_zero == INT_ZERO else w_zero
    if config.kernel == "persistent" and (weight.bits == 4 or (grouped and (w_zero or codes.zero is not None))):
        config = Config("tiles", 128, 64, 4, 3, swap=weight.bits == 4)
    form = {"GROUPED": grouped, "PER": per, "WZERO": w_zero, "XZERO": codes.zero is not None, **end.meta}
    run = {"slices": _slices, "tiles": _tiles, "persistent": _persistent}
    run |= {"specialized": hopper.product, "fours": large.fours}
    of_x, of_w = operands(codes, weight, sums)
    run[config.kernel](_Product(codes, weight, of_x, of_w, end, y, config, p, *steps(weight, p), form, device))
    return y


def forget() -> None:
    """Choose anew from now on: something has been measured."""
    choose.cache_clear()
    replay.forget()


class _Product(NamedTuple):
    """What a launch needs; see `operands` for ``of_x`` and ``of_w``, `steps` for ``blocks`` and ``pitch``."""

    codes: Codes
    weight: Weight
    of_x: tuple[Tensor, ...]
    of_w: tuple[Tensor, ...]
    end: End
    y: Tensor
    config: Config
    p: int
    blocks: int
    pitch: int
    form: dict[str, Any]
    device: Device

    @property
    def sizes(self) -> tuple[int, ...]:
        """M, N, K and the steps along K."""
        return self.codes.q.shape[0], self.weight.n, self.weight.k, self.blocks

    @property
    def tiles(self) -> int:
        """Tiles of the result."""
        return -(-self.weight.n // self.config.bn) * -(-self.codes.q.shape[0] // self.config.bm)

    @property
    def aligned(self) -> bool:
        """Whether rows of the result start on 16 values."""
        return self.weight.n % 16 == 0

    def meta(self) -> dict[str, Any]:
        """Constexprs and options that all kernels have."""
        c = self.config
        common = {"P": self.p, "BN": c.bn, "BM": c.bm, "STAGES": c.stages}
        return {**common, **self.form, **options(self.device, c.warps)}


def _slices(r: _Product) -> None:
    c, (m, wide) = r.config, r.codes.q.shape
    launch(
        slices, (-(-r.weight.n // c.bn), -(-m // c.bm)),
        r.codes.q, *r.of_x, r.weight.data, *r.of_w, *r.end.args, r.y, *r.end.numbers, *r.sizes, wide // 128, r.pitch,
        BITS=r.weight.bits, S=c.warps, ASM=r.device.asm, **r.meta(),
    )  # fmt: skip


def _tiles(r: _Product) -> None:
    c, wide = r.config, r.codes.q.shape[1]
    launch(
        tiles, (r.tiles,),
        r.codes.q, *r.of_x, r.weight.data, *r.of_w, _x_sums(r), *r.end.args, r.y, *r.end.numbers, *r.sizes,
        wide // 128, r.pitch,
        BITS=r.weight.bits, GROUP_M=c.group_m, SWAP=c.swap, ALIGNED=r.aligned, ASM=r.device.asm, **r.meta(),
    )  # fmt: skip


def _persistent(r: _Product) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    c, (m, wide), n, pitch = r.config, r.codes.q.shape, r.weight.n, r.pitch * 32
    tma_store = c.tma_store and r.aligned
    launch(
        persistent, (min(r.tiles, c.per_sm * r.device.sms) if c.per_sm else r.tiles,),
        TensorDescriptor(r.codes.q, [m, wide], [wide, 1], [c.bm, r.p]), *r.of_x,
        TensorDescriptor(r.weight.data, [r.weight.data.shape[0], pitch], [pitch, 1], [c.bn, r.p]), *r.of_w,
        _x_sums(r), *r.end.args, r.y,
        TensorDescriptor(r.y, [m, n], [n, 1], [c.bm, c.bn // c.parts]) if tma_store else r.y,
        *r.end.numbers, *r.sizes,
        GROUP_M=c.group_m, ALIGNED=r.aligned, PARTS=c.parts, TMA_STORE=tma_store, FLATTEN=c.flatten,
        SPECIALIZE=c.specialize, **r.meta(),
    )  # fmt: skip


def _x_sums(r: _Product) -> Tensor:
    form, meta = r.form, options(r.device, 4)
    return host.x_sums(launch, empty, r.codes, form["WZERO"], form["GROUPED"], r.p, r.blocks, **meta)


def unpacked(weight: Weight, wide: int, p: int, per: int, device: Device) -> Weight:
    """An int4 weight as int8 rows of ``wide`` codes, its integer zero points subtracted."""
    planes, blocks = weight.data.shape[:2]
    data = empty((planes * 16, wide), torch.int8, weight.data.device)
    subtract = weight.zero_kind == INT_ZERO
    zero = weight.scale if weight.zero is None else weight.zero
    launch(
        unpack,
        (planes, blocks),
        weight.data,
        zero,
        data,
        weight.n,
        blocks,
        wide // 128,
        P=p,
        PER=per,
        SUBTRACT=subtract,
        **options(device, 4),
    )
    return weight._replace(data=data, bits=8, zero=None if subtract else weight.zero)
