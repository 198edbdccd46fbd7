"""Tiny models for tests of whole models: a decoder with a static KV cache, an encoder, and a counter."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """As in transformers: computed in float32, the weight applied in the dtype of x."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + 0.1 * torch.randn(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, length: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.register_buffer("keys", torch.zeros(1, kv_heads, length, self.size), persistent=False)
        self.register_buffer("values", torch.zeros(1, kv_heads, length, self.size), persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        each = self.heads // self.kv_heads
        keys, values = self.repeat(self.keys, each), self.repeat(self.values, each)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).contiguous().reshape(batch, length, -1))

    @staticmethod
    def repeat(x: Tensor, each: int) -> Tensor:
        batch, heads, length, size = x.shape
        if each == 1:
            return x
        return x[:, :, None].expand(batch, heads, each, length, size).reshape(batch, heads * each, length, size)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, length: int, bias: bool) -> None:
        super().__init__()
        self.input_norm, self.post_norm = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads, length, bias)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x), *rest)
        y = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Decoder(nn.Module):
    """A Llama (``bias=True``: a Qwen2) with KV caches in buffers; ids and positions to logits of the last token."""

    def __init__(
        self, vocabulary: int = 96, width: int = 64, heads: int = 4, kv_heads: int = 2, inner: int = 96,
        layers: int = 2, length: int = 32, bias: bool = False, tied: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, inner, length, bias) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        size = width // heads
        inverse = 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
        self.register_buffer("inverse", inverse, persistent=False)
        self.length = length

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        angles = positions[None, :, None].float() * self.inverse
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        seen = torch.arange(self.length, device=ids.device)[None, :] <= positions[:, None]
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=ids.device).masked_fill(~seen, torch.finfo(x.dtype).min)
        for layer in self.layers:
            x = layer(x, cos, sin, mask[None, None], positions)
        return self.lm_head(self.norm(x[:, -1:]))

    def reset(self) -> None:
        """Empty the caches."""
        for layer in self.layers:
            layer.attention.keys.zero_()
            layer.attention.values.zero_()


class Encoder(nn.Module):
    """A BERT with mean pooling, as sentence embedders have it; ids and mask (1: a token) to unit vectors."""

    def __init__(
        self, vocabulary: int = 96, width: int = 48, heads: int = 4, inner: int = 64, layers: int = 2, length: int = 64
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(EncoderBlock(width, heads, inner) for _ in range(layers))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))[None])
        added = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, added)
        weights = mask[..., None].to(x.dtype)
        pooled = (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return F.normalize(pooled, dim=-1)


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.dense = nn.Linear(width, width)
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.intermediate, self.output = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, self.heads, -1).transpose(1, 2)

        y = F.scaled_dot_product_attention(split(self.query(x)), split(self.key(x)), split(self.value(x)), mask)
        x = self.first_norm(x + self.dense(y.transpose(1, 2).reshape(batch, length, width)))
        return self.second_norm(x + self.output(F.gelu(self.intermediate(x))))


def decoded(model, lengths=(5, 1, 1), batch=1):
    """Results of a prompt and of steps behind it, one after the other: a decoder with a static cache."""
    generator, start, results = torch.Generator().manual_seed(3), 0, []
    for length in lengths:
        ids = torch.randint(0, 96, (batch, length), generator=generator)
        results.append(model(ids, torch.arange(start, start + length)))
        start += length
    return torch.cat(results, 1)


class Counter(nn.Module):
    """Adds x to a buffer."""

    def __init__(self, count):
        super().__init__()
        self.register_buffer("count", count)

    def forward(self, x):
        self.count.add_(x)
        return self.count * 2
