"""A kernel as Triton hands it on, with launchers that compute on the CPU: they get addresses, as the real ones do."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch

SIZE = 8
"""Numbers in every tensor."""


def at(address):
    """The float32 tensor at an address."""
    return torch.frombuffer((ctypes.c_char * (4 * SIZE)).from_address(address), dtype=torch.float32)


@dataclass
class TensorDescriptor:
    """What Triton's class of that name holds."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: str = "zero"


class Run:
    """What Triton's launcher of a compiled kernel looks like."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, compute, direct):
        self.compute, self.calls, self.direct = compute, [], direct

    def __call__(self, *args):
        self.calls.append(args)
        self.compute(*args[9:])

    def launch(self, *args):
        self.direct.append(args)
        self.compute(*args[13:])


class Metadata(NamedTuple):
    name: str = "fake"
    num_warps: int = 4
    num_ctas: int = 1
    shared: int = 0


class Compiled:
    function, packed_metadata, metadata = "function", "metadata", Metadata()

    def __init__(self, *args):
        self.run = Run(*args)


def add(x, y, m, *_constants):
    """``y = x + m``."""
    at(y).copy_(at(x) + m)


class Kernel:
    """By default `add`; ``direct``: launches that asked Triton nothing; ``device``, ``stream``: the current ones."""

    device, stream = -1, 77

    def __init__(self, arg_names=("x", "y", "m", "WIDE"), compute=add, direct=None):
        self.arg_names, self.compute, self.made, self.compiled = arg_names, compute, [], []
        self.direct = [] if direct is None else direct
        self.warm = []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **meta):
            self.made.append((grid, args, meta))
            self.compiled.append(self.warm.pop() if self.warm else Compiled(self.compute, self.direct))
            self.compute(*(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args))
            return self.compiled[-1]

        return compile_and_launch

    def warmup(self, *_args, **_meta):
        """What the next launch will be of."""
        self.warm.append(Compiled(self.compute, self.direct))
        return self.warm[-1]
