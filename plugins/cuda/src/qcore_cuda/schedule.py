"""The distribution of tiles, and of steps along K, over programs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple


class Spread(NamedTuple):
    """**Fields:** ``waves``: whole tiles of a program; ``share``: its steps of the other tiles; ``programs``."""

    waves: int
    share: int
    programs: int


def spread(tiles: int, steps: int, split: int, even: int, sms: int) -> Spread:
    """How ``tiles`` of so many steps along K are spread.

    ``split``: programs that share the K of a tile; ``even``: programs per multiprocessor, of which there are ``sms``,
    if all tiles are spread evenly over them instead, else 0.
    """
    if not even:
        if split == 1:
            return Spread(1, 0, tiles)
        share = -(-steps // split)
        return Spread(0, share, -(-tiles * steps // share))
    programs = even * sms
    waves, left = divmod(tiles, programs)
    share = -(-left * steps // programs)
    return Spread(waves, share, programs if waves else -(-tiles * steps // share))


TILE_TIMES: Mapping[int, float] = {256: 10.0, 128: 5.6, 64: 3.8, 32: 3.0}
"""Tokens of a tile of `gemm_hopper`: the time that a block of 128 columns takes, as measured on an H200."""


SPLITS = (1, 2, 4, 8, 0)
"""How the tiles of the last, incomplete wave are computed: whole, split along K, or spread evenly (0)."""


def tail_spread(tiles: int, blocks: int, split: int, sms: int) -> Spread:
    """Whole waves of ``tiles`` of so many blocks of K, and the rest as one of `SPLITS` says.

    The rest runs whole if it cannot be split so.
    """
    waves, left = divmod(tiles, sms)
    if left and split == 0 and blocks >= 8:
        share = -(-left * blocks // sms)
        return Spread(waves, share, sms if waves else -(-left * blocks // share))
    if left and split > 1 and left * split <= sms and blocks >= 2 * split:
        share = -(-blocks // split)
        return Spread(waves, share, sms if waves else -(-left * blocks // share))
    return Spread(waves + (left > 0), 0, sms if waves else tiles)


@lru_cache(maxsize=8192)
def best_split(tiles: int, blocks: int, bm: int, sms: int, columns: int = 128) -> tuple[float, int]:
    """The relative time that `gemm_hopper` takes for ``tiles`` of ``bm`` tokens, and the best of `SPLITS`.

    ``blocks``: of K, of ``columns`` each. Parts of sums cost time, too (as measured on an H200).
    """

    def time(split: int) -> float:
        waves, share, _ = tail_spread(tiles, blocks, split, sms)
        sharing = 0.0 if not share else 0.12 if split else 0.4
        return (waves * blocks + share) * TILE_TIMES[bm] * columns / 128 + sharing * bm

    return min((time(split), split) for split in SPLITS)
