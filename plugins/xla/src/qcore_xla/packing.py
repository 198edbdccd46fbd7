"""How weights are packed: slices along K for products, rows for gathers. Only torch ops, on any device.

A slice is a run of codes along K that lies in one group: a whole group, or 128 of its codes if its size is a
multiple of 128; per channel the slices are 128 codes. Slices lie one after another, N innermost, so that a CPU
dequantizes one at a time and an accelerator multiplies all of them at once:

* 8 bits (int8, the bytes of fp8, other tables): int8 ``(S, b, N)``;
* 4 bits: int32 ``(S, b/8, N)``, eight nibbles per word, two's complement or codes of a table: nibble j of word i is
  code ``j * b/8 + i``, so that a plane of nibbles is a run of consecutive codes along K and unpacking moves no data.

The codes of a slice are padded to a multiple of 8, the slices to a multiple of 128 codes and N to a multiple of 64:
few different shapes, because XLA compiles each of them. A convolution in H channel groups has ``(H, S, b, N/H)``,
padded to multiples of 8 codes only. `scale` and `zero` are ``(G, N)`` as in a `qcore.QTensor`, padded likewise
(``(H, G, N/H)``). Scales in e8m0 and e4m3 are bfloat16, which holds them exactly: XLA converts it inside a product, and
would write decoded bytes to memory first. Padding is 0 everywhere. The global scale of a weight is a `factor`
``(1, N)`` (``(H, 1, N/H)``): weights that are multiplied together have one each. Weights of experts are stacked along a
first dimension.

Products on a GPU need K innermost: there the layout is int8 ``(N, K)`` and int32 ``(N, K/8)`` per channel, the whole
row one run, and int8 ``(N, G, g)`` and int32 ``(N, G, g/8)`` in groups if activations are floats.

An embedding table is packed by rows, int8 ``(V, D)`` or int32 ``(V, D/8)`` in which the whole row is one run, each
group padded to a multiple of 8 codes; `scale` and `zero` are ``(V, G)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import Format, Kernel, QTensor, ScaleType, ZeroPoint
from qcore.plugin_api import Element, Packed, check_weight

from .views import pack_whole, unpack_whole

NIBBLES = 8
"""Codes per int32 word."""
NIBBLE_BITS = 4
SLICE = 128
"""Codes per slice unless the group size sets another number; a dequantized slice of these fits into a core's cache."""
_ROWS = 64
_CHUNK = 1 << 24
"""Codes packed at a time: a large weight is never in memory as a whole in unpacked form."""


