"""Device functions shared by the integer kernels: exact division by a scale, rounding to codes, dependent launch."""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without the NVIDIA backend, which compiles no code that uses these names
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def begin(PDL: tl.constexpr, LATE: tl.constexpr = False):
    """Let the next kernel be scheduled, then wait for the previous one; to be called before any load or store.

    LATE: in reverse order. Then the next kernel may read all data written before this kernel, without waiting.
    """
    if PDL:
        if LATE:
            gdc_wait()
        gdc_launch_dependents()
        if not LATE:
            gdc_wait()


@triton.jit
def quotient(v, scale, inverse):
    """``v / scale`` correctly rounded, given ``inverse = div_rn(1, scale)``, for quotients below 4096 in magnitude.

    One Newton step on a correctly rounded reciprocal (Markstein): three instructions instead of the ten of a division.
    """
    q = v * inverse
    return tl.fma(tl.fma(-q, scale, v), inverse, q)


MAGIC: tl.constexpr = tl.constexpr(0x4B400000)
"""The bits of 1.5 * 2**23, the magic number of float32 rounding: added to a number, it rounds that to an integer, half
to even, and leaves the integer in the low bits of the sum, without conversion instructions."""


@triton.jit
def magic_round(q):
    """``round(q) + MAGIC``, int32, for ``|q| < 2**21``."""
    return (q + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def magic_code(q, zero):
    """``clamp(round(q), -128 - zero, 127 - zero) + MAGIC``, int32; zero is an integer in float32."""
    return magic_round(tl.minimum(tl.maximum(q, -128.0 - zero), 127.0 - zero))


@triton.jit
def magic_quotient(v, scale, inverse, zero):
    """`magic_code` of ``v / scale`` for any v, including infinities, and any positive scale.

    ``inverse``: ``div_rn(1, scale)``. v is limited, not its quotient: to a quarter of a step beyond the last codes,
    which rounds to them. Where that is no float32 number, or the inverse is none, both are multiplied by a power of two
    first.
    """
    small, large = scale < 7.888609052210118e-31, scale >= 6.646139978924579e35  # 2**-100, 2**119
    power = tl.where(small, 1.8446744073709552e19, tl.where(large, 1.52587890625e-05, 1.0))  # 2**64, 2**-16
    scale *= power
    inverse = tl.where(small | large, tl.div_rn(1.0, scale), inverse)
    low, high = (-128.25 - zero) * scale, (127.25 - zero) * scale
    return magic_round(quotient(tl.minimum(tl.maximum(v * power, low), high), scale, inverse))


@triton.jit
def code_of(bits, zero):
    """The int8 code, zero point included, of a `magic_code`."""
    return (bits + zero.to(tl.int32)).to(tl.int8)


@triton.jit
def code(v, scale, inverse, zero):
    """``clamp(round(v / scale) + zero, -128, 127)`` as int8 for any v, including infinities."""
    return code_of(magic_quotient(v, scale, inverse, zero), zero)


@triton.jit
def magnitude(v):
    """``|v|`` as an int32 that compares like the float, with NaN above everything: ordinary maxima drop NaN."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def symmetric_scale(largest):
    """The scale for a token whose `magnitude` is at most ``largest``; NaN for NaN and infinity."""
    size = tl.where(largest < 0x7F800000, largest, 0x7FC00000).to(tl.float32, bitcast=True)
    return usable(tl.div_rn(size, 127.0))


@triton.jit
def asymmetric_scale(below, above):
    """Scale and zero point for a token in ``-below .. above`` (`magnitude` of ends); NaN as in `symmetric_scale`."""
    low = -tl.where(below < 0x7F800000, below, 0x7FC00000).to(tl.float32, bitcast=True)
    high = tl.where(above < 0x7F800000, above, 0x7FC00000).to(tl.float32, bitcast=True)
    scale = usable(tl.div_rn(high - low, 255.0))
    step = -128.0 - tl.div_rn(low, scale)  # in -128..127, so the trick of `magic_round` holds
    return scale, (step + 12582912.0) - 12582912.0


@triton.jit
def usable(scale):
    """1 for 0, and at least the smallest normal float32; NaN stays."""
    floored = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    return tl.where(scale == 0.0, 1.0, floored)
