"""`QuantizedScaledEmbedding`: embeddings whose rows are multiplied by a number, as Gemma's and Bart's are.

transformers has two kinds of them, each a subclass of `torch.nn.Embedding` in every architecture that needs one:
``super().forward(ids) * self.embed_scale`` with a number, and ``... * self.embed_scale.to(self.weight.dtype)`` with a
buffer that no checkpoint holds. Nothing of transformers is imported: what its forward computes tells such a class.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.checks import FLOAT_DTYPES
from ..weights.schemes import Scheme
from .embedding import QuantizedEmbedding

_NAMES = {"super", "forward", "embed_scale", "to", "weight", "dtype"}
"""The names that the forward of such a class reads."""
_TRIAL = 1.3
"""A scale that no float dtype of less than 64 bits holds exactly."""


def is_scaled_embedding(module: nn.Module) -> bool:
    """Whether a module is an embedding with a forward of its own that does nothing but multiply rows by a number."""
    kind: Any = type(module)
    if not isinstance(module, nn.Embedding) or "forward" in vars(module) or _number_of(module) is None:
        return False
    return _only_multiplies(kind, isinstance(module.embed_scale, Tensor))


def _number_of(module: Any) -> float | None:
    scale = getattr(module, "embed_scale", None)
    if isinstance(scale, Tensor) and (scale.is_meta or scale.numel() != 1):
        scale = getattr(module, "scalar_embed_scale", None)  # with which the buffer is filled later
    return float(scale) if isinstance(scale, (int, float, Tensor)) else None


@functools.lru_cache(maxsize=64)
def _only_multiplies(kind: type[nn.Embedding], is_buffer: bool) -> bool:
    code = getattr(kind.forward, "__code__", None)
    if code is None or not set(code.co_names) <= _NAMES:
        return False
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        return all(_multiplies(kind, is_buffer, dtype) for dtype in (torch.float32, torch.bfloat16))


def _multiplies(kind: Any, is_buffer: bool, dtype: torch.dtype) -> bool:
    """Whether the forward of a class multiplies three rows as `QuantizedScaledEmbedding` does."""
    table, ids = torch.arange(1, 13).reshape(4, 3).to(dtype) / 7, torch.tensor([2, 0, 3])
    trial = object.__new__(kind)
    nn.Embedding.__init__(trial, 4, 3, _weight=table)
    _set_scale(trial, _TRIAL, is_buffer)
    try:
        found: Any = kind.forward(trial, ids)
    except Exception:  # noqa: BLE001 - whatever a stranger's class raises, it is another kind
        return False
    wanted = table[ids] * (torch.tensor(_TRIAL).to(dtype) if is_buffer else _TRIAL)
    return isinstance(found, Tensor) and torch.equal(found, wanted)


def _set_scale(module: nn.Module, scale: float, is_buffer: bool) -> None:
    if is_buffer:
        module.register_buffer("embed_scale", torch.tensor(scale), persistent=False)
        module.scalar_embed_scale = scale  # type: ignore[assignment]
    else:
        module.embed_scale = scale  # type: ignore[assignment]


class QuantizedScaledEmbedding(QuantizedEmbedding):
    """Looks up rows of a quantized table and multiplies them by ``embed_scale``; otherwise a `QuantizedEmbedding`."""

    embed_scale = 1.0
    rounds_scale = False
    """Whether the scale is rounded to the dtype of the rows first."""
    float_type: type[nn.Embedding] = nn.Embedding
    """The class of the float layer."""

    @classmethod
    def from_float(
        cls, module: nn.Embedding, scheme: Scheme | str, *, name: str = "weight", moments: Tensor | None = None
    ) -> QuantizedScaledEmbedding:
        """As that of `QuantizedEmbedding`, for a module of which `is_scaled_embedding` holds."""
        made = super().from_float(module, scheme, name=name, moments=moments)
        assert isinstance(made, QuantizedScaledEmbedding)
        return made.scaled_like(module)

    def scaled_like(self, module: nn.Module) -> QuantizedScaledEmbedding:
        """Take the scale of a float or quantized embedding; returns this layer."""
        if isinstance(module, QuantizedScaledEmbedding):
            self.float_type, self.rounds_scale, self.embed_scale = (
                module.float_type, module.rounds_scale, module.embed_scale,
            )  # fmt: skip
        else:
            scale = _number_of(module)
            assert scale is not None
            self.float_type, self.embed_scale = type(module), scale  # type: ignore[assignment]
            self.rounds_scale = isinstance(module.embed_scale, Tensor)
        self._factors = {dtype: float(torch.tensor(self.embed_scale).to(dtype)) for dtype in FLOAT_DTYPES}
        return self

    def factor(self, dtype: torch.dtype) -> float:
        """The number by which rows of a dtype are multiplied."""
        return self._factors[dtype] if self.rounds_scale else self.embed_scale

    def empty_float(self) -> nn.Embedding:
        """A float layer like the one that this was made from, whose weight is on meta."""
        made = object.__new__(self.float_type)
        table = torch.empty(self.num_embeddings, self.embedding_dim, device="meta")
        nn.Embedding.__init__(made, self.num_embeddings, self.embedding_dim, self.padding_idx, _weight=table)
        _set_scale(made, self.embed_scale, self.rounds_scale)
        return made

    def forward(self, indices: Tensor) -> Tensor:
        """Look up and multiply rows: ``(*indices.shape, embedding_dim)`` of the layer's dtype."""
        rows = super().forward(indices)
        return rows * self.factor(rows.dtype)
