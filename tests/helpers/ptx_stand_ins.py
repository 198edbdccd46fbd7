"""What qcore-cuda's inline PTX does, in numpy: with it, kernels made of single threads run in Triton's interpreter.

Shared memory starts as garbage, and a copy arrives when it is waited for and not before, so a stage that is read too
early, or overwritten while it is still needed, gives wrong results here too.
"""

from __future__ import annotations

import ctypes

import numpy as np

WARP = 32


def _array(value):
    return value.handle.data


def _tensor(data, dtype):
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def _words(data):
    import triton.language as tl

    return _tensor(np.ascontiguousarray(data).view(np.int32), tl.int32)


def _value(constant):
    return getattr(constant, "value", constant)


class Ring:
    """Stands in for the functions of `qcore_cuda.kernels.smem_pipeline`."""

    START = 256

    def __init__(self):
        self.memory = np.zeros(0, np.uint8)
        self.groups: list[list] = [[]]

    def allocate(self, thread, NW, BYTES, DYNAMIC):
        size = _value(BYTES)
        assert size + 512 * _value(NW) <= (227 if _value(DYNAMIC) else 48) << 10, f"{size} bytes of shared memory"
        self.memory = np.full(self.START + size, 0xA5, np.uint8)
        self.groups = [[]]
        return _words(np.full(_array(thread).shape, self.START, np.int32))

    def copy(self, to, address, size, wanted, BYTES):
        width = _value(BYTES)
        to, address, size, wanted = (np.broadcast_to(_array(v), _array(to).shape) for v in (to, address, size, wanted))
        assert (to % width == 0).all()
        for t, a, s in zip(to[wanted != 0], address[wanted != 0], size[wanted != 0], strict=True):
            assert self.START <= t <= len(self.memory) - width
            assert int(a) % width == 0
            assert 0 <= s <= width
            self.groups[-1].append((int(t), int(a), int(s), width))
        return to

    def commit(self, thread):
        self.groups.append([])
        return thread

    def wait(self, thread, LEFT):
        closed = len(self.groups) - 1
        for _ in range(closed - _value(LEFT)):
            for to, address, size, width in self.groups.pop(0):
                read = ctypes.string_at(address, size) if size else b""
                self.memory[to : to + width] = np.frombuffer(read.ljust(width, b"\0"), np.uint8)
        return thread

    def clear(self, to):
        self._place(_array(to), 16)
        for at in _array(to):
            self.memory[at : at + 16] = 0
        return to

    def _place(self, at, width):
        assert (at >= self.START).all()
        assert (at + width <= len(self.memory)).all()
        assert (at % width == 0).all()
        return at

    def _read(self, at, width):
        self._place(at, width)
        return self.memory[at[:, None] + np.arange(width)]

    def words(self, at, V):
        read = self._read(_array(at), 4 * _value(V)).view(np.int32)
        return tuple(_words(read[:, i]) for i in range(read.shape[1]))

    def place(self, at, word, wanted):
        spots, raw = self._place(_array(at), 2), np.ascontiguousarray(_array(word)).view(np.uint8).reshape(-1, 4)
        for spot, some, on in zip(spots, raw, _array(wanted), strict=True):
            if on:
                self.memory[spot : spot + 2] = some[:2]
        return at

    def fragments(self, at):
        rows = self._read(_array(at), 16).view(np.int32).reshape(-1, 4, 8, 4)  # warp, matrix, row, column pair
        return tuple(_words(rows[:, i].reshape(-1)) for i in range(4))

    def number(self, at, DTYPE):
        import torch
        import triton.language as tl

        width = DTYPE.primitive_bitwidth // 8
        read = self._read(_array(at), width)
        if width == 1:
            return _tensor(read.view(np.int8).reshape(-1).astype(np.int32), tl.int32)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[str(DTYPE)]
        return _tensor(torch.from_numpy(read).view(dtype).float().numpy().reshape(-1), tl.float32)


