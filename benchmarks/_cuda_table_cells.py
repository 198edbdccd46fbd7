"""Cells of tables and e4m3 activations on a GPU beside torch's bf16 product: the figures that issue 19 asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from qcore import Format, QTensor
from qcore_cuda import fp8, tuning, weight_only
from qcore_triton.packing import sizes_of, weight_of, pack
from qcore_triton.weights import Weight

BF16 = torch.bfloat16
FORMATS = {
    "w4a16-g32": "int4-g32", "mxfp4": "fp4-g32-e8m0", "nvfp4": "fp4-g16-e4m3", "nf4": "nf4-g64",
    "w4a16-g64": "int4-g64", "w8a16": "int8", "wfp8a16": "fp8", "mxfp8": "fp8-g32-e8m0",
}  # fmt: skip


def random_weight(text: str, n: int, k: int) -> Weight:
    """A packed weight of random codes, scales about 1/64, on the GPU."""
    form = Format.parse(text)
    element, groups = form.element, form.groups(k)
    low, high = element.code_range
    codes = torch.randint(low, high + 1, (n, k), device="cuda", dtype=torch.int16).to(element.code_dtype)
    if element.has_invalid_codes:
        codes &= 0x77  # no NaN
    scale = torch.rand(groups, n, device="cuda", dtype=BF16) / 64 + 0.01
    whole = None
    if form.scale.name == "E8M0":
        scale = torch.randint(118, 124, (groups, n), device="cuda", dtype=torch.uint8)
    elif form.scale.has_global:
        scale, whole = scale.to(torch.float8_e4m3fn), torch.tensor(1.0, device="cuda")
    made = QTensor.__new__(QTensor)
    fields = {"data": form.codec.encode(codes), "scale": scale, "zero": None, "shape": torch.Size((n, k)), "format": form}
    for name, value in {**fields, "quantizer": None, "order": None, "global_scale": whole}.items():
        object.__setattr__(made, name, value)
    return weight_of(pack(made), form, n, k)


def bf16_us(m: int, n: int, k: int) -> float:
    """torch's product, over as many weights as exceed the L2 cache."""
    x = torch.randn(m, k, device="cuda", dtype=BF16)
    count = max(1, min(8, (150 << 20) // (2 * n * k) + 1))
    weights = [torch.randn(n, k, device="cuda", dtype=BF16) for _ in range(count)]
    return tuning.microseconds([partial(F.linear, x, w) for w in weights])


def mine_us(weight: Weight, m: int, call: Callable[[Tensor, Weight], Tensor]) -> float:
    """A call over copies of the weight."""
    x = torch.randn(m, weight.k, device="cuda", dtype=BF16)
    return tuning.microseconds([partial(call, x, w) for w in tuning.copies(weight)])


def plain(x: Tensor, weight: Weight) -> Tensor:
    return weight_only.linear(x, weight, None, BF16)


def cells(sizes: tuple[tuple[int, int], ...], rows: tuple[int, ...], names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """(K x N, scheme, M, kernel, us, bf16 us, ratio)."""
    for k, n in sizes:
        base = {m: bf16_us(m, n, k) for m in rows}
        for name in names:
            weight = random_weight(FORMATS[name], n, k)
            for m in rows:
                plan = weight_only.plan(torch.empty(m, k, device="cuda", dtype=BF16), weight, BF16)
                us = mine_us(weight, m, plain)
                yield (f"{k}x{n}", name, str(m), f"{plan.product.name}{tuple(plan.config)}", f"{us:.1f}",
                       f"{base[m]:.1f}", f"{base[m] / us:.2f}")  # fmt: skip


def fp8_cells(sizes: tuple[tuple[int, int], ...], rows: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    """The same for e4m3 activations, by every way that exists."""
    for k, n in sizes:
        for name, text, group in (("wfp8afp8", "fp8", 0), ("wfp8afp8-g128", "fp8-g128", 128)):
            weight = random_weight(text, n, k)
            for m in rows:
                base = bf16_us(m, n, k)
                form = fp8.form_of(weight)
                way = fp8.way_of(fp8.device_of(weight.data.device), form, m, group, BF16, None)
                call = lambda x, w, group=group: fp8.product(x, w, None, BF16, group, None)  # noqa: E731
                us = mine_us(weight, m, call)
                yield f"{k}x{n}", name, str(m), way, f"{us:.1f}", f"{base:.1f}", f"{base / us:.2f}"


def fp8_errors(k: int, n: int, m: int) -> Iterator[str]:
    """How far torch's scaled products are from float64, in units of what the contract allows."""
    for name, text, group in (("wfp8afp8", "fp8", 0), ("wfp8afp8-g128", "fp8-g128", 128)):
        weight = random_weight(text, n, k)
        device = fp8.device_of(weight.data.device)
        x = torch.randn(m, k, device="cuda", dtype=BF16)
        if group:
            q, s = fp8._by_group(x, k, group, torch.uint8, device)
            values = q.view(torch.float8_e4m3fn).double() * s.t().double().repeat_interleave(group, 1)
            given = s.t()
        else:
            q, s = fp8._by_row(x, k, torch.uint8, None, device)
            values = q.view(torch.float8_e4m3fn).double() * s.double()[:, None]
            given = s.view(-1, 1)
        dense = weight.data[:n].view(torch.float8_e4m3fn).double()
        dense = dense * weight.scale.double().repeat_interleave(weight.group, 0)[:k].t()
        exact, size = values @ dense.t(), values.abs() @ dense.abs().t()
        squares = ((values**2) @ (dense**2).t()).sqrt()
        allowed = 2.0**-20 * max(1.0, (k / 256) ** 0.5) * size
        for fast in (False, True):
            try:
                kind = torch.float8_e4m3fn
                y = torch._scaled_mm(
                    q.view(kind), weight.data[:n].view(kind).t(), given, weight.scale.float(), out_dtype=BF16,
                    use_fast_accum=fast,
                )  # fmt: skip
            except RuntimeError as error:
                yield f"{name} K={k} fast={fast}: {str(error)[:300]}"
                continue
            error = (y.double() - exact).abs()
            left = (error - 2.0**-7 * exact.abs()).clamp_min(0)
            ratio = left / allowed
            yield (
                f"{name} K={k} fast={fast}: left over after rounding / allowed: max {ratio.max():.2f}, share above 1 "
                f"{(ratio > 1).double().mean():.2e}; left / sqrt(sum of squares) max {(left / squares).max():.2e}; "
                f"error of the smallest 5 % of results / sqrt(sum of squares): "
                f"{(error / squares)[exact.abs() < 0.06 * exact.std()].max():.2e}"
            )
