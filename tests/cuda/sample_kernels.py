"""Kernels that show what the compile harness can see."""

import triton
import triton.language as tl


@triton.jit
def total(x, y, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of columns, ROWS x BLOCK numbers a turn: many registers where ROWS is large."""
    columns = tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in range(0, K, ROWS):
        sums += tl.load(x + (k + rows)[:, None] * BLOCK + columns[None, :])
    tl.store(y + rows[:, None] * BLOCK + columns[None, :], tl.sqrt(sums))


@triton.jit
def product(x, w, y, K, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of a matrix product."""
    at = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        weights = tl.load(w + at[:, None] * K + k + at[None, :]).to(TYPE)
        acc = tl.dot(weights, tl.load(x + at[None, :] * K + k + at[:, None]).to(TYPE), acc)
    tl.store(y + at[:, None] * BLOCK + at[None, :], acc)
