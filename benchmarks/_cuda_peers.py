"""What users would pick instead on a CUDA device: ops of torch itself, and libraries where they are installed.

Each function takes a `Problem` and gives its contenders; one that cannot be built raises, and the reason is reported.
Activations are quantized by a kernel of our own, so that a peer without a good one does not lose by it.
"""

# ruff: noqa: SLF001 - the quantized products inside torch are private ops

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from _cuda_problem import BF16, GROUP, Contender, Problem, Run, copies_of, nbytes
from torch import Tensor

Make = Callable[[Problem], list[Contender]]
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@triton.jit
def _quantize_rows(x, codes, scales, K, TOP: tl.constexpr, INTEGER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-8) / TOP
    values = values / scale
    if INTEGER:
        values = (values + 12582912.0) - 12582912.0  # to the nearest integer, half to even
    tl.store(codes + row * K + at, values.to(codes.dtype.element_ty), mask=at < K)
    tl.store(scales + row, scale)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes ``(M, K)`` and scales ``(M, 1)``, one per row."""
    m, k = x.shape
    codes = torch.empty(m, k, device=x.device, dtype=dtype)
    scales = torch.empty(m, 1, device=x.device, dtype=torch.float32)
    block, top = triton.next_power_of_2(k), 127.0 if dtype == torch.int8 else FP8_MAX
    _quantize_rows[(m,)](x, codes, scales, k, top, dtype == torch.int8, block, num_warps=8 if block >= 4096 else 4)
    return codes, scales


def _unsigned(problem: Problem, scheme: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..15 ``(N, K)``, bfloat16 scales and integer zero points ``(N, K/group)`` in the same domain."""
    weight = problem.quantized(scheme)
    zero = weight.integer_zero()
    zero = torch.zeros_like(weight.scale) if zero is None else zero
    return (
        (weight.codes() + 8).to(torch.uint8),
        weight.scale.t().to(BF16).contiguous(),
        (zero + 8).t().to(BF16).contiguous(),
    )


def _fp8(problem: Problem) -> tuple[Tensor, Tensor]:
    """The weight in fp8 with a float32 scale per output channel ``(N, 1)``."""
    wide = problem.weight.float()
    scale = wide.abs().amax(1, keepdim=True) / FP8_MAX
    return (wide / scale).to(FP8), scale


def inside_torch(problem: Problem) -> list[Contender]:
    codes, scale, zero = _unsigned(problem, "w4a16-g128-asym")
    packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    pairs = torch.stack([scale.t(), ((8 - zero) * scale).t()], -1).contiguous()
    w8, sums = problem.quantized("w8a8"), problem.quantized("w8a8").scale.view(1, -1).float()
    f8, f8_scale = _fp8(problem)

    def tinygemm(w: Tensor, p: Tensor) -> Run:
        return lambda x: torch.ops.aten._weight_int4pack_mm(x, w, GROUP, p)

    def int_mm(w: Tensor, s: Tensor) -> Run:
        def run(x: Tensor) -> Tensor:
            q, sx = quantize_rows(x, torch.int8)
            padded = torch.nn.functional.pad(q, (0, 0, 0, max(0, 32 - len(q))))  # it wants more than 16 rows
            return (torch._int_mm(padded, w.t())[: len(q)].float() * sx * s).to(BF16)

        return run

    def scaled_mm(w: Tensor, s: Tensor) -> Run:
        def run(x: Tensor) -> Tensor:
            q, sx = quantize_rows(x, FP8)
            return torch._scaled_mm(q, w.t(), scale_a=sx, scale_b=s, out_dtype=BF16, use_fast_accum=True)

        return run

    f8_tensors, fp8 = [f8, f8_scale.view(1, -1).contiguous()], "aten _scaled_mm fp8 rowwise + quantization"
    return [
        # Beyond a few rows it takes milliseconds.
        problem.contender("aten tinygemm", "w4a16-g128-asym", [packed, pairs], tinygemm, rows=lambda m: m <= 16),
        problem.contender("aten _int_mm + quantization", "w8a8", [w8.data, sums], int_mm),
        problem.contender(fp8, "w8a8", f8_tensors, scaled_mm, lambda: f8.float() * f8_scale),
    ]


