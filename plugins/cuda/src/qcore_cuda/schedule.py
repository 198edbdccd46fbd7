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


TILE_TIMES: Mapping[int, float] = {256: 10.0, 128: 5.6, 64: 3.8}
"""Tokens of a tile of `gemm_hopper`: the time that a block of 128 columns takes, as measured on an H200."""


@lru_cache(maxsize=8192)
def shares(tiles: int, blocks: int, bm: int, sms: int) -> tuple[float, Spread]:
    """The time that `gemm_hopper` takes for ``tiles`` of ``bm`` tokens and so many blocks of K, and their spread.

    The tiles of the last, incomplete wave run whole, or their K is split, or they are spread evenly: partial sums cost
    time, too (as measured on an H200).
    """
    waves, left = divmod(tiles, sms)
    programs = sms if waves else tiles
    ways = [(float(waves + (left > 0)), 0.0, Spread(waves + (left > 0), 0, programs))]
    for split in (2, 4, 8):
        if left and left * split <= sms and blocks >= 4 * split:
            share = -(-blocks // split)
            programs = sms if waves else -(-left * blocks // share)
            ways.append((waves + 1 / split, 0.12, Spread(waves, share, programs)))
    if waves and left and blocks >= 8:
        ways.append((tiles / sms, 0.4, Spread(waves, -(-left * blocks // sms), sms)))
    return min((rounds * blocks * TILE_TIMES[bm] + sharing * bm, way) for rounds, sharing, way in ways)
