"""`grouped_linear` on a CUDA device beside torch's bf16 `grouped_mm`: results, then times of CUDA graph replays.

    python benchmarks/cuda_experts.py --check              # every kernel and configuration against float64
    python benchmarks/cuda_experts.py --scheme w4a16-g32   # a table of decode and prefill cells
    python benchmarks/cuda_experts.py --configurations     # the same for every configuration, to choose from

Rows go to random experts, some of which are more popular than others, differently in each of the calls of a graph.
Times are of the operation alone, activations' quantization included.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

# ruff: noqa: SLF001 - configurations other than the chosen one have no public way
import torch
from torch import Tensor
from torch.nn import functional as F

import qcore
from qcore.contracts import GROUPED_LINEAR
from qcore_cuda.grouped import choice, product
from qcore_cuda.grouped.problem import Experts, grouped_problem
from qcore_cuda.grouped.product import GroupedPlan
from qcore_cuda.grouped_linear import CudaGroupedLinear
from qcore_cuda.problem import form_of
from qcore_cuda.products.gemm import Tile, steps_of
from qcore_cuda.runtime.device import device_of
from qcore_triton.codes import given_of, mode_of

BF16 = torch.bfloat16
L2 = 200 << 20
"""Bytes that the calls of a graph read in all, at least: several times the second-level cache."""


class Layer(NamedTuple):
    """Weights of a mixture of experts; ``chosen``: experts of a token."""

    name: str
    experts: int
    n: int
    k: int
    chosen: int


LAYERS = (
    Layer("Mixtral up", 8, 14336, 4096, 2),
    Layer("Mixtral down", 8, 4096, 14336, 2),
    Layer("Qwen3-30B up", 128, 1536, 2048, 8),
    Layer("Qwen3-30B down", 128, 2048, 768, 8),
    Layer("gpt-oss-20b up", 32, 5760, 2880, 4),
    Layer("gpt-oss-120b down", 128, 2880, 2880, 4),
    Layer("DeepSeek-like 64", 64, 1408, 2048, 6),
)
DECODE, PREFILL = (8, 32, 128, 512), (4096,)
SCHEMES = ("w4a16-g128", "w4a16-g32", "w4a16-g32-asym", "mxfp4", "w8a16-g128", "w8a8", "w4a8-g128")


def offsets(layer: Layer, rows: int, seed: int) -> Tensor:
    """Ends of the rows of each expert for ``rows`` rows, tokens choosing different experts each."""
    generator = torch.Generator().manual_seed(seed)
    popular = torch.randn(layer.experts, generator=generator) * 0.5
    tokens = -(-rows // layer.chosen)
    noise = -torch.log(-torch.log(torch.rand(tokens, layer.experts, generator=generator)))
    chosen = (popular + noise).topk(layer.chosen, dim=1).indices.flatten()[:rows]
    counts = torch.bincount(chosen, minlength=layer.experts)
    return counts.cumsum(0).to("cuda", torch.int32)


@lru_cache(maxsize=2)
def packed_weight(layer: Layer, scheme: str) -> tuple[CudaGroupedLinear, dict[str, Tensor], Tensor]:
    """The kernel for a layer, random packed weights, and that of which all are multiples, float64 (N, K)."""
    parsed = qcore.Scheme.parse(scheme)
    request = GROUPED_LINEAR.request_for(parsed, torch.device("cuda", 0), BF16, layer.n, layer.k)
    made = CudaGroupedLinear(dataclasses.replace(request, experts=layer.experts))
    one = qcore.quantize(
        torch.randn(layer.n, layer.k, device="cuda", dtype=BF16) * 0.02,
        parsed.weight,
        "minmax" if "asym" in scheme else "absmax",
    )
    from qcore_triton import packing

    parts = {name: part.expand(layer.experts, *part.shape).contiguous() for name, part in packing.pack(one).items()}
    powers = factors(layer)[:, None, None]
    if parts["scale"].is_floating_point():
        parts["scale"] *= powers.to(parts["scale"].dtype)
    elif "factor" in parts:
        parts["factor"] *= powers[:, 0].float()
    else:  # e8m0
        parts["scale"] = (parts["scale"].int() + powers.log2().int()).to(torch.uint8)
    return made, parts, one.dequantize(torch.float64)


def factors(layer: Layer) -> Tensor:
    """Experts have one weight times a power of two each."""
    return 2.0 ** (torch.arange(layer.experts, device="cuda") % 5 - 2).double()


def expected(layer: Layer, x: Tensor, ends: Tensor, wide: Tensor) -> Tensor:
    """The result in float64, all rows having an expert."""
    expert = torch.searchsorted(ends.long(), torch.arange(len(x), device="cuda"), right=True)
    return (x.double() @ wide.t()) * factors(layer)[expert][:, None]


def experts_of(made: CudaGroupedLinear, packed: dict[str, Tensor]) -> Experts:
    parts = packed["data"], packed["scale"], packed.get("zero")
    return Experts(*parts, *made._constants[:5], packed.get("factor"))


def mode_for(made: CudaGroupedLinear, x: Tensor) -> Any:
    codes, symmetric, scale, zero = made._constants[5:9]
    return mode_of(x, symmetric, given_of(None, None, scale, zero)) if codes else None


def plan_with(made: CudaGroupedLinear, experts: Experts, x: Tensor, config: Any) -> GroupedPlan:
    where = device_of(x.device)
    problem = grouped_problem(
        form_of(experts.first), experts.number, x.shape[0], x.dtype, made.out_dtype, codes=made._constants[5]
    )
    return GroupedPlan(where, problem, choice.choose(where, problem) if config is None else config)


def call_with(
    made: CudaGroupedLinear, packed: dict[str, Tensor], x: Tensor, ends: Tensor, config: Any, bias: Any = None
) -> Any:
    """A call by a configuration, None: the one that is chosen."""
    experts = experts_of(made, packed)
    plan, mode = plan_with(made, experts, x, config), mode_for(made, x)
    return lambda: product.run(x, experts, bias, ends, mode, plan)


def configurations(plan: GroupedPlan) -> Iterator[Any]:
    """Those to choose from for a problem, the present choice first."""
    yield from dict.fromkeys([plan.config, *choice.candidates(plan.device, plan.problem)])


def graph_microseconds(calls: list[Any], rounds: int = 5) -> float:
    """Microseconds of one call: a graph of all of them, replayed."""
    for call in calls[:1]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    graph.replay()
    after.record()
    torch.cuda.synchronize()
    repeat = max(1, min(20, int(2.0 / max(before.elapsed_time(after), 1e-3))))
    times = []
    for _ in range(rounds):
        before.record()
        for _ in range(repeat):
            graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) * 1e3 / repeat / len(calls))
    return statistics.median(times)


def cell(
    layer: Layer, rows: int, scheme: str, dense: Tensor | None, every: bool
) -> tuple[float, list[tuple[float, Any]]]:
    """Microseconds of bf16 and of each configuration."""
    made, packed, wide = packed_weight(layer, scheme)
    turns = 12 if rows <= 512 else 2
    ends = [offsets(layer, rows, seed) for seed in range(turns)]
    xs = [torch.randn(rows, layer.k, device="cuda", dtype=BF16) for _ in range(turns)]
    base = 0.0
    if dense is not None:
        base = graph_microseconds(
            [lambda x=x, e=e: F.grouped_mm(x, dense.transpose(1, 2), offs=e) for x, e in zip(xs, ends, strict=True)]
        )
    plan = plan_with(made, experts_of(made, packed), xs[0], None)
    right = expected(layer, xs[0], ends[0], wide)
    found = []
    for config in configurations(plan) if every else [plan.config]:
        try:
            y = call_with(made, packed, xs[0], ends[0], config)()
            error = float((y.double() - right).abs().max() / right.abs().max())
            if not error < (3e-2 if made._constants[5] else 1e-2):
                print(f"    WRONG {layer.name} {scheme} T={rows} {config}: error {error:.3g}", flush=True)
            us = graph_microseconds([call_with(made, packed, x, e, config) for x, e in zip(xs, ends, strict=True)])
        except Exception as error:
            print(f"    {config}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            if "CUDA error" in str(error):
                raise
            continue
        found.append((us, config))
    return base, found


def short(config: Any) -> str:
    return f"{type(config).__name__[:2]}(" + ",".join(str(int(v)) for v in config) + ")"


def table(layers: list[Layer], schemes: list[str], sizes: tuple[int, ...], every: bool) -> None:
    for layer in layers:
        dense = torch.randn(layer.experts, layer.n, layer.k, device="cuda", dtype=BF16) * 0.02
        bases: dict[int, float] = {}
        for scheme in schemes:
            for rows in sizes:
                base, found = cell(layer, rows, scheme, None if rows in bases else dense, every)
                base = bases.setdefault(rows, base)
                own, ranked = found[0], sorted(found, key=lambda pair: pair[0])
                best = ranked[0]
                chosen = f"chosen {short(own[1])} {own[0]:.1f} ({base / own[0]:.2f})"
                others = " ".join(f"{short(c)}={us:.1f}" for us, c in ranked[:8])
                fastest = f"best {short(best[1])} {best[0]:.1f} ({base / best[0]:.2f}); {others}" if every else ""
                print(f"{layer.name} {scheme} T={rows}: bf16 {base:.1f}; {chosen} {fastest}", flush=True)
        del dense
        torch.cuda.empty_cache()


def check(
    layer: Layer,
    scheme: str,
    rows: int,
    config: Any,
    ends: Tensor | None = None,
    bias: bool = False,
    dtype: torch.dtype = BF16,
) -> str:
    """What is wrong with a result, or nothing."""
    parsed = qcore.Scheme.parse(scheme)
    request = GROUPED_LINEAR.request_for(parsed, torch.device("cuda", 0), dtype, layer.n, layer.k)
    made = CudaGroupedLinear(dataclasses.replace(request, experts=layer.experts, bias=bias))
    torch.manual_seed(rows)
    dense = torch.randn(layer.experts, layer.n, layer.k, device="cuda", dtype=dtype)
    rule = "minmax" if parsed.weight.zero is not qcore.ZeroPoint.NONE else "absmax"
    weight = qcore.nn.QuantizedGroupedLinear.from_float(dense, f"{qcore.Scheme(parsed.weight)}@{rule}").weight
    packed = made.pack(weight)
    x = torch.randn(rows, layer.k, device="cuda", dtype=dtype)
    b = torch.randn(layer.experts, layer.n, device="cuda", dtype=dtype) if bias else None
    ends = offsets(layer, rows, 1) if ends is None else ends
    expected = torch.zeros(rows, layer.n, dtype=torch.float64, device="cuda")
    wide = weight.dequantize(torch.float64)
    values = x.double()
    if made._constants[5]:
        from qcore.weights.activations import dynamic_parameters, quantize_int8

        scale, zero = dynamic_parameters(x, made._constants[6])
        codes = quantize_int8(x, scale, zero).double()
        values = (codes if zero is None else codes - zero.double()) * scale.double()
    start = 0
    for e, end in enumerate(ends.tolist()):
        expected[start:end] = values[start:end] @ wide[e].t() + (0 if b is None else b[e].double())
        start = end
    call = call_with(made, packed, x, ends, config, b)
    y = call()
    error = (y.double() - expected).abs().max() / expected.abs().max()
    again = call()
    torch.cuda.synchronize()
    if not torch.equal(y, again):
        return "not deterministic"
    return "" if float(error) < 1e-2 else f"error {float(error):.3g}"


CHECKED = (
    Layer("small", 4, 256, 512, 2),
    Layer("odd", 7, 200, 352, 2),
    Layer("ragged", 5, 272, 1440, 2),
    Layer("many", 40, 384, 768, 8),
)
CHECKS = (*SCHEMES, "nvfp4", "nf4", "wfp8a16", "w8a16-g32-asym", "w4a16-g64-fzp", "w8a8-aasym")


def checks(processes: int) -> int:
    """Every scheme on small layers, by the kernels that are chosen; returns the number of faults."""
    first, behind = [0, 0, 100, 100, 300], [3, 3, 50, 60, 70]
    asked: list[Any] = [(layer, scheme, rows, None, rows == 100, BF16) for layer, scheme, rows in product_of()]
    for scheme in ("w4a16-g128", "w8a16-g128", "w4a16-g32-asym", "w8a8"):
        asked += [(CHECKED[2], scheme, 300, first, True, BF16), (CHECKED[2], scheme, 90, behind, True, BF16)]
    asked += [(CHECKED[0], "w4a16-g128", 300, None, False, dtype) for dtype in (torch.float16, torch.float32)]
    done, found = 0, 0
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for wrong in pool.imap_unordered(checked, asked):
            done += 1
            if wrong:
                found += 1
                print(wrong, flush=True)
            if done % 16 == 0 or done == len(asked):
                print(f"{done} of {len(asked)} checks, {found} wrong", flush=True)
    return found


def checked(asked: tuple[Layer, str, int, list[int] | None, bool, torch.dtype]) -> str:
    """`check` in a process of its own, and what was checked."""
    layer, scheme, rows, given, bias, dtype = asked
    ends = None if given is None else torch.tensor(given, device="cuda", dtype=torch.int32)
    with torch.no_grad():
        wrong = check(layer, scheme, rows, None, ends, bias, dtype)
    return wrong and f"WRONG {asked}: {wrong}"


def product_of() -> Iterator[tuple[Layer, str, int]]:
    """Layers, schemes and numbers of rows that are checked, each scheme with every number of rows."""
    for i, scheme in enumerate(CHECKS):
        for j, rows in enumerate((5, 100, 700)):
            yield CHECKED[(i + j) % len(CHECKED)], scheme, rows


def graph_check() -> int:
    """A captured call follows offsets that change."""
    layer, faults = CHECKED[2], 0
    for rows in (40, 600):
        made, packed, _ = packed_weight(layer, "w4a16-g128")
        x, ends = torch.randn(rows, layer.k, device="cuda", dtype=BF16), offsets(layer, rows, 0)
        made(x, packed, None, offsets=ends)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = made(x, packed, None, offsets=ends)
        for seed in range(1, 4):
            ends.copy_(offsets(layer, rows, seed))
            graph.replay()
            torch.cuda.synchronize()
            if not torch.equal(y, made(x, packed, None, offsets=ends.clone())):
                faults += 1
                print(f"WRONG graph, {rows} rows", flush=True)
    return faults


def warm(job: tuple[Layer, str, int, Any]) -> None:
    """Compile a configuration, in a process of its own, into Triton's cache."""
    layer, scheme, rows, config = job
    made, packed, _ = packed_weight(layer, scheme)
    x, ends = torch.randn(rows, layer.k, device="cuda", dtype=BF16), offsets(layer, rows, 0)
    try:
        call_with(made, packed, x, ends, config)()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - said where it is measured
        print(f"    warm {job}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def jobs_of(layers: list[Layer], schemes: list[str], sizes: tuple[int, ...], every: bool) -> list[Any]:
    """A job for each different kernel, about."""
    found: dict[Any, Any] = {}
    for layer in layers:
        for scheme in schemes:
            made, packed, _ = packed_weight(layer, scheme)
            for rows in sizes:
                plan = plan_with(
                    made, experts_of(made, packed), torch.empty(rows, layer.k, device="cuda", dtype=BF16), None
                )
                for wanted in configurations(plan) if every else [plan.config]:
                    config, steps = wanted, None
                    if isinstance(config, Tile):
                        config = config._replace(even=0)
                        steps = steps_of(experts_of(made, packed).first, plan.device, plan.problem.gemm, config)[:2]
                    found.setdefault((scheme, config, steps, layer.n % 8 == 0), (layer, scheme, rows, config))
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--configurations", action="store_true")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="compile, or check, in so many processes")
    parser.add_argument("--layer", action="append", help="a part of a layer's name")
    parser.add_argument("--scheme", action="append")
    parser.add_argument("--rows", type=int, action="append")
    options = parser.parse_args()
    schemes = options.scheme or list(SCHEMES)
    layers = [layer for layer in LAYERS if not options.layer or any(part in layer.name for part in options.layer)]
    sizes = tuple(options.rows or (*DECODE, *PREFILL))
    if options.warm and not options.check:
        jobs = jobs_of(layers, schemes, sizes, options.configurations)
        start = time.perf_counter()
        with multiprocessing.get_context("spawn").Pool(options.warm) as pool:
            pool.map(warm, jobs, chunksize=1)
        print(f"{len(jobs)} kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)
    with torch.no_grad():
        if options.check:
            sys.exit(bool(checks(max(1, options.warm)) + graph_check()))
        table(layers, schemes, sizes, options.configurations)


if __name__ == "__main__":
    main()
