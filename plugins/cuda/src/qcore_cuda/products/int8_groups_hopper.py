"""`INT8_GROUPS_HOPPER`: many rows of codes and int8 weights with scales of groups on sm_90."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from torch import Tensor

from qcore_triton.codes import Codes
from qcore_triton.weights import FLOAT_ZERO, INT_ZERO, NO_ZERO

from ..problem import GemmProblem
from ..runtime import hopper
from ..runtime.device import Device
from ..runtime.hopper import descriptor, early, room_for
from ..runtime.launch import launch
from .aligned import finished
from .base import Operands
from .quantized import arguments_of, rows_in_memory, x_sums
from .tails import TiledCodes, Tokens, tail_of

_STAGES = {128: 6, 64: 8, 32: 10}
"""The most stages of a ring, by tokens of a tile."""


class Int8GroupsHopper(TiledCodes):
    """See `kernels.int8_groups_hopper`."""

    name: ClassVar[str] = "int8_groups_hopper"

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """Groups of 32, 64 or a multiple of 128; no float zero points, results of one or two bytes, not by tokens."""
        sized = problem.step in (problem.group, 128)
        plain = problem.zero != FLOAT_ZERO and not problem.out_by_token
        return (
            problem.bits == 8 and problem.grouped and sized and plain and problem.rows > 8
            and problem.out_dtype.itemsize <= 2 and hopper.fits(device, 128)
        )  # fmt: skip

    def sizes(self, problem: GemmProblem) -> Collection[int]:
        """Tokens of a tile for which registers suffice."""
        return (128, 64, 32) if problem.zero == NO_ZERO else (64, 32)

    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: Tokens) -> Tensor:
        from ..kernels.int8_groups_hopper import int8_groups_hopper

        args, weight = arguments_of(codes, operands, problem, tiles=True), operands.weight
        (x_scale, x_zero), (scale, zero, sums), form = args.of_x, args.of_w, args.form
        (m, columns), n, bm, moved, lowered = (
            codes.q.shape, problem.n, config.bm, form["XZERO"], problem.zero == INT_ZERO,
        )  # fmt: skip
        each, blocks = 128 // problem.step, columns // 128

        def by_row(tensor: Tensor, described: bool = True) -> Any:
            return descriptor(tensor, (each, 128), swizzled=False) if described else tensor

        # Sums of whole tiles of x, as far as memory goes: rows of a descriptor begin on 16 bytes.
        whole = codes.q.as_strided((rows_in_memory(codes.q), columns), codes.q.stride())
        of_tokens = x_sums(codes._replace(q=whole), args, device) if lowered else x_scale
        numbers = scale.element_size() + lowered + 4 * moved
        stage = (bm + 128) * 128 + each * (128 * numbers + 4 * bm * lowered)
        tail = tail_of(device, codes.q, n, config, blocks)
        launch(
            int8_groups_hopper, (tail.programs,),
            descriptor(whole, (bm, 128)), x_scale, x_zero, descriptor(weight.data, (128, 128)), by_row(scale),
            by_row(zero, lowered), by_row(sums, moved),
            descriptor(of_tokens, (each, bm), swizzled=False) if lowered else of_tokens, args.end.args[0], args.y,
            descriptor(args.y, (bm, 64)), *tail.memory(args.y), *args.end.numbers, m, n, blocks,
            min(problem.per, blocks), tail.waves, tail.share,
            BM=bm, STAGES=room_for(stage, 0, 2 * bm * 128, _STAGES[bm]), BAND=2048 // bm, EACH=each,
            ALIGNED=n % 16 == 0, ZERO=lowered, MOVED=moved, HAS_BIAS=form["HAS_BIAS"], OUT=form["OUT"],
            SPREAD=tail.parts is not None,
            **early(device, 4, weight.data, scale, weight.zero, sums if moved else None),
        )  # fmt: skip
        return finished(args.y, n, device)


INT8_GROUPS_HOPPER = Int8GroupsHopper()
