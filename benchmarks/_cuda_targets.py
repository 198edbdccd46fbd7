"""What the plugin's issue asks for on one H200, and whether a run has reached it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Size = tuple[int, int]
"""(K, N)."""

_SIZES: tuple[Size, ...] = ((4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672))
_COLUMNS = {
    ("w4a16-g128", 1): ((2.1, 1.91), (2.4, 2.09), (2.5, 2.20), (3.3, 3.08)),
    ("w4a16-g128", 16): ((1.7, 1.57), (2.1, 1.95), (2.1, 1.90), (2.6, 2.43)),
    ("w4a16-g128", 64): ((1.05, 0.99), (1.5, 1.39), (1.5, 1.41), (1.75, 1.65)),
    ("w8a16", 1): ((1.9, 1.82), (1.8, 1.57), (1.85, 1.74), (2.05, 2.02)),
    ("w4a8-g128", 1): ((1.55, 1.46), (2.1, 2.01), (2.1, 1.97), (2.65, 2.53)),
    ("w8a8", 2048): ((1.65, 1.59), (1.85, 1.83), (1.85, 1.80), (1.9, 1.90)),
}
TARGETS: dict[tuple[str, int, Size], tuple[float, float]] = {
    (scheme, rows, size): pair
    for (scheme, rows), pairs in _COLUMNS.items()
    for size, pair in zip(_SIZES, pairs, strict=True)
}
"""(ratio to bfloat16 to reach, best peer measured for the issue) by scheme, M and size."""

LARGE_ROWS, LARGE_RATIO = 256, 0.95
"""From this many rows on no scheme may be slower than this."""
GOAL_SCHEME, GOAL_SIZE, GOAL_SHARE = "w4a16-g128", (8192, 28672), 0.85
"""Share of the read bandwidth at M = 1."""
ASYMMETRIC = 1.08
"""What a zero point may cost, in time."""
HOST_US = 14.0
"""Host time of a whole call at 4096 x 4096, M = 1."""
CONV_RATIO = 1.2
"""w8a8 convolution against cuDNN in bfloat16."""


@dataclass(frozen=True)
class Cell:
    """One measured figure. ``competes``: the scheme whose peers it is one of; ``share``: of the floor."""

    name: str
    competes: str
    k: int
    n: int
    rows: int
    us: float
    ratio: float
    share: float
    error: float
    note: str = ""

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def ours(self) -> bool:
        return self.name == self.competes


@dataclass(frozen=True)
class Verdict:
    """One promise: what was asked, what came, and who else competes."""

    what: str
    asked: str
    found: str
    met: bool | None
    peer: str = ""

    def row(self) -> tuple[str, ...]:
        mark = {True: "yes", False: "**no**", None: "not measured"}[self.met]
        return (self.what, self.asked, self.found, mark, self.peer)


def goal(scheme: str, rows: int, size: Size) -> float | None:
    """The ratio that a cell has to reach."""
    named = TARGETS.get((scheme, rows, size))
    return named[0] if named else LARGE_RATIO if rows >= LARGE_ROWS else None


def verdicts(cells: Iterable[Cell], host: Mapping[str, float], conv: Mapping[str, float]) -> Iterator[Verdict]:
    """Every target beside what was measured. ``host``: microseconds by call; ``conv``: ratios by scheme."""
    cells = list(cells)
    ours = {(c.name, c.rows, (c.k, c.n)): c for c in cells if c.ours}
    for (scheme, rows, size), (wanted, recorded) in TARGETS.items():
        yield _ratio(scheme, rows, size, wanted, recorded, ours.get((scheme, rows, size)), cells)
    yield _large(ours.values())
    yield _bandwidth(ours.get((GOAL_SCHEME, 1, GOAL_SIZE)))
    yield from _asymmetric(ours)
    yield from _host(host)
    yield from _conv(conv)


def _ratio(
    scheme: str, rows: int, size: Size, wanted: float, recorded: float, cell: Cell | None, cells: list[Cell]
) -> Verdict:
    what = f"{scheme}, {size[0]} x {size[1]}, M = {rows}"
    asked = f"{wanted:.2f} x, peer {recorded:.2f} x"
    if cell is None:
        return Verdict(what, asked, "", None)
    beaten, peer = best_peer(cell, cells)
    return Verdict(what, asked, f"{cell.ratio:.2f} x", cell.ratio >= wanted and beaten, peer)


def best_peer(cell: Cell, cells: Iterable[Cell]) -> tuple[bool, str]:
    """Whether the fastest peer of the run is beaten, and who that is."""
    place = (cell.k, cell.n, cell.rows)
    kinds = {cell.competes.partition("-")[0]} | ({"w4a8", "w8a8"} if "a8" in cell.competes else set())
    peers = [c for c in cells if not c.ours and c.competes.partition("-")[0] in kinds and (c.k, c.n, c.rows) == place]
    if not peers:
        return True, ""
    best = max(peers, key=lambda c: c.ratio)
    return cell.ratio >= best.ratio, f"{best.name} {best.ratio:.2f} x"


def _large(ours: Iterable[Cell]) -> Verdict:
    what, asked = f"every scheme, M >= {LARGE_ROWS}", f"{LARGE_RATIO} x"
    large = [c for c in ours if c.rows >= LARGE_ROWS]
    if not large:
        return Verdict(what, asked, "", None)
    worst = min(large, key=lambda c: c.ratio)
    found = f"{worst.ratio:.2f} x at worst: {worst.name}, {worst.k} x {worst.n}, M = {worst.rows}"
    return Verdict(what, asked, found, worst.ratio >= LARGE_RATIO)


def _bandwidth(cell: Cell | None) -> Verdict:
    what = f"{GOAL_SCHEME}, {GOAL_SIZE[0]} x {GOAL_SIZE[1]}, M = 1: share of the floor"
    found, met = (f"{cell.share:.0%}", cell.share >= GOAL_SHARE) if cell else ("", None)
    return Verdict(what, f"{GOAL_SHARE:.0%}", found, met)


def _asymmetric(ours: Mapping[tuple[str, int, Size], Cell]) -> Iterator[Verdict]:
    costs: dict[int, list[float]] = {}
    for (name, rows, size), cell in ours.items():
        other = ours.get((f"{name}-asym", rows, size))
        if other:
            costs.setdefault(rows, []).append(other.us / cell.us)
    for rows, found in sorted(costs.items()):
        text = f"{statistics.median(found) - 1:+.1%} in the median, {max(found) - 1:+.1%} at worst"
        yield Verdict(f"zero point, M = {rows}: time", f"{ASYMMETRIC - 1:+.0%}", text, max(found) <= ASYMMETRIC)


def _host(host: Mapping[str, float]) -> Iterator[Verdict]:
    what, base = "host time of a call, 4096 x 4096, M = 1", host.get("bf16 F.linear", 0.0)
    found = {name: us for name, us in host.items() if name.startswith("layer ")}
    if not found:
        yield Verdict(what, f"{HOST_US:.0f} us", "", None)
    for name, us in found.items():
        text = f"{us:.1f} us (bf16 F.linear {base:.1f} us)"
        yield Verdict(f"{what}: {name}", f"{HOST_US:.0f} us", text, us <= HOST_US)


def _conv(conv: Mapping[str, float]) -> Iterator[Verdict]:
    """Both kinds of int8 activations: one scale for all of x, and one per column, which takes writing the columns."""
    for scheme in sorted(name for name in conv if name.startswith("w8a8")) or ["w8a8"]:
        ratio = conv.get(scheme)
        what, asked = f"conv2d {scheme}, 256 -> 256, 3 x 3, 56 x 56, batch 32", f"{CONV_RATIO:.2f} x cuDNN bf16"
        yield Verdict(what, asked, f"{ratio:.2f} x" if ratio else "", ratio >= CONV_RATIO if ratio else None)
