"""PTX that decodes tables and floating-point elements of 4 and 8 bits to pairs of 16-bit floats.

A floating-point code's bits move to their place in the wider float, whose exponent has another bias; a product with a
power of two corrects it, exactly, for subnormal numbers as well. Another table of 16 numbers is looked up with
``prmt``, which picks four bytes out of eight by four bits each: four codes are its selector as they are
stored. Upper and lower bytes of a number are looked up apart, for codes below 8 and above; the code's upper bit, spread
over a byte by another ``prmt``, chooses. Numbers are rounded to the 16-bit dtype, see `elements.balanced_bits`.

Each function gives text for registers that it is given; ``half``: float16 instead of bfloat16.
"""

from __future__ import annotations

import triton

from qcore_triton.kernels.elements import balanced_bits

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# The functions run while a kernel is compiled, so that its code depends on their source.


@triton.constexpr_function
def table_words(element, half):
    """The table's bytes as eight words: upper bytes of numbers 0 to 3, 4 to 7, ...; then lower bytes."""
    bits = [] if half else balanced_bits(element)
    for word in [int(element[i : i + 8], 16) for i in range(1, 129, 8)] if half else ():
        # The exponent has another bias; numbers are 0 or normal.
        size = max(0, (word & 0x7FFFFFFF) - (112 << 23))
        bits.append((word >> 31 << 15) | (size + 0xFFF + (size >> 13 & 1)) >> 13)
    found = []
    for shift in (8, 0):
        parts = [bit >> shift & 0xFF for bit in bits]
        found += [sum(parts[i + j] << (8 * j) for j in range(4)) for i in range(0, 16, 4)]
    return [f"0x{word:08X}" for word in found]


@triton.constexpr_function
def power(element, half):
    """The power of two, twice in a word: 2**120, 2**112 and 2**126, or 2**8, 1 and 2**14; empty for 1."""
    words = {"e4m3": ("0x7B807B80", "0x5C005C00"), "e5m2": ("0x77807780", ""), "e2m1": ("0x7E807E80", "0x74007400")}
    return words[element][1 if half else 0]


@triton.constexpr_function
def corrected(out, element, half):
    """Multiply both floats of a register with the power of two that an element's bias needs."""
    if not power(element, half):
        return ""
    # There is no product of bfloat16 alone before sm_90; adding -0 keeps the sign of a zero.
    return f"fma.rn.{'f16x2' if half else 'bf16x2'} {out}, {out}, tn, ts; "


@triton.constexpr_function
def declared(element, half):
    """Registers that the other functions use, and the numbers that they need in registers."""
    if element[0] != "t":
        number = power(element, half) or "0"
        return f".reg .b32 tt, tk, tz, tn, ts; mov.b32 tz, 0; mov.b32 tn, {number}; mov.b32 ts, 0x80008000; "
    names = ("th0", "th1", "th2", "th3", "tl0", "tl1", "tl2", "tl3")
    moves = " ".join(f"mov.b32 {n}, {w};" for n, w in zip(names, table_words(element, half), strict=True))
    return f".reg .b32 tt, tk, tf, tm, ta, tb, tu, tv, {', '.join(names)}; {moves} "


@triton.constexpr_function
def four_of_table(source, selector, mask, low, high):
    """Four codes in the lower half of ``selector``, less their upper bit, to pairs: of bytes' low and high nibbles.

    tf holds the word ``source``, 4 bits further up; ``mask`` picks the bytes whose upper bits are those of the codes.
    """
    return (
        f"prmt.b32 tm, {source}, tf, {mask}; "
        f"prmt.b32 ta, th0, th1, {selector}; prmt.b32 tb, th2, th3, {selector}; lop3.b32 tu, ta, tb, tm, 0xD8; "
        f"prmt.b32 ta, tl0, tl1, {selector}; prmt.b32 tb, tl2, tl3, {selector}; lop3.b32 tv, ta, tb, tm, 0xD8; "
        f"prmt.b32 {low}, tv, tu, 0x6240; prmt.b32 {high}, tv, tu, 0x7351; "
    )


