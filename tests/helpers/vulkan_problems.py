"""Contract problems as programs of steps, without the plugin's hooks."""

from __future__ import annotations

import pytest
import torch
from linear_problems import linear_problem
from torch import Tensor

from qcore.contracts import CONTRACTS, Problem
from qcore_vulkan import device as devices
from qcore_vulkan import steps
from qcore_vulkan.builder import Builder, Place
from qcore_vulkan.device import Device
from qcore_vulkan.layout import upload
from qcore_vulkan.steps import Geometry2d, Image, Rows


@pytest.fixture
def vulkan() -> Device:
    """The device that tests run on."""
    return devices.get()


def place(x: Rows) -> Place:
    return Place(x.ref, x.rows, x.columns * x.dtype.itemsize, x.pitch * x.dtype.itemsize)


def bring(b: Builder, rows: int, columns: int, dtype: torch.dtype) -> Rows:
    ref = b.input(steps.rows_bytes(rows, columns, dtype))
    return Rows(ref, rows, columns, steps.rows_pitch(columns, dtype), dtype)


def run_linear(device: Device, problem: Problem) -> Tensor:
    """A linear problem with rows, on ``device``."""
    r, x = problem.request, problem.x.reshape(-1, problem.request.k).contiguous()
    b = Builder(device)
    rows = bring(b, x.shape[0], r.k, x.dtype)
    given = {name: value.contiguous() for name, value in problem.given.items()}
    refs = {name: b.input(value.nbytes) for name, value in given.items()}
    bias = None if problem.bias is None else device.upload(problem.bias.float())
    out = b.output(steps.rows_bytes(x.shape[0], r.n, r.out_dtype))
    weight = upload(device, problem.weight)
    y = steps.linear(b, rows, weight, bias, r.activation, r.output, r.out_dtype, refs, out)
    places = [Place(ref, 1, given[name].nbytes, given[name].nbytes) for name, ref in refs.items()]
    result = torch.empty(x.shape[0], r.n, dtype=r.out_dtype)
    b.program([place(rows), *places], [place(y)]).run([x, *given.values()], [result])
    return result.view(*problem.x.shape[:-1], r.n)


def run_conv2d(device: Device, problem: Problem) -> Tensor:
    """A convolution of at least one image, on ``device``."""
    r, (batch, channels, height, width) = problem.request, problem.x.shape
    b = Builder(device)
    pixels = problem.x.movedim(1, -1).reshape(-1, channels).contiguous()
    x = Image(bring(b, pixels.shape[0], channels, pixels.dtype), batch, channels, height, width)
    geometry = Geometry2d(r.kernel_size, r.stride, r.padding, r.dilation, r.groups)
    bias = None if problem.bias is None else device.upload(problem.bias.float())
    weight = upload(device, problem.weight)
    oh, ow = geometry.output(height, width)
    out = b.output(steps.rows_bytes(batch * oh * ow, r.n, r.out_dtype))
    y = steps.conv2d(b, x, weight, bias, geometry, r.activation, r.output, r.out_dtype, out)
    assert (y.batch, y.height, y.width, y.channels) == (batch, oh, ow, r.n)
    result = torch.empty(y.rows.rows, r.n, dtype=r.out_dtype)
    b.program([place(x.rows)], [place(y.rows)]).run([pixels], [result])
    return result.view(batch, oh, ow, r.n).movedim(-1, 1)


def run_embedding(device: Device, problem: Problem) -> Tensor:
    """A lookup of at least one row, on ``device``."""
    r, indices = problem.request, problem.x.reshape(-1).to(torch.int32)
    b = Builder(device)
    ref = b.input(indices.nbytes)
    out = b.output(steps.rows_bytes(len(indices), r.k, r.out_dtype))
    y = steps.embedding(b, ref, len(indices), upload(device, problem.weight), r.out_dtype, out)
    result = torch.empty(len(indices), r.k, dtype=r.out_dtype)
    b.program([Place(ref, 1, indices.nbytes, indices.nbytes)], [place(y)]).run([indices], [result])
    return result.view(*problem.x.shape, r.k)


def run_grouped_linear(device: Device, problem: Problem) -> Tensor:
    """A problem of experts with rows, on ``device``: their ends and biases are in its memory."""
    r, (rows, k), ends = problem.request, problem.x.shape, problem.given["offsets"]
    b = Builder(device)
    x = bring(b, rows, k, problem.x.dtype)
    biases = torch.empty(0) if problem.bias is None else problem.bias.float().flatten()
    beside = torch.cat([ends.view(torch.float32), biases])
    given = b.input(beside.nbytes)
    out = b.output(steps.rows_bytes(rows, r.n, r.out_dtype))
    own = steps.Ends(given, r.experts, problem.bias is not None)
    y = steps.grouped_linear(b, x, upload(device, problem.weight), own, r.activation, r.out_dtype, out)
    result = torch.full((rows, r.n), torch.nan, dtype=r.out_dtype)
    b.program([place(x), Place(given, 1, beside.nbytes, beside.nbytes)], [place(y)]).run(
        [problem.x.contiguous(), beside], [result]
    )
    return result


RUN = {
    "linear": run_linear,
    "conv2d": run_conv2d,
    "embedding": run_embedding,
    "grouped_linear": run_grouped_linear,
}


def drawn(scheme: str, m: int, n: int, k: int, dtype: torch.dtype = torch.float32, **more) -> Problem:
    """A linear problem, in float32 unless said otherwise."""
    return linear_problem(scheme, m, n, k, dtype, **more)


def assert_right(device: Device, problem: Problem) -> None:
    """Hold what ``device`` makes of a problem against its contract."""
    contract = problem.request.contract
    verdict = CONTRACTS[contract].judge(problem, RUN[contract](device, problem))
    assert verdict.ok, verdict.message
