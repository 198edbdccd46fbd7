"""Tiles of rows of the weight by tokens, of which programs share those of the last wave, see `schedule.tail_spread`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from qcore_triton.weights import Weight

from ..costs import Work
from ..problem import GemmProblem
from ..runtime import hopper
from ..runtime.counters import counters
from ..runtime.device import Device
from ..runtime.replay import empty, tracked
from ..schedule import SPLITS, best_split, tail_spread
from .aligned import copies_of_result
from .base import Choice, Int8Product

ROWS = 64
"""Rows of the weight that a warpgroup multiplies."""


class Tokens(NamedTuple):
    """**Fields:** ``bm``: tokens of a tile, 256, 128, 64 or 32; ``split``: one of `SPLITS`."""

    bm: int
    split: int = 1


def tile_choices(
    problem: GemmProblem, sizes: Collection[int], columns: int, sms: int, rows: int = 128
) -> Iterator[Tokens]:
    """Tiles for which programs have enough to do, with the ways to compute the last wave that differ.

    ``rows``: of the weight in a tile.
    """
    for bm in sizes:
        if problem.rows * 2 >= bm and (problem.rows <= 16 * bm or bm == max(sizes)):
            tiles, blocks = tiles_of(problem.n, problem.rows, bm, rows), -(-problem.k // columns)
            spreads = {tail_spread(tiles, blocks, split, sms): split for split in reversed(SPLITS)}
            yield from (Tokens(bm, split) for split in sorted(spreads.values()))


def best_tile(problem: GemmProblem, sizes: Collection[int], columns: int, sms: int) -> Tokens:
    """The tile for which programs have the least to do, by analysis."""
    blocks = -(-problem.k // columns)
    found = ((best_split(tiles_of(problem.n, problem.rows, bm), blocks, bm, sms, columns), bm) for bm in sizes)
    (_, split), bm = min(found)
    return Tokens(bm, split)


def tail_work(device: Device, problem: GemmProblem, config: Tokens, columns: int, rows: int = 128) -> Work:
    """The work of a launch with `tail_spread`; a step is a block of ``columns``."""
    blocks = -(-problem.k // columns)
    waves, share, _ = tail_spread(tiles_of(problem.n, problem.rows, config.bm, rows), blocks, config.split, device.sms)
    rounds = waves + (share > 0)
    # A tile begins anywhere in a program's share, unless it is a whole number of shares.
    parts = 0.0 if not share else blocks / share if blocks % share == 0 else blocks / share + 1
    return Work(rounds * device.sms, (waves * blocks + share) / rounds, parts)


def tail_apart(device: Device, problem: GemmProblem, config: Tokens, columns: int, rows: int = 128) -> bool:
    """`Product.apart` with `tail_spread`: tiles that cannot be split are computed as those that need not be."""
    tiles, blocks = tiles_of(problem.n, problem.rows, config.bm, rows), -(-problem.k // columns)
    return config.split == 1 or tail_spread(tiles, blocks, config.split, device.sms).share > 0


def tiles_of(n: int, m: int, bm: int, rows: int = 128) -> int:
    """The number of tiles of ``rows`` rows of the weight and ``bm`` tokens."""
    return -(-n // rows) * -(-m // bm)


class Tail(NamedTuple):
    """How a launch spreads its tiles.

    **Fields:** ``tiles``: all; ``waves``, ``share``, ``programs``: see `schedule.Spread`; ``parts``: float32 memory for
    sums of tiles that programs share, None without any; ``counts``: of each warpgroup and such tile, 0 now.
    """

    tiles: int
    waves: int
    share: int
    programs: int
    parts: Tensor | None
    counts: Tensor | None

    def memory(self, instead: Tensor) -> tuple[Tensor, Tensor]:
        """Parts and counts, or another tensor ``instead`` of either."""
        return instead if self.parts is None else self.parts, instead if self.counts is None else self.counts


def tail_of(device: Device, x: Tensor, n: int, config: Tokens, blocks: int, rows: int = 128) -> Tail:
    """The tiles of x ``(M, .)`` times N ``rows`` of the weight each, on a device; ``blocks``: steps along K."""
    tiles = tiles_of(n, len(x), config.bm, rows)
    waves, share, programs = tail_spread(tiles, blocks, config.split, device.sms)
    left = tiles - waves * programs if share else 0
    if not left:
        return Tail(tiles, waves, share, programs, None, None)
    parties = max(2, rows // ROWS)
    parts = empty(((programs + left) * parties * ROWS * config.bm,), torch.float32, x.device)
    return Tail(tiles, waves, share, programs, parts, tracked(counters, parties * left, x.device))


def is_narrow(device: Device, problem: GemmProblem) -> bool:
    """More than 8 rows, with results of one or two bytes, not scaled by tokens, on a GPU for kernels in Gluon."""
    narrow = problem.out_dtype.itemsize <= 2 and not problem.out_by_token
    return narrow and problem.rows > 8 and hopper.fits(device, 128)


class TiledCodes(Int8Product[Tokens]):
    """An int8 product of such tiles. **Fields:** ``rows``: of the weight in a tile."""

    config = Tokens
    wants_totals: ClassVar[bool] = False
    rows: ClassVar[int] = 128

    @abstractmethod
    def sizes(self, problem: GemmProblem) -> Collection[int]:
        """Tokens that a tile may have."""

    def columns(self, problem: GemmProblem) -> int:
        """Columns of a step along K."""
        del problem
        return 128

    def rule(self, device: Device, problem: GemmProblem) -> Tokens | None:
        return best_tile(problem, self.sizes(problem), self.columns(problem), device.sms)

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Tokens]:
        yield from tile_choices(problem, self.sizes(problem), self.columns(problem), device.sms, self.rows)

    def adapted(self, problem: GemmProblem, config: Tokens) -> Choice:
        """A tile that registers suffice for: one measured without zero points may be too large with them."""
        return Choice(self, config._replace(bm=min(config.bm, max(self.sizes(problem)))))

    def order(self, weight: Weight) -> int:
        del weight
        return 0

    def work(self, device: Device, problem: GemmProblem, config: Tokens) -> Work:
        return tail_work(device, problem, config, self.columns(problem), self.rows)

    def apart(self, device: Device, problem: GemmProblem, config: Tokens) -> bool:
        return tail_apart(device, problem, config, self.columns(problem), self.rows)

    def copies(self, problem: GemmProblem) -> tuple[int, ...]:
        return copies_of_result(problem)