@triton.constexpr_function
def nibbles_text(word, outs, element, half):
    """A word of eight nibbles to four registers: the low nibbles of bytes 0, 1 and of 2, 3; then the high ones."""
    if element[0] == "t":
        text = f"and.b32 tt, {word}, 0x77777777; shl.b32 tf, {word}, 4; "
        text += four_of_table(word, "tt", "0x9D8C", outs[0], outs[2])
        text += "shr.u32 tt, tt, 16; "
        return text + four_of_table(word, "tt", "0xBFAE", outs[1], outs[3])
    return plane_text(word, outs[:2], False, element, half) + plane_text(word, outs[2:], True, element, half)


@triton.constexpr_function
def plane_text(word, outs, high, element, half):
    """A word's low or ``high`` nibbles to two registers: of bytes 0, 1 and of 2, 3."""
    if element[0] == "t":
        text = f"shr.u32 tk, {word}, 4; and.b32 tk, tk, 0x0F0F0F0F; " if high else f"and.b32 tk, {word}, 0x0F0F0F0F; "
        # Together the four nibbles are a selector.
        text += "shr.u32 tt, tk, 4; or.b32 tk, tk, tt; prmt.b32 tk, tk, tk, 0x2020; "
        text += "and.b32 tt, tk, 0x7777; shl.b32 tf, tk, 4; prmt.b32 tm, tk, tf, 0x9D8C; "
        text += "prmt.b32 ta, th0, th1, tt; prmt.b32 tb, th2, th3, tt; lop3.b32 tu, ta, tb, tm, 0xD8; "
        text += "prmt.b32 ta, tl0, tl1, tt; prmt.b32 tb, tl2, tl3, tt; lop3.b32 tv, ta, tb, tm, 0xD8; "
        return text + f"prmt.b32 {outs[0]}, tv, tu, 0x5140; prmt.b32 {outs[1]}, tv, tu, 0x7362; "
    text = f"and.b32 tk, {word}, {'0xF0F0F0F0' if high else '0x0F0F0F0F'}; "
    for out, order in zip(outs, ("0x4140", "0x4342"), strict=True):
        text += placed("tk", order, out, high, half) + corrected(out, element, half)
    return text


@triton.constexpr_function
def placed(nibbles, order, out, high, half):
    """Two nibbles of e2m1, the low or ``high`` ones of bytes, at the place of a float's bits."""
    up = 4 if high else 0
    text = f"prmt.b32 tt, {nibbles}, tz, {order}; "
    if half:
        # The sign at bit 15, the other three from bit 9 on.
        text += f"shl.b32 {out}, tt, {12 - up}; and.b32 {out}, {out}, 0x80008000; shl.b32 tt, tt, {9 - up}; "
        return text + f"and.b32 tt, tt, 0x0E000E00; or.b32 {out}, {out}, tt; "
    # Two copies, 2**12 and 2**6 times: the sign to bit 15, the other three from bit 6 on.
    return text + f"mul.lo.u32 tt, tt, 0x{0x1040 >> up:X}; and.b32 {out}, tt, 0x81C081C0; "


@triton.constexpr_function
def bytes_text(word, outs, element, half):
    """A word of four bytes to two registers, in order; of a single pair if there is one register."""
    shift = {("e4m3", False): 4, ("e4m3", True): 1, ("e5m2", False): 3, ("e5m2", True): 0}[element, half]
    mask = 0x7F00 >> shift
    text = ""
    for out, order in zip(outs, ("0x1404", "0x3424"), strict=False):
        text += f"prmt.b32 {out}, {word}, tz, {order}; "
        if shift:
            text += f"shr.u32 tt, {out}, {shift}; and.b32 tt, tt, 0x{mask:04X}{mask:04X}; "
            text += f"lop3.b32 {out}, {out}, 0x80008000, tt, 0xEA; "
        text += corrected(out, element, half)
    return text


@triton.constexpr_function
def nibbles_asm(element, half):
    """Assembly: a word $4 of nibbles to registers $0 to $3, see `nibbles_text`."""
    return f"{{ {declared(element, half)}{nibbles_text('$4', ('$0', '$1', '$2', '$3'), element, half)}}}"


@triton.constexpr_function
def bytes_asm(element, half):
    """Assembly: a word $2 of bytes to registers $0 and $1, see `bytes_text`."""
    return f"{{ {declared(element, half)}{bytes_text('$2', ('$0', '$1'), element, half)}}}"