def _floats(word, bf16):
    """The two 16-bit floats of each word, as float64 ``(..., 2)``."""
    halves = np.ascontiguousarray(_array(word)).view(np.uint16).reshape(-1, 2)
    if bf16:
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return halves.view(np.float16).astype(np.float64)


def _bits(values, bf16):
    """The inverse of `_floats`, for numbers that the 16-bit float holds exactly."""
    if bf16:
        found = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        found = values.astype(np.float16).view(np.uint16)
    return _words(found.view(np.int32).reshape(-1))


def _pairs(numbers, bf16):
    return _bits(numbers[:, :2], bf16), _bits(numbers[:, 2:], bf16)


def load_quad(address, wanted):
    found = np.zeros((len(_array(wanted)), 4), np.int32)
    for i, (at, on) in enumerate(zip(_array(address), _array(wanted), strict=True)):
        if on:
            assert int(at) % 16 == 0
            found[i] = np.frombuffer(ctypes.string_at(int(at), 16), np.int32)
    return tuple(_words(found[:, i]) for i in range(4))


def spread(nibbles, taken, BF16):
    bf16 = _value(BF16)
    values = _array(nibbles).view(np.uint8).reshape(-1, 4).astype(np.float64) + (128 if bf16 else 1024)
    return _pairs(values + _floats(taken, bf16).reshape(-1, 2)[:, :1], bf16)


def codes8(word, BF16):
    return _pairs(_array(word).view(np.int8).reshape(-1, 4).astype(np.float64), _value(BF16))


def mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, BF16):
    import triton.language as tl

    bf16 = _value(BF16)
    a = [_floats(v, bf16).reshape(-1, 8, 4, 2) for v in (a0, a1, a2, a3)]  # warp, r, t, pair
    rows = np.concatenate([np.concatenate([a[0], a[2]], 2), np.concatenate([a[1], a[3]], 2)], 1)
    left = rows.reshape(rows.shape[0], 16, 16)
    right = np.concatenate([_floats(v, bf16).reshape(-1, 8, 4, 2) for v in (b0, b1)], 2)
    product = np.einsum("wik,wnk->win", left, right.reshape(-1, 8, 16)).reshape(-1, 2, 8, 4, 2)
    out = []
    for i, c in enumerate((c0, c1, c2, c3)):
        found = product[:, i // 2, :, :, i % 2].reshape(-1) + _array(c)
        out.append(_tensor(found.astype(np.float32), tl.float32))
    return tuple(out)


def mma8(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    import triton.language as tl

    def codes(word):
        return (
            np.ascontiguousarray(_array(word)).view(np.int8).reshape(-1, 8, 4, 4).astype(np.int64)
        )  # warp, r, t, byte

    a = [codes(v) for v in (a0, a1, a2, a3)]
    rows = np.concatenate([np.concatenate([a[0], a[2]], 2), np.concatenate([a[1], a[3]], 2)], 1)
    left = rows.reshape(rows.shape[0], 16, 32)
    right = np.concatenate([codes(b0), codes(b1)], 2).reshape(-1, 8, 32)
    product = np.einsum("wik,wnk->win", left, right).reshape(-1, 2, 8, 4, 2)
    out = []
    for i, c in enumerate((c0, c1, c2, c3)):
        found = product[:, i // 2, :, :, i % 2].reshape(-1) + _array(c)
        out.append(_tensor(found.astype(np.int32), tl.int32))
    return tuple(out)


def nibbles16(word):
    raw = np.ascontiguousarray(_array(word)).view(np.uint8)
    return _words((raw << 4) ^ 0x80), _words((raw & 0xF0) ^ 0x80)


def install(monkeypatch):
    """Let the kernels for few rows use the stand-ins."""
    from qcore_cuda.kernels import blocks, gemv, int8_gemv

    ring = Ring()
    for module, functions in ((blocks, ()), (gemv, (spread, codes8, mma)), (int8_gemv, (load_quad, mma8, nibbles16))):
        monkeypatch.setattr(module, "pipeline", ring)
        for function in functions:
            monkeypatch.setattr(module, function.__name__, function)