def fbgemm(problem: Problem) -> list[Contender]:
    spec = find_spec("fbgemm_gpu")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).parent / "experimental/gen_ai/fbgemm_gpu_experimental_gen_ai.so"
    torch.ops.load_library(str(library))
    ops = torch.ops.fbgemm
    codes, scale, zero = _unsigned(problem, "w4a16-g128-asym")
    signed = (codes.to(torch.int16) - 8).to(torch.int8)
    packed = ((signed[:, ::2] & 0xF) | (signed[:, 1::2] << 4)).contiguous()
    shuffled, shuffled_scale = ops.preshuffle_i4(packed, scale.t().contiguous())
    added = ((8 - zero) * scale).t().contiguous()
    f8, f8_scale = _fp8(problem)

    def bf16i4(w: Tensor, s: Tensor, z: Tensor) -> Run:
        return lambda x: ops.bf16i4bf16_shuffled(x, w, s, z)

    def f8f8(w: Tensor, s: Tensor) -> Run:
        def run(x: Tensor) -> Tensor:
            q, sx = quantize_rows(x, FP8)
            return ops.f8f8bf16_rowwise(q, w, sx.view(-1), s)

        return run

    f8_tensors = [f8, f8_scale.view(-1).contiguous()]
    return [
        problem.contender("fbgemm bf16i4 shuffled", "w4a16-g128-asym", [shuffled, shuffled_scale, added], bf16i4),
        problem.contender("fbgemm fp8 rowwise + quantization", "w8a8", f8_tensors, f8f8, lambda: f8.float() * f8_scale),
    ]


def humming(problem: Problem) -> list[Contender]:
    from humming import ops

    def pack(codes: Tensor, bits: int) -> Tensor:
        return ops.pack_weight(codes.to(torch.int32).contiguous(), bits)

    codes, scale, _ = _unsigned(problem, "w4a16-g128")
    codes_z, scale_z, zero = _unsigned(problem, "w4a16-g128-asym")
    w8 = problem.quantized("w8a16")
    int4 = {"weight": pack(codes, 4), "weight_scale": scale}
    zeros = pack(zero.t().to(torch.int32), 4).t().contiguous()
    int4_z = {"weight": pack(codes_z, 4), "weight_scale": scale_z, "zero_point": zeros}
    int8 = {"weight": pack(w8.codes().to(torch.int32) + 128, 8), "weight_scale": w8.scale.view(-1, 1).to(BF16)}
    grouped, channel = {"dtype": "uint4", "group_size": GROUP}, {"dtype": "uint8", "group_size": 0}
    integers = {"dtype": "int8"}
    return [
        _humming(problem, "humming w4a16", "w4a16-g128", grouped, None, int4),
        _humming(problem, "humming w4a16 asym", "w4a16-g128-asym", {**grouped, "has_zero_point": True}, None, int4_z),
        _humming(problem, "humming w8a16", "w8a16", channel, None, int8),
        _humming(problem, "humming w8a8", "w8a8", channel, integers, int8),
        _humming(problem, "humming w4a8", "w4a8-g128", grouped, integers, int4),
    ]


def _humming(
    problem: Problem,
    name: str,
    scheme: str,
    weight: dict[str, Any],
    activation: dict[str, Any] | None,
    tensors: dict[str, Tensor],
) -> Contender:
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    sizes = {"shape_n": problem.n, "shape_k": problem.k}
    layer = HummingLayer(**sizes, weight_config=weight, input_config=activation, torch_dtype=BF16).cuda()
    layer.load_from_tensors({key: tensor.cuda() for key, tensor in tensors.items()})
    layer.transform()
    made = _of_layers(problem, name, scheme, layer)
    configs: dict[int, str] = {}

    def config(m: int) -> str:  # for this row count alone: all of them would take minutes to build
        if m not in configs:
            found = get_heuristics_config(layer_config=layer.humming_config, shape_m=m)
            configs[m] = json.dumps([[0, 1 << 30, found]])
        return configs[m]

    made.runs = [lambda x, own=own: own(x, tuning_config=config(len(x))) for own in made.runs]
    return made


