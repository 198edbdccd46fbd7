"""What the tests in test_contracts, test_contracts_tolerance share."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from qcore.contracts import (
    CONV2D,
    LINEAR,
    Conv2dRequest,
    Problem,
)
from qcore.formats import ZeroPoint
from qcore.weights.activations import DynamicInt8
from qcore.weights.qtensor import QTensor
from qcore.weights.schemes import SCHEMES, Scheme

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """The problems are small: threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


F = np.float32


def shape_name(case) -> str:
    """``rows-16`` of ``linear[w8a16-float32-rows-16]``."""
    return case.id.split("float32-")[-1].split("float16-")[-1].rstrip("]")


def linear_cases(scheme: str, dtype: torch.dtype, *names: str):
    wanted = [c for c in LINEAR.cases([Scheme.parse(scheme)], [dtype]) if c.scheme == scheme]
    return [c for c in wanted if not names or shape_name(c) in names]


def parameters(problem: Problem, prefix: str, token: int) -> tuple[float, int]:
    part = problem.request.activation if prefix == "x" else problem.request.output
    if part.per_token:
        return float(problem.given[f"{prefix}_scale"][token]), int(problem.given[f"{prefix}_zero_point"][token])
    return float(F(part.scale)), part.zero_point


def quantized(problem: Problem, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centred codes ``(rows, K)`` and scales ``(rows, 1)`` of A(x), in float32 as the design says; in numpy."""
    act, wide = problem.request.activation, rows.astype(F)
    low = np.minimum(wide.min(1, keepdims=True, initial=0), F(0))
    high = np.maximum(wide.max(1, keepdims=True, initial=0), F(0))
    if isinstance(act, DynamicInt8):
        s = np.maximum(-low, high) / F(127) if act.symmetric else (high - low) / F(255)
        s = np.where(s == 0, F(1), s)
        z = np.zeros_like(s) if act.symmetric else np.round(F(-128) - low / s)
    else:
        pairs = np.array([parameters(problem, "x", token) for token in range(len(rows))], dtype=F).reshape(-1, 2)
        s, z = pairs[:, :1], pairs[:, 1:]
    codes = wide if rows.dtype == np.int8 else np.clip(np.round(wide / s) + z, F(-128), F(127))
    return codes.astype(np.float64) - z, s


def activation_values(problem: Problem, rows: np.ndarray) -> list[list[float]]:
    """A(x), row by row."""
    if problem.request.activation is None:
        return rows.tolist()
    codes, scale = quantized(problem, rows)
    return (codes * scale.astype(np.float64)).tolist()


def dense_weight(weight: QTensor) -> list[list[float]]:
    codes, scale = weight.codes().tolist(), weight.scale.double().tolist()
    zero = weight.integer_zero() if weight.format.zero is ZeroPoint.INT else weight.zero
    zeros = None if zero is None else zero.double().tolist()
    n, k = weight.shape
    g = weight.format.group_size or max(k, 1)

    def value(i: int, j: int) -> float:
        q, s = codes[i][j], scale[j // g][i]
        if zeros is None:
            return q * s
        z = zeros[j // g][i]
        return (q - z) * s if weight.format.zero is ZeroPoint.INT else q * s + z

    return [[value(i, j) for j in range(k)] for i in range(n)]


def brute_force_linear(problem: Problem) -> list[list[float]]:
    """Loops over rows, outputs and columns."""
    w = dense_weight(problem.weight)
    bias = [0.0] * len(w) if problem.bias is None else problem.bias.double().tolist()
    x = problem.x.reshape(-1, problem.request.k)
    rows = (x if x.dtype == torch.int8 else x.float()).numpy()
    result = []
    for token, a in enumerate(activation_values(problem, rows)):
        y = [dot(a, line) + b for line, b in zip(w, bias, strict=True)]
        if problem.request.output is not None:
            s, z = parameters(problem, "out", token)
            y = [max(-128, min(127, round(v / s) + z)) for v in y]
        result.append(y)
    return result


def float32_kernel(problem: Problem, narrow: torch.dtype = torch.float32) -> torch.Tensor:
    """What a decent kernel computes: one float32 product, scales in float32, one rounding.

    ``narrow``: the dtype that the dense weight of a float product is rounded to.
    """
    request, weight = problem.request, problem.weight
    x = problem.x.reshape(problem.x.shape[:-1].numel(), request.k)
    dense = weight.dequantize(torch.float32)
    act = request.activation
    if act is None:
        y = x.float() @ dense.to(narrow).float().t()
    else:
        codes, scale = quantized(problem, (x if x.dtype == torch.int8 else x.float()).numpy())
        y = grouped_integer_product(torch.from_numpy(codes), weight) * torch.from_numpy(scale)
    if problem.bias is not None:
        y = y + problem.bias.float()
    if request.output is not None:
        pairs = [parameters(problem, "out", token) for token in range(x.shape[0])]
        s, z = (torch.tensor([p[i] for p in pairs], dtype=torch.float32).view(-1, 1) for i in (0, 1))
        return (torch.round(y / s) + z).clamp(-128, 127).to(torch.int8).view(*problem.x.shape[:-1], request.n)
    return y.to(request.out_dtype).view(*problem.x.shape[:-1], request.n)


def grouped_integer_product(codes: torch.Tensor, weight: QTensor) -> torch.Tensor:
    """Exact per group, scales in float32, summed in float32."""
    g = weight.format.group_size or max(1, weight.shape[1])
    y = torch.zeros(codes.shape[0], weight.shape[0])
    for group, (a, q) in enumerate(zip(codes.split(g, 1), weight.codes().split(g, 1), strict=True)):
        zero = weight.integer_zero()
        centred = q.double() if zero is None else q.double() - zero[group].double().unsqueeze(1)
        y += (a.double() @ centred.t()).float() * weight.scale[group].float()
        if weight.format.zero is ZeroPoint.FLOAT:
            y += a.double().sum(1, keepdim=True).float() * weight.zero[group].float()
    return y


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(p * q for p, q in zip(a, b, strict=True))


TOKEN = ["w4a8-g32-asym-token", "w4a8-g32-asym-token-o8t"]


ALL_SCHEMES = [*SCHEMES, *TOKEN]


def reweighted(problem: Problem, **changes) -> torch.Tensor:
    fields = {name: getattr(problem.weight, name) for name in ("data", "scale", "zero", "shape", "format")}
    return float32_kernel(replace(problem, weight=QTensor(**{**fields, **changes})))


def flipped_zero(problem):
    zero = problem.weight.zero
    low, high = problem.weight.format.code_range
    return reweighted(
        problem, zero=-zero if zero.is_floating_point() else (-zero.int()).clamp(low, high).to(torch.int8)
    )


def dropped_zero(problem):
    return reweighted(problem, zero=torch.zeros_like(problem.weight.zero))


def wrong_group(problem):
    return reweighted(problem, scale=problem.weight.scale.roll(1, 0).clone())


def transposed_scale(problem):
    g, n = problem.weight.scale.shape
    return reweighted(problem, scale=problem.weight.scale.t().reshape(g, n).clone())


def swapped_nibbles(problem):
    data = problem.weight.data
    return reweighted(problem, data=(data << 4) | (data >> 4))


def dropped_bias(problem):
    return float32_kernel(replace(problem, bias=None))


def bias_twice(problem):
    return float32_kernel(replace(problem, bias=2 * problem.bias))


def dropped_last_column(problem):
    x = problem.x.clone()
    x[..., -1] = 0
    if problem.request.activation is None:
        return float32_kernel(replace(problem, x=x))
    codes = problem.weight.codes().clone()
    codes[:, -1] = 0 if problem.weight.integer_zero() is None else problem.weight.integer_zero()[-1]
    zero = problem.weight.integer_zero()
    return float32_kernel(
        replace(problem, weight=QTensor.from_codes(codes, problem.weight.scale, zero, problem.weight.format))
    )


def one_code_off(problem):
    codes = problem.weight.codes().clone()
    low, high = problem.weight.format.code_range
    j = int(problem.x.reshape(-1, problem.request.k).float().abs().sum(0).argmax())
    codes[0, j] = low if codes[0, j] > (low + high) // 2 else high
    weight = problem.weight
    zero = weight.integer_zero() if weight.format.zero is ZeroPoint.INT else weight.zero
    return float32_kernel(replace(problem, weight=QTensor.from_codes(codes, weight.scale, zero, weight.format)))


def rows_beyond_k_repeat(problem):
    y, k = float32_kernel(problem), problem.request.k
    return y[torch.arange(y.shape[0]) % k]


def last_row_left_out(problem):
    y = float32_kernel(problem).clone()
    y[-1] = 0
    return y


def strides_ignored(problem):
    x = problem.x
    flat = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return float32_kernel(replace(problem, x=flat[: x.numel()].view(x.shape)))


def float_zero_rows(problem):
    y = float32_kernel(problem).clone()
    y[::2] = float("nan")
    return y


ERRORS = [
    (
        flipped_zero,
        ("w8a16-asym", "w8a16-g32-asym", "w4a16-g128-asym", "w4a16-g32-fzp", "w4a8-g32-asym"),
        ("rows-16", "k-odd", "n-12"),
    ),
    (dropped_zero, ("w8a16-asym", "w4a16-asym", "w4a16-g32-fzp", "w4a8-asym", "w8a8-g64-asym"), ("rows-2", "k-ragged")),
    (
        wrong_group,
        ("w8a16-g32", "w4a16-g128", "w4a16-g32-fzp", "w4a8-g32", "w8a8-g64"),
        ("rows-16", "deep", "k-ragged"),
    ),
    (transposed_scale, ("w8a16-g32", "w4a16-g128-asym", "w4a8-g32"), ("rows-16", "k-ragged")),
    (swapped_nibbles, ("w4a16", "w4a16-g128-asym", "w4a8-g32"), ("rows-1", "n-3", "k-ragged")),
    (
        dropped_bias,
        ("w8a16", "w4a16-g128-asym", "w8a8", "w8a8-static", "w4a8-g32"),
        ("bias", "bias-float32", "bias-ragged"),
    ),
    (bias_twice, ("w8a16", "w8a8"), ("bias", "bias-float32", "bias-ragged")),
    (dropped_last_column, ("w8a16", "w4a16-g128-asym", "w8a8", "w4a8-g32"), ("k-odd", "k-5", "strided-odd")),
    (
        one_code_off,
        ("w8a16", "w8a16-asym", "w4a16-g128", "w4a16-g128-asym", "w8a8", "w4a8-g32-asym"),
        ("rows-16", "k-5", "n-1"),
    ),
    (rows_beyond_k_repeat, ("w8a16", "w4a16-g128", "w8a8", "w4a8-g32"), ("m-above-k", "m-above-k-wide")),
    (last_row_left_out, ("w8a16", "w4a16-g128", "w8a8", "w8a8-static-o8"), ("rows-17", "rows-33", "m-above-k")),
    (strides_ignored, ("w8a16", "w4a16-g128", "w8a8"), ("strided-columns", "strided-rows", "strided-odd")),
    (float_zero_rows, ("w8a8", "w8a8-aasym"), ("zero-rows",)),
]


def conv_cases(scheme: str, dtype: torch.dtype = torch.float32):
    return list(CONV2D.cases([Scheme.parse(scheme)], [dtype]))


def geometry(request: Conv2dRequest) -> dict:
    names = ("stride", "padding", "dilation", "groups")
    return {name: getattr(request, name) for name in names}


def loop_columns(x: torch.Tensor, r: Conv2dRequest) -> list[list[list[float]]]:
    """Receptive fields by index arithmetic, columns in (KH, KW, IC) order: [position][group][column]."""
    b, c, h, w = x.shape
    per, values = c // r.groups, x.tolist()
    sizes = zip((h, w), r.padding, r.dilation, r.kernel_size, r.stride, strict=True)
    oh, ow = ((s + 2 * p - d * (k - 1) - 1) // t + 1 for s, p, d, k, t in sizes)
    found = []
    for i in range(b):
        for top in range(oh):
            for left in range(ow):
                fields = []
                for group in range(r.groups):
                    field = []
                    for dy in range(r.kernel_size[0]):
                        for dx in range(r.kernel_size[1]):
                            row = top * r.stride[0] - r.padding[0] + dy * r.dilation[0]
                            col = left * r.stride[1] - r.padding[1] + dx * r.dilation[1]
                            inside = 0 <= row < h and 0 <= col < w
                            field += [values[i][group * per + ic][row][col] if inside else 0.0 for ic in range(per)]
                    fields.append(field)
                found.append(fields)
    return found
