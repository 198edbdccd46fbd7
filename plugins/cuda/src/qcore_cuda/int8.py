"""Products with int8 activations: quantize x, multiply codes, one epilogue."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import few, hopper, large, replay
from .device import Device, device_of
from .dispatch import bucket
from .int8_config import Config, Problem, choose
from .kernels.int8_persistent import persistent
from .kernels.int8_slices import slices
from .launch import launch, options
from .portable.kernels.int8_gemm import tiles, unpack
from .portable.kernels.quantize import group_sums
from .portable.kernels.quantize import quantize_rows as quantize_kernel
from .portable.weights import INT_ZERO, Weight
from .replay import empty

_IN_REGISTERS = 32768
"""Rows up to this K are read once."""
_EXACT_K = {False: 1 << 16, True: 1 << 15}
"""Up to this K the products of one group fit int32; True: with differences of int8 codes and zero points as factors."""


class Codes(NamedTuple):
    """Quantized activations: ``x = scale * (q - zero)``.

    **Fields:** ``q``: int8 ``(M, KQ)``, KQ = K rounded up to 128, 0 behind K; ``scale``: float32 ``(M,)``; ``zero``:
    float32 ``(M,)`` of whole numbers, None for 0; ``total``: int32 ``(M,)``, the sums of codes, where asked for;
    ``order``: of the columns, as `Weight.order`.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor | None
    total: Tensor | None = None
    order: int = 0


def quantize_rows(x: Tensor, *, symmetric: bool, total: bool = False, order: int = 0) -> Codes:
    """Quantize x ``(M, K)`` of any strides, each token by parameters of its own.

    ``total``: also sum the codes; ``order``: as `Weight.order` of the weight that they meet.
    """
    return _quantize(x, *_mode(x, symmetric, None), total, order)


def quantize_given(
    x: Tensor, scale: Tensor | float, zero: Tensor | float, *, total: bool = False, order: int = 0
) -> Codes:
    """Quantize x ``(M, K)`` with given numbers, or tensors ``(M,)`` per token. An int8 x is taken as codes."""
    return _quantize(x, *_mode(x, True, Given(scale, zero)), total, order)


class Given(NamedTuple):
    """Scale and zero point that activations, or results, are quantized with: numbers, or tensors ``(M,)``."""

    scale: Tensor | float
    zero: Tensor | float


def _mode(x: Tensor, symmetric: bool, given: Given | None) -> tuple[int, Any, Any]:
    """The mode of `kernels.quantize`, and scale and zero point where they are given."""
    if given is None:
        return 0 if symmetric else 1, None, None
    if isinstance(given.scale, Tensor):
        return 3, _flat(given.scale), _flat(torch.as_tensor(given.zero, device=x.device))
    return 2, float(given.scale), float(given.zero)


def _flat(parameter: Tensor) -> Tensor:
    """Parameters per token as kernels read them, one after the other."""
    return parameter.reshape(-1).contiguous()


