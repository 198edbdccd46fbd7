"""A Llama-shaped model of transformers compiled whole for a device, beside the same model layer by layer.

    python benchmarks/whole_models.py --backend qcore_vulkan [--shape 1.1b] [--schemes w4a16-g128,w8a8] [--output FILE]
    python benchmarks/whole_models.py --backend qcore_xla --device cuda --dtype bfloat16 --shape 8b --layers 8

Weights are random: times are real, texts are not. Decode: a step of batch 1 over a static cache of ``--places``, up to
the next token on the host, the median of ``--tokens`` steps; and as many steps in a row, of which only the last is
waited for (quicker where a device works while the host goes on). Prefill: one call for the whole prompt, up to the
next token; the median of five. The floor of a step is the bytes of the weights over the bandwidth.

The scheme ``dense`` is the float model. Needs transformers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _table import header, markdown
from torch import Tensor, nn

import qcore
from qcore.nn import QuantizedEmbedding, QuantizedLinear

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 256},
    "1.1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
             "num_key_value_heads": 4, "vocab_size": 32000},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
DENSE = "dense"
"""In the place of a scheme: the float model."""


def main() -> None:
    """Measure every scheme, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True, help="qcore_vulkan or qcore_xla")
    parser.add_argument("--shape", choices=list(SHAPES), default="1.1b")
    parser.add_argument("--layers", type=int, help="blocks, if not all of the shape's")
    parser.add_argument("--schemes", default="w4a16-g128,w8a8")
    parser.add_argument("--table", default="w8a16", help="scheme of the embedding and the head; 'dense': as they are")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", default="512", help="lengths of prompts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--places", type=int, default=640, help="of the static cache")
    parser.add_argument("--no-layers", action="store_true", help="leave out layer by layer")
    parser.add_argument("--skip-guards", action="store_true", help="of torch.compile, once the model is compiled")
    parser.add_argument("--replay", action="store_true", help="repeat steps by `qcore.graphs.make_replay`")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    prefills = [f"prefill {p}, ms" for p in _numbers(args.prompts)]
    columns = ["scheme", "how", "ms per token", "tokens/s", "ms in a row", *prefills]
    rows = []
    for scheme in args.schemes.split(","):
        with qcore.using(f"{args.backend.removeprefix('qcore_')},torch"):
            for row in _rows(scheme, args):
                print(row, flush=True)
                rows.append(row)
    text = f"{header(f'Whole models by {args.backend}, {args.shape}')}\n\n{markdown(columns, rows)}\n"
    print(text)
    if args.output:
        args.output.write_text(text, encoding="utf-8")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _rows(scheme: str, args: argparse.Namespace) -> Iterator[list[str]]:
    """The rows of the table for a scheme: layer by layer, then compiled."""
    model = _made(scheme, args)
    if not args.no_layers:
        yield _row(scheme, "layer by layer", model, model, args)
    torch._dynamo.reset()  # noqa: SLF001
    begun = time.perf_counter()
    compiled = torch.compile(model, backend=args.backend)
    yield _row(scheme, "one program", compiled, model, args)
    found = qcore.graphs.explain(compiled)
    parts = [len(report.parts) for report in found.reports]
    print(f"  logits of a prompt and of three tokens, relative difference: {_difference(compiled, model, args):.1e}")
    print(f"  {len(found.reports)} programs of {parts} parts, {len(found.host)} nodes on the host; all in "
          f"{time.perf_counter() - begun:.0f} s", flush=True)  # fmt: skip
    if found.host:
        print(found)


def _row(scheme: str, how: str, call: Callable[..., Any], model: Any, args: argparse.Namespace) -> list[str]:
    each, in_a_row = (1e3 * seconds for seconds in _decode(call, model, args))
    prefill = [f"{1e3 * _prefill(call, model, length, args):.2f}" for length in _numbers(args.prompts)]
    return [scheme, how, f"{each:.2f}", f"{1 / each * 1e3:.1f}", f"{in_a_row:.2f}", *prefill]


