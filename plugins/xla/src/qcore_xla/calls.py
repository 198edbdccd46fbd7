"""The ops on torch tensors: x is padded to a shape that XLA compiles for, the engine runs the body, and y is cropped.

On a CPU the bodies compute in float32 for all dtypes: XLA's products of 16-bit floats are slow there, and the
copy that pads x converts it as well. Rows are padded to powers of two, and to at least 4: XLA compiles for each
number of rows, and its int8 product of fewer than 4 rows is 20 times slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import DynamicFP8, Format, ScaleType, StaticFP8
from qcore.plugin_api import Activation, DynamicInt8, Packed, Scheme, check_indices

from . import biases, environment
from .engines import base
from .packing import NIBBLE_BITS, Plan, plan, wants_rows
from .scratch import SCRATCH
from .tables import bare_columns, plan_of_table
from .views import computed

MOST_ROWS = 4096
"""Longer inputs are split: this bounds the number of compiled shapes and the float32 copies of x and y."""
_FEW, _FEWEST = 16, 4
_TILE = 64
"""The fewest codes per slice that give the Pallas kernel for TPUs whole tiles of int32 words."""


class Weight(NamedTuple):
    """A packed weight, see `packing`: ``sums`` of codes if activations have zero points."""

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    factor: Tensor | None
    sums: Tensor | None

    @classmethod
    def of(cls, packed: Packed) -> Weight:
        """The tensors by name."""
        return cls(packed["data"], packed["scale"], packed.get("zero"), packed.get("factor"), packed.get("sums"))


class Given(NamedTuple):
    """Parameters ``(M,)`` of x and of y, or ``(1,)`` for all rows; None if there are none."""

    x_scale: Tensor | None = None
    x_zero: Tensor | None = None
    out_scale: Tensor | None = None
    out_zero: Tensor | None = None


@dataclass(frozen=True)
class Call:
    """Everything except tensors that a product depends on: the weight's plan and format, how x and y are quantized."""

    plan: Plan
    format: Format
    activation: str
    requantize: bool
    out_dtype: torch.dtype

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.plan, self.format, self.activation, self.requantize, self.out_dtype))

    # What a call on a CPU looks up, for which even a cache by equal arguments takes long.

    @cached_property
    def body(self) -> Any:
        """The function of `bodies`."""
        return _body("grouped" if self.plan.heads > 1 else "linear")

    @cached_property
    def form_on_cpu(self) -> Any:
        """`form_of` on a CPU."""
        return form_of(self, "cpu")

    @cached_property
    def no_bias_on_cpu(self) -> Tensor:
        """Zeros in the place of a bias."""
        return _no_bias(self.plan, torch.device("cpu"))


@lru_cache(maxsize=4096)
def call_of(device: torch.device, n: int, k: int, scheme: str, heads: int, out_dtype: torch.dtype) -> Call:
    """The call for tensors on ``device``; ``scheme``: its text; ``heads``: channel groups."""
    of = scheme_of(scheme)
    group, kind = of.weight.group_size, kind_of(of.activation)
    rows = wants_rows(device, k, group, heads, kind)
    layout = plan(n, k, of.weight.element.container_bits, group, heads, rows)
    return Call(layout, of.weight, kind, of.output is not None, out_dtype)


@lru_cache(maxsize=4096)
def scheme_of(text: str) -> Scheme:
    """The scheme of a text."""
    return Scheme.parse(text)


def kind_of(activation: Activation | None) -> str:
    """How x is quantized, see `qcore_xla.bodies.form.Activation`."""
    if activation is None:
        return "float"
    if isinstance(activation, DynamicInt8):
        return "symmetric" if activation.symmetric else "asymmetric"
    if isinstance(activation, DynamicFP8):
        return "fp8" if activation.group is None else "fp8-groups"
    return "fp8-given" if isinstance(activation, StaticFP8) else "given"


def has_zeros(activation: Activation | None) -> bool:
    """Whether activations have zero points, for which a weight is packed with the sums of its codes."""
    return kind_of(activation) in {"asymmetric", "given"}


def linear(x: Tensor, weight: Weight, bias: Tensor | None, given: Given, call: Call) -> Tensor:
    """``A(x) @ W^T + bias``: x ``(M, K)`` of any strides to ``(M, N)``, or ``(H, M, K)`` to ``(H, M, N/H)``."""
    rows, of = x.shape[-2], call.plan
    if rows > MOST_ROWS:
        starts = range(0, rows, MOST_ROWS)
        pieces = [linear(x[..., at : at + MOST_ROWS, :], weight, bias, _cut(given, at), call) for at in starts]
        return torch.cat(pieces, dim=-2)
    n = of.n // of.heads
    if not rows:
        return x.new_empty((*x.shape[:-1], n), dtype=call.out_dtype)
    engine = base.find(x.device.type)
    assert engine is not None  # eligibility has checked this
    y = engine.run(*prepared(x, weight, bias, given, call), (rows, n))
    if y.shape[-2] != rows or y.shape[-1] != n:
        y = y[..., :rows, :n]
    if y.dtype != call.out_dtype:
        y = y.to(call.out_dtype)
    return y.contiguous()


