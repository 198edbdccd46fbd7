"""Tables, their kinds of scales and e4m3 activations on a GPU, held against the contracts; a script, not collected.

``python tests/cuda/tables_on_gpu.py [--seconds N] [SCHEME ...]``

Each scheme is computed by what the plugin chooses, for few and many rows and sizes that are no multiple of anything,
and by every kernel that supports it in several configurations. Processes share the GPU, because compilation takes most
of the time; what N seconds do not suffice for is counted as not checked.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from itertools import product as pairs
from multiprocessing import get_context
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "helpers"))

SCHEMES = (
    "wfp8a16", "wfp4a16-g32-e8m0", "wfp4a16-g16-e4m3", "wnf4a16-g64", "wfp8afp8", "wfp8afp8-g128", "wfp8a16-g128",
    "wfp8a16-g32-e8m0", "wfp4a16-g16-e4m3d", "wfp8afp8-static", "wfp8_e5m2a16", "wfp4_bnba16-g64", "wfp4a16",
    "wnf4a16", "wfp8a16-g64-fzp", "wfp4a16-g64-fzp", "wnf4a16-g32-fzp", "w4afp8-g32-asym",
)  # fmt: skip
SIZES = (
    (1, 272, 576, "bfloat16"), (64, 272, 576, "bfloat16"), (300, 272, 1024, "bfloat16"), (40, 37, 77, "bfloat16"),
    (8, 272, 576, "bfloat16"), (1, 272, 576, "float16"), (40, 272, 576, "float16"), (40, 129, 576, "float32"),
    (2, 48, 300, "float32"), (16, 64, 1024, "bfloat16"), (3, 129, 300, "bfloat16"),
)  # fmt: skip
PRODUCTS = (
    ("gemv", (1, 1, 4, 2), 1), ("gemm", (64, 32, 4, 3, 2, True, 2), 33), ("gemm_hopper", (128, 0), 130),
    ("dense", (), 30), ("gemv", (2, 1, 4, 3, True), 5), ("gemm", (64, 32, 4, 3), 33), ("gemm_hopper", (256, 1), 260),
    ("gemm", (128, 64, 8, 3, 1, True, 1, 1), 70), ("gemm_hopper", (32, 2), 32),
)  # fmt: skip
"""Kernels, fields of a configuration, and rows."""


TWO_LEVEL = ((64, 256, 256), (17, 50, 77), (90, 4100, 256), (130, 400, 640), (300, 272, 1024), (257, 1040, 384))
"""M, N and K for the kernel with e4m3 operands, which has no configurations."""


def tasks(schemes):
    """What is checked, the most important first: (function, scheme, what it takes)."""
    yield from (("two_level", s, size) for s in schemes for size in TWO_LEVEL if s in ("wfp8afp8", "wfp8afp8-g128"))
    for i in range(max(len(SIZES), len(PRODUCTS))):
        for scheme in schemes:
            if i < len(SIZES):
                yield "linear", scheme, SIZES[i]
            if i < len(PRODUCTS) and "a16" in scheme:
                yield "product", scheme, PRODUCTS[i]
            if i == 1 and "a16" in scheme:
                yield "embedding", scheme, ()


def check(task):
    """(right, line) of each result of a task."""
    name, scheme, what = task
    title = f"{name} {scheme} {what}"
    try:
        return [
            (verdict is None or verdict.ok, f"{title} {more}" + (f": {verdict.message}" if verdict else ""), verdict)
            for verdict, more in CHECKS[name](scheme, *what)
        ]
    except Exception as error:  # noqa: BLE001  all of them are wanted
        traceback.print_exc(limit=-2)
        return [(False, f"{title}: {type(error).__name__}: {str(error)[-300:]}", None)]


def made(scheme, m, n, k, dtype, bias):
    """A problem, the plugin's kernel for it, and its tensors on the GPU."""
    from cuda_problems import linear_problem

    from qcore_cuda.linear import kernel

    case = linear_problem(scheme, m, n, k, dtype, bias)
    mine = kernel(case.request)
    return case, mine, case.x.cuda(), mine.pack(case.weight.to("cuda")), None if bias == "none" else case.bias.cuda()


def linear(scheme, m, n, k, name):
    """What the plugin chooses."""
    import torch

    from qcore.contracts import LINEAR
    from qcore_cuda.eligibility import why_not

    case, mine, x, packed, bias = made(scheme, m, n, k, getattr(torch, name), "same" if m % 3 else "none")
    reason = why_not(replace(case.request, device=torch.device("cuda:0")))
    assert not reason, reason
    yield LINEAR.judge(case, mine.run(x, packed, bias).cpu()), ""


