"""The numbers that codes and scales stand for, in plain Triton for any device.

Floating-point elements of few bits are decoded by moving their bits to the place that they have in float32, whose
exponent has another bias: a product with a power of two corrects that, exactly, also for subnormal numbers. Tables are
a tree of selections. ``ELEMENT`` is the text of `packing.element_text`.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"


@triton.constexpr_function
def table_value(element, i):
    """Number i of a table's text."""
    bits = int(element[1 + 8 * i : 9 + 8 * i], 16)
    exponent, size = bits >> 23 & 0xFF, 1.0 + (bits & 0x7FFFFF) / 8388608.0
    value = size * 2.0 ** (exponent - 127) if exponent else 0.0  # text holds 0 and normal numbers
    return -value if bits >> 31 else value


@triton.constexpr_function
def balanced_bits(element):
    """A table's numbers as the bits of bfloat16, rounded so that the sum of their errors is about 0.

    Each weight is one of 16 numbers, whose errors are the same in all columns: with activations whose mean is not 0
    they add up. Therefore up to three numbers are rounded to the farther of their two neighbours in bfloat16: those
    that minimize 4 * (sum of errors)**2 + sum of errors**2.
    """
    exact = [table_value(element, i) for i in range(16)]
    words = [int(element[i : i + 8], 16) for i in range(1, 129, 8)]
    near = [(word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words]  # ties to even
    errors = [bfloat16_value(bits) - value for bits, value in zip(near, exact, strict=True)]
    far = [
        bits - 1 if abs(bfloat16_value(bits)) > abs(value) else bits + 1
        for bits, value in zip(near, exact, strict=True)
    ]
    other = [bfloat16_value(bits) - value for bits, value in zip(far, exact, strict=True)]
    rounded = [i for i in range(16) if errors[i]]
    chosen, least = (), None
    for count in range(4):
        for moved in itertools.combinations(rounded, count):
            found = [other[i] if i in moved else errors[i] for i in range(16)]
            cost = 4 * sum(found) ** 2 + sum(error * error for error in found)
            if least is None or cost < least:
                chosen, least = moved, cost
    return [far[i] if i in chosen else near[i] for i in range(16)]


@triton.constexpr_function
def bfloat16_value(bits):
    """The number of a bfloat16's bits, 0 or normal."""
    return table_value(f"t{bits << 16:08x}", 0)


@triton.constexpr_function
def balanced_value(element, i):
    """Number i of `balanced_bits`."""
    return bfloat16_value(balanced_bits(element)[i])


@triton.jit
def decoded(codes, ELEMENT: tl.constexpr, BALANCED: tl.constexpr = False):
    """Raw codes, integers of any type, as float32; the upper bits of nibbles are 0.

    BALANCED: a table's numbers as bfloat16 has them, see `balanced_bits`.
    """
    c = codes.to(tl.int32)
    if ELEMENT == "e4m3":
        value = (((c & 0x80) << 24) | ((c & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    elif ELEMENT == "e5m2":
        value = (((c & 0x80) << 24) | ((c & 0x7F) << 21)).to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2**112
    elif ELEMENT == "e2m1":
        value = (((c & 8) << 28) | ((c & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
    else:
        value = _selected(c, ELEMENT, BALANCED)
    return value


@triton.jit
def _number(i: tl.constexpr, shape: tl.constexpr, ELEMENT: tl.constexpr, BALANCED: tl.constexpr):
    return tl.full(shape, balanced_value(ELEMENT, i) if BALANCED else table_value(ELEMENT, i), tl.float32)


@triton.jit
def _selected(c, ELEMENT: tl.constexpr, BALANCED: tl.constexpr):
    """Numbers of a table: the four bits of a code, from the lowest, halve what is left."""
    left = ()
    for i in tl.static_range(8):
        low = _number(2 * i, c.shape, ELEMENT, BALANCED)
        left = left + (tl.where((c & 1) != 0, _number(2 * i + 1, c.shape, ELEMENT, BALANCED), low),)
    four = ()
    for i in tl.static_range(4):
        four = four + (tl.where((c & 2) != 0, left[2 * i + 1], left[2 * i]),)
    low = tl.where((c & 4) != 0, four[1], four[0])
    high = tl.where((c & 4) != 0, four[3], four[2])
    return tl.where((c & 8) != 0, high, low)


@triton.jit
def nibble_value(codes, ELEMENT: tl.constexpr):
    """Unsigned nibbles as float32: ``u - 8`` of integers."""
    return codes.to(tl.float32) - 8.0 if ELEMENT == "int" else decoded(codes, ELEMENT)


@triton.jit
def byte_value(codes, ELEMENT: tl.constexpr):
    """Bytes, int8, as float32."""
    return codes.to(tl.float32) if ELEMENT == "int" else decoded(codes, ELEMENT)


@triton.jit
def scale_value(raw, DTYPE: tl.constexpr):
    """A scale loaded through a pointer to DTYPE as float32: uint8 is e8m0, int8 the bits of e4m3.

    The bits of e8m0 are float32's exponent; but for 2**-127, a subnormal number.
    """
    if tl.uint8 == DTYPE:
        bits = raw.to(tl.int32) << 23
        value = tl.maximum(bits, 0x00400000).to(tl.float32, bitcast=True)
    elif tl.int8 == DTYPE:
        value = ((raw.to(tl.int32) << 20) & -2014314496).to(
            tl.float32, bitcast=True
        ) * 1.329227995784916e36  # 0x87F00000
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def pitch_of(N):
    """The columns of scales, zero points and sums of codes: N rows of a packed weight, rounded up, see `packing`."""
    return (N + 15) // 16 * 16


@triton.jit
def factor_of(factor, FACTOR: tl.constexpr):
    """The number that all results are multiplied with; 1 if there is none."""
    return tl.load(factor) if FACTOR else 1.0
