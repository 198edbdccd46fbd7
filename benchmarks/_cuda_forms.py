"""The forms of weights and activations that tables of qcore-cuda distinguish, with random weights for measurements."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcore.errors import first_line
from qcore_cuda import int8, weight_only
from qcore_cuda.problem import GemmProblem
from qcore_cuda.products.base import Choice, Operands
from qcore_cuda.products.catalog import FLOAT_PRODUCTS, INT8_PRODUCTS
from qcore_cuda.runtime.device import Device, device_of
from qcore_cuda.runtime.launch import launch
from qcore_cuda.runtime.replay import empty
from qcore_triton import host
from qcore_triton.codes import mode_of
from qcore_triton.packing import units_of
from qcore_triton.weights import NO_ZERO, Weight

DTYPE = torch.bfloat16


class Form(NamedTuple):
    """**Fields:** ``codes``: x is quantized to int8; ``bits``; ``group``: 0 per channel.

    ``zero``: of the weight, see `Weight.zero_kind`; ``x_zero``: x gets zero points.
    """

    codes: bool
    bits: int
    group: int
    zero: int = NO_ZERO
    x_zero: bool = False

    @property
    def name(self) -> str:
        """The name of the table, as in `qcore_cuda.costs.forms`."""
        group, zero = f"-g{self.group}" if self.group else "", "-int" if self.zero else ""
        return f"w{self.bits}{group}{zero}{'-xz' if self.x_zero else ''}"

    @property
    def activations(self) -> str:
        """The part of the table file."""
        return "int8" if self.codes else "float"

    @property
    def units(self) -> bool:
        """Whether weights of this form have units, see `qcore_triton.packing.units_of`."""
        return self.codes and self.bits == 4 and self.group in {32, 64} and not self.zero


FORMS = (
    Form(False, 4, 128), Form(False, 8, 0), Form(False, 4, 32, 1), Form(False, 4, 32), Form(False, 8, 128),
    Form(False, 4, 128, 1), Form(False, 4, 0), Form(False, 4, 64), Form(True, 8, 0), Form(True, 4, 128),
    Form(True, 4, 32), Form(True, 8, 0, x_zero=True), Form(True, 4, 32, x_zero=True), Form(True, 4, 0),
    Form(True, 8, 64), Form(True, 8, 128), Form(True, 8, 64, 1), Form(True, 8, 128, 1),
)  # fmt: skip


def problem_of(form: Form, m: int, n: int, k: int) -> GemmProblem:
    """The problem of M rows; nothing is allocated."""
    block = min(form.group, 128) or 128
    step = block if form.bits == 4 else form.group or 128
    return GemmProblem(
        form.bits, n, k, m, block if form.bits == 4 else 64, not form.group, form.group or k, form.zero,
        codes=form.codes, step=step if form.codes else 128, grouped=form.codes and bool(form.group),
        x_zero=form.x_zero, units=form.units,
    )  # fmt: skip


class Instance(NamedTuple):
    """A random problem. **Fields:** ``sums``: of codes of the weight, if x has zero points."""

    form: Form
    x: Tensor
    weight: Weight
    sums: Tensor | None
    device: Device
    problem: GemmProblem


def instance(form: Form, m: int, n: int, k: int) -> Instance:
    """A random problem on the current GPU."""
    x, weight = torch.randn(m, k, device="cuda", dtype=DTYPE) + 0.5 * form.x_zero, _weight(form, n, k)
    if form.codes:
        device, problem, *_ = int8.plan_of(x, weight, DTYPE, form.x_zero, None)
    else:
        device, problem, *_ = weight_only.plan(x, weight, DTYPE)
    return Instance(form, x, weight, _sums(weight) if form.x_zero else None, device, problem)


def _weight(form: Form, n: int, k: int) -> Weight:
    groups = k // form.group if form.group else 1
    if form.bits == 8:
        data = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
    else:
        block = min(form.group, 128) or 128
        data = torch.randint(0, 256, (n // 16, k // block, 16, block // 2), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(groups, n, device="cuda").to(DTYPE) + 0.5) * (1e-2 if form.bits == 4 else 1e-3)
    zero = torch.randint(-8, 8, (groups, n), dtype=torch.int8, device="cuda") if form.zero else None
    units = units_of(scale) if form.units else None
    return Weight(data, scale, zero, n, k, form.bits, form.group or k, units=units)


def _sums(weight: Weight) -> Tensor:
    codes = dense(weight._replace(scale=torch.ones_like(weight.scale, dtype=torch.float32)))
    return codes.view(weight.n, weight.scale.shape[0], -1).sum(2).t().contiguous().to(torch.int32)


def dense(weight: Weight) -> Tensor:
    """The dequantized weight, float32 ``(N, K)``."""
    return host.dense(launch, empty, weight, torch.float32, num_warps=4)


def call(made: Instance, choice: Choice) -> Any:
    """The product by a given choice, as the plugin would make it."""
    device, problem, config = made.device, made.problem, choice.config
    if not made.form.codes:
        return partial(choice.product.launch, made.x, made.weight, None, device, problem, config)
    mode, operands = mode_of(made.x, not made.form.x_zero, None), Operands(made.weight, made.sums, None, None)
    return partial(int8.run, made.x, mode, operands, int8.planned(device, problem, choice))


def choice_of(form: Form, kernel: str, config: dict[str, Any]) -> Choice:
    """A kernel by its name, with a configuration."""
    product = product_of(form.codes, kernel)
    return Choice(product, product.config(**config))


def product_of(codes: bool, kernel: str) -> Any:
    """A kernel by its name, of those that multiply codes or floats."""
    return next(p for p in (INT8_PRODUCTS if codes else FLOAT_PRODUCTS) if p.name == kernel)


def rotations(nbytes: int) -> int:
    """How many copies of so many bytes take twice the second-level cache: none is there when its turn comes."""
    return max(2, min(96, math.ceil(2 * torch.cuda.get_device_properties(0).L2_cache_size / nbytes)))


def rotating_floats(n: int, k: int) -> list[torch.Tensor]:
    """bfloat16 weights ``(n, k)``, as many as `rotations` says."""
    return [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(rotations(2 * n * k))]


def compiled_as(choice: Choice, m: int) -> tuple[Any, ...]:
    """What the machine code depends on besides the form: neither how K is split nor the order of tiles."""
    config = choice.config._asdict()
    spread = choice.product.name != "gemm" and config.get("split", 1) != 1
    fields = tuple(sorted((name, v) for name, v in config.items() if name not in {"split", "even", "group_m"}))
    return choice.product.name, fields, spread, 1 if m <= 8 else 16 if m <= 16 else 64


def works(form: Form, kernel: str, config: dict[str, Any], m: int, n: int = 512, k: int = 1024) -> str:
    """Compile and run a configuration on a small problem; returns what went wrong, or an empty text."""
    try:
        made = instance(form, m, n, k)
        found = call(made, choice_of(form, kernel, config))().double()
        wanted = made.x.double() @ dense(made.weight).double().t()
        error = float((found - wanted).norm() / wanted.norm())
    except Exception as error:  # noqa: BLE001 - whatever it is, the configuration is not for this GPU
        return f"{type(error).__name__}: {first_line(error)}"[:160]
    return "" if error < (0.02 if form.codes else 0.006) else f"wrong: relative error {error:.4f}"


def device() -> Device:
    """The current GPU."""
    return device_of(torch.device("cuda", torch.cuda.current_device()))
