"""`Form`: the static parameters of a body, known before it is traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..codes import INTEGERS, Encoding

Activation: TypeAlias = Literal["float", "symmetric", "asymmetric", "given", "fp8", "fp8-groups", "fp8-given"]
"""How x is quantized: not at all; to int8 per token from its range, with or without a zero point, or with given
parameters; to fp8 (e4m3) per token, per group of the weight, or with a given scale."""


def is_int8(kind: str) -> bool:
    """Whether x is quantized to int8."""
    return kind in {"symmetric", "asymmetric", "given"}


@dataclass(frozen=True)
class Form:
    """The static part of a call; everything else is arrays.

    **Fields:** ``activation``; ``out_dtype``: a NumPy dtype name, e.g. ``"bfloat16"``; ``requantize``: whether results
    become int8 codes; ``scan``: slices of the weight one after another, so that only one is dequantized at a time
    (CPUs), or all in one product (TPUs, which unpack in registers); ``rows``: data is ``(N, K)`` or ``(N, S, b)``
    (GPUs);
    ``pallas``: integer weights of 4 bits are multiplied by `qcore_xla.pallas` if it has tiles for them (XLA would
    unpack the weight to memory): on TPUs with int8 activations, on GPUs with 16-bit floats and few rows;
    ``axis``: of a mesh, if this is one device's part of a product that is cut along K: results are summed over it;
    ``local``: then each device quantizes its own part of a token by scales of its own; ``encoding``: what the codes of
    the weight stand for.
    """

    activation: Activation = "float"
    out_dtype: str = "float32"
    requantize: bool = False
    scan: bool = False
    rows: bool = False
    pallas: bool = False
    axis: str = ""
    local: bool = False
    encoding: Encoding = INTEGERS
