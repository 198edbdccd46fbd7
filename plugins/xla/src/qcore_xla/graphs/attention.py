"""Attention of many rows on NVIDIA GPUs by cuDNN, which keeps the scores on the chip: XLA writes them to memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .products import attention

FEWEST_ROWS = 64
"""With fewer rows the scores are small, and reading the keys takes the time."""


def attention_on_gpu(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None) -> Any:
    """`products.attention`; by cuDNN if it has a kernel for these shapes and this GPU."""
    if q.dtype in (jnp.bfloat16, jnp.float16) and q.dtype == k.dtype == v.dtype and q.shape[2] >= FEWEST_ROWS:
        try:
            return by_cudnn(q, k, v, _whole_mask(mask, is_causal, q.shape[2], k.shape[2]), scale)
        except (NotImplementedError, RuntimeError, ValueError):  # JAX says so while it traces
            pass
    return attention(q, k, v, mask, is_causal, scale)


def _whole_mask(mask: Any, is_causal: bool, length: int, seen: int) -> Any:
    """``mask`` and causality in one mask of four dimensions, ``(..., length, seen)``; None if there is neither."""
    shape = (length, seen)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], *shape))
    if not is_causal:
        return mask
    allowed = lax.broadcasted_iota(jnp.int32, shape, 0) >= lax.broadcasted_iota(jnp.int32, shape, 1)
    if mask is None:
        return allowed[None, None]
    return mask & allowed if mask.dtype == jnp.bool_ else jnp.where(allowed, mask, -jnp.inf)


def by_cudnn(q: Any, k: Any, v: Any, mask: Any, scale: float | None, implementation: Any = "cudnn") -> Any:
    """Heads first, as `attention`. Raises an error of JAX's for what cuDNN does not do here."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    boolean = mask is not None and mask.dtype == jnp.bool_
    y = jax.nn.dot_product_attention(
        q, k, v, bias=None if boolean or mask is None else mask.astype(q.dtype), mask=mask if boolean else None,
        scale=scale, implementation=implementation,
    )  # fmt: skip
    y = jnp.swapaxes(y, 1, 2)
    if mask is None:
        return y
    # Rows that see nothing give zeros, as torch's attention does.
    sees = jnp.any(mask if boolean else mask > -jnp.inf, axis=-1, keepdims=True)
    return jnp.where(sees, y, jnp.zeros((), y.dtype))
