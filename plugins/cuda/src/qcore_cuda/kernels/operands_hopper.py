"""Operand A of ``wgmma``: a warpgroup's 64 rows of a packed weight, unpacked and scaled in registers.

int4 comes as words of eight nibbles in planar16 blocks of P = 32, 64 or 128 columns, int8 as pairs of neighbours in
rows16. Both are already in the order in which a thread holds operand A, so that unpacking moves nothing between
threads. 128 columns of int4 are four words of a thread for each of its two rows. With blocks of 128, the low nibbles of
the four are the first 64 columns, the high nibbles the others; with smaller blocks, which have parameters of their own,
two words are 64 columns.

Register layouts are spelled out for the versions of Triton that `runtime.hopper` lists.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qcore_triton.kernels.elements import scale_value

from .tables import bytes_text, declared, nibbles_text, plane_text

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

ROWS = gl.constexpr(64)
"""Rows of the weight in a tile of one warpgroup: the M of a ``wgmma`` instruction."""


@gluon.constexpr_function
def _layout(registers, lanes, columns):
    """Rows as operand A has them: l / 4 and 8 below in lane l, 16 in each warp."""
    lanes = [*lanes, [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.constexpr_function
def words_layout():
    """int4: words (64, 16) of 128 columns; thread t of four has words 4 t to 4 t + 3 of each of its two rows."""
    return _layout([[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8]], 16)


@gluon.constexpr_function
def _halves():
    """int4 in blocks of less than 128: words (64, 4, 2) of 64 columns, by row, thread and word."""
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout([[0, 0, 1], [8, 0, 0]], lanes, warps, [], [64, 4, 2])


@gluon.constexpr_function
def _quarters():
    """int4 in blocks of 32: words (64, 4) of one block, by row and thread."""
    return _layout([[8, 0]], [[0, 1], [0, 2]], 4)


@gluon.constexpr_function
def _stored_block(block):
    """`_quarters` or `_halves` as the words of one block are stored, (4, 2 * block)."""
    row = block // 8
    lanes = [[0, row // 4], [0, row // 2], [0, row], [0, 2 * row], [0, 4 * row]]
    registers = [[0, 8 * row]] if block == 32 else [[0, 1], [0, 8 * row]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0], [2, 0]], [], [4, 2 * block])


@gluon.constexpr_function
def pairs_layout():
    """int8: pairs (64, 32) of neighbours in 64 columns, each at its place in operand A."""
    return _layout([[8, 0], [0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2]], 32)


@gluon.constexpr_function
def _pairs_by_group():
    """`pairs_layout` as (64, 2, 16): groups of 32 columns of their own."""
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    registers = [[8, 0, 0], [0, 0, 4], [0, 0, 8], [0, 1, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, 2, 16])


@gluon.constexpr_function
def _stored(block):
    """`words_layout` as the words are stored, (4, 256): in blocks of 16 rows, a row has ``block / 8`` words in each."""
    row = block // 8
    words = {128: [[0, 1], [0, 2]], 64: [[0, 1], [0, 128]], 32: [[0, 64], [0, 128]]}[block]
    lanes = [[0, row // 4], [0, row // 2], [0, row], [0, 2 * row], [0, 4 * row]]
    return gl.DistributedLinearLayout([*words, [0, 8 * row]], lanes, [[1, 0], [2, 0]], [], [4, 256])


@gluon.constexpr_function
def _by_row(rows):
    """One number for each row, (1, 64), or two, (2, 64), or four, (4, 64)."""
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    registers = {1: [[0, 8]], 2: [[1, 0], [0, 8]], 4: [[1, 0], [2, 0], [0, 8]]}[rows]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 16], [0, 32]], [], [rows, 64])


@gluon.constexpr_function
def _times(dtype, count):
    return (dtype,) * count


@gluon.constexpr_function
def _commas(letter, outs, ins):
    return ",".join([f"=&{letter}"] * outs + [letter] * ins)


@gluon.constexpr_function
def _pair_constraints(numbers):
    return ",".join(["=&h", "=&h", "r", *["h"] * numbers])


@gluon.constexpr_function
def _pair(register, source, order, kind, offset, scale, summand):
    """PTX: two nibbles u, bytes of ``source``, to a register with a pair of 16-bit floats.

    A nibble below the sign and exponent of 128 (bfloat16) or 1024 (float16) is 128 + u or 1024 + u; one fused
    multiply-add subtracts the rest. Then the scale, and the summand, if there are any.
    """
    exponent = "0x64646464" if kind == "f16x2" else "0x43434343"
    text = f"prmt.b32 {register}, {source}, {exponent}, {order}; fma.rn.{kind} {register}, {register}, one, {offset}; "
    return text + _times_scale(register, kind, scale, summand)


@gluon.constexpr_function
def _times_scale(register, kind, scale, summand):
    """PTX: a pair of 16-bit floats times the scale, plus the summand, if there are any."""
    if summand:
        return f"fma.rn.{kind} {register}, {register}, {scale}, {summand}; "
    return f"mul.rn.{kind} {register}, {register}, {scale}; " if scale else ""


@gluon.constexpr_function
def _table_of_words(element, high, half, scaled, zero):
    """`_unpack_words` for tables, which have no INT zero points."""
    kind, scale = "f16x2" if half else "bf16x2", "$6" if scaled or zero == 2 else ""
    text = f"{{ {declared(element, half)}"
    for word, outs in (("$4", ("$0", "$1")), ("$5", ("$2", "$3"))):
        text += plane_text(word, outs, high, element, half)
        for out in outs:
            text += _times_scale(out, kind, scale, "$7" if zero == 2 else "")
    return text + "}"


@gluon.constexpr_function
def _table_of_halves(element, half, scaled, zero, apart):
    """`_unpack_halves` for tables; ``apart``: low and high nibbles have scales of their own, two operands.

    Such blocks have no zero points.
    """
    kind = "f16x2" if half else "bf16x2"
    text = f"{{ .reg .b32 s, z; {declared(element, half)}"
    for word, first, both in (("$8", 0, "0x1010"), ("$9", 4, "0x3232")):
        outs = [f"${first + i}" for i in range(4)]
        text += nibbles_text(word, outs, element, half)
        if zero == 2:
            text += f"prmt.b32 z, $11, $11, {both}; "
        for high in (0, 1):
            scale = ("$11" if apart and high else "$10") if scaled or zero == 2 else ""
            if scale:
                text += f"prmt.b32 s, {scale}, {scale}, {both}; "
            for out in outs[2 * high : 2 * high + 2]:
                text += _times_scale(out, kind, "s" if scale else "", "z" if zero == 2 else "")
    return text + "}"


@gluon.constexpr_function
def _table_of_pairs(element, half, scaled, zero):
    """`_unpack_pairs` for tables."""
    kind = "f16x2" if half else "bf16x2"
    text = f"{{ .reg .b32 p, q, s; {declared(element, half)}"
    text += bytes_text("$2", ("p",), element, half)
    if scaled or zero == 2:
        text += "mov.b32 s, {$3, $3}; "
        if zero == 2:
            text += "mov.b32 q, {$4, $4}; "
        text += _times_scale("p", kind, "s", "q" if zero == 2 else "")
    return text + "mov.b32 {$0, $1}, p; }"


@gluon.constexpr_function
def _unpack_words(high, half, scaled, zero, element="int"):
    """PTX: two words $4, $5 of nibbles ``q + 8``, the low or the high nibbles of both, to four registers $0 to $3.

    Operands after the words: the summand that replaces -136 or -1032 (INT zero points); scale; the summand after
    scaling (FLOAT zero points).
    """
    if element != "int":
        return _table_of_words(element, high, half, scaled, zero)
    kind, one, offset = ("f16x2", "0x3C003C00", "0xE408E408") if half else ("bf16x2", "0x3F803F80", "0xC308C308")
    text = f"{{ .reg .b32 p, one, off; mov.b32 one, {one}; mov.b32 off, {'$6' if zero == 1 else offset}; "
    scale = ("$7" if zero == 1 else "$6") if scaled or zero == 2 else ""
    for word, outs in (("$4", ("$0", "$1")), ("$5", ("$2", "$3"))):
        text += f"shr.u32 p, {word}, 4; and.b32 p, p, 0x0F0F0F0F; " if high else f"and.b32 p, {word}, 0x0F0F0F0F; "
        for out, order in zip(outs, ("0x4140", "0x4342"), strict=True):
            text += _pair(out, "p", order, kind, "off", scale, "$7" if zero == 2 else "")
    return text + "}"


@gluon.constexpr_function
def _unpack_halves(half, scaled, zero, element="int", apart=False):
    """PTX: two words $8, $9 of nibbles to registers $0 to $3 of the first one, low nibbles first, and $4 to $7.

    Operands after the words are those of `_unpack_words`, each a pair: of the first word and of the second.
    """
    if element != "int":
        return _table_of_halves(element, half, scaled, zero, apart)
    kind, one, offset = ("f16x2", "0x3C003C00", "0xE408E408") if half else ("bf16x2", "0x3F803F80", "0xC308C308")
    text = f"{{ .reg .b32 p, one, off, s, z; mov.b32 one, {one}; mov.b32 off, {offset}; "
    scale = ("$11" if zero == 1 else "$10") if scaled or zero == 2 else ""
    for word, first, both in (("$8", 0, "0x1010"), ("$9", 4, "0x3232")):
        if scale:
            text += f"prmt.b32 s, {scale}, {scale}, {both}; "
        if zero:
            source, target = ("$10", "off") if zero == 1 else ("$11", "z")
            text += f"prmt.b32 {target}, {source}, {source}, {both}; "
        for high in (0, 1):
            text += f"shr.u32 p, {word}, 4; and.b32 p, p, 0x0F0F0F0F; " if high else f"and.b32 p, {word}, 0x0F0F0F0F; "
            for h, order in enumerate(("0x4140", "0x4342")):
                out = f"${first + 2 * high + h}"
                text += _pair(out, "p", order, kind, "off", "s" if scale else "", "z" if zero == 2 else "")
    return text + "}"


@gluon.constexpr_function
def _unpack_pairs(half, scaled, zero, element="int"):
    """PTX: a pair of int8 to two floats $0, $1, less $3 (INT zero points), scaled, plus the FLOAT zero point.

    The pair is the lower half of the word $2: a load of two bytes fills a word, and taking it as two would cost a move.
    bfloat16 holds 7 bits below the exponent of 128, so the sign's bit is cleared in the one that is subtracted from and
    alone in the other: there it makes 256 of 128.
    """
    if element != "int":
        return _table_of_pairs(element, half, scaled, zero)
    kind, rounding = ("f16x2", "") if half else ("bf16x2", ".rn")
    text = "{ .reg .b32 p, q, s; "
    if half:
        text += "xor.b32 p, $2, 0x8080; prmt.b32 p, p, 0x64646464, 0x4140; mov.b32 q, 0x64806480; sub.f16x2 p, p, q; "
    else:
        text += "prmt.b32 p, $2, 0, 0x4140; lop3.b32 q, p, 0x00800080, 0x43004300, 0xEA; "
        text += "lop3.b32 p, p, 0x007F007F, 0x43004300, 0xEA; sub.rn.bf16x2 p, p, q; "
    if zero == 1:
        text += f"mov.b32 q, {{$3, $3}}; sub{rounding}.{kind} p, p, q; "
    if scaled or zero == 2:
        scale = "$4" if zero == 1 else "$3"
        text += f"mov.b32 s, {{{scale}, {scale}}}; "
        if zero == 2:
            text += f"mov.b32 q, {{$4, $4}}; fma.rn.{kind} p, p, s, q; "
        else:
            text += f"mul.rn.{kind} p, p, s; "
    return text + "mov.b32 {$0, $1}, p; }"


@gluon.jit
def _arguments(b, s, z, SCALED: gl.constexpr, ZERO: gl.constexpr):
    """Codes and the parameters that the assembly takes, in its order."""
    if ZERO == 2:
        arguments = (b, s, z)
    elif ZERO and SCALED:
        arguments = (b, z, s)
    elif ZERO:
        arguments = (b, z)
    elif SCALED:
        arguments = (b, s)
    else:
        arguments = (b,)
    return arguments


@gluon.jit
def from_words(b, s, z, DT: gl.constexpr, HIGH: gl.constexpr, SCALED: gl.constexpr, ZERO: gl.constexpr,
               DOT: gl.constexpr, ELEMENT: gl.constexpr):  # fmt: skip
    """One half of a block of 128 columns, (64, 64), from words (64, 16) and parameters (64,), as operand A."""
    ASM: gl.constexpr = _unpack_words(HIGH, gl.float16 == DT, SCALED, ZERO, ELEMENT)
    if SCALED:
        s = s[:, None].broadcast_to(b.shape)
    if ZERO:
        z = z[:, None].broadcast_to(b.shape)
    # pack=2: one assembly call turns two words into four registers. Each register holds two columns that are neighbours
    # in k, where Triton expects one value of each word; the reshape and permute below restore the order of columns.
    NUMBERS: gl.constexpr = (1 if SCALED or ZERO == 2 else 0) + (1 if ZERO else 0)
    p, q, r, t = gl.inline_asm_elementwise(
        ASM, _commas("r", 4, 2 + NUMBERS), _arguments(b, s, z, SCALED, ZERO), dtype=_times(DT, 4), is_pure=True, pack=2
    )
    codes = gl.join(gl.join(p, q), gl.join(r, t))  # row, word, h, low bit of j; see `packing` for the letters
    codes = codes.reshape([ROWS, 4, 2, 2, 2, 2]).permute((0, 2, 5, 4, 1, 3))  # from (row, t, j, e, h, low bit of j)
    return gl.convert_layout(codes.reshape([ROWS, 64]), DOT, assert_trivial=True)


@gluon.jit
def from_halves(b, s, z, DT: gl.constexpr, P: gl.constexpr, SCALED: gl.constexpr, ZERO: gl.constexpr,
                DOT: gl.constexpr, ELEMENT: gl.constexpr, APART: gl.constexpr = False):  # fmt: skip
    """64 columns in blocks of P = 32 or 64, (64, 64), from words and parameters (64, 4, 2), as operand A.

    APART: s is for low nibbles, z for high ones; there are no zero points.
    """
    ASM: gl.constexpr = _unpack_halves(gl.float16 == DT, SCALED, ZERO, ELEMENT, APART)
    NUMBERS: gl.constexpr = (1 if SCALED or ZERO == 2 else 0) + (1 if ZERO or APART else 0)
    # As in `from_words`; here two words are eight registers.
    a0, a1, a2, a3, b0, b1, b2, b3 = gl.inline_asm_elementwise(
        ASM, _commas("r", 8, 2 + NUMBERS), _arguments(b, s, z, SCALED, 2 if APART else ZERO), dtype=_times(DT, 8),
        is_pure=True, pack=2,
    )  # fmt: skip
    first = gl.join(gl.join(a0, a1), gl.join(a2, a3))
    codes = gl.join(first, gl.join(gl.join(b0, b1), gl.join(b2, b3)))
    # From (row, t, e, h, nibble, word). A block of 32 has the columns of one word, low nibbles first; a block of 64 the
    # low nibbles of both words, then the high ones.
    codes = codes.permute((0, 5, 4, 3, 1, 2) if P == 32 else (0, 4, 5, 3, 1, 2))
    return gl.convert_layout(codes.reshape([ROWS, 64]), DOT, assert_trivial=True)


@gluon.jit
def from_one_word(b, z, DT: gl.constexpr, ZERO: gl.constexpr, DOT: gl.constexpr):
    """A block of 32 columns, (64, 32), from words and zero points (64, 4), unscaled, as operand A."""
    ASM: gl.constexpr = _unpack_halves(gl.float16 == DT, False, ZERO)
    a0, a1, a2, a3, b0, b1, b2, b3 = gl.inline_asm_elementwise(
        ASM, _commas("r", 8, 2 + (1 if ZERO else 0)), _arguments(b, b, z, False, ZERO), dtype=_times(DT, 8),
        is_pure=True, pack=2,
    )  # fmt: skip
    first = gl.join(gl.join(a0, a1), gl.join(a2, a3))
    codes = gl.join(first, gl.join(gl.join(b0, b1), gl.join(b2, b3)))
    # The two words of a call are those of rows 8 apart. From (16 rows, e, row of 8, t, h, nibble, half of the rows).
    codes = codes.reshape([4, 2, 8, 4, 2, 2, 2]).permute((0, 6, 2, 5, 4, 3, 1))
    return gl.convert_layout(codes.reshape([ROWS, 32]), DOT, assert_trivial=True)


@gluon.jit
def from_pairs(b, s, z, DT: gl.constexpr, SCALED: gl.constexpr, ZERO: gl.constexpr, DOT: gl.constexpr,
               ELEMENT: gl.constexpr):  # fmt: skip
    """Codes (64, 64) from pairs (64, 32) and parameters, of rows (64,) or of pairs (64, 32), as operand A."""
    ASM: gl.constexpr = _unpack_pairs(gl.float16 == DT, SCALED, ZERO, ELEMENT)
    if SCALED and len(s.shape) == 1:
        s = s[:, None].broadcast_to(b.shape)
    if ZERO and len(z.shape) == 1:
        z = z[:, None].broadcast_to(b.shape)
    NUMBERS: gl.constexpr = (1 if SCALED or ZERO == 2 else 0) + (1 if ZERO else 0)
    p, q = gl.inline_asm_elementwise(
        ASM, _pair_constraints(NUMBERS), _arguments(b.to(gl.int32), s, z, SCALED, ZERO), dtype=_times(DT, 2),
        is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(gl.join(p, q).reshape([ROWS, 64]), DOT, assert_trivial=True)


@gluon.jit
def scales_of(raw, DT: gl.constexpr):
    """Scales as the assembly takes them: uint8 is e8m0, int8 the bits of e4m3."""
    if raw.dtype.primitive_bitwidth == 8:
        raw = scale_value(raw, raw.dtype)
    return raw.to(DT)


@gluon.jit
def quarter_numbers(numbers, HALF: gl.constexpr, WG: gl.constexpr):
    """Numbers of one half of 128 columns in groups of 16, of (8, 128): of words (64, 4, 2), low and high nibbles."""
    LAYOUT: gl.constexpr = _halves()
    mine = numbers.slice(4 * HALF, 4, dim=0).slice(WG * ROWS, ROWS, dim=1).load(_by_row(4))
    low, high = mine.permute((1, 0)).reshape([ROWS, 2, 2]).split()
    low = gl.convert_layout(low, gl.SliceLayout(1, LAYOUT)).expand_dims(1)
    high = gl.convert_layout(high, gl.SliceLayout(1, LAYOUT)).expand_dims(1)
    return low.broadcast_to([ROWS, 4, 2]), high.broadcast_to([ROWS, 4, 2])


@gluon.jit
def zero_point(z, DT: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr):
    """A zero point as the assembly takes it: exact but for FLOAT ones."""
    if BITS == 4 and ZERO == 1:
        # The bits of -136 and -1032, plus z: from there to -256 and -2048, a step of the bits is a step of 1.
        z = (z.to(gl.int16) + (-7160 if gl.float16 == DT else -15608)).to(DT, bitcast=True)
    return z.to(DT)


@gluon.jit
def load_words(stored, P: gl.constexpr):
    """A group's words (64, 16) of 128 columns of int4, stored in blocks of P columns."""
    raw = stored.load(_stored(P))
    if P == 64:  # block, row, t, word
        raw = raw.reshape([4, 2, 16, 4, 2]).permute((0, 2, 3, 1, 4))
    elif P == 32:  # block, row, t
        raw = raw.reshape([4, 4, 16, 4]).permute((0, 2, 3, 1))
    return gl.convert_layout(raw.reshape([ROWS, 16]), words_layout(), assert_trivial=True)