def product(scheme, name, fields, m):
    """One kernel and configuration, for a K of whole blocks and one that is none."""
    import torch

    from qcore.contracts import LINEAR
    from qcore_cuda.problem import float_problem, form_of
    from qcore_cuda.products.catalog import FLOAT_PRODUCTS
    from qcore_cuda.runtime.device import device_of
    from qcore_triton.packing import weight_of

    found = next(p for p in FLOAT_PRODUCTS if p.name == name)
    for n, k in ((272, 1024), (400, 416)):
        case, _, x, packed, bias = made(scheme, m, n, k, torch.bfloat16, "same")
        weight, device = weight_of(packed, case.weight.format, n, k), device_of(x.device)
        problem = float_problem(form_of(weight), m, torch.bfloat16, torch.bfloat16)
        choice = found.adapted(problem, found.config(*fields)) if found.serves(device, problem) else None
        if choice is None:
            yield None, f"{n}x{k} not supported"
        else:
            y = choice.product.launch(x, weight, bias, device, problem, choice.config)
            yield LINEAR.judge(case, y.cpu()), f"{n}x{k}"


def embedding(scheme):
    """Half of the contract's cases."""
    import torch

    from qcore.contracts import EMBEDDING
    from qcore.weights.schemes import Scheme
    from qcore_cuda.embedding import CudaEmbedding

    cuda = torch.device("cuda")
    for case in list(EMBEDDING.cases([Scheme.parse(scheme)], [torch.bfloat16, torch.float32]))[::2]:
        here = case.build(1, cuda)
        problem = here.to(cuda)
        mine = CudaEmbedding(problem.request)
        yield EMBEDDING.judge(here, mine(problem.x, mine.pack(problem.weight), None)), case.id


def in_squares(weight):
    """A weight with one scale for 128 rows each, as checkpoints of fp8 have them."""
    import torch

    from qcore import QTensor

    first = torch.arange(weight.shape[0]) // 128 * 128
    return QTensor.from_codes(weight.codes(), weight.scale[:, first].contiguous(), None, weight.format)


def two_level(scheme, m, n, k):
    """The kernel with e4m3 operands."""
    import torch

    from qcore.contracts import LINEAR
    from qcore_cuda import fp8
    from qcore_cuda.runtime.device import device_of
    from qcore_triton.packing import weight_of

    for dtype, square in pairs(("bfloat16", "float16"), (False, True) if "g128" in scheme else (False,)):
        case, mine, x, packed, bias = made(scheme, m, n, k, getattr(torch, dtype), "same" if m % 2 else "none")
        if square:
            case = replace(case, weight=in_squares(case.weight))
            packed = mine.pack(case.weight.to("cuda"))
        weight, device = weight_of(packed, case.weight.format, n, k), device_of(x.device)
        columns, squares = weight.data.shape[1], packed["blocks"] if square else None
        if "g128" in scheme:
            codes, scale = fp8._by_group(x, columns, 128, torch.uint8, device)
        else:
            codes, scale = fp8._by_row(x, columns, torch.uint8, None, device)
        y = fp8.two_level(codes, scale, weight, bias, getattr(torch, dtype), squares)
        yield LINEAR.judge(case, y.cpu()), f"{dtype} {square}"


CHECKS = {"linear": linear, "product": product, "embedding": embedding, "two_level": two_level}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("schemes", nargs="*", default=SCHEMES)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    counts, worst = Counter(), Counter()
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        open_tasks = {pool.submit(check, task): task for task in tasks(options.schemes)}
        while open_tasks and time.monotonic() < end:
            done, _ = wait(open_tasks, max(0.0, end - time.monotonic()), FIRST_COMPLETED)
            for future in done:
                name, scheme, _ = open_tasks.pop(future)
                for right, line, verdict in future.result():
                    counts["right" if right else "wrong"] += 1
                    worst[name, scheme] = max(worst[name, scheme], verdict.worst if verdict else 0)
                    if not right:
                        print(f"WRONG {line}", flush=True)
        for future in open_tasks:
            future.cancel()
        for process in pool._processes.values():
            if open_tasks:
                process.terminate()
    print("worst error / allowed:", ", ".join(f"{' '.join(key)} {value:.2f}" for key, value in worst.items()))
    print(f"{dict(counts)}, {len(open_tasks)} tasks not checked")
    return counts["wrong"] > 0


if __name__ == "__main__":
    sys.exit(main())
