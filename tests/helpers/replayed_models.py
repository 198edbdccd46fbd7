"""A model that a replay repeats, and its twin."""

import torch
from torch import nn

import qcore


class Cached(nn.Module):
    """A quantized layer, and a buffer that it writes to."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0
        self.register_buffer("cache", torch.zeros(5, 8))
        qcore.quantize_(self, "w8a16")

    def forward(self, x, place, scale=1.0):
        y = self.layer(x) * scale
        self.cache.index_copy_(0, place, y)
        return {"y": y, "sums": (self.cache.sum(0), self.cache)}


def twins(kind, *args):
    torch.manual_seed(0)
    model = kind(*args).eval()
    torch.manual_seed(0)
    return model, kind(*args).eval()
