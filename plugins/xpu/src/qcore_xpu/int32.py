"""The packing of int4 weights for `aten.int4_mm`: the bytes of ``PLAIN_INT32``, with groups that the op supports.

**words**: int32 ``(N, K'/8)``. Word j of a row holds the unsigned codes ``u = q + 8`` of columns 8j to 8j + 7, lowest
bits = lowest column. If the group size is a multiple of 32, columns are those of the weight, and K' is K rounded up to
whole groups: a weight in ``PLAIN_INT32`` is used as is. Any other group (one of 20 columns, a single one over a K
of 77) is spread to the next multiple of 32: group i takes columns ``i * wide`` to ``i * wide + group - 1``, and the
rest up to ``(i + 1) * wide`` is padding. Padding is the code 8; x is 0 there (`Form.spread`), so it adds nothing.

**zeros**: int8 ``(G, N)``, the zero point of unsigned codes: ``z + 8``, 8 for symmetric ones. The op supports
integers only. A FLOAT zero point, ``w = q * s + z``, becomes the code ``r`` nearest to ``-z / s`` and a ``rest``
``e = z + r * s``, at most half a step: ``w = (q - r) * s + e``. The op computes the first part, whose terms are as
small as those of the weight itself, and sums of x per group times ``rest``, float32 ``(G, N)``, give the second: no
large numbers that cancel. Only weights that are far from zero throughout a group leave a larger rest.

**bias**: the op has none, and rounds its sum to x's dtype, so that a bias added afterwards is rounded a second time: a
large error if the two nearly cancel. Hence, for a layer with a bias, one more group: ``step`` columns that hold the
weight 1, where x is ``1 / step`` (``tail``), and whose scale is the bias. (One column followed by zeros would turn an
Inf bias into NaN.) Groups of more than 128 columns, or a single one over all of K, which would need an extra group of
the same size, are passed to the op as several groups with the same scale. So are groups, if there is more than one, of
a size that is not a power of two: it is not known whether oneDNN's kernels for GPUs support those.

**scales**: the op reads scales in x's dtype, ``(G, N)``: ``factor``. `Scales` describes the treatment of values that
do not fit it.

Everything here uses torch ops and runs on any device, including meta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import PLAIN, PLAIN_INT32, Format, QTensor, ZeroPoint
from qcore.plugin_api import Packed, has_values

from .aten import ALIGNMENT, GROUP

_CHUNK = 1 << 25
"""Codes spread at a time: a large weight is never in memory as a whole in unpacked form."""
_PADDING_BYTE = 0x88
"""Two codes 8; also the mask that turns two's complement into offset binary."""
_ONES_BYTE = 0x99
"""Two codes 9: weights of 1, for the bias."""
_STEPS = (128, 64, 32)
_SMALLEST_HALF, _LARGEST_HALF = 2.0**-14, 2.0**11
"""Scales that float16 holds at full precision, and whose products with differences of codes it holds, too."""


