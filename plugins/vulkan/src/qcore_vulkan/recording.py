"""A run of modules recorded as one program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qcore import Conv2dRequest, DynamicInt8, EmbeddingRequest, StaticInt8
from qcore.plugin_api import AnyRequest, laid_out_like

from . import steps
from .bias import Biases
from .builder import Builder, Place, Program, Ref
from .calls import geometry, in_rows, indices_of, pixels_of, place, rows_in
from .device import Buffer, Device
from .flow import IMAGE, INDICES, Flow, Stage
from .steps import Image, Rows
from .weights import Resident, find


@dataclass(frozen=True)
class _BiasInUse:
    """``module.bias``, which was ``buffer`` on the device when it was recorded; None: there was none."""

    module: nn.Module
    biases: Biases
    buffer: Buffer | None

    def current(self) -> bool:
        bias = self.module._parameters["bias"]  # noqa: SLF001 - as core's own modules do, at a quarter of the cost
        return (None if bias is None else self.biases.buffer(bias)) is self.buffer


@dataclass(frozen=True)
class Recorded:
    """A program for ``stages``, on the weights that they had."""

    stages: tuple[Stage, ...]
    device: Device
    program: Program
    biases: tuple[_BiasInUse, ...]
    residents: tuple[Resident, ...]

    def current(self) -> bool:
        """Whether the device is alive and every bias is unchanged; `Sequential` checks the weights."""
        return not self.device.lost and all(bias.current() for bias in self.biases)

    def run(self, x: Tensor) -> Tensor:
        """The result of the modules for x, which has the shape and dtype that was recorded."""
        first, last = self.stages[0].before, self.stages[-1].after
        if first.kind == INDICES:
            flat = indices_of(x, self.residents[0].n)
        else:
            flat = pixels_of(x) if first.kind == IMAGE else in_rows(x.reshape(first.matrix))
        y = torch.empty(last.matrix, dtype=last.dtype, device="cpu")
        self.program.run([flat], [y])
        if last.kind != IMAGE:
            return y.view(last.shape)
        batch, channels, height, width = last.shape
        return laid_out_like(y.view(batch, height, width, channels).movedim(-1, 1), x)


def device_of(stages: Sequence[Stage]) -> Device | None:
    """The device of the first weight."""
    return next((_resident(stage).device for stage in stages if stage.bound), None)


def _resident(stage: Stage) -> Resident:
    assert stage.bound is not None
    return find(stage.bound.packed["weight"])


def record(stages: Sequence[Stage]) -> Recorded:
    """Record modules of which at least one has a weight; all weights are on one device."""
    residents = {id(stage): _resident(stage) for stage in stages if stage.bound}
    device = next(iter(residents.values())).device
    b = Builder(device)
    value, brought = _input(b, stages[0].before)
    working = [stage for stage in stages if stage.bound or stage.elementwise]
    biases: list[_BiasInUse] = []
    sizes = [steps.rows_bytes(*stage.after.matrix, stage.after.dtype) for stage in working]
    # Intermediate results alternate between two buffers, however long the chain.
    places = [b.scratch(max(sizes[turn:-1:2], default=0)) for turn in range(2)]
    for turn, (stage, size) in enumerate(zip(working, sizes, strict=True)):
        out = b.output(size) if stage is working[-1] else places[turn % 2].part(0, size)
        if stage.bound:
            value = _product(b, value, stage, stage.bound.request, residents[id(stage)], biases, out)
        else:
            assert isinstance(value, Rows)
            value = steps.elementwise(b, _seen_as(value, stage.before), stage.elementwise, out)
    assert isinstance(value, Rows)
    program = b.program([brought], [place(_seen_as(value, stages[-1].after))])
    return Recorded(tuple(stages), device, program, tuple(biases), tuple(residents.values()))


def _input(b: Builder, flow: Flow) -> tuple[Rows | Ref, Place]:
    rows, columns = flow.matrix
    if flow.kind == INDICES:
        ref = b.input(4 * rows)
        return ref, Place(ref, 1, 4 * rows, 4 * rows)
    return rows_in(b, rows, columns, flow.dtype)


def _seen_as(value: Rows, flow: Flow) -> Rows:
    """The same memory as another flow's matrix: views that `flow` allows keep the columns."""
    rows, columns = flow.matrix
    assert (rows, columns) == (value.rows, value.columns)
    return value


def _product(
    b: Builder,
    value: Rows | Ref,
    stage: Stage,
    request: AnyRequest,
    resident: Resident,
    biases: list[_BiasInUse],
    out: Ref | None,
) -> Rows:
    bias = stage.module._parameters.get("bias")  # noqa: SLF001 - as above
    if not isinstance(value, Rows) or isinstance(request, EmbeddingRequest):
        assert isinstance(value, Ref)
        return steps.embedding(b, value, stage.before.matrix[0], resident.weight, request.out_dtype, out)
    buffer = None if bias is None else resident.biases.buffer(bias)
    biases.append(_BiasInUse(stage.module, resident.biases, buffer))
    # Eligibility has refused fp8 activations.
    assert request.activation is None or isinstance(request.activation, (DynamicInt8, StaticInt8))
    quantization = (request.activation, request.output, request.out_dtype)
    if not isinstance(request, Conv2dRequest):
        return steps.linear(b, value, resident.weight, buffer, *quantization, out=out)
    sizes = geometry(request.kernel_size, request.stride, request.padding, request.dilation, request.groups)
    batch, channels, height, width = stage.before.shape
    image = Image(value, batch, channels, height, width)
    return steps.conv2d(b, image, resident.weight, buffer, sizes, *quantization, out=out).rows