def _made(scheme: str, args: argparse.Namespace) -> Any:
    """The model with random weights, on the device; layers of one shape have the same values, each its own copy."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    config = LlamaConfig(**sizes, max_position_embeddings=4096)
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype).eval()
    weights: dict[tuple[int, int, str], Any] = {}
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear | nn.Embedding):
            is_table = name.endswith(("embed_tokens", "lm_head")) and scheme != DENSE
            _fill(model, name, layer, args.table if is_table else scheme, weights, dtype, device)
    for parameter_name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, _, own = parameter_name.rpartition(".")
            ones = nn.Parameter(torch.ones(parameter.shape, dtype=dtype, device=device))
            setattr(model.get_submodule(owner), own, ones)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def _fill(
    model: nn.Module, name: str, layer: Any, scheme: str, weights: dict[Any, Any], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Give a layer values, or put a quantized one in its place."""
    owner, _, own = name.rpartition(".")
    shape = tuple(layer.weight.shape)
    key = (*shape, scheme)
    if key not in weights:
        generator = torch.Generator(device).manual_seed(1)
        dense = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(shape[1] ** -0.5)
        made = None if scheme == DENSE else qcore.Scheme.parse(scheme)
        weights[key] = dense.to(dtype) if made is None else qcore.quantize(dense.to(dtype), made.weight, "absmax")
    if scheme == DENSE:
        layer.weight = nn.Parameter(weights[key].clone())
        return
    weight = weights[key]
    if isinstance(layer, nn.Embedding):
        made = QuantizedEmbedding.from_qtensor(weight, dtype=dtype)
    else:
        made = QuantizedLinear.from_qtensor(weight, None, scheme, dtype=dtype)
    setattr(model.get_submodule(owner), own, made)


def _cache(model: Any, args: argparse.Namespace) -> Any:
    from transformers import StaticCache

    config = model.config
    cache = StaticCache(config=config, max_cache_len=args.places)
    size = config.hidden_size // config.num_attention_heads
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    cache.early_initialization(1, config.num_key_value_heads, size, dtype, device)
    return cache


@torch.no_grad()
def _step(call: Callable[..., Any], ids: Tensor, place: Tensor, cache: Any) -> Tensor:
    return _next(call(**_arguments(ids, place, cache)))


def _arguments(ids: Tensor, place: Tensor, cache: Any) -> dict[str, Any]:
    return {
        "input_ids": ids, "past_key_values": cache, "position_ids": place[None], "use_cache": True, "logits_to_keep": 1,
    }  # fmt: skip


def _next(output: Any) -> Tensor:
    """The token with the largest logit."""
    found: Tensor = output.logits[:, -1].argmax(-1, keepdim=True)
    return found


@torch.no_grad()
def _difference(call: Callable[..., Any], model: Any, args: argparse.Namespace) -> float:
    """The largest relative difference of logits from those of ``model`` layer by layer: a prompt of 8, then tokens."""
    caches, found, start = (_cache(model, args), _cache(model, args)), [], 0
    for length in (8, 1, 1, 1):
        generator = torch.Generator(args.device).manual_seed(length + start)
        ids = torch.randint(0, model.config.vocab_size, (1, length), generator=generator, device=args.device)
        place = torch.arange(start, start + length, device=args.device)
        y, whole = (
            one(input_ids=ids, past_key_values=cache, position_ids=place[None], use_cache=True).logits.double()
            for one, cache in zip((model, call), caches, strict=True)
        )
        found.append(float((whole - y).norm() / y.norm()))
        start += length
    return max(found)


def _decode(call: Callable[..., Any], model: Any, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a step from ids to the next token on the host, and of one in a row."""
    cache = _cache(model, args)
    ids, place = (
        torch.ones(1, 1, dtype=torch.int64, device=args.device),
        torch.zeros(1, dtype=torch.int64, device=args.device),
    )
    times = []
    for _ in range(4):
        ids = _step(call, ids, place, cache)
        place = place + 1
    if args.replay and call is not model:
        with torch.no_grad():
            call = qcore.graphs.make_replay(call, **_arguments(ids, place, cache))
        ids, place = _next(call.result), place + 1
    # The model, its weights and its cache stay what they are from here on, which torch would find out at each call.
    with torch.compiler.set_stance(skip_guard_eval_unsafe=args.skip_guards):
        for _ in range(args.tokens):
            start = time.perf_counter()
            ids = _step(call, ids, place, cache)
            int(ids)  # waits for the device
            times.append(time.perf_counter() - start)
            place = place + 1
        start = time.perf_counter()
        for _ in range(args.tokens):
            ids = _step(call, ids, place, cache)
            place = place + 1
        int(ids)
        in_a_row = (time.perf_counter() - start) / args.tokens
    return statistics.median(times), in_a_row


def _prefill(call: Callable[..., Any], model: Any, length: int, args: argparse.Namespace) -> float:
    cache = _cache(model, args)
    generator = torch.Generator(args.device).manual_seed(2)
    ids = torch.randint(0, model.config.vocab_size, (1, length), generator=generator, device=args.device)
    place = torch.arange(length, device=args.device)
    times = []
    for _ in range(7):
        for layer in cache.layers:
            layer.cumulative_length.zero_()  # not `reset`, which writes whole caches as well
        start = time.perf_counter()
        int(_step(call, ids, place, cache))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