@gluon.jit
def block_operand(words, zeros, G: gl.constexpr, WG: gl.constexpr, DT: gl.constexpr, P: gl.constexpr,
                  ZERO: gl.constexpr, DOT: gl.constexpr):  # fmt: skip
    """Block G of those of P = 32 or 64 in 128 columns, codes (64, P) less INT zero points, as operand A."""
    LAYOUT: gl.constexpr = _quarters() if P == 32 else _halves()
    raw = words.slice(2 * P * G, 2 * P, dim=1).load(_stored_block(P))
    raw = raw.reshape([ROWS, 4] if P == 32 else [ROWS, 4, 2])
    raw = gl.convert_layout(raw, LAYOUT, assert_trivial=True)
    z = raw
    if ZERO:
        if P == 32:
            z = zero_point(row_numbers(zeros.slice(G, 1, dim=0), WG, LAYOUT), DT, 4, ZERO)
            z = z[:, None].broadcast_to(raw.shape)
        else:
            z = zero_point(half_numbers(zeros, G, WG, P), DT, 4, ZERO)
    # Triton goes on behind a return in a branch that it chose while compiling: one expression, not two statements.
    return from_one_word(raw, z, DT, ZERO, DOT) if P == 32 else from_halves(raw, raw, z, DT, P, False, ZERO, DOT, "int")


