"""Cells of tables and e4m3 activations on a GPU beside torch's bf16 product: the figures that issue 19 asks for.

``python benchmarks/_cuda_table_cells.py`` prints them plainly, with how far torch's scaled products are from float64;
``cuda_formats.py --only tables`` makes a table of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from qcore import Format, QTensor, ScaleType
from qcore_cuda import fp8, tuning, weight_only
from qcore_cuda.problem import form_of
from qcore_cuda.runtime.device import device_of
from qcore_triton.packing import pack, weight_of
from qcore_triton.weights import Weight

# ruff: noqa: SLF001 - parts of a call are timed, too

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FORMATS = {
    "w4a16-g32": "int4-g32", "mxfp4": "fp4-g32-e8m0", "nvfp4": "fp4-g16-e4m3", "nf4": "nf4-g64",
    "w4a16-g64": "int4-g64", "w8a16": "int8", "wfp8a16": "fp8", "mxfp8": "fp8-g32-e8m0",
}  # fmt: skip
WITH_E4M3 = {"wfp8afp8": ("fp8", 0), "wfp8afp8-g128": ("fp8-g128", 128)}
FOUR = ("w4a16-g32", "mxfp4", "nvfp4", "nf4")
CELLS = (
    (8192, 28672, (1,), tuple(FORMATS)), (4096, 14336, (16, 64, 256, 2048), FOUR),
    (4096, 4096, (1, 2048), (*FOUR, "wfp8a16")),
)  # fmt: skip
"""K, N, rows and schemes."""
Cell = tuple[str, ...]


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
    if form.scale is ScaleType.E8M0:
        scale = torch.randint(118, 124, (groups, n), device="cuda", dtype=torch.uint8)
    elif form.scale.has_global:
        scale, whole = scale.to(E4M3), torch.tensor(1.0, device="cuda")
    made = QTensor.from_codes(codes, scale, None, form, global_scale=whole)
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
    """The product with float activations."""
    return weight_only.linear(x, weight, None, BF16)


def cells() -> Iterator[Cell]:
    """K x N, scheme, M, kernel, microseconds, those of bf16, ratio."""
    for k, n, rows, names in CELLS:
        base = {m: bf16_us(m, n, k) for m in rows}
        for name in names:
            weight = random_weight(FORMATS[name], n, k)
            for m in rows:
                plan = weight_only.plan(torch.empty(m, k, device="cuda", dtype=BF16), weight, BF16)
                us = mine_us(weight, m, plain)
                kernel = f"{plan.product.name}{tuple(plan.config)}"
                yield f"{k}x{n}", name, str(m), kernel, f"{us:.1f}", f"{base[m]:.1f}", f"{base[m] / us:.2f}"


def fp8_cells() -> Iterator[Cell]:
    """The same for e4m3 activations."""
    for k, n in ((4096, 4096), (8192, 28672)):
        for name, (text, group) in WITH_E4M3.items():
            weight = random_weight(text, n, k)
            for m in (1, 2048):
                base = bf16_us(m, n, k)
                way = fp8.way_of(device_of(weight.data.device), form_of(weight), m, group, BF16, None)
                us = mine_us(weight, m, lambda x, w, group=group: fp8.product(x, w, None, BF16, group, None))  # type: ignore[misc]
                yield f"{k}x{n}", name, str(m), way, f"{us:.1f}", f"{base:.1f}", f"{base / us:.2f}"


def _quantized(x: Tensor, k: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales as `fp8.product` makes them for torch."""
    device = device_of(x.device)
    if group:
        codes, scale = fp8._by_group(x, k, group, torch.uint8, device)
        return codes, scale.t()
    codes, scale = fp8._by_row(x, k, torch.uint8, None, device)
    return codes, scale.view(-1, 1)


def fp8_parts(k: int, n: int, m: int) -> Iterator[str]:
    """Quantization and torch's product apart, and the error of the latter as the contract counts it."""
    for name, (text, group) in WITH_E4M3.items():
        weight, x = random_weight(text, n, k), torch.randn(m, k, device="cuda", dtype=BF16)
        codes, scale = _quantized(x, k, group)
        wide = weight.scale.float()
        us = tuning.microseconds([partial(_quantized, x, k, group)])
        by_x = scale.double().repeat_interleave(group, 1) if group else scale.double()
        few = slice(0, min(n, 1024))
        dense = weight.data[few].view(E4M3).double() * wide.double().repeat_interleave(weight.group, 0)[:k, few].t()
        values = codes.view(E4M3).double() * by_x
        exact, squares = values @ dense.t(), ((values**2) @ (dense**2).t()).sqrt()
        allowed = 2.0**-20 * max(1.0, (k / 256) ** 0.5) * (values.abs() @ dense.abs().t()) + 2.0**-9 * squares
        allowed = allowed + 2.0**-7 * (exact.abs() + allowed)
        given = scale.t() if group else scale.flatten()
        ways = {"fp8_hopper": partial(fp8.two_level, codes, given, weight, None, BF16)}
        for fast in (False, True) if not group else (False,):
            ways[f"torch, fast accumulation {fast}"] = partial(
                torch._scaled_mm, codes.view(E4M3), weight.data[:n].view(E4M3).t(), scale, wide, out_dtype=BF16,
                use_fast_accum=fast,
            )  # fmt: skip
        for way, product in ways.items():
            try:
                error = (product()[:, few].double() - exact).abs()
                yield (
                    f"{name} {k}x{n} M={m}: quantized in {us:.1f} us, multiplied in "
                    f"{tuning.microseconds([product]):.1f} us by {way}; error / allowed {(error / allowed).max():.2f}"
                )
            except Exception as error:  # noqa: BLE001, PERF203  the other ways are wanted
                yield f"{name} {way}: {type(error).__name__}: {str(error)[:300]}"


def main() -> None:
    """Print everything."""
    torch.manual_seed(0)
    for row in (*fp8_parts(512, 1024, 512), *fp8_parts(4096, 4096, 2048), *fp8_parts(8192, 28672, 2048)):
        print(row, flush=True)
    for part in (fp8_cells, cells):
        for cell in part():
            print(*cell, flush=True)


if __name__ == "__main__":
    main()
