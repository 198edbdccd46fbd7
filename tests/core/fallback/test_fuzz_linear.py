"""Random products: every kernel under biases, scales, zero points, parameters and x in any strides, and uneven values.

The first run in `nox -s tests`, the others in `nox -s grids`; QCORE_FUZZ=N draws N of them.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from grids import draws

from qcore.contracts import LINEAR
from qcore.contracts.inputs import Draw, Shape
from qcore.weights.activations import StaticInt8
from qcore.weights.schemes import SCHEMES, Scheme

SEED = 14
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def draw(number):
    r, source = random.Random(f"{SEED} {number}"), Draw(torch.Generator().manual_seed(SEED * 1_000_003 + number))
    scheme, dtype = source.fill(Scheme.parse(r.choice([*SCHEMES, "w4a8-g32-asym-token-o8t"]))), r.choice(DTYPES)
    shape = Shape(
        "drawn",
        r.choice([(), (1,), (2,), (7,), (2, 3), (33,), (90,)]),
        r.choice((1, 3, 16, 48, 65)),
        r.choice((1, 5, 32, 77, 128, 256)),
        bias=r.choice(("none", "float32")),
        weights=r.choice(("skewed", "codes", "zeros", "tiny", "narrow")),
        inputs=r.choice(("normal", "large", "zero-rows", "outliers", "spikes")),
        parts=r.choice(("dense", "strided", "expanded")),
    )
    strides = r.choice(("dense", "columns", "rows", "expanded")) if shape.lead else "dense"
    request = LINEAR.request_for(scheme, torch.device("cpu"), dtype, shape.n, shape.k)
    if request.x_dtype.is_floating_point and isinstance(scheme.activation, StaticInt8) and r.random() < 0.2:
        request = replace(request, x_dtype=torch.int8)
    asked = replace(request, bias=shape.bias != "none")
    return source.linear(asked, replace(shape, strides=strides), scheme.quantizer, dtype)


@pytest.mark.parametrize("numbers", draws(500, few=80))
def test_random_products(tools, numbers):
    wrong = []
    for number in numbers:
        problem = draw(number)
        for name, kernel in tools.offers(problem.request).items():
            packed = kernel.pack(problem.weight)
            verdict = LINEAR.judge(problem, kernel(problem.x, packed, problem.bias, **problem.given))
            if not verdict.ok:
                wrong.append(f"{number} {name} {verdict.message}; {tuple(problem.x.shape)} {problem.request}")
    assert not wrong, "\n".join(wrong[:20])
