"""Calls: from torch tensors to a program on the device, and back to a torch tensor.

A program is made once per weight and form of the call (rows, dtypes, bias) and reused for calls of that form. Calls
whose activations are too large for one run are split, see `parts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from qcore import DynamicInt8, FormatError, OutputInt8, StaticInt8
from qcore.plugin_api import check_indices, check_offsets, contiguous

from . import steps
from .builder import Builder, Place, Program, Ref
from .device import Buffer, Device
from .layout import DeviceWeight
from .parts import Box, Sizes, in_boxes, in_parts
from .steps import Ends, Geometry2d, Image, Rows
from .weights import Resident

LARGEST = 128 << 20
"""Bytes of activations that one run copies to the device or back; larger calls are split."""

_NOTHING: Mapping[str, Tensor] = {}


class Form:
    """Everything except tensors that a product depends on: the request's activation, output and result dtype.

    Compared by identity, which costs less than comparing the values: `form` makes one for each combination.
    """

    __slots__ = ("activation", "out_dtype", "output")

    def __init__(
        self, activation: DynamicInt8 | StaticInt8 | None, output: OutputInt8 | None, out_dtype: torch.dtype
    ) -> None:
        self.activation, self.output, self.out_dtype = activation, output, out_dtype


@lru_cache(maxsize=4096)
def form(activation: DynamicInt8 | StaticInt8 | None, output: OutputInt8 | None, out_dtype: torch.dtype) -> Form:
    """The one `Form` with these values."""
    return Form(activation, output, out_dtype)


def largest(device: Device) -> int:
    """Bytes of a matrix of activations that one call may have."""
    return min(LARGEST, device.description.limits.max_storage_range)


def linear(
    x: Tensor, resident: Resident, bias: Tensor | None, form: Form, given: Mapping[str, Tensor] = _NOTHING
) -> Tensor:
    """``A(x) @ W^T + bias``: x ``(M, K)`` of any strides to ``(M, N)``; ``given``: per token, ``(M,)``, by name."""
    m, n = x.shape[0], resident.n
    x = in_rows(x)
    y = torch.empty((m, n), dtype=form.out_dtype, device="cpu")
    buffer = None if bias is None else resident.biases.buffer(bias)
    names, tensors = tuple(given), [per_token(name, value, m) for name, value in given.items()]

    def run(start: int, stop: int) -> None:
        key = (stop - start, x.dtype, form, buffer and id(buffer), names)
        program = resident.programs.get(
            key, lambda: record_linear(resident.device, resident.weight, stop - start, x.dtype, buffer, form, names)
        )
        _run(program, [x, *tensors], y, start, stop)

    in_parts(m, largest(resident.device) // _row_bytes(resident.weight.geometry.columns, n), run)
    return y


def _row_bytes(*columns: int) -> int:
    """Bytes of a row of the widest matrix, as float32."""
    return steps.rows_bytes(1, max(columns), torch.float32)


def record_linear(
    device: Device,
    weight: DeviceWeight,
    rows: int,
    dtype: torch.dtype,
    bias: Buffer | None,
    form: Form,
    given: tuple[str, ...],
    *,
    timed: bool = False,
) -> Program:
    """A program that takes x ``(rows, K)`` and the vectors ``given`` by name, and returns ``(rows, N)``."""
    b, g = Builder(device), weight.geometry
    x, of_x = rows_in(b, rows, g.k, dtype)
    vectors = {name: b.input(4 * rows) for name in given}
    out = b.output(steps.rows_bytes(rows, g.n, form.out_dtype))
    y = steps.linear(b, x, weight, bias, form.activation, form.output, form.out_dtype, vectors, out)
    places = [of_x, *(Place(ref, 1, 4 * rows, 4 * rows) for ref in vectors.values())]
    return b.program(places, [place(y)], timed=timed)


def grouped_linear(x: Tensor, offsets: Tensor, resident: Resident, bias: Tensor | None, form: Form) -> Tensor:
    """X ``(T, K)`` of any strides to ``(T, N)``, each row by the weight of its expert; ``offsets``: int32 ``(E,)``.

    Raises `FormatError` for offsets that descend or are outside of 0..T.
    """
    rows, n, experts = x.shape[0], resident.n, resident.weight.experts
    check_offsets(offsets, experts, rows)
    x, ends = in_rows(x), contiguous(offsets)
    y = torch.empty((rows, n), dtype=form.out_dtype, device="cpu")
    buffer = None if bias is None else resident.biases.buffer(bias)

    def run(start: int, stop: int) -> None:
        key = ("grouped", stop - start, x.dtype, form, buffer and id(buffer))
        program = resident.programs.get(key, lambda: _grouped_linear(resident, stop - start, x.dtype, buffer, form))
        program.run([x[start:stop], ends - start if start else ends], [y[start:stop]])

    in_parts(rows, largest(resident.device) // _row_bytes(resident.weight.geometry.columns, n), run)
    return y


def _grouped_linear(resident: Resident, rows: int, dtype: torch.dtype, bias: Buffer | None, form: Form) -> Program:
    b, g, experts = Builder(resident.device), resident.weight.geometry, resident.weight.experts
    x, of_x = rows_in(b, rows, g.k, dtype)
    given = b.input(4 * experts)
    ref = b.scratch(4 * experts * (1 + g.n if bias is not None else 1))
    b.copy(given, Ref(ref.buffer, ref.offset, 4 * experts))
    if bias is not None:
        b.copy(Ref(bias, 0, 4 * experts * g.n), Ref(ref.buffer, ref.offset + 4 * experts, 4 * experts * g.n))
    ends, out = Ends(ref, experts, bias is not None), b.output(steps.rows_bytes(rows, g.n, form.out_dtype))
    y = steps.grouped_linear(b, x, resident.weight, ends, form.activation, form.out_dtype, out)
    return b.program([of_x, Place(given, 1, 4 * experts, 4 * experts)], [place(y)])


def rows_in(b: Builder, rows: int, columns: int, dtype: torch.dtype) -> tuple[Rows, Place]:
    """A matrix that is copied to the device: the rows that steps read, and the place that the host writes."""
    ref = b.input(steps.rows_bytes(rows, columns, dtype))
    x = Rows(ref, rows, columns, steps.rows_pitch(columns, dtype), dtype)
    return x, place(x)


def place(x: Rows) -> Place:
    """Where the host writes or reads a matrix."""
    return Place(x.ref, x.rows, x.columns * x.dtype.itemsize, x.pitch * x.dtype.itemsize)


def _run(program: Program, inputs: list[Tensor], y: Tensor, start: int, stop: int) -> None:
    """Run on a range of rows of everything."""
    if stop - start < y.shape[0]:
        program.run([part[start:stop] for part in inputs], [y[start:stop]])
    else:
        program.run(inputs, [y])


def in_rows(x: Tensor) -> Tensor:
    """A matrix whose rows are contiguous: x, or a copy."""
    return x if x.stride(1) == 1 else x.contiguous()


def per_token(name: str, value: Tensor, rows: int) -> Tensor:
    """A vector of parameters as the device takes it. Raises `FormatError` for a wrong length."""
    if tuple(value.shape) != (rows,):
        raise FormatError(f"{name} has shape {tuple(value.shape)}; there are {rows} tokens, so it must be ({rows},).")
    return contiguous(value.to(torch.int32 if name.endswith("zero_point") else torch.float32))


def embedding(indices: Tensor, resident: Resident, out_dtype: torch.dtype) -> Tensor:
    """Rows of a table ``(V, D)``: int32 or int64 indices of any shape to ``(*indices.shape, D)``.

    Raises `IndexError` for an index outside ``0..V-1``.
    """
    flat = indices_of(indices, resident.n)
    y = torch.empty((flat.shape[0], resident.k), dtype=out_dtype, device="cpu")

    def run(start: int, stop: int) -> None:
        key = ("embedding", stop - start, out_dtype)
        program = resident.programs.get(key, lambda: _embedding(resident, stop - start, out_dtype))
        _run(program, [flat], y, start, stop)

    in_parts(flat.shape[0], largest(resident.device) // _row_bytes(resident.k), run)
    return y.view(*indices.shape, resident.k)


def indices_of(indices: Tensor, size: int) -> Tensor:
    """Indices of any shape and strides as the device takes them, flat int32; `IndexError` outside ``0..size-1``."""
    check_indices(indices, size)
    return indices.reshape(-1).to(torch.int32).contiguous()


def _embedding(resident: Resident, count: int, out_dtype: torch.dtype) -> Program:
    b = Builder(resident.device)
    indices = b.input(4 * count)
    out = b.output(steps.rows_bytes(count, resident.k, out_dtype))
    y = steps.embedding(b, indices, count, resident.weight, out_dtype, out)
    return b.program([Place(indices, 1, 4 * count, 4 * count)], [place(y)])


def conv2d(x: Tensor, resident: Resident, bias: Tensor | None, form: Form, geometry: Geometry2d) -> Tensor:
    """X ``(B, IC, H, W)`` to ``(B, OC, OH, OW)``, channels last."""
    batch, _, *size = x.shape
    height, width = geometry.output(*size)
    y = torch.empty((batch, height, width, resident.n), dtype=form.out_dtype, device="cpu")
    buffer = None if bias is None else resident.biases.buffer(bias)

    def fits(sizes: Sizes) -> bool:
        return _box_bytes(x, resident, geometry, sizes) <= largest(resident.device)

    def run(box: Box) -> None:
        pixels, results, part = x, y, geometry
        if box != whole:
            (first, last), rows, columns = box
            part, (top, bottom), (left, right) = geometry.part((size[0], size[1]), rows, columns)
            pixels = x[first:last, :, top:bottom, left:right]
            results = y[first:last, slice(*rows), slice(*columns)]
        shape = pixels.shape
        key = (shape, x.dtype, form, part, buffer and id(buffer))
        program = resident.programs.get(key, lambda: _conv2d(resident, shape, x.dtype, buffer, form, part))
        program.run([pixels_of(pixels)], [results.view(-1, resident.n)])

    whole = ((0, batch), (0, height), (0, width))
    in_boxes((batch, height, width), fits, run)
    return y.movedim(-1, 1)


def _box_bytes(x: Tensor, resident: Resident, geometry: Geometry2d, sizes: Sizes) -> int:
    """Bytes of the largest matrix that a part of a convolution with results of these sizes needs, as float32."""
    images, rows, columns = sizes
    height, width = min(x.shape[2], geometry.reach(0, rows)), min(x.shape[3], geometry.reach(1, columns))
    pixels, results = images * height * width, images * rows * columns
    scratch = 4 * resident.weight.geometry.columns * geometry.groups
    return max(pixels * _row_bytes(x.shape[1]), results * _row_bytes(resident.n), min(results, steps.PART) * scratch)


def pixels_of(x: Tensor) -> Tensor:
    """Images ``(B, C, H, W)`` as the matrix ``(B * H * W, C)``: no copy if they are channels last."""
    return in_rows(x.movedim(1, -1).reshape(-1, x.shape[1]))


def _conv2d(
    resident: Resident,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bias: Buffer | None,
    form: Form,
    geometry: Geometry2d,
) -> Program:
    batch, channels, height, width = shape
    b = Builder(resident.device)
    x, of_x = rows_in(b, batch * height * width, channels, dtype)
    oh, ow = geometry.output(height, width)
    out = b.output(steps.rows_bytes(batch * oh * ow, resident.n, form.out_dtype))
    image = Image(x, batch, channels, height, width)
    quantization = (form.activation, form.output, form.out_dtype)
    y = steps.conv2d(b, image, resident.weight, bias, geometry, *quantization, out)
    return b.program([of_x], [place(y.rows)])


def geometry(
    kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Geometry2d:
    """The sizes of a convolution as steps take them."""
    return Geometry2d(_pair(kernel), _pair(stride), _pair(padding), _pair(dilation), groups)


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    height, width = sizes
    return height, width