def prepared(
    x: Tensor, weight: Weight, bias: Tensor | None, given: Given, call: Call
) -> tuple[Any, Any, tuple[Any, ...], tuple[int, ...]]:
    """The arguments of `Engine.run`: function, form, tensors and the positions of those that change with each call.

    On a CPU x is a NumPy array that the next call may overwrite.
    """
    of, rows = call.plan, x.shape[-2]
    filled, count = _padded_rows(x, of)
    fresh, parameters = _parameters(given, rows, count)
    if bias is not None:
        added = biases.filled(bias, weight.data, of)
    else:
        added = call.no_bias_on_cpu if x.is_cpu else _no_bias(of, x.device)
    tensors = (
        filled, weight.data, weight.scale, weight.zero, added, weight.sums, _padding(weight, of, x.device),
        *parameters, weight.factor,
    )  # fmt: skip
    return call.body, call.form_on_cpu if x.is_cpu else form_of(call, x.device.type), tensors, fresh


def _padded_rows(x: Tensor, of: Plan) -> tuple[Any, int]:
    """What the product takes of x ``(..., M, K)``, and its number of rows."""
    count = bucket(x.shape[-2], 1 if of.by_rows else _FEWEST)
    if x.is_cpu and of.dense:
        return SCRATCH.filled(x, count, of.columns), count
    return _filled(x, of, count, native=not x.is_cpu), count


def _padding(weight: Weight, of: Plan, device: torch.device) -> Tensor | None:
    return _mask(of, device) if weight.sums is not None and weight.zero is not None else None


def experts(x: Tensor, weight: Weight, bias: Tensor | None, offsets: Tensor, given: Given, call: Call) -> Tensor:
    """`linear` of rows x ``(T, K)``, each with the weight of its expert: tensors of E, bias ``(E, N)``.

    ``offsets``: int32 ``(E,)``, the end of each expert's rows; rows after the last end give 0.
    """
    rows, of = x.shape[0], call.plan
    if rows > MOST_ROWS:
        pieces = []
        for at in range(0, rows, MOST_ROWS):
            ends = (offsets - at).clamp(0, MOST_ROWS)
            pieces.append(experts(x[at : at + MOST_ROWS], weight, bias, ends, given, call))
        return torch.cat(pieces)
    if not rows:
        return x.new_empty((0, of.n), dtype=call.out_dtype)
    engine = base.find(x.device.type)
    assert engine is not None
    added = None if bias is None else pad(bias.detach().float(), (0, of.rows - of.n))
    tensors = (
        _padded_rows(x, of)[0], weight.data, weight.scale, weight.zero, added, weight.sums,
        _padding(weight, of, x.device), given.x_scale, given.x_zero, weight.factor, offsets,
    )  # fmt: skip
    y = engine.run(_body("experts"), form_of(call, x.device.type), tensors, _EXPERTS_TOO, (rows, of.n))
    return y[:rows, : of.n].to(call.out_dtype).contiguous()


_EXPERTS_TOO = (0, 4, 10)
"""Positions of arguments that change with each call: x, the bias, the ends of experts' rows."""


