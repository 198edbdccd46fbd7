"""Time of saving and loading a quantized model, against what the disk and the bus do, and of its first step.

    python benchmarks/loading.py [--device cuda] [--layers 32] [--schemes w4a16-g128,w8a8] [--directory DIR]

A Llama of the 8B shape with random weights. *Write* and *read* are rates of the same bytes by plain files (written with
fsync, read while the system still holds them, as the checkpoint is), *to device* a copy from ordinary memory: a
checkpoint cannot be loaded faster than by reading and copying. *First step*: a prompt of 64 tokens right after loading,
kernels compiled included (set TRITON_CACHE_DIR to an empty directory to see a new user's), and the second one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _table import markdown
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import qcore


def _config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, tie_word_embeddings=False,
    )  # fmt: skip


def _random(config: LlamaConfig, device: str) -> nn.Module:
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    model = model.to_empty(device=device).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers are computed, not loaded
    return model


def _wait(device: str) -> None:
    if device != "cpu":
        getattr(torch, device).synchronize()


def _timed(device: str, call: Callable[[], object]) -> float:
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _plain_rates(directory: Path, device: str, size: int) -> tuple[float, float, float]:
    """Bytes per second of writing, reading, and copying to the device."""
    data = torch.randint(0, 256, (min(size, 1 << 30),), dtype=torch.uint8)
    path = directory / "plain"

    def write() -> None:
        with path.open("wb") as file:
            file.write(memoryview(data.numpy()))
            os.fsync(file.fileno())

    def read() -> None:
        with path.open("rb") as file:
            file.readinto(memoryview(data.numpy()))

    times = [_timed("cpu", write), _timed("cpu", read), _timed(device, lambda: data.to(device, copy=True))]
    path.unlink()
    write_rate, read_rate, copy_rate = (data.numel() / seconds for seconds in times)
    return write_rate, read_rate, copy_rate


def _saved(model: nn.Module, scheme: str, device: str, path: Path) -> float:
    qcore.quantize_(model, scheme)
    return _timed(device, lambda: qcore.save(model, path))


def _row(scheme: str, layers: int, device: str, directory: Path) -> list[str]:
    config, ids = _config(layers), torch.ones(1, 64, dtype=torch.int64, device=device)
    saving = _saved(_random(config, device), scheme, device, directory / "model")
    size = sum(file.stat().st_size for file in (directory / "model").iterdir())
    with torch.device("meta"):
        loaded = LlamaForCausalLM(config).bfloat16().eval()
    loading = _timed(device, lambda: qcore.load_(loaded, directory / "model", device=device))
    rates = (size / saving, size / loading, *_plain_rates(directory, device, size))
    save_rate, load_rate, written, read, copied = (rate / 1e9 for rate in rates)
    with torch.inference_mode():
        steps = [_timed(device, lambda: loaded(ids)) for _ in range(2)]
    cells = (size / 1e9, saving, save_rate, written, loading, load_rate, read, copied, *steps)
    return [scheme, *(f"{cell:.2f}" for cell in cells)]


def main() -> None:
    """Print a row per scheme."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--schemes", default="w4a16-g128,w8a8")
    parser.add_argument("--directory", help="where to write; default: a temporary directory")
    options = parser.parse_args()
    names = ("scheme", "GB", "save, s", "GB/s", "write GB/s", "load, s", "GB/s", "read GB/s", "to device GB/s")
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        print(markdown((*names, "first step, s", "second"), [
            _row(scheme, options.layers, options.device, directory) for scheme in options.schemes.split(",")
        ]))  # fmt: skip
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
