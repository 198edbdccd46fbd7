"""`INT8_GROUPS_HOPPER`: many rows of codes and int8 weights with scales of groups on sm_90."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from torch import Tensor

from qcore_triton.codes import Codes
from qcore_triton.weights import NO_ZERO

from ..problem import GemmProblem
from ..runtime.device import Device
from ..runtime.hopper import descriptor, early, room_for
from ..runtime.launch import launch
from .aligned import finished
from .base import Operands
from .quantized import arguments_of
from .tails import TiledCodes, Tokens, is_narrow, tail_of

_STAGES = {128: 6, 64: 8, 32: 10}
"""The most stages of a ring, by tokens of a tile."""


class Int8GroupsHopper(TiledCodes):
    """See `kernels.int8_groups_hopper`; `W8A8GroupsHopper` is for zero points."""

    name: ClassVar[str] = "int8_groups_hopper"

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """Groups of 32, 64 or a multiple of 128, no zero points; results of one or two bytes, not scaled by tokens."""
        sized = problem.bits == 8 and problem.grouped and problem.step in (problem.group, 128)
        return sized and problem.zero == NO_ZERO and is_narrow(device, problem)

    def sizes(self, problem: GemmProblem) -> Collection[int]:
        del problem
        return 128, 64, 32

    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: Tokens) -> Tensor:
        from ..kernels.int8_groups_hopper import int8_groups_hopper

        args, weight = arguments_of(codes, operands, problem, tiles=True), operands.weight
        (x_scale, x_zero), (scale, _, sums), form = args.of_x, args.of_w, args.form
        (m, columns), n, bm, moved = codes.q.shape, problem.n, config.bm, form["XZERO"]
        each, blocks = 128 // problem.step, columns // 128
        numbers = scale.element_size() + 4 * moved
        stage = (bm + 128) * 128 + each * 128 * numbers
        tail = tail_of(device, codes.q, n, config, blocks)
        launch(
            int8_groups_hopper, (tail.programs,), descriptor(codes.q, (bm, 128)), x_scale, x_zero,
            descriptor(weight.data, (128, 128)), descriptor(scale, (each, 128), swizzled=False),
            descriptor(sums, (each, 128), swizzled=False) if moved else sums, args.end.args[0], args.y,
            descriptor(args.y, (bm, 64)), *tail.memory(args.y), *args.end.numbers, m, n, blocks,
            min(problem.per, blocks), tail.waves, tail.share,
            BM=bm, STAGES=room_for(stage, 0, 2 * bm * 128, _STAGES[bm]), BAND=2048 // bm, EACH=each,
            ALIGNED=n % 16 == 0, MOVED=moved, HAS_BIAS=form["HAS_BIAS"], OUT=form["OUT"],
            SPREAD=tail.parts is not None, **early(device, 4, weight.data, scale, sums if moved else None),
        )  # fmt: skip
        return finished(args.y, n, device)


INT8_GROUPS_HOPPER = Int8GroupsHopper()
