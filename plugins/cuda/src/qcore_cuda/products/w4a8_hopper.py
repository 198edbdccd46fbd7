"""`W4A8_HOPPER`: many rows of codes and int4 weights on sm_90: one warp copies, others unpack, multiply and scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from qcore_triton.codes import Codes
from qcore_triton.weights import FLOAT_ZERO, Weight

from ..costs import Work
from ..problem import GemmProblem
from ..runtime import hopper
from ..runtime.device import Device
from ..runtime.hopper import descriptor, early, int4_words
from ..runtime.launch import launch
from .aligned import copies_of_result, finished
from .base import Int8Product, Operands
from .quantized import arguments_of

ORDER = 32
"""The order of columns, see `Weight.order`, of the codes that it takes."""
_TIMES = {128: 1.0, 64: 0.7, 32: 0.5}
"""Tokens of a tile: the time that one takes."""


class Tokens(NamedTuple):
    """**Fields:** ``bm``: tokens of a tile, 128, 64 or 32; it has 128 rows of the weight."""

    bm: int


class W4A8Hopper(Int8Product[Tokens]):
    """See `kernels.w4a8_hopper`."""

    name: ClassVar[str] = "w4a8_hopper"
    config = Tokens
    wants_totals: ClassVar[bool] = False  # it has integer zero points only, which it subtracts

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """No float zero points, results of one or two bytes, not scaled by tokens; codes in an order of its own."""
        plain = problem.bits == 4 and problem.zero != FLOAT_ZERO and not (problem.out_by_token or problem.own_order)
        return (
            plain and problem.rows > 8 and problem.out_dtype.itemsize <= 2
            and hopper.fits(device, problem.step)
        )  # fmt: skip

    def rule(self, device: Device, problem: GemmProblem) -> Tokens | None:
        """The tile for which programs have the least to do, in rounds of one tile each; for few, another kernel."""
        if problem.rows <= min(_TIMES):
            return None

        def cost(bm: int) -> float:
            tiles = -(-problem.rows // bm) * -(-problem.n // 128)
            return -(-tiles // device.sms) * _TIMES[bm]

        return Tokens(min(_TIMES, key=cost))

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Tokens]:
        del device
        yield from (Tokens(bm) for bm in _TIMES if bm <= problem.rows)

    def order(self, weight: Weight) -> int:
        del weight
        return ORDER

    def work(self, device: Device, problem: GemmProblem, config: Tokens) -> Work:
        del device
        return Work(-(-problem.n // 128) * -(-problem.rows // config.bm), problem.k / 128)

    def copies(self, problem: GemmProblem) -> tuple[int, ...]:
        return copies_of_result(problem)

    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: Tokens) -> Tensor:
        from ..kernels.w4a8_hopper import w4a8_hopper

        assert codes.order == ORDER, "codes were quantized for another kernel"
        args, weight, m, n, bm = (
            arguments_of(codes, operands, problem, tiles=True),
            operands.weight,
            len(codes.q),
            problem.n,
            config.bm,
        )
        (x_scale, x_zero), (scale, zero, sums), form = args.of_x, args.of_w, args.form
        each, moved = problem.grouped, form["XZERO"]
        # Zero points and quantized results take the registers of a second block's sums.
        plain = not moved and weight.zero is None and form["OUT"] == 0

        def by_row(tensor: Tensor, described: bool) -> Any:
            return descriptor(tensor, (1, 128), swizzled=False) if described else tensor

        launch(
            w4a8_hopper, (min(-(-n // 128) * -(-m // bm), device.sms),),
            descriptor(codes.q, (bm, 128)), x_scale, x_zero, int4_words(weight.data), by_row(scale, each),
            by_row(zero, weight.zero is not None), by_row(sums, each and moved), args.end.args[0], args.y,
            descriptor(args.y, (bm, 64)), *args.end.numbers, m, n, args.blocks, problem.per,
            BM=bm, STAGES=6 if bm > 64 else 8, GROUP=2048 // bm, ALIGNED=n % 16 == 0, EACH=each,
            ZERO=weight.zero is not None, MOVED=moved, HAS_BIAS=form["HAS_BIAS"],
            OUT=form["OUT"], U={128: 2 if plain else 1, 64: 4, 32: 1}[bm],
            **early(device, 4, weight.data, scale if each else None, weight.zero, sums if each and moved else None),
        )  # fmt: skip
        return finished(args.y, n, device)


W4A8_HOPPER = W4A8Hopper()
