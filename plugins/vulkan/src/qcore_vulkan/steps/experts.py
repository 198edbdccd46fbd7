"""Rows that are sorted by expert, each of which has its own weight: mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from ..builder import Ref
from ..device import Buffer
from ..layout import Geometry, Part


@dataclass(frozen=True)
class Ends:
    """The end of each expert's rows, which the device reads.

    **Fields:** ``ref``: int32 ``(E,)``, followed by the biases ``(E, N)``, float32, if ``biased``; ``experts``: E;
    ``row``: which row row 0 of x is by the ends. Ends outside of the rows are taken for the nearest that is not.
    """

    ref: Ref
    experts: int
    biased: bool
    row: int = 0

    def words(self, part: Part, geometry: Geometry) -> list[int | float]:
        """Push constants of the shaders for the experts of a part of the weight."""
        padded = geometry.padded_n
        return [part.first // padded, part.n // padded, self.experts, self.row]


Added = Buffer | Ends | None
"""What a product adds: a bias ``(N,)``, float32, if any; with experts their biases, which lie behind their ends."""


def is_biased(added: Added) -> bool:
    """Whether anything is added."""
    return added.biased if isinstance(added, Ends) else added is not None


def memory(added: Added, part: Part) -> Ref | Buffer:
    """What is bound in the place of the bias; a product that does not use it gets any buffer."""
    return added.ref if isinstance(added, Ends) else added or part.scale


def first_column(added: Added, part: Part) -> int:
    """The column of the result where those of a part of the weight begin."""
    return 0 if isinstance(added, Ends) else part.first


def columns(added: Added, part: Part, geometry: Geometry) -> int:
    """Columns of a part: every expert has all of the result."""
    return geometry.n if isinstance(added, Ends) else part.n


def words(added: Added, part: Part, geometry: Geometry) -> list[int | float]:
    """Push constants that follow the others of a shader that serves experts."""
    return added.words(part, geometry) if isinstance(added, Ends) else []


def row_tiles(rows: int, height: int, added: Added) -> int:
    """Tiles of rows; with experts at most, since the host does not know how many rows an expert has."""
    if not isinstance(added, Ends):
        return -(-rows // height)
    owners = min(added.experts + 1, rows)  # that have rows; one more for rows of no expert
    return (rows + owners * (height - 1)) // height
