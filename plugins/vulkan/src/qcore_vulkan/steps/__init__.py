"""Ops as steps of a program: functions that append to a `Builder`, so that several ops form one submission."""

from .convolution import Geometry2d, Image, conv2d
from .elementwise import ELEMENTWISE, elementwise
from .embedding import embedding
from .experts import Ends
from .linear import grouped_linear, linear
from .rows import PART, Rows, rows_bytes, rows_pitch

__all__ = [
    "ELEMENTWISE",
    "PART",
    "Ends",
    "Geometry2d",
    "Image",
    "Rows",
    "conv2d",
    "elementwise",
    "embedding",
    "grouped_linear",
    "linear",
    "rows_bytes",
    "rows_pitch",
]
