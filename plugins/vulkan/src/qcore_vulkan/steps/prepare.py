"""Activations for a product: float32 rows, or int8 codes with their scales, padded group by group like the weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from qcore import DynamicInt8, StaticInt8

from ..builder import Builder, Ref, fold
from ..device import Device
from ..layout import Geometry
from .rows import NUMBERS, FloatRows, Int8Rows, Rows, is_local, local

Activation = DynamicInt8 | StaticInt8

LANES = 64
"""The workgroup size of shaders whose lanes are independent."""
_SMALL = 1 << 18
"""Up to this many bytes, activations are read twice in place: a copy would take longer."""
_MOST_KEPT = 16
"""Words of a row that a lane keeps in registers."""

SYMMETRIC, ASYMMETRIC, GIVEN, PER_TOKEN = range(4)
"""How rows are quantized, as in the shader."""


@dataclass(frozen=True)
class Window:
    """Columns of a convolution: ``rows`` of one channel group, followed by those of the next.

    **Fields:** ``heads``: channel groups; ``channels`` of one; ``first``: the output position of row 0;
    ``sizes``: the words after ``channels`` in the shader's push constants.
    """

    rows: int
    heads: int
    channels: int
    first: int
    sizes: tuple[int | float, ...]


@dataclass(frozen=True)
class Source:
    """Input of a preparation: rows of ``x``, or a convolution's columns over the pixels ``x``."""

    x: Rows
    window: Window | None = None

    @property
    def rows(self) -> int:
        """Rows of a channel group."""
        return self.x.rows if self.window is None else self.window.rows

    @property
    def heads(self) -> int:
        """Channel groups."""
        return 1 if self.window is None else self.window.heads

    def push(self, geometry: Geometry, grid: int, mode: int, scale: float = 0.0, zero: int = 0) -> list[int | float]:
        """The push constants of `prepare` and `quantize`."""
        w, g = self.window, geometry
        words = [self.rows, g.k, self.x.pitch, g.group, g.groups, g.steps, grid, self.rows * self.heads, mode]
        return [*words, scale, zero, *((0, 1) if w is None else (w.first, w.channels, *w.sizes))]

    def constants(self, geometry: Geometry) -> tuple[int, int, int]:
        """Their specialization constants: CONV, DTYPE and ALIGNED."""
        w, g = self.window, geometry
        aligned = (w is None or w.channels % 4 == 0) and (g.groups == 1 or g.group % 4 == 0)
        return int(w is not None), NUMBERS[self.x.dtype], int(aligned)


def prepare_float(b: Builder, source: Source, geometry: Geometry, dtype: torch.dtype = torch.float32) -> FloatRows:
    """Rows in ``dtype``, float32 or float16. Float32 rows without padding are used as is if that is cheap."""
    x, rows = source.x, source.rows * source.heads
    as_they_are = x.dtype == dtype == torch.float32 and geometry.columns == geometry.k and is_local(b, x)
    if source.window is None and as_they_are:
        return FloatRows(x.ref, rows, x.pitch, dtype)
    groups = fold(-(-rows * geometry.columns // (4 * LANES)))
    push = source.push(geometry, groups[0], NUMBERS[dtype])
    constants = LANES, *source.constants(geometry)

    def make() -> FloatRows:
        ref = b.scratch(rows * geometry.columns * dtype.itemsize)
        b.dispatch("prepare", constants, groups, push, [x.ref, *[None] * 6, ref])
        return FloatRows(ref, rows, geometry.columns, dtype)

    return b.prepared(x.ref, ("prepare", constants, *push), make)


def quantize(
    b: Builder, source: Source, geometry: Geometry, activation: Activation, given: Mapping[str, Ref]
) -> Int8Rows:
    """Rows as int8 codes. ``given``: float32 x_scale and int32 x_zero_point per row, if passed with the call."""
    mode, scale, zero = mode_of(activation)
    lanes, kept = _quantize_shape(b.device, geometry)
    if not kept and mode in (SYMMETRIC, ASYMMETRIC) and source.x.ref.bytes > _SMALL:
        source = replace(source, x=local(b, source.x))  # read for its extent first
    x, rows, words = source.x, source.rows * source.heads, geometry.columns // 4
    groups = fold(rows)
    tokens = [given["x_scale"], given["x_zero_point"]] if mode == PER_TOKEN else [x.ref, x.ref]
    push = source.push(geometry, groups[0], mode, scale, zero)
    constants = (lanes, *source.constants(geometry), kept)

    def make() -> Int8Rows:
        codes, params = b.scratch(4 * rows * words), b.scratch(4 * rows * (2 + geometry.groups))
        refs = [x.ref, *tokens, None, None, params, None, codes]
        b.dispatch("quantize", constants, groups, push, refs)
        return Int8Rows(codes, params, rows, words, geometry.groups, is_asymmetric(activation))

    return make() if mode == PER_TOKEN else b.prepared(x.ref, ("quantize", constants, *push), make)


def is_asymmetric(activation: Activation) -> bool:
    """Whether zero points of rows may differ from 0."""
    mode, _, zero = mode_of(activation)
    return mode in (ASYMMETRIC, PER_TOKEN) or zero != 0


def is_symmetric(activation: Activation) -> bool:
    """Whether each row gets its own scale and the zero point 0."""
    return mode_of(activation)[0] == SYMMETRIC


def mode_of(activation: Activation) -> tuple[int, float, int]:
    """How the shader quantizes, with the scale and zero point of the tensor if they are given."""
    if isinstance(activation, DynamicInt8):
        return (SYMMETRIC if activation.symmetric else ASYMMETRIC), 1.0, 0
    if activation.per_token:
        return PER_TOKEN, 1.0, 0
    return GIVEN, 1.0 if activation.scale is None else activation.scale, activation.zero_point


def _quantize_shape(device: Device, geometry: Geometry) -> tuple[int, int]:
    """Lanes of the workgroup that quantizes a row, a power of two, and the words that a lane keeps; 0: x is read twice.

    Sizes for GPUs were measured on an H200.
    """
    if device.profile == "cpu":
        return 8, 0
    words = geometry.columns // 4
    most = 256 if words <= 1024 else 512 if words <= 2048 else 1024
    most = 1 << min(most, device.description.limits.max_invocations).bit_length() - 1
    lanes = min(most, max(32, 1 << (words - 1).bit_length()))
    team = max(1, lanes >> (geometry.groups - 1).bit_length())
    each = -(-4 * geometry.steps // team) * -(-geometry.groups * team // lanes)
    return lanes, each if each <= _MOST_KEPT else 0
