"""Ops as steps of a program: functions that append to a `Builder`, so that several ops form one submission."""

from .convolution import Geometry2d, Image, conv2d
from .elementwise import ELEMENTWISE, elementwise
from .embedding import embedding
from .linear import linear
from .rows import PART, Rows, rows_bytes, rows_pitch

__all__ = [
    "ELEMENTWISE",
    "PART",
    "Geometry2d",
    "Image",
    "Rows",
    "conv2d",
    "elementwise",
    "embedding",
    "linear",
    "rows_bytes",
    "rows_pitch",
]
