"""Small models, made the same way in this process and in a fresh one."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import qcore


class Text(nn.Module):
    """Embedding, linear layers with and without bias, a norm, and a head tied to the embedding."""

    def __init__(self, width: int = 33) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width, padding_idx=0)
        self.up = nn.Linear(width, 40)
        self.norm = nn.LayerNorm(40)
        self.down = nn.Linear(40, width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.norm(self.up(self.embed(indices))))))


class Image(nn.Module):
    """Convolutions of every geometry, a batch norm with buffers, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, (3, 1), padding="same", groups=4, dilation=(2, 1), bias=False)
        self.last = nn.Conv2d(8, 12, 1, padding=2, padding_mode="reflect")
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.first(x)))
        return self.out(self.last(self.depth(x)).mean((2, 3)))


FAMILIES: dict[str, type[nn.Module]] = {
    "w8a16": Text,
    "w8a16-g32-asym": Text,
    "w4a16-g32-asym": Text,
    "w4a16-g32-fzp": Text,
    "w4a16-g32/plain_int32": Text,
    "w4a16": Text,
    "w4a8-g32": Text,
    "w8a8": Text,
    "w8a8-static": Image,
    "w4a16-g32": Image,
    "mxfp4": Text,
    "nvfp4": Text,
    "wfp4a16-g16-e4m3d": Text,
    "nf4": Text,
    "wfp8_e5m2a16": Text,
    "wfp8afp8-g32": Text,
    "wfp8afp8-static": Text,
    "mxfp8": Text,
}


def inputs(kind: type[nn.Module]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind is Text:
        return torch.randint(0, 50, (2, 7), generator=generator)
    return torch.randn(2, 3, 9, 9, generator=generator)


def quantized(scheme: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    kind = FAMILIES[scheme]
    model = kind().eval()
    if kind is Image:
        with torch.no_grad():
            model.bn.running_mean.normal_()
    calibration = [inputs(kind)] if "static" in scheme else None
    qcore.quantize_(model, scheme, calibration=calibration)
    return model


def file_name(scheme: str) -> str:
    return scheme.replace("/", "_") + ".safetensors"


@torch.no_grad()
def main(directory: Path) -> None:
    """In a fresh process: load each file into a fresh model and store what it computes."""
    outputs = {}
    for number, (scheme, kind) in enumerate(FAMILIES.items()):
        torch.manual_seed(100 + number)
        model = kind().eval()
        qcore.load_(model, directory / file_name(scheme))
        outputs[scheme] = model(inputs(kind))
    torch.save(outputs, directory / "outputs.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