def up(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class Plan:
    """The layout of the codes of a weight ``(n, k)``.

    **Fields:** ``bits``: 4 or 8, which a code takes; ``group``: codes per group; ``groups``: their number, ``filled``:
    with padding groups; ``width``: stored codes of a group; ``length``: codes of a slice; ``heads``: channel groups,
    ``rows``: stored rows of each; ``by_rows``: whether N is outermost.
    """

    n: int
    k: int
    bits: int
    group: int
    groups: int
    filled: int
    width: int
    length: int
    heads: int
    rows: int
    by_rows: bool = False

    def __hash__(self) -> int:
        return self._hash  # a key of every call: computed once

    @cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    @property
    def slices(self) -> int:
        """S."""
        return self.filled * self.width // self.length

    @property
    def columns(self) -> int:
        """Columns of x in the product, including padding."""
        return self.filled * self.width

    @property
    def dense(self) -> bool:
        """Whether column k of x is column k of the product, without gaps between groups."""
        return self.groups == 1 or self.width == self.group


@lru_cache(maxsize=1024)
def plan(n: int, k: int, bits: int, group_size: int | None, heads: int = 1, by_rows: bool = False) -> Plan:
    """The plan for a weight ``(n, k)`` in groups of ``group_size`` codes (None: per channel)."""
    if by_rows:
        whole = plan(n, k, bits, group_size, heads)
        if whole.groups == 1:  # one run, although other plans may pad it with separate groups
            return replace(whole, filled=1, width=whole.columns, length=whole.columns, by_rows=True)
        return replace(whole, length=whole.width, by_rows=True)
    if heads > 1:
        group = k if group_size is None else min(group_size, k)
        groups, width = -(-k // group), up(group, NIBBLES)
        return Plan(n, k, bits, group, groups, groups, width, width, heads, n // heads)
    if group_size is None or group_size >= k:
        width = up(k, SLICE) if group_size is None or group_size >= SLICE else up(group_size, NIBBLES)
        filled = max(1, SLICE // width)
        return Plan(n, k, bits, k, 1, filled, width, min(width, SLICE), 1, up(n, _ROWS))
    groups, width = -(-k // group_size), up(group_size, NIBBLES)
    filled = up(groups, max(1, SLICE // width))
    length = SLICE if width % SLICE == 0 else width
    return Plan(n, k, bits, group_size, groups, filled, width, length, 1, up(n, _ROWS))


def wants_rows(device: torch.device, k: int, group_size: int | None, heads: int, activation: str) -> bool:
    """Whether tensors on ``device`` are multiplied by rows; ``activation``: see `qcore_xla.bodies.form`.

    In groups, weights by rows are rounded to the dtype of x, for which the tolerance of quantized activations has no
    room.
    """
    per_channel = group_size is None or group_size >= k
    return device.type == "cuda" and heads == 1 and (per_channel or activation == "float")


def pack(weight: QTensor, plan: Plan, *, sums: bool = False) -> dict[str, Tensor]:
    """``data``, ``scale`` and, if there is one, ``zero`` and ``factor``; of ``(E, N, K)`` those of each, stacked.

    ``sums``: also int32 ``(G, N)``, the sum of codes over each group, which corrects for a
    zero point of activations.
    """
    if weight.dim() > 2:
        return stacked([pack(weight[e], plan, sums=sums) for e in range(len(weight))])
    packed = {name: _filled(parameter, plan) for name, parameter in parameters(weight).items()}
    packed["data"] = _pack_data(weight, plan)
    if weight.global_scale is not None:
        shape = (plan.heads, 1, plan.rows) if plan.heads > 1 else (1, plan.rows)
        packed["factor"] = weight.global_scale.expand(shape).contiguous()
    if sums:
        packed["sums"] = _filled(_group_sums(weight, plan), plan)
    return packed


def stacked(parts: Sequence[Packed]) -> dict[str, Tensor]:
    """The tensors of several packed weights, along a first dimension."""
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def parameters(weight: QTensor) -> dict[str, Tensor]:
    """``scale`` and, if there is one, ``zero`` in the domain of the codes, ``(G, N)``, as they are packed."""
    found = {"scale": _float_scale(weight.scale, weight.format.scale)}
    zero = weight.integer_zero() if weight.format.zero is ZeroPoint.INT else weight.zero
    return found if zero is None else {**found, "zero": zero}


_MANTISSA, _SMALLEST_EXPONENT = 7, 0x40
"""Of bfloat16: bits of the mantissa, and the bits of 2**-127, which is byte 0 of e8m0."""


def _float_scale(scale: Tensor, kind: ScaleType) -> Tensor:
    """Stored scales as floats, exactly."""
    if kind is ScaleType.E8M0:
        bits = scale.to(torch.int16)
        return torch.where(bits == 0, _SMALLEST_EXPONENT, bits << _MANTISSA).view(torch.bfloat16)
    return scale.to(torch.bfloat16) if kind.has_global else scale


def _stored_scale(scale: Tensor, kind: ScaleType) -> Tensor:
    """The inverse of `_float_scale`."""
    if kind is ScaleType.E8M0:
        return torch.bitwise_right_shift(scale.view(torch.int16), _MANTISSA).to(torch.uint8)
    return scale.to(torch.float8_e4m3fn) if kind.has_global else scale


def restored(
    packed: Packed, codes: Iterable[Tensor], bare: Callable[[Tensor], Tensor], shape: tuple[int, int], format: Format
) -> QTensor:
    """The weight ``(N, K)`` of these ``codes``, int8 ``(rows, K)`` one after another.

    ``bare``: takes a packed parameter to ``(G, N)``.
    """
    data = torch.cat([format.codec.encode(_element_codes(part, format.element)) for part in codes])
    tensors = {"data": data, "scale": _stored_scale(bare(packed["scale"]), format.scale)}
    if format.scale.has_global:
        tensors["global_scale"] = packed["factor"].flatten()[0].clone()
    if "zero" in packed:
        zero = bare(packed["zero"])
        tensors["zero"] = format.codec.encode_zero(zero) if format.zero is ZeroPoint.INT else zero
    return QTensor.from_tensors(tensors, shape, format)


def unpack(packed: Packed, plan: Plan, format: Format) -> QTensor:
    """The inverse of `pack` of one weight, bit for bit."""
    if plan.by_rows:
        flat = packed["data"].view(plan.rows, plan.slices, -1)[: plan.n]
    else:
        data = packed["data"] if plan.heads > 1 else packed["data"].unsqueeze(0)
        rows = data.movedim(-1, 1)  # (H, rows, S, b)
        flat = rows.flatten(0, 1) if plan.heads > 1 else rows[0, : plan.n]
    codes = (_codes(part, plan) for part in torch.split(flat, _step(plan.k)))
    return restored(packed, codes, partial(_bare, plan=plan), (plan.n, plan.k), format)


def _element_codes(stored: Tensor, element: Element) -> Tensor:
    """int8 codes as they are stored to codes of an element: tables have unsigned ones."""
    if element.is_integer:
        return stored
    unsigned = stored & 15 if element.container_bits == NIBBLE_BITS else stored
    return unsigned.view(torch.uint8)


def _step(k: int) -> int:
    return max(1, _CHUNK // max(1, k))


def _pack_data(weight: QTensor, plan: Plan) -> Tensor:
    words = plan.length // NIBBLES if plan.bits == NIBBLE_BITS else plan.length
    dtype = torch.int32 if plan.bits == NIBBLE_BITS else torch.int8
    shape = (plan.rows, plan.slices, words) if plan.by_rows else (plan.slices, words, plan.rows)
    data = torch.zeros((plan.heads, *shape), dtype=dtype, device=weight.device)
    stored, start = data if plan.by_rows else data.permute(0, 3, 1, 2), 0  # (H, rows, S, words)
    for codes in _chunks_of_codes(weight):
        parts = _spread(codes, plan).view(codes.shape[0], plan.slices, plan.length)
        packed = words_of(parts) if plan.bits == NIBBLE_BITS else parts
        if plan.heads == 1:
            stored[0, start : start + codes.shape[0]] = packed
        else:
            here = torch.arange(start, start + codes.shape[0], device=weight.device)
            stored[here // plan.rows, here % plan.rows] = packed
        start += codes.shape[0]
    if plan.by_rows and plan.slices == 1:
        return data.view(plan.rows, words)
    return data if plan.heads > 1 else data[0]


def _chunks_of_codes(weight: QTensor) -> Iterator[Tensor]:
    """Codes, int8 ``(rows, K)``, see `signed`."""
    for part in torch.split(weight.data, _step(weight.shape[1])):
        yield signed(weight.format.codec.decode(part, weight.shape[1]))


def signed(codes: Tensor) -> Tensor:
    """Codes as int8: those of tables are the same bits."""
    return codes if codes.dtype == torch.int8 else codes.view(torch.int8)


def _spread(codes: Tensor, plan: Plan) -> Tensor:
    """Codes ``(rows, K)`` to ``(rows, columns)``, each group at a multiple of the width."""
    groups = pad(codes, (0, plan.groups * plan.group - plan.k)).view(-1, plan.groups, plan.group)
    return pad(groups, (0, plan.width - plan.group, 0, plan.filled - plan.groups)).flatten(1)


def _codes(stored: Tensor, plan: Plan) -> Tensor:
    """Stored rows ``(rows, S, words)`` to codes ``(rows, K)``."""
    codes = codes_of(stored) if plan.bits == NIBBLE_BITS else stored
    groups = codes.reshape(-1, plan.filled, plan.width)[:, : plan.groups, : plan.group]
    return groups.reshape(groups.shape[0], -1)[:, : plan.k].contiguous()


def words_of(codes: Tensor) -> Tensor:
    """int8 codes ``(..., b)`` to int32 words ``(..., b/8)``: nibble j of word i is code ``j * b/8 + i``."""
    nibbles = (codes & 15).to(torch.int32).reshape(*codes.shape[:-1], NIBBLES, -1)
    words: Tensor = nibbles[..., 0, :].clone()
    for j in range(1, NIBBLES):
        words |= nibbles[..., j, :] << (4 * j)
    return words


def codes_of(words: Tensor) -> Tensor:
    """The inverse of `words_of`."""
    # Not `>>`, which on XLA tensors divides, and rounds negative numbers towards zero.
    planes = [torch.bitwise_right_shift(words << (28 - 4 * j), 28) for j in range(NIBBLES)]
    return torch.stack(planes, dim=-2).flatten(-2).to(torch.int8)


def _filled(parameter: Tensor, plan: Plan) -> Tensor:
    """``(G, N)`` padded with zeros; ``(H, G, N/H)`` for channel groups."""
    if plan.heads > 1:
        return parameter.reshape(parameter.shape[0], plan.heads, -1).movedim(1, 0).contiguous()
    return pad(parameter, (0, plan.rows - plan.n, 0, plan.filled - plan.groups)).contiguous()


def _bare(parameter: Tensor, plan: Plan) -> Tensor:
    if plan.heads > 1:
        return parameter.movedim(0, 1).flatten(1).contiguous()
    return parameter[: plan.groups, : plan.n].contiguous()


def _group_sums(weight: QTensor, plan: Plan) -> Tensor:
    """Sums of codes over each group, int32 ``(G, N)``."""
    parts = [
        pad(codes, (0, plan.groups * plan.group - plan.k)).view(-1, plan.groups, plan.group).sum(-1, dtype=torch.int32)
        for codes in _chunks_of_codes(weight)
    ]
    return torch.cat(parts).t()


class PackedKernel(Kernel):
    """A kernel on weights packed as above: made for one `Format` and shape ``(n, k)``, or ``experts`` of it."""

    def __init__(
        self, name: str, format: Format, n: int, k: int, *,
        sums: bool = False, heads: int = 1, rows: bool = False, experts: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.format, self.n, self.k, self.sums, self.experts = name, format, n, k, sums, experts
        self.plan = plan(n, k, format.element.container_bits, format.group_size, heads, rows)
        self.shape = (experts, n, k) if experts else (n, k)

    @property
    def packing(self) -> str:
        heads = f"-h{self.plan.heads}" if self.plan.heads > 1 else ""
        return f"xla.{'rows' if self.plan.by_rows else 'slices'}{heads}" + ("+sums" if self.sums else "")

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Raises `FormatError` unless the weight has the format and shape the kernel was made for."""
        check_weight(self.name, weight, self.format, *self.shape)
        return pack_whole(weight, partial(pack, plan=self.plan, sums=self.sums))

    def unpack(self, packed: Packed) -> QTensor:
        """The inverse of `pack`, bit for bit."""
        return unpack_whole(packed, self.shape, self.format, self._unpacked)

    def _unpacked(self, packed: Packed) -> QTensor:
        if not self.experts:
            return unpack(packed, self.plan, self.format)
        own = ({name: part[e] for name, part in packed.items()} for e in range(self.experts))
        return QTensor.stack([unpack(one, self.plan, self.format) for one in own])
