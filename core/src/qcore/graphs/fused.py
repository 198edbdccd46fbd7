"""Torch's fused layers as ops of the list: what `torch.nn.TransformerEncoderLayer` and `MultiheadAttention` call.

In inference these modules leave their submodules aside and call one op for the whole layer, which no backend has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# ruff: noqa: SLF001 - the fused ops have private names

_qcore: Any = torch.ops.qcore_graph


def _projected(inputs: tuple[Tensor, Tensor, Tensor], weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values ``(B, L, D)`` by the rows of ``weight`` ``(3 D, D)``."""
    query, key, value = inputs
    if query is key and key is value:
        return tuple(_qcore.dense(query, weight, bias).chunk(3, -1))
    each = zip(inputs, weight.chunk(3), bias.chunk(3), strict=True)
    return tuple(_qcore.dense(x, own, own_bias) for x, own, own_bias in each)


_PADDING = 1
"""The type of a mask ``(B, S)`` of keys; other masks broadcast to ``(B, H, L, S)``."""


def _attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``aten::_native_multi_head_attention``; ``mask``: anything but 0 hides a key. Rows that see nothing are NaN."""
    projected = _projected((query, key, value), qkv_weight, qkv_bias)
    q, k, v = (x.view(*x.shape[:2], heads, embed_dim // heads).transpose(1, 2) for x in projected)
    shares: Tensor | None = None
    if mask is None and not need_weights:
        mixed = _qcore.attention(q, k, v, None, False, None)
    else:
        scores = (q * (embed_dim // heads) ** -0.5) @ k.mT
        if mask is not None:
            hidden = mask.to(torch.bool)
            scores = scores.masked_fill(hidden[:, None, None] if mask_type == _PADDING else hidden, -torch.inf)
        shares = scores.softmax(-1)
        mixed = shares @ v
    y: Tensor = _qcore.dense(mixed.transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if shares is None or not need_weights:
        return y, None
    return y, shares.mean(1) if average_attn_weights else shares


def _encoder_layer(
    x: Tensor, embed_dim: int, heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """``aten::_transformer_encoder_layer_fwd``."""

    def attended(x: Tensor) -> Tensor:
        own = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return _attention(x, x, x, embed_dim, heads, *own, mask, need_weights=False, mask_type=mask_type)[0]

    def fed(x: Tensor) -> Tensor:
        wide = _qcore.dense(x, ffn_weight_1, ffn_bias_1)
        y: Tensor = _qcore.dense(F.gelu(wide) if use_gelu else F.relu(wide), ffn_weight_2, ffn_bias_2)
        return y

    for part, weight, bias in ((attended, norm_weight_1, norm_bias_1), (fed, norm_weight_2, norm_bias_2)):
        if norm_first:
            x = x + part(_qcore.layer_norm(x, weight, bias, eps))
        else:
            x = _qcore.layer_norm(x + part(x), weight, bias, eps)
    return x


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._native_multi_head_attention.default: _attention,
    torch.ops.aten._transformer_encoder_layer_fwd.default: _encoder_layer,
}
"""By overload: functions that torch's tracing calls in the place of the op."""
