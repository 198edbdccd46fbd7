"""The format: a table of eight numbers, and eight codes in three bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from qcore.plugin_api import Element, FormatError, Layout

_LEVELS = (-2.2546, -1.4764, -0.9188, -0.4436, 0.0, 0.5606, 1.1881, 2.0334)
"""Eight levels with the least squared error for a standard normal variable, one of them held at 0 so that zeros stay
exact: Lloyd's iteration (S. P. Lloyd, "Least squares quantization in PCM", IEEE Trans. Inf. Theory 28(2), 1982)."""


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


LM3 = Element.table("lm3", tuple(_float32(level / 2.2546) for level in _LEVELS))
"""3 bits: the levels divided by the largest, so that scales are as for other tables."""


class Dense3(Layout):
    """Eight codes in three bytes: uint8 ``(N, 3 * ceil(K/8))``, lowest bits = lowest k, pad code 0."""

    name = "dense3"
    dtypes = ("lm3",)

    def encode(self, codes: Tensor) -> Tensor:
        """Codes ``(N, K)`` uint8 to bytes."""
        n, k = codes.shape
        words = -(-k // 8)
        eight = torch.nn.functional.pad(codes, (0, -k % 8)).reshape(n, words, 8).int()
        shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=codes.device)
        bits = (eight << shifts).sum(-1, dtype=torch.int32)
        return torch.stack((bits & 255, (bits >> 8) & 255, bits >> 16), -1).to(torch.uint8).reshape(n, 3 * words)

    def decode(self, data: Tensor, k: int) -> Tensor:
        """Bytes to codes ``(N, k)`` uint8."""
        n, words = data.shape[0], data.shape[1] // 3
        low, middle, high = data.reshape(n, words, 3).int().unbind(-1)
        bits = low | (middle << 8) | (high << 16)
        shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=data.device)
        return ((bits.unsqueeze(-1) >> shifts) & 7).to(torch.uint8).reshape(n, 8 * words)[:, :k]

    def check(self, data: Tensor, n: int, k: int) -> None:
        """Raise `FormatError` unless ``data`` has the dtype and shape for ``(n, k)`` codes."""
        shape = (n, 3 * (-(-k // 8)))
        if data.dtype != torch.uint8 or tuple(data.shape) != shape:
            raise FormatError(
                f"data has dtype {data.dtype} and shape {tuple(data.shape)};\nlayout 'dense3' needs uint8 and {shape}."
            )
