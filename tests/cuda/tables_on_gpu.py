"""Tables, their kinds of scales and e4m3 activations on a GPU, held against the contracts; a script, not collected.

``python tests/cuda/tables_on_gpu.py [SCHEME ...]``

Each scheme is computed by what the plugin chooses, for few and many rows and sizes that are no multiple of anything,
and by every kernel that supports it in several configurations. Schemes run in processes of their own, which share the
GPU, because compilation takes most of the time.
"""

from __future__ import annotations

import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "helpers"))

SCHEMES = (
    "wfp8a16", "wfp8a16-g128", "wfp8_e5m2a16", "wfp8a16-g32-e8m0", "wfp8a16-g64-fzp", "wfp8afp8", "wfp8afp8-g128",
    "wfp8afp8-static", "wfp4a16-g32-e8m0", "wfp4a16-g16-e4m3", "wfp4a16-g16-e4m3d", "wfp4a16", "wfp4a16-g64-fzp",
    "wnf4a16-g64", "wnf4a16", "wnf4a16-g32-fzp", "wfp4_bnba16-g64", "w4afp8-g32-asym",
)  # fmt: skip
SIZES = (
    (1, 272, 576, "bfloat16"), (8, 272, 576, "bfloat16"), (16, 64, 1024, "bfloat16"), (64, 272, 576, "bfloat16"),
    (300, 272, 1024, "bfloat16"), (3, 129, 300, "bfloat16"), (40, 37, 77, "bfloat16"), (1, 272, 576, "float16"),
    (40, 272, 576, "float16"), (2, 48, 300, "float32"), (40, 129, 576, "float32"),
)  # fmt: skip


def configurations():
    """Products with configurations that cover their constexprs."""
    from qcore_cuda.products.dense import DENSE, Whole
    from qcore_cuda.products.gemm import GEMM, Tile
    from qcore_cuda.products.gemm_hopper import GEMM_HOPPER, Tokens
    from qcore_cuda.products.gemv import GEMV
    from qcore_cuda.products.skinny_gemm import WarpShape

    yield GEMV, WarpShape(1, 1, 4, 2), 1
    yield GEMV, WarpShape(2, 1, 4, 3, True), 5
    yield GEMM, Tile(64, 32, stages=3), 33
    yield GEMM, Tile(64, 32, stages=3, scaled=True, unroll=2, split=2), 33
    yield GEMM, Tile(128, 64, 8, 3, scaled=True, even=1), 70
    yield GEMM_HOPPER, Tokens(32, 2), 32
    yield GEMM_HOPPER, Tokens(128, 0), 130
    yield GEMM_HOPPER, Tokens(256), 260
    yield DENSE, Whole(), 30


def linear_problem(scheme, m, n, k, dtype, bias):
    from cuda_problems import linear_problem as made

    return made(scheme, m, n, k, dtype, bias)


def judged(name, case, call):
    """A line that says how a result stands against its contract."""
    from qcore.contracts import LINEAR

    try:
        verdict = LINEAR.judge(case, call().cpu())
        return verdict.ok, f"{'ok   ' if verdict.ok else 'WRONG'} {verdict.worst:8.3g} {name} " + (
            "" if verdict.ok else verdict.message
        )
    except Exception as error:  # noqa: BLE001  all of them are wanted
        traceback.print_exc()
        return False, f"ERROR {name}: {type(error).__name__}: {str(error)[-300:]}"


def check(scheme):
    """Every line of a scheme."""
    import torch

    from qcore.contracts import EMBEDDING
    from qcore.plugin_api import LINEAR
    from qcore.weights.schemes import Scheme
    from qcore_cuda import ops
    from qcore_cuda.eligibility import why_not
    from qcore_cuda.embedding import CudaEmbedding
    from qcore_cuda.linear import kernel
    from qcore_cuda.problem import float_problem, form_of
    from qcore_cuda.runtime.device import device_of
    from qcore_triton.packing import weight_of

    del LINEAR
    lines = []
    cuda = torch.device("cuda")
    for m, n, k, name in SIZES:
        dtype = getattr(torch, name)
        case = linear_problem(scheme, m, n, k, dtype, "same" if m % 3 else "none")
        reason = why_not(replace(case.request, device=torch.device("cuda:0")))
        if reason:
            lines.append((False, f"REFUSED {scheme}: {reason}"))
            break
        mine = kernel(case.request)
        packed = mine.pack(case.weight.to("cuda"))
        x, bias = case.x.to(cuda), None if case.bias is None else case.bias.to(cuda)
        call = lambda mine=mine, x=x, packed=packed, bias=bias: mine.run(x, packed, bias)  # noqa: E731
        lines.append(judged(f"{scheme} {m}x{n}x{k} {name}", case, call))
    if "a16" in scheme:
        for product, config, m in configurations():
            for n, k in ((272, 1024), (400, 416)):
                case = linear_problem(scheme, m, n, k, torch.bfloat16, "same")
                mine = kernel(case.request)
                weight = weight_of(mine.pack(case.weight.to("cuda")), case.weight.format, n, k)
                x, bias, device = case.x.to(cuda), case.bias.to(cuda), device_of(cuda)
                problem = float_problem(form_of(weight), m, torch.bfloat16, torch.bfloat16)
                choice = product.adapted(problem, config) if product.serves(device, problem) else None
                title = f"{scheme} {m}x{n}x{k} {product.name} {tuple(config)}"
                if choice is None:
                    lines.append((True, f"none           {title}"))
                    continue
                call = lambda c=choice, x=x, w=weight, b=bias, d=device, p=problem: c.product.launch(  # noqa: E731
                    x, w, b, d, p, c.config
                )
                lines.append(judged(title, case, call))
        parsed = Scheme.parse(scheme)
        cases = list(EMBEDDING.cases([parsed], [torch.bfloat16, torch.float32]))
        for case in cases[::2]:
            problem = case.build(1, cuda).to(cuda)
            mine = CudaEmbedding(problem.request)
            try:
                packed = mine.pack(problem.weight)
                verdict = EMBEDDING.judge(
                    case.build(1, cuda), mine(problem.x, packed, None)
                )
                lines.append((verdict.ok, f"{'ok   ' if verdict.ok else 'WRONG'} {verdict.worst:8.3g} {case.id} {'' if verdict.ok else verdict.message}"))
            except Exception as error:  # noqa: BLE001
                traceback.print_exc()
                lines.append((False, f"ERROR {case.id}: {type(error).__name__}: {str(error)[-300:]}"))
    del ops
    return lines


def main():
    chosen = sys.argv[1:] or SCHEMES
    count = wrong = 0
    with ProcessPoolExecutor(min(len(chosen), 14), get_context("spawn")) as pool:
        for lines in pool.map(check, chosen):
            for ok, line in lines:
                count, wrong = count + 1, wrong + (not ok)
                if not ok or "-v" in sys.argv or not line.startswith("ok"):
                    print(line, flush=True)
            worst = max((float(line.split()[1]) for ok, line in lines if line.startswith("ok")), default=0)
            print(f"{sum(ok for ok, _ in lines)} of {len(lines)} right, worst {worst:.2f}", flush=True)
    print(f"{count - wrong} of {count} right")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
