"""Measuring the kernels that a device has for a product, for ``qcore tune``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from . import tuning_cache
from .calls import Form, in_rows, per_token, record_linear
from .layout import DeviceWeight, download, upload
from .steps import selection
from .steps.problem import GemmProblem
from .weights import Resident

_CACHED = 96 << 20
"""Bytes of the copies of a weight that runs alternate between, so that none stays in a cache of the device."""
_MOST = 8
_RUNS = 20


def tune_linear(x: Tensor, resident: Resident, bias: Tensor | None, form: Form, given: Mapping[str, Tensor]) -> None:
    """Measure every kernel for this number of rows on the device; the fastest is used from now on."""
    device = resident.device
    if device.profile != "gpu":
        return  # register tiles are the only kernel
    out_dtype = form.out_dtype if form.output is None else torch.float32
    problem = GemmProblem.of(form.activation, x.shape[0], resident.weight.geometry, (x.dtype, out_dtype))
    weights = _copies(resident)
    inputs = [in_rows(x), *(per_token(name, value, x.shape[0]) for name, value in given.items())]
    y = torch.empty((x.shape[0], resident.n), dtype=form.out_dtype, device="cpu")
    buffer = None if bias is None else resident.biases.buffer(bias)
    times = {}
    for kernel in list(selection.usable(device, problem)):
        selection.prefer(device, problem, kernel)
        programs = [
            record_linear(device, weight, x.shape[0], x.dtype, buffer, form, tuple(given), timed=True)
            for weight in weights
        ]
        found = [program.run(inputs, [y]) for _ in range(_RUNS) for program in programs]
        times[kernel] = statistics.median(time for time in found[len(programs) :] if time is not None)
    if times:
        best = min(times, key=times.__getitem__)
        selection.prefer(device, problem, best)
        tuning_cache.keep(device.description, problem, best)
    resident.programs.clear()


def _copies(resident: Resident) -> list[DeviceWeight]:
    weight, count = resident.weight, min(_MOST, -(-_CACHED // resident.weight.nbytes))
    if count == 1:
        return [weight]
    neutral = download(weight)
    return [weight, *(upload(resident.device, neutral) for _ in range(count - 1))]
