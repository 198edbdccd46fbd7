"""`W4A8_GROUPS_HOPPER`: many rows of codes and int4 weights in groups of 32 or 64 on sm_90, codes held as bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from qcore_triton.codes import Codes
from qcore_triton.weights import FLOAT_ZERO, Weight

from ..costs import Work
from ..problem import GemmProblem
from ..runtime import hopper
from ..runtime.counters import counters
from ..runtime.device import Device
from ..runtime.hopper import descriptor, early, int4_words, room_for
from ..runtime.launch import launch
from ..runtime.replay import empty, tracked
from ..schedule import tail_spread
from .aligned import copies_of_result, finished
from .base import Choice, Int8Product, Operands
from .gemm_hopper import Tokens, best_tile, tail_apart, tail_work, tile_choices, tiles_of
from .quantized import arguments_of

_STAGES = {128: 8, 64: 14, 32: 18}
"""The most stages of a ring, by tokens of a tile, if groups have 32 columns."""


def _sizes(problem: GemmProblem) -> tuple[int, ...]:
    """Tokens of a tile for which registers suffice."""
    return (64, 32) if problem.step == 64 and problem.x_zero else (128, 64, 32)


class W4A8GroupsHopper(Int8Product[Tokens]):
    """See `kernels.w4a8_groups_hopper`."""

    name: ClassVar[str] = "w4a8_groups_hopper"
    config = Tokens
    wants_totals: ClassVar[bool] = False  # it has integer zero points only, which it subtracts
    codes = torch.bfloat16

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """Groups of one block; no float zero points, results of one or two bytes, not scaled by tokens."""
        small = problem.bits == 4 and problem.grouped and problem.group == problem.step < 128
        plain = problem.zero != FLOAT_ZERO and not (problem.out_by_token or problem.own_order)
        return (
            small and plain and problem.rows > 8 and problem.out_dtype.itemsize <= 2
            and hopper.fits(device, 128)
        )  # fmt: skip

    def rule(self, device: Device, problem: GemmProblem) -> Tokens:
        return best_tile(problem, _sizes(problem), 2 * problem.step, device.sms)

    def adapted(self, problem: GemmProblem, config: Tokens) -> Choice:
        """A tile that registers suffice for: one measured without zero points of x may be too large with them."""
        return Choice(self, config._replace(bm=min(config.bm, max(_sizes(problem)))))

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Tokens]:
        yield from tile_choices(problem, _sizes(problem), 2 * problem.step, device.sms)

    def order(self, weight: Weight) -> int:
        del weight
        return 0

    def work(self, device: Device, problem: GemmProblem, config: Tokens) -> Work:
        return tail_work(device, problem, config, 2 * problem.step)

    def apart(self, device: Device, problem: GemmProblem, config: Tokens) -> bool:
        return tail_apart(device, problem, config, 2 * problem.step)

    def copies(self, problem: GemmProblem) -> tuple[int, ...]:
        return copies_of_result(problem)

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
        tiles = tiles_of(n, m, bm)
        waves, share, programs = tail_spread(tiles, stages, config.split, device.sms)
        left = tiles - waves * programs if share else 0
        parts = empty(((programs + left) * 128 * bm,), torch.float32, codes.q.device) if left else args.y
        launch(
            w4a8_groups_hopper, (programs,),
            descriptor(codes.q, (bm, 2 * p)), x_scale, x_zero, int4_words(weight.data, 2 * p), by_row(scale, True),
            by_row(zero, weight.zero is not None), by_row(sums, moved), args.end.args[0], args.y,
            descriptor(args.y, (bm, 64)), parts, tracked(counters, 2 * left, codes.q.device) if left else args.y,
            *args.end.numbers, m, n, stages, waves, share,
            P=p, BM=bm, STAGES=room_for(stage, 0, 2 * bm * 128, _STAGES[bm] * 32 // p), BAND=2048 // bm,
            ALIGNED=n % 16 == 0, ZERO=weight.zero is not None, MOVED=moved, HAS_BIAS=form["HAS_BIAS"], OUT=form["OUT"],
            SPREAD=left > 0,
            **early(device, 4, weight.data, scale, weight.zero, sums if moved else None),
        )  # fmt: skip
        return finished(args.y, n, device)


W4A8_GROUPS_HOPPER = W4A8GroupsHopper()
