"""The sizes of the weights in a checkpoint, for ``qcore tune --model``."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint import inspect
from ..errors import QcoreError


def model_sizes(path: Path) -> dict[str, list[tuple[int, int]]]:
    """The distinct sizes (N, K) of the quantized weights, by scheme; experts are left out, as no command measures them.

    Raises `QcoreError` if there are none.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for tensor in inspect(path).quantized:
        if len(tensor.shape) != 2:
            continue
        n, k = tensor.shape
        sizes = found.setdefault(tensor.scheme, [])
        if (n, k) not in sizes:
            sizes.append((n, k))
    if not found:
        raise QcoreError(
            f"{path} has no quantized weights.\nQuantize it: qcore quantize {path} OUT --scheme w4a16-g128"
        )
    return found