def _of_layers(
    problem: Problem,
    name: str,
    scheme: str,
    layer: Any,
    tensors: Iterable[Tensor] = (),
    rows: Callable[[int], bool] = lambda _: True,
) -> Contender:
    """A peer that comes as a module: copied whole."""
    size = nbytes(list(tensors) or layer.parameters()) or problem.k * problem.n
    layers = [layer, *(copy.deepcopy(layer) for _ in range(copies_of(size) - 1))]
    judge = problem.quantized(scheme)
    return Contender(name, scheme, layers, size, lambda: judge.dequantize(torch.float32), rows)


def bitsandbytes(problem: Problem) -> list[Contender]:
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(problem.weight, blocksize=64, quant_type="nf4")

    def gemm(w: Tensor, scales: Tensor) -> Run:
        op, fixed = torch.ops.bitsandbytes.gemm_4bit.default, (state.blocksize, state.quant_type)
        return lambda x: op(x, w, state.shape, scales, *fixed)

    def dense() -> Tensor:
        return functional.dequantize_4bit(packed, state).float()

    return [
        problem.contender("bitsandbytes nf4, block 64", "w4a16-g128", [packed.view(-1, 1), state.absmax], gemm, dense)
    ]


def gemlite(problem: Problem) -> list[Contender]:
    from gemlite import helper

    codes, scale, zero = _unsigned(problem, "w4a16-g128-asym")
    w8 = problem.quantized("w8a16")
    where = {"device": "cuda", "dtype": BF16}
    made = {
        "w4a16-g128-asym": helper.A16Wn(**where).from_weights(
            codes, scale.reshape(-1, 1), zero.reshape(-1, 1), 4, GROUP
        ),
        "w8a16": helper.A16W8_INT8(**where).from_weights(w8.codes(), scales=w8.scale.view(-1, 1).to(BF16)),
        "w8a8": helper.A8W8_INT8_dynamic(**where).from_weights(w8.codes(), scales=w8.scale.view(-1, 1).float()),
    }

    def few(m: int) -> bool:
        return m in (1, 16)  # each row count is tuned for seconds to minutes

    return [_of_layers(problem, f"gemlite {s}", s, x, [x.W_q, x.scales], few) for s, x in made.items()]


def torchao(problem: Problem) -> list[Contender]:
    from torchao import quantization

    tiles = {"group_size": GROUP, "int4_packing_format": "tile_packed_to_4d"}
    configs = {
        "torchao int4 tile packed, eager": ("w4a16-g128-asym", quantization.Int4WeightOnlyConfig(**tiles)),
        "torchao int8 weight only, eager": ("w8a16", quantization.Int8WeightOnlyConfig()),
    }
    return [_torchao(problem, quantization.quantize_, name, *config) for name, config in configs.items()]


def _torchao(problem: Problem, quantize: Callable[..., Any], name: str, scheme: str, config: Any) -> Contender:
    layer = torch.nn.Linear(problem.k, problem.n, bias=False, device="cuda", dtype=BF16)
    with torch.no_grad():
        layer.weight.copy_(problem.weight)
    model = torch.nn.Sequential(layer)
    quantize(model, config)
    made = _of_layers(problem, name, scheme, model, [problem.weight[: problem.n // 2]])  # 8 bits: an upper bound

    def dense() -> Tensor:  # multiplied out: not every tensor of torchao can be dequantized
        parts = torch.eye(problem.k, device="cuda", dtype=BF16).split(1024)
        return torch.cat([model(part) for part in parts]).t().float()

    made.dense = dense
    return made


PEERS: dict[str, tuple[str, Make]] = {
    "torch": ("torch", inside_torch),
    "humming": ("humming", humming),
    "fbgemm": ("fbgemm_gpu", fbgemm),
    "bitsandbytes": ("bitsandbytes", bitsandbytes),
    "torchao": ("torchao", torchao),
    "gemlite": ("gemlite", gemlite),
}
"""By the name that ``--peers`` takes: the module it needs, and its maker."""


def installed() -> list[str]:
    return [name for name, (module, _) in PEERS.items() if find_spec(module)]