def embedding(
    indices: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor | None,
    v: int, d: int, format: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Rows of a table ``(v, d)``: int32 or int64 indices of any shape to ``(*indices.shape, d)``.

    ``format``: the text of the weight's format.
    """
    count = indices.numel()
    if not count:
        return indices.new_empty((*indices.shape, d), dtype=out_dtype)
    check_indices(indices, v)
    engine = base.find(indices.device.type)
    assert engine is not None
    filled = pad(indices.reshape(-1).to(torch.int32), (0, _power(count, _FEW) - count))
    form = table_form(format_of(format), torch.float32 if indices.device.type == "cpu" else out_dtype)
    rows = engine.run(_body("embedding"), form, (filled, data, scale, zero, factor), (0,))
    found = bare_columns(rows[:count], plan_of_table(v, d, format_of(format)))
    return found.to(out_dtype).contiguous().view(*indices.shape, d)


def bucket(rows: int, fewest: int = _FEWEST) -> int:
    """The number of rows to compile for: 4, 16, or the next power of two; a single row if ``fewest`` is 1."""
    if rows <= fewest:
        return fewest
    return _FEWEST if rows <= _FEWEST else _power(rows, _FEW)


def _power(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())


def _filled(x: Tensor, of: Plan, count: int, native: bool) -> Tensor:
    """Pad x ``(..., M, K)`` with 0 to the shape that the product takes, ``(..., count, columns)``."""
    x = x.to(x.dtype if native or x.dtype == torch.int8 else torch.float32)
    rows = count - x.shape[-2]
    if of.dense:
        return _padded(x, of.columns - of.k, rows)
    groups = _padded(x, of.groups * of.group - of.k, rows).reshape(*x.shape[:-2], count, of.groups, of.group)
    return pad(groups, (0, of.width - of.group, 0, of.filled - of.groups)).flatten(-2)


def _padded(x: Tensor, columns: int, rows: int) -> Tensor:
    return pad(x, (0, columns, 0, rows)) if columns or rows else x.contiguous()


def _cut(given: Given, at: int) -> Given:
    cut = [one if one is None or one.shape[0] == 1 else one[at : at + MOST_ROWS] for one in given]
    return Given(*cut)


_ONCE, _X_TOO, _Y_TOO, _BOTH = (0,), (0, 7, 8), (0, 9, 10), (0, 7, 8, 9, 10)
"""Positions of arguments that change with each call: x, and parameters per token."""


def _parameters(given: Given, rows: int, count: int) -> tuple[tuple[int, ...], tuple[Tensor | None, ...]]:
    """Which arguments change with each call, and the parameters in float32, padded."""
    if given.x_scale is None and given.out_scale is None:
        return _ONCE, given
    tokens = [one is not None and (one.shape[0] > 1 or rows == 1) for one in (given.x_scale, given.out_scale)]
    fresh = (_ONCE, _Y_TOO, _X_TOO, _BOTH)[2 * tokens[0] + tokens[1]]
    places = (tokens[0], tokens[0], tokens[1], tokens[1])
    return fresh, tuple(_ones(one, count) if new else one for one, new in zip(given, places, strict=True))


def _ones(parameter: Tensor | None, count: int) -> Tensor | None:
    if parameter is None:
        return None
    return pad(parameter.float(), (0, count - parameter.shape[0]), value=1.0)


@lru_cache(maxsize=1024)
def number(value: float, device: torch.device) -> Tensor:
    """A parameter for all rows, ``(1,)``."""
    return computed(torch.full((1,), value, dtype=torch.float32, device=device))


@lru_cache(maxsize=256)
def _no_bias(of: Plan, device: torch.device) -> Tensor:
    return computed(torch.zeros((of.heads, of.rows) if of.heads > 1 else of.rows, dtype=torch.float32, device=device))


@lru_cache(maxsize=256)
def _mask(of: Plan, device: torch.device) -> Tensor | None:
    """1 for columns of x and 0 for padding; None if there is no padding."""
    if of.columns == of.k:
        return None
    return computed(_filled(torch.ones(1, of.k, dtype=torch.int8, device=device), of, 1, native=True)[0])


@lru_cache(maxsize=4096)
def form_of(call: Call, kind: str) -> Any:
    """The `qcore_xla.bodies.form.Form` of a product on a type of torch device."""
    from .bodies.form import Form, is_int8

    out = call.out_dtype if kind != "cpu" or call.requantize else torch.float32
    of = call.plan
    # Sums per group of many rows would fill a GPU's memory as well, even if exact; a TPU's compiler fuses them.
    in_turn = kind == "cpu" or (kind == "cuda" and not of.by_rows and of.heads == 1)
    on_tpu = kind == "tpu" or (kind == "xla" and bool(environment.tpu()))
    encoding = encoding_of(call.format)
    words = of.bits == NIBBLE_BITS and encoding.integer
    tiled = on_tpu and words and is_int8(call.activation) and of.heads == 1 and of.length >= _TILE
    few = kind == "cuda" and words and call.activation == "float" and of.by_rows and triton()
    return Form(
        call.activation,  # type: ignore[arg-type]
        _name(out), call.requantize, scan=in_turn, rows=of.by_rows, pallas=tiled or few, encoding=encoding,
    )  # fmt: skip


_FLOAT8 = {"fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Elements that XLA has as types."""


@lru_cache(maxsize=256)
def encoding_of(format: Format) -> Any:
    """The `qcore_xla.codes.Encoding` of a format."""
    from .codes import Encoding

    element, divides = format.element, format.scale is ScaleType.E4M3D
    if element.is_integer or element.name in _FLOAT8:
        return Encoding(_FLOAT8.get(element.name, ""), divides=divides)
    values = element.values or ()
    missing = (1 << element.container_bits) - len(values)
    # No weight has codes of NaN and Inf; they are equal to no other number, as keys of caches should be.
    return Encoding(table=(*(v if math.isfinite(v) else 0.0 for v in values), *[0.0] * missing), divides=divides)


@lru_cache(maxsize=1)
def triton() -> bool:
    """Whether JAX's Triton supports these GPUs: NVIDIA, Ampere or later, all of one kind, since it compiles for one."""
    cuda = torch.cuda
    kinds = {cuda.get_device_capability(index) for index in range(cuda.device_count())}
    return torch.version.cuda is not None and len(kinds) == 1 and min(kinds) >= (8, 0)


@lru_cache(maxsize=256)
def table_form(format: Format, out_dtype: torch.dtype) -> Any:
    """The form of an embedding."""
    from .bodies.form import Form

    return Form(out_dtype=_name(out_dtype), encoding=encoding_of(format))


@lru_cache(maxsize=256)
def format_of(text: str) -> Format:
    """The format of a text."""
    return Format.parse(text)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=8)
def _body(name: str) -> Any:
    """A function of `bodies`, which import JAX."""
    from .bodies import embedding, experts, linear

    modules = {"embedding": embedding, "experts": experts}
    return getattr(modules.get(name, linear), name)
