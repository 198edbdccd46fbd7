"""A small convolutional network for handwritten digits, trained in seconds and quantized."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import qcore

SCHEMES = ("w8a16", "w8a8-static")
EPOCHS = 12


@dataclass(frozen=True)
class Split:
    """Images ``(B, 1, 8, 8)`` in 0..1 and their digits ``(B,)``, for training and for testing."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Accuracy:
    """Share of right answers before and after, and how many layers each kernel serves."""

    scheme: str
    before: float
    after: float
    kernels: dict[str, int]


def load_split() -> Split:
    """1797 digits of scikit-learn, every fourth for testing."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    test = torch.arange(len(y)) % 4 == 0
    return Split(x[~test], y[~test], x[test], y[test])


def make_network() -> nn.Sequential:
    """Three convolutions and a linear layer: 37 000 weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


def train(split: Split) -> nn.Sequential:
    """Train for a few seconds; the seed makes it repeatable."""
    torch.manual_seed(0)
    model = make_network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(split.train_y)).split(64):
            loss = nn.functional.cross_entropy(model(split.train_x[rows]), split.train_y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def accuracy(model: nn.Module, split: Split) -> float:
    """Share of test images that are named right."""
    device = next(iter(model.state_dict().values())).device
    with torch.inference_mode():
        return float((model(split.test_x.to(device)).argmax(1).cpu() == split.test_y).float().mean())


def quantized(model: nn.Module, scheme: str, split: Split, device: torch.device) -> Accuracy:
    """Quantize a copy and move it; activations with static scales are calibrated on training images."""
    before, smaller = accuracy(model, split), copy.deepcopy(model)
    calibration = split.train_x.split(64) if scheme.endswith("-static") else None
    qcore.quantize_(smaller, scheme, calibration=calibration)
    smaller.to(device)
    return Accuracy(scheme, before, accuracy(smaller, split), qcore.report(smaller).kernels())


def run(device: torch.device) -> list[Accuracy]:
    """Train, then quantize to every scheme."""
    split = load_split()
    model = train(split)
    return [quantized(model, scheme, split, device) for scheme in SCHEMES]
