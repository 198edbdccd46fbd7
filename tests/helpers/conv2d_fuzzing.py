"""Random convolutions, run in a process that may crash: ``python conv2d_fuzzing.py SEED START STOP``.

Each number is printed before its convolution runs, and what is wrong with it after that.
"""

from __future__ import annotations

import random
import sys

import torch
from torch.nn.grad import conv2d_input

from qcore.contracts import CONV2D, Conv2dRequest, Problem
from qcore.contracts.conv2d import dense_kernel, laid_out_like, output_size
from qcore.contracts.inputs import Draw, laid_out
from qcore.fallback import plugin
from qcore.functional.autograd import _input_gradient
from qcore.weights.activations import StaticInt8
from qcore.weights.schemes import Scheme

SCHEMES = (
    *("w8a16", "w4a16-g32-asym", "w8a16-g32-fzp", "w8a8", "w4a8-g32-asym", "w8a8-aasym"),
    *("w8a8-static", "w4a8-static", "w8a8-static-o8"),
)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)


def odd_strides(x, r):
    """Other strides where a size is 1: torch takes them for contiguous."""
    strides = [r.choice((1, 2, 7, 64)) if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


LAYOUTS = {
    "dense": lambda x, r: x,
    "channels-last": lambda x, r: x.contiguous(memory_format=torch.channels_last),
    "odd": odd_strides,
    "odd-last": lambda x, r: odd_strides(x.contiguous(memory_format=torch.channels_last), r),
    "inside": lambda x, r: torch.nn.functional.pad(x, (1, 1, 1, 1))[:, :, 1:-1, 1:-1],
    "transposed": lambda x, r: x.transpose(2, 3).contiguous().transpose(2, 3),
    "reversed": lambda x, r: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "expanded": lambda x, r: x[:, :1].expand(x.shape),
}


def draw_request(r: random.Random, draw: Draw) -> tuple[Conv2dRequest, tuple[int, int]]:
    """A request and an image that is at least as large as the kernel."""
    scheme, dtype = draw.fill(Scheme.parse(r.choice(SCHEMES))), r.choice(DTYPES)
    groups = r.choice((1, 1, 1, 2, 3, 8))
    sizes = groups * r.choice((1, 1, 2, 3, 4, 16)), groups * r.choice((1, 2, 3, 4, 17, 40))
    x_dtype = torch.int8 if isinstance(scheme.activation, StaticInt8) and r.random() < 0.2 else dtype
    out = torch.int8 if scheme.output else dtype
    quantization = (scheme.weight, scheme.activation, scheme.output)
    while True:
        geometry = [tuple(r.randint(low, high) for _ in "hw") for low, high in ((1, 5), (1, 3), (0, 4), (1, 3))]
        request = Conv2dRequest(
            torch.device("cpu"), x_dtype, out, *sizes, *geometry, groups, *quantization, True, False
        )
        image = tuple(r.choice((1, 1, 2, 3, 5, 8, 12)) for _ in "hw")
        if min(output_size(request, *image)) > 0:
            return request, image


def faults(seed: int, number: int) -> list[str]:
    """What is wrong with the results of every kernel, and the gradient, of one convolution."""
    r, draw = random.Random(f"{seed} {number}"), Draw(torch.Generator().manual_seed(seed * 1_000_003 + number))
    request, image = draw_request(r, draw)
    shape, layout = (r.choice((0, 1, 1, 2, 3)), request.in_channels, *image), r.choice(list(LAYOUTS))
    x = LAYOUTS[layout](draw.activations(shape, request.x_dtype, "normal", "dense"), r)
    weight, bias = draw.weight(request.n, request.k, request.weight), draw.bias(request.n, "same", torch.float32)
    problem = laid_out(Problem(request, x, weight, bias), r.choice(("dense", "strided", "expanded")))
    found = []
    for offer in plugin.qcore_conv2d(request):
        y = offer.kernel(problem.x, offer.kernel.pack(problem.weight), problem.bias)
        verdict = CONV2D.judge(problem, laid_out_like(y, problem.x))
        if not verdict.ok:
            found.append(f"{offer.kernel.name}: {verdict.message}")
    if x.dtype == torch.float32:
        found += _gradient_faults(problem)
    return [f"{text}; {layout} {tuple(x.shape)} {request}" for text in found]


def _gradient_faults(problem: Problem) -> list[str]:
    request, x = problem.request, problem.x
    size = (x.shape[0], request.n, *output_size(request, *x.shape[2:]))
    grad, exact = torch.randn(size), dense_kernel(problem.weight, request, torch.float64)
    geometry = (request.stride, request.padding, request.dilation, request.groups)
    expected = conv2d_input(x.shape, exact, grad.double(), *geometry)
    error = _input_gradient(grad, problem.weight, request, x.shape) - expected
    return ["gradient"] if error.numel() and float(error.abs().max()) > 1e-3 else []


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number in range(int(sys.argv[2]), int(sys.argv[3])):
        print(number, flush=True)
        for fault in faults(int(sys.argv[1]), number):
            print("WRONG", fault, flush=True)
