"""`W4A8_GROUPS_HOPPER`, `W8A8_GROUPS_HOPPER`: many rows of codes held as bfloat16, weights in groups, on sm_90."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import ClassVar

import torch
from torch import Tensor

from qcore_triton.codes import Codes
from qcore_triton.weights import FLOAT_ZERO, INT_ZERO

from ..problem import GemmProblem
from ..runtime.device import Device
from ..runtime.hopper import descriptor, early, int4_words, room_for
from ..runtime.launch import launch
from .aligned import finished
from .base import Operands
from .quantized import arguments_of
from .tails import TiledCodes, Tokens, is_narrow, tail_of

_STAGES = {128: 8, 64: 14, 32: 18}
"""The most stages of a ring, by tokens of a tile, if blocks have 32 columns."""


class _GroupsHopper(TiledCodes):
    """See `kernels.groups_hopper`. It subtracts zero points of the weight, integer ones only."""

    codes = torch.bfloat16
    bits: ClassVar[int]

    @abstractmethod
    def block(self, problem: GemmProblem) -> int:
        """Columns of a block, a group or half or less of one: 32 or 64; 0 if it cannot be computed so."""

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """Groups of whole blocks; no float zero points, results of one or two bytes, not scaled by tokens."""
        sized = problem.bits == self.bits and problem.grouped and self.block(problem) > 0
        plain = problem.zero != FLOAT_ZERO and not problem.own_order
        return sized and plain and is_narrow(device, problem)

    def sizes(self, problem: GemmProblem) -> Collection[int]:
        del problem
        return 128, 64, 32

    def columns(self, problem: GemmProblem) -> int:
        """Two blocks."""
        return 2 * self.block(problem)

    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: Tokens) -> Tensor:
        from ..kernels.groups_hopper import groups_hopper

        assert (codes.order, codes.zero) == (0, None), "codes were quantized for another kernel"
        args, weight = arguments_of(codes, operands, problem, tiles=True), operands.weight
        p, bm, n, (m, columns) = self.block(problem), config.bm, problem.n, codes.q.shape
        (x_scale, _), (scale, zero, _), form = args.of_x, args.of_w, args.form
        stages = -(-columns // (2 * p))
        each = 2 if problem.group == p else 1
        numbers = scale.element_size() + (weight.zero is not None)
        stage = bm * 4 * p + 32 * weight.bits * p + 128 * each * numbers
        tail = tail_of(device, codes.q, n, config, stages)
        packed = weight.data
        launch(
            groups_hopper, (tail.programs,), descriptor(codes.q, (bm, 2 * p)), x_scale,
            int4_words(packed, 2 * p) if weight.bits == 4 else descriptor(packed.view(torch.int16), (64, p // 2)),
            descriptor(scale, (each, 128), swizzled=False),
            zero if weight.zero is None else descriptor(zero, (each, 128), swizzled=False), args.end.args[0], args.y,
            descriptor(args.y, (bm, 64)), *tail.memory(args.y), *args.end.numbers, m, n, stages,
            max(1, min(problem.group // (2 * p), stages)), tail.waves, tail.share,
            BITS=weight.bits, P=p, BM=bm, STAGES=room_for(stage, 0, 2 * bm * 128, _STAGES[bm] * 32 // p),
            BAND=2048 // bm, EACH=each, ALIGNED=n % 16 == 0, ZERO=weight.zero is not None, HAS_BIAS=form["HAS_BIAS"],
            OUT=form["OUT"], SPREAD=tail.parts is not None, **early(device, 4, packed, scale, weight.zero),
        )  # fmt: skip
        return finished(args.y, n, device)


class W4A8GroupsHopper(_GroupsHopper):
    """int4 in groups of 32 or 64, as they are packed."""

    name: ClassVar[str] = "w4a8_groups_hopper"
    bits: ClassVar[int] = 4

    def block(self, problem: GemmProblem) -> int:
        return problem.group if problem.group == problem.step < 128 else 0


class W8A8GroupsHopper(_GroupsHopper):
    """int8 with zero points in groups of 64 or of a multiple of 128; `Int8GroupsHopper` is for those without.

    With tiles of 128 tokens, a few registers of a thread are spilled; those of 64 take longer by a third.
    """

    name: ClassVar[str] = "w8a8_groups_hopper"
    bits: ClassVar[int] = 8

    def block(self, problem: GemmProblem) -> int:
        return 64 if problem.zero == INT_ZERO and (problem.group == 64 or problem.step == 128) else 0


W4A8_GROUPS_HOPPER = W4A8GroupsHopper()
W8A8_GROUPS_HOPPER = W8A8GroupsHopper()
