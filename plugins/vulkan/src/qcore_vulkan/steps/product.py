"""Products of activations and a weight: the choice of a kernel, and register tiles, which run on every device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from qcore import PluginError

from ..builder import Builder, Ref
from ..device import Buffer, Device
from ..layout import DeviceWeight, Geometry, Part
from ..variants import float_variant, int_variant
from .experts import Added, Ends, columns, first_column, is_biased, memory, row_tiles, words
from .prepare import Activation, Source, prepare_float, quantize
from .problem import Activations, GemmKernel, GemmProblem
from .rows import NUMBERS, Int8Rows, Rows

_WIDE = 256
"""Columns beyond which larger tiles are worth their longer compilation on a CPU."""


@dataclass(frozen=True)
class Tile:
    """`gemm_float` or `gemm_int`: a lane computes ``tm`` rows by ``tn`` columns.

    ``heads``: channel groups; ``experts``: whether rows are sorted by expert.
    """

    variant: str
    form: Literal["float32", "int8"]
    lanes: int
    tm: int
    tn: int
    heads: int = 1
    experts: bool = False

    def append(self, b: Builder, x: Activations, part: Part, geometry: Geometry, bias: Added, out: Rows) -> None:
        assert not isinstance(x, Rows)
        n, g = columns(bias, part, geometry) // self.heads, geometry
        groups = (-(-n // (self.lanes * self.tn)), row_tiles(out.rows, self.tm, bias), self.heads)
        stride = (x.words if isinstance(x, Int8Rows) else x.stride) // 4
        form = [first_column(bias, part), NUMBERS[out.dtype], g.zero_kind, int(is_biased(bias))]
        push: list[int | float] = [out.rows, n, part.padded_n, g.groups, g.steps, stride, out.pitch, *form, x.rows]
        zero = part.scale if part.zero is None else part.zero
        refs: list[Ref | Buffer | None] = [part.codes, part.scale, zero]
        if isinstance(x, Int8Rows):
            push += [int(x.asymmetric), *words(bias, part, g)]
            refs += [part.sums, x.codes, x.params]
        else:
            push += [0, *words(bias, part, g)]
            refs += [part.values, x.ref, None]
        refs += [memory(bias, part), out.ref]
        b.dispatch(self.variant, self.constants(g, out.dtype), groups, push, refs)

    def constants(self, g: Geometry, dtype: torch.dtype) -> tuple[int, ...]:
        """Specialization constants: lanes, TM, TN, BITS, WIDE, EXPERTS and VALUES."""
        return self.lanes, self.tm, self.tn, g.bits, int(dtype == torch.float32), int(self.experts), g.values


def tile(device: Device, op: str, m: int, geometry: Geometry, heads: int, experts: bool = False) -> Tile:
    """The register tile for ``m`` rows and the columns of each channel group; on CPUs as measured on lavapipe."""
    n, lanes = geometry.n // heads, 8 if device.profile == "cpu" else 32
    if m == 1:
        tm, tn = 1, 4 if n > lanes else 1
    elif device.profile != "cpu":
        tm, tn = 4, 4
    elif op == "gemm_float":
        tm, tn = 4, 8
    else:
        tm, tn = 8 if m > 4 else 4, 8 if m > 4 and n > _WIDE else 4
    if op == "gemm_float":
        return Tile(float_variant(device), "float32", lanes, tm, tn, heads, experts)
    return Tile(int_variant(device), "int8", lanes, tm, tn, heads, experts)


def multiply(
    b: Builder,
    source: Source,
    weight: DeviceWeight,
    bias: Added,
    activation: Activation | None,
    given: Mapping[str, Ref],
    out: Rows,
) -> None:
    """``A(x) @ W^T + bias`` into ``out``, float32, float16 or bfloat16.

    With experts ``bias`` holds the ends of their rows as well.
    """
    if source.heads > 1 and len(weight.parts) > 1:
        raise PluginError(
            "a convolution in channel groups needs its weight in one buffer; this device's buffers are too small"
        )
    product = _choose(b.device, source, weight, bias, activation, out)
    x: Activations
    if product.form == "rows" and source.window is None:
        x = source.x
    elif product.form == "int8":
        assert activation is not None
        x = quantize(b, source, weight.geometry, activation, given)
    else:
        dtype = torch.float16 if product.form == "float16" else torch.float32
        x = prepare_float(b, source, weight.geometry, dtype)
    for part in weight.parts:
        product.append(b, x, part, weight.geometry, bias, out)


def _choose(
    device: Device, source: Source, weight: DeviceWeight, bias: Added, activation: Activation | None, out: Rows
) -> GemmKernel:
    experts = bias.experts if isinstance(bias, Ends) else 0
    rows = -(-source.rows // experts) if experts else source.rows
    if source.heads == 1:
        from . import selection

        dtypes, window = (source.x.dtype, out.dtype), source.window is not None
        form = {"window": window, "coarse": source.x.coarse, "experts": bool(experts)}
        problem = GemmProblem.of(activation, rows, weight.geometry, dtypes, **form)
        found = selection.choose(device, problem)
        if found is not None:
            return found
    op = "gemm_float" if activation is None else "gemm_int"
    return tile(device, op, rows, weight.geometry, source.heads, bool(experts))