@gluon.jit
def in_halves(words):
    """Words (64, 16) of 128 columns in blocks of less, as those (64, 4, 2) of each half."""
    first, second = words.reshape([ROWS, 4, 2, 2]).permute((0, 1, 3, 2)).split()
    first = gl.convert_layout(first, _halves(), assert_trivial=True)
    return first, gl.convert_layout(second, _halves(), assert_trivial=True)


@gluon.jit
def row_numbers(numbers, WG: gl.constexpr, LAYOUT: gl.constexpr):
    """A group's (64) of numbers (1, 128) in shared memory."""
    mine = numbers.slice(WG * ROWS, ROWS, dim=1).load(_by_row(1))
    return gl.convert_layout(mine.reshape([ROWS]), gl.SliceLayout(1, LAYOUT))


@gluon.jit
def half_numbers(numbers, HALF: gl.constexpr, WG: gl.constexpr, P: gl.constexpr):
    """A group's numbers of one half of 128 columns, for each word (64, 4, 2), of (128 / P, 128) in shared memory."""
    LAYOUT: gl.constexpr = _halves()
    if P == 32:
        mine = numbers.slice(2 * HALF, 2, dim=0).slice(WG * ROWS, ROWS, dim=1).load(_by_row(2))
        mine = gl.convert_layout(mine.permute((1, 0)), gl.SliceLayout(1, LAYOUT))
        mine = mine.expand_dims(1)
    else:
        mine = row_numbers(numbers.slice(HALF, 1, dim=0), WG, gl.SliceLayout(2, LAYOUT))
        mine = mine[:, None].broadcast_to([ROWS, 4]).expand_dims(2)
    return mine.broadcast_to([ROWS, 4, 2])


@gluon.jit
def pair_numbers(numbers, HALF: gl.constexpr, WG: gl.constexpr):
    """A group's numbers of one half of 128 columns in groups of 32, of (4, 128), for each pair (64, 32) of int8."""
    LAYOUT: gl.constexpr = _pairs_by_group()
    mine = numbers.slice(2 * HALF, 2, dim=0).slice(WG * ROWS, ROWS, dim=1).load(_by_row(2))
    mine = gl.convert_layout(mine.permute((1, 0)), gl.SliceLayout(2, LAYOUT)).expand_dims(2)
    return gl.convert_layout(mine.broadcast_to([ROWS, 2, 16]).reshape([ROWS, 32]), pairs_layout(), assert_trivial=True)


@gluon.jit
def word_numbers(numbers, WG: gl.constexpr):
    """A group's numbers of (1, 128) in shared memory, one per row, for each word (64, 4, 2)."""
    LAYOUT: gl.constexpr = _halves()
    mine = row_numbers(numbers, WG, gl.SliceLayout(2, LAYOUT))
    return mine[:, None].broadcast_to([ROWS, 4]).expand_dims(2).broadcast_to([ROWS, 4, 2])