class Form(NamedTuple):
    """The places of a weight's columns in its words.

    **Fields:** ``k``; ``groups``, ``group``: number and size of the weight's groups; ``wide``: the size in the words;
    ``step``: the size of the op's groups, which divides ``wide``; ``biased``: 1 if one of them is for the bias.
    """

    k: int
    groups: int
    group: int
    wide: int
    step: int
    biased: int

    @classmethod
    def of(cls, format: Format, k: int, *, bias: bool = False) -> Form:
        """The form of weights of ``format`` and K = ``k``."""
        groups, group = format.groups(k), format.group(k)
        wide = -(-group // GROUP) * GROUP
        odd = groups > 1 and wide & (wide - 1) != 0
        step = next(size for size in _STEPS if wide % size == 0) if bias or odd else wide
        return cls(k, groups, group, wide, step, int(bias))

    @property
    def spreads(self) -> bool:
        """Whether columns are moved."""
        return self.wide != self.group and self.groups > 1

    @property
    def columns(self) -> int:
        """Columns of the weight in the words, including padding."""
        return self.groups * self.wide

    @property
    def all_columns(self) -> int:
        """K', including the bias."""
        return self.columns + self.step * self.biased

    @property
    def repeats(self) -> int:
        """The number of the op's groups per group of the weight."""
        return self.wide // self.step

    def tail(self, like: Tensor) -> Tensor | None:
        """The values that follow the columns of x, or the moved ones: ``(1, columns)``; None if there are none."""
        missing = 0 if self.spreads else self.columns - self.k
        zeros = like.new_zeros((1, missing))
        if self.biased:
            return pad(zeros, (0, self.step), value=1 / self.step)
        return zeros if missing else None

    def spread(self, x: Tensor, tail: Tensor | None) -> Tensor:
        """Columns of x ``(M, K)`` to ``(M, K')``; x itself if nothing has to change. ``tail``: a result of `tail`."""
        x = self.moved(x) if self.spreads else x
        return x if tail is None else torch.cat((x, tail.expand(x.shape[0], -1)), 1)

    def moved(self, values: Tensor) -> Tensor:
        """Columns ``(rows, K)`` at their places in the words, ``(rows, columns)``."""
        split = self.grouped(values)
        return pad(split, (0, self.wide - self.group)).reshape(values.shape[0], self.columns)

    def grouped(self, x: Tensor) -> Tensor:
        """Columns of x ``(M, K)`` by groups, ``(M, G, group)``; a partial last group is padded with zeros."""
        ragged = self.groups * self.group - self.k
        return (pad(x, (0, ragged)) if ragged else x).reshape(x.shape[0], self.groups, self.group)


# Words.


def pack_words(weight: QTensor, form: Form) -> Tensor:
    """The words of a weight in any layout."""
    if not form.spreads and weight.format.layout in _BYTES:
        signs = _BYTES[weight.format.layout]
        stored = weight.data.contiguous().view(torch.uint8)
        stored = stored ^ signs if signs else stored
        stored = _widened(stored, form.columns // 2, _PADDING_BYTE)
        return own(_widened(stored, form.all_columns // 2, _ONES_BYTE)).view(torch.int32)
    codec = weight.format.codec

    def packed(data: Tensor) -> Tensor:
        # Code 0 is the unsigned 8.
        codes = form.moved(codec.decode(data, form.k))
        return PLAIN_INT32.encode(pad(codes, (0, form.all_columns - form.columns), value=1))

    return _by_rows(packed, weight.data, form.columns)


def _widened(stored: Tensor, columns: int, filling: int) -> Tensor:
    missing = columns - stored.shape[1]
    return pad(stored, (0, missing), value=filling) if missing else stored


def unpack_words(words: Tensor, format: Format, form: Form) -> Tensor:
    """The data of a weight in ``format``, the inverse of `pack_words`."""
    if not form.spreads and format.layout in _BYTES:
        signs = _BYTES[format.layout]
        size = -(-form.k // 8) * 4 if format.layout == PLAIN_INT32 else -(-form.k // 2)
        stored = words.view(torch.uint8)[:, :size]
        return stored ^ signs if signs else stored.contiguous().view(torch.int32)
    codec = format.codec

    def unpacked(part: Tensor) -> Tensor:
        rows, codes = part.shape[0], PLAIN_INT32.decode(part, form.columns)
        groups = codes.reshape(rows, form.groups, form.wide)[..., : form.group]
        return codec.encode(groups.reshape(rows, -1)[:, : form.k])

    return _by_rows(unpacked, words, form.columns)


_BYTES = {PLAIN: _PADDING_BYTE, PLAIN_INT32: 0}
"""Layouts whose bytes are those of the words except for the sign of each code: a mask that flips them."""


def _by_rows(function: Callable[[Tensor], Tensor], data: Tensor, columns: int) -> Tensor:
    parts = [function(part) for part in torch.split(data, max(1, _CHUNK // columns))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def own(tensor: Tensor) -> Tensor:
    """``tensor``, contiguous and aligned for oneDNN; copied if it is an unaligned view."""
    tensor = tensor.contiguous()
    offset = tensor.storage_offset() * tensor.element_size()
    return tensor.clone() if type(offset) is int and offset % ALIGNMENT else tensor


# Parameters.


class Scales(NamedTuple):
    """Scales for the op, one per group of the weight, and the factor to apply after it: ``s = factor * after``.

    bfloat16 has float32's range but 8 significant bits. If a scale has more and one group spans all of K, so that
    errors would not average out, the op multiplies integers (``factor`` 1) and the scale is applied after it, in
    float32. float16 has 11 bits; there ``factor`` is the power of two below the scale, and ``after`` 1 to 2, so that
    the op's sums overflow only if the result does. float16 lacks the range for small scales and for unscaled sums. If a
    scale is not in its comfortable range, all are multiplied by a power of two per output column, which is undone
    afterwards (a single scale per column is again applied after the op); then x is levelled, too (see `products`), so
    that no sum can overflow.

    **Fields:** ``factor``: ``(G, N)`` of x's dtype; ``after``: float32 ``(N,)`` or None; ``levels``: whether x must be
    levelled.
    """

    factor: Tensor
    after: Tensor | None
    levels: bool = False

    def value(self) -> Tensor:
        """The scales that the op and ``after`` amount to, float32 ``(G, N)``."""
        return self.factor.float() if self.after is None else self.factor.float() * self.after


def split_scales(weight: QTensor, form: Form, dtype: torch.dtype) -> Scales:
    """Scales of ``weight`` for x of ``dtype``, bfloat16 or float16."""
    scale = weight.scale
    if dtype == torch.float16 and uncomfortable(scale):
        return _levelled(weight, form)
    # float16 holds the bits of a comfortable bfloat16 scale, but not vice versa.
    if form.groups > 1 or scale.dtype == dtype or (dtype, scale.dtype) == (torch.float16, torch.bfloat16):
        return Scales(scale.to(dtype), None)
    whole = scale.float()
    factor = power_of_two(_exponent(whole)) if dtype == torch.float16 else torch.ones_like(whole)
    factor = torch.where(whole == 0, 0.0, factor)  # and `after` is 1: a bias is divided by it
    return Scales(factor.to(dtype), torch.where(whole == 0, 1.0, whole / factor)[0])


def uncomfortable(scale: Tensor, largest: float = _LARGEST_HALF) -> bool:
    """Whether float16 would lose bits of any of ``scale``, or could not hold its products with codes."""
    if not has_values(scale) or not scale.numel():
        return False
    size = scale.float().abs()
    return bool(((size > largest) | ((size < _SMALLEST_HALF) & (size > 0))).any())


def _levelled(weight: QTensor, form: Form) -> Scales:
    """Scales times a power of two per column, so that x of size 1 cannot make the largest sum overflow."""
    # Groups whose weights are all zero do not count, regardless of their scale.
    scale = weight.scale.float() * _used(weight, form)
    top = math.floor(math.log2(torch.finfo(torch.float16).max / 2 / (15 * form.columns)))
    if form.groups == 1:
        factor = torch.full_like(scale, 2.0**top)
        largest = torch.finfo(torch.float32).max
        return Scales(factor.to(torch.float16), (scale / factor)[0].clamp(-largest, largest), levels=True)
    exponent = _exponent(scale.abs().amax(0)).clamp(-101, 99) + 1 - top
    return Scales((scale * power_of_two(-exponent)).to(torch.float16), power_of_two(exponent), levels=True)


def _exponent(values: Tensor) -> Tensor:
    """The exponent of the power of two at or below each of ``values``, float32: their exponent bits."""
    return (values.abs().view(torch.int32) >> 23) - 127


def power_of_two(exponent: Tensor) -> Tensor:
    """``2 ** exponent`` in float32, for int32 exponents of -126 to 127: exactly, unlike pow on some devices."""
    return (exponent + 127 << 23).view(torch.float32)


def _used(weight: QTensor, form: Form) -> Tensor:
    """Which groups hold anything other than their zero point, ``(G, N)``."""
    zero = whole_zero(weight, weight.scale.float())
    codec, step = weight.format.codec, max(1, _CHUNK // form.columns)
    found = []
    for data, zeros in zip(torch.split(weight.data, step), torch.split(zero, step, dim=1), strict=True):
        codes = codec.decode(data, form.k)
        # Compare before padding: padding must not look like a weight.
        column = torch.arange(form.k, device=codes.device) // form.group
        found.append(form.grouped(codes != zeros.t()[:, column]).any(-1).t())
    return torch.cat(found, dim=1)


def whole_zero(weight: QTensor, scale: Tensor) -> Tensor:
    """The integer zero point that the op uses, in the domain of signed codes: int8 ``(G, N)``; see above."""
    zero = weight.integer_zero()
    if zero is not None:
        return zero
    if weight.zero is None:
        return torch.zeros_like(weight.scale, dtype=torch.int8)
    steps = torch.where(scale == 0, 0.0, -weight.zero.float() / scale)
    return torch.round(steps).clamp(-8, 7).to(torch.int8)


# The weight as a whole.


def pack(weight: QTensor, dtype: torch.dtype, *, bias: bool = False) -> dict[str, Tensor]:
    """A weight for x of ``dtype``, and for a layer with a ``bias`` or without.

    ``data``: the words; ``scale``: ``(G, N)`` as in the weight; ``zeros``: see above; and only if they are needed:
    ``factor`` (without it, ``scale`` is read by the op), and ``after``, or ``levels`` if x must be levelled: see
    `Scales`; ``zero`` and ``rest``: a FLOAT zero point as in the weight, and its remainder; ``tail``: see `Form.tail`.

    The bias itself is passed with each call; its group has no row in ``factor``, and a row of 8 in ``zeros``.
    """
    form = Form.of(weight.format, weight.shape[1], bias=bias)
    scales = split_scales(weight, form, dtype)
    packed = {"data": pack_words(weight, form), "scale": own(weight.scale)}
    if scales.after is not None or weight.scale.dtype != dtype or form.repeats > 1:
        packed["factor"] = scales.factor.repeat_interleave(form.repeats, 0).contiguous()
    if scales.after is not None:
        packed["levels" if scales.levels else "after"] = scales.after.contiguous()
    value = scales.value()
    whole = whole_zero(weight, value)
    zeros = (whole + 8).repeat_interleave(form.repeats, 0)
    packed["zeros"] = own(pad(zeros, (0, 0, 0, form.biased), value=8))
    if weight.format.zero is ZeroPoint.FLOAT and weight.zero is not None:
        packed["zero"] = weight.zero
        packed["rest"] = torch.addcmul(weight.zero.float(), whole.float(), value).contiguous()
    tail = form.tail(weight.scale.new_empty(0, dtype=dtype))
    return packed if tail is None else {**packed, "tail": tail}


def unpack(packed: Packed, format: Format, n: int, k: int, *, bias: bool = False) -> QTensor:
    """The inverse of `pack`, bit for bit: a weight of shape ``(n, k)`` in ``format``."""
    form, zero = Form.of(format, k, bias=bias), packed.get("zero")
    if format.zero is ZeroPoint.INT:
        zeros = packed["zeros"][: form.groups * form.repeats : form.repeats]
        zero = format.codec.encode_zero(zeros - 8)
    data = unpack_words(packed["data"], format, form)
    return QTensor(data, packed["scale"], zero, (n, k), format)