def _quantize(x: Tensor, mode: int, scale: Any, zero: Any, total: bool, order: int) -> Codes:
    m, k = x.shape
    device, wide = device_of(x.device), -(-k // 128) * 128
    q = empty((m, wide), torch.int8, x.device)
    s = empty((m,), torch.float32, x.device)
    z = empty((m,), torch.float32, x.device) if mode else None
    t = empty((m,), torch.int32, x.device) if total else None
    if m:
        block = min(_IN_REGISTERS, max(512, 1 << max(0, wide - 1).bit_length()))
        number = mode == 2
        launch(
            quantize_kernel,
            (m,),
            x,
            q,
            s,
            s if z is None else z,
            s if t is None else t,
            scale if mode == 3 else s,
            zero if mode == 3 else s,
            scale if number else 0.0,
            zero if number else 0.0,
            k,
            x.stride(0) if m > 1 else 0,
            x.stride(1) if k > 1 else 1,
            MODE=mode,
            CODES=x.dtype == torch.int8,
            BLOCK=block,
            LOOP=wide > block,
            TOTAL=total,
            ORDER=order,
            LATE=m > 32,
            **options(device, max(1, min(16, block // 512 if m <= 256 else block // 1024))),
        )
    return Codes(q, s, z, t, order)


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
    of_y, zero_y = out or (None, None)
    order = weight.order
    if config.kernel == "fours":
        if large.computes_fours(weight, out_dtype, of_y):
            order = large.FOURS_ORDER
        else:
            config = choose(device, problem_of(weight, x.shape[0]), specialized=False)
    mode, scale, zero = _mode(x, symmetric, given)
    if config.kernel == "gemv" and few.quantizes_itself(x, weight, device):
        if mode == 2:
            activations = few.Activations(x, None, None, (scale, zero), mode, True)
        else:
            activations = few.Activations(x, scale, zero, (0.0, 0.0), mode, mode != 0)
        y = empty((1, weight.n), out_dtype, x.device)
        return _few(activations, weight, sums, _end(bias, of_y, zero_y, y), y, device, config)
    # A zero point per channel meets the sum of a whole row of codes, which quantizing gives on the side.
    total = weight.zero is not None and weight.scale.shape[0] == 1 and config.kernel not in {"gemv", "fours"}
    codes = _quantize(x, mode, scale, zero, total, order)
    return linear(codes, weight, sums, bias, out_dtype, of_y, zero_y, config)


def _few(
    activations: few.Activations, weight: Weight, sums: Tensor | None, end: _End, y: Tensor, device: Device, c: Config
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
    end = _end(bias, out_scale, out_zero, y)
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
    of_x, of_w = _operands(codes, weight, sums)
    run[config.kernel](_Product(codes, weight, of_x, of_w, end, y, config, p, *_steps(weight, p), form, device))
    return y


def forget() -> None:
    """Choose anew from now on: something has been measured."""
    choose.cache_clear()
    replay.forget()


def blocking(weight: Weight) -> tuple[int, bool, int]:
    """Columns per step along K, whether groups are scaled one by one, and steps per group."""
    groups = weight.scale.shape[0]
    p = weight.order or 128
    if groups > 1:
        p = p if weight.bits == 4 else next(size for size in (128, 64, 32) if weight.group % size == 0)
        return p, True, weight.group // p
    return p, weight.k > _EXACT_K[weight.bits == 8 and weight.zero_kind == INT_ZERO], 1 << 24


class _End(NamedTuple):
    args: tuple[Any, ...]
    numbers: tuple[float, float]
    meta: dict[str, Any]


def _end(bias: Tensor | None, scale: Tensor | float | None, zero: Tensor | float | None, y: Tensor) -> _End:
    """Arguments of the epilogue; y stands in for tensors that are not there."""
    meta = {"HAS_BIAS": bias is not None, "OUT": 0}
    args: tuple[Any, ...] = (y if bias is None else bias, y, y)
    numbers = (1.0, 0.0)
    if isinstance(scale, Tensor):
        args, meta["OUT"] = (args[0], _flat(scale), _flat(torch.as_tensor(zero, device=y.device))), 2
    elif scale is not None:
        numbers, meta["OUT"] = (float(scale), float(0.0 if zero is None else zero)), 1
    return _End(args, numbers, meta)


def _operands(codes: Codes, weight: Weight, sums: Tensor | None) -> tuple[Any, ...]:
    """X's and w's parameters: scale, zero of x; scale, zero, sums of w."""
    x_zero = codes.scale if codes.zero is None else codes.zero
    w_zero = weight.scale if weight.zero is None else weight.zero
    return (codes.scale, x_zero), (weight.scale, w_zero, codes.scale if sums is None else sums)


def _steps(weight: Weight, p: int) -> tuple[int, int]:
    """Steps along K, and the row pitch of an int8 weight in units of 32."""
    if weight.bits == 4:
        return weight.data.shape[1], 0
    return -(-weight.k // p), weight.data.shape[1] // 32


class _Product(NamedTuple):
    """What a launch needs; see `_operands` for ``of_x`` and ``of_w``, `_steps` for ``blocks`` and ``pitch``."""

    codes: Codes
    weight: Weight
    of_x: tuple[Tensor, ...]
    of_w: tuple[Tensor, ...]
    end: _End
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
    """int32 ``(blocks, M)``, or ``(1, M)`` per channel: sums of x that zero points of the weight multiply."""
    if not r.form["WZERO"]:
        return r.codes.scale
    if r.form["GROUPED"]:
        return _block_sums(r.codes.q, r.p, r.blocks, r.device)
    if r.codes.total is not None:
        return r.codes.total
    return _block_sums(r.codes.q, 128, r.codes.q.shape[1] // 128, r.device).sum(0, dtype=torch.int32)


def _block_sums(q: Tensor, p: int, blocks: int, device: Device) -> Tensor:
    m = q.shape[0]
    sums = empty((blocks, m), torch.int32, q.device)
    launch(group_sums, (-(-m // 32), blocks), q, sums, m, q.shape[1], B=p, BM=32, **options(device, 4))
    return sums


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
