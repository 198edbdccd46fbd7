"""Small models for tests of tensor parallel: an MLP, attention with grouped heads, experts; quantized, whole."""

from __future__ import annotations

import torch
from torch import nn

import qcore
from qcore.nn import QuantizedExperts, QuantizedLinear


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The relative error of a."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


class Mlp(nn.Module):
    """Gate, up and down projection, with the names of transformers."""

    def __init__(self, k: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(k, hidden, bias)
        self.up_proj = nn.Linear(k, hidden, bias)
        self.down_proj = nn.Linear(hidden, k, bias)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """What down_proj reads."""
        return nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.inner(x))


class Attention(nn.Module):
    """Grouped-query attention that keeps its numbers of heads in attributes."""

    def __init__(self, d: int, heads: int, kv_heads: int, head_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(d, heads * head_dim, bias)
        self.k_proj = nn.Linear(d, kv_heads * head_dim, bias)
        self.v_proj = nn.Linear(d, kv_heads * head_dim, bias)
        self.o_proj = nn.Linear(heads * head_dim, d, bias)

    def context(self, x: torch.Tensor) -> torch.Tensor:
        """What o_proj reads."""
        b, t, _ = x.shape

        def split(y: torch.Tensor, count: int) -> torch.Tensor:
            return y.reshape(b, t, count, self.head_dim).transpose(1, 2)

        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        out = nn.functional.scaled_dot_product_attention(
            split(q, self.num_heads), split(k, self.num_kv_heads), split(v, self.num_kv_heads),
            is_causal=True, enable_gqa=True,
        )  # fmt: skip
        return out.transpose(1, 2).reshape(b, t, self.num_heads * self.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.context(x))


class Block(nn.Module):
    """A transformer block with a name for each part."""

    def __init__(self, d: int = 128, heads: int = 8, kv_heads: int = 4, hidden: int = 256, bias: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(d, heads, kv_heads, d // heads, bias)
        self.mlp = Mlp(d, hidden, bias)
        self.norm = nn.LayerNorm(d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norm(x))
        return x + self.mlp(self.norm(x))


def quantized(model: nn.Module, scheme: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model with every linear layer quantized by absmax or minmax, which are quick; for inference."""
    if qcore.Scheme.parse(scheme).quantizer == "mse" and "-fzp" not in scheme:
        head, slash, layout = scheme.partition("/")
        scheme = f"{head}@{'minmax' if '-asym' in scheme else 'absmax'}{slash}{layout}"
    model = model.to(dtype).eval().requires_grad_(False)
    qcore.quantize_(model, scheme)
    return model


class ExpertWeights(nn.Module):
    """Fused experts as transformers 5 describes them; ``interleaved``: gate and up alternate, as in gpt-oss."""

    has_gate, is_transposed = True, False

    def __init__(self, e: int, d: int, hidden: int, bias: bool, interleaved: bool) -> None:
        super().__init__()
        self.num_experts, self.has_bias, self.interleaved = e, bias, interleaved
        self.gate_up_proj = nn.Parameter(torch.randn(e, 2 * hidden, d) * d**-0.5)
        self.down_proj = nn.Parameter(torch.randn(e, d, hidden) * hidden**-0.5)
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(e, 2 * hidden))
            self.down_proj_bias = nn.Parameter(torch.randn(e, d))

    def _apply_gate(self, y: torch.Tensor) -> torch.Tensor:
        gate, up = (y[..., ::2], y[..., 1::2]) if self.interleaved else y.chunk(2, -1)
        return nn.functional.silu(gate) * up


def experts(scheme: str = "w4a16-g32@absmax", e: int = 4, d: int = 64, hidden: int = 96, bias: bool = True,
            interleaved: bool = False) -> QuantizedExperts:  # fmt: skip
    """Quantized experts."""
    made = QuantizedExperts.from_float(ExpertWeights(e, d, hidden, bias, interleaved), scheme)
    return made.requires_grad_(False)


def with_order(layer: QuantizedLinear, order: torch.Tensor) -> None:
    """Give the weight of a layer an order of its columns, as GPTQ's act-order does; changes what it computes."""
    from qcore.parallel.order import _replace

    _replace(layer, layer._store.neutral().derived(order=order.to(torch.int32)))
