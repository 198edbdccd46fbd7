"""`W4A8_GROUPS_HOPPER`: many rows of codes and int4 weights in groups of 32 or 64 on sm_90, codes held as bfloat16."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import Tensor

from qcore_triton.codes import Codes
from qcore_triton.weights import FLOAT_ZERO

from ..problem import GemmProblem
from ..runtime import hopper
from ..runtime.device import Device
from ..runtime.hopper import descriptor, early, int4_words, room_for
from ..runtime.launch import launch
from .aligned import finished
from .base import Operands
from .quantized import arguments_of
from .tails import TiledCodes, Tokens, tail_of

_STAGES = {128: 8, 64: 14, 32: 18}
"""The most stages of a ring, by tokens of a tile, if groups have 32 columns."""


class W4A8GroupsHopper(TiledCodes):
    """See `kernels.w4a8_groups_hopper`. It subtracts zero points of the weight, integer ones only."""

    name: ClassVar[str] = "w4a8_groups_hopper"
    codes = torch.bfloat16

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """Groups of one block; no float zero points, results of one or two bytes, not scaled by tokens."""
        small = problem.bits == 4 and problem.grouped and problem.group == problem.step < 128
        plain = problem.zero != FLOAT_ZERO and not (problem.out_by_token or problem.own_order)
        return (
            small and plain and problem.rows > 8 and problem.out_dtype.itemsize <= 2
            and hopper.fits(device, 128)
        )  # fmt: skip

    def sizes(self, problem: GemmProblem) -> Collection[int]:
        """Tokens of a tile for which registers suffice."""
        return (64, 32) if problem.step == 64 and problem.x_zero else (128, 64, 32)

    def columns(self, problem: GemmProblem) -> int:
        """Two groups."""
        return 2 * problem.step

    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: Tokens) -> Tensor:
        from ..kernels.w4a8_groups_hopper import w4a8_groups_hopper

        assert codes.order == 0, "codes were quantized for another kernel"
        args, weight = arguments_of(codes, operands, problem, tiles=True), operands.weight
        p, bm = problem.step, config.bm
        (x_scale, x_zero), (scale, zero, sums), form = args.of_x, args.of_w, args.form
        (m, columns), n, moved = codes.q.shape, problem.n, problem.x_zero

        def by_row(tensor: Tensor, described: bool) -> Any:
            return descriptor(tensor, (2, 128), swizzled=False) if described else tensor

        stages = -(-columns // (2 * p))
        numbers = scale.element_size() + (weight.zero is not None) + 4 * moved
        stage = (bm * 4 + 128) * p + 256 * numbers
        tail = tail_of(device, codes.q, n, config, stages)
        launch(
            w4a8_groups_hopper, (tail.programs,),
            descriptor(codes.q, (bm, 2 * p)), x_scale, x_zero, int4_words(weight.data, 2 * p), by_row(scale, True),
            by_row(zero, weight.zero is not None), by_row(sums, moved), args.end.args[0], args.y,
            descriptor(args.y, (bm, 64)), *tail.memory(args.y), *args.end.numbers, m, n, stages, tail.waves, tail.share,
            P=p, BM=bm, STAGES=room_for(stage, 0, 2 * bm * 128, _STAGES[bm] * 32 // p), BAND=2048 // bm,
            ALIGNED=n % 16 == 0, ZERO=weight.zero is not None, MOVED=moved, HAS_BIAS=form["HAS_BIAS"], OUT=form["OUT"],
            SPREAD=tail.parts is not None,
            **early(device, 4, weight.data, scale, weight.zero, sums if moved else None),
        )  # fmt: skip
        return finished(args.y, n, device)


W4A8_GROUPS_HOPPER = W4A8GroupsHopper()
