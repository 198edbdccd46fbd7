"""Serve a folder with vLLM, in this process or, as a program, in one of its own: prints the tokens as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise each rank binds to cores that others use, too
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
PROMPTS = [[1, 5, 9, 200, 31], [7, 8, 300, 17, 2, 90, 44]]
STEPS = 16


def start(folder, **options):
    """An engine for float32, without a tokenizer."""
    from vllm import LLM

    usual = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    return LLM(model=str(folder), skip_tokenizer_init=True, **{**usual, "enforce_eager": True, **options})


def tokens(llm, prompts=PROMPTS, steps=STEPS):
    """The greedy continuation of each prompt."""
    from vllm import SamplingParams

    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    how = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True, detokenize=False)
    return [list(result.outputs[0].token_ids) for result in llm.generate(given, how, use_tqdm=False)]


def in_own_process(folder, timeout=900, prompts=PROMPTS, **options):
    """Tokens and log of an engine with several ranks, or one that compiles."""
    command = [sys.executable, __file__, str(folder), json.dumps(options), json.dumps(prompts)]
    env = {**os.environ, **SETTINGS}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    log = done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("tokens: ")]
    return (json.loads(found[0].removeprefix("tokens: ")) if found else None), log


if __name__ == "__main__":
    print("tokens:", json.dumps(tokens(start(sys.argv[1], **json.loads(sys.argv[2])), json.loads(sys.argv[3]))))
