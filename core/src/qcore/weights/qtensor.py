"""`QTensor`: a quantized weight as plain tensors plus the `Format` that defines their meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import FormatError
from ..formats import Format, Layout, ScaleType, ZeroPoint, effective_scale
from ..formats.bits import has_values, raw
from . import slicing
from .validation import (
    check_codes,
    check_global_scale,
    check_order,
    check_parameter,
    check_tensors,
    check_valid_codes,
    check_values,
    check_zero,
)

WEIGHT_TENSORS = ("data", "scale", "zero", "order", "global_scale")
"""The names of a weight's tensors, in the order of `QTensor.tensors`; every weight has the first two."""


def contiguous(t: Tensor) -> Tensor:
    """``t`` with the strides of a new tensor and plain values: itself, or a view or copy of it.

    Kernels pass addresses to libraries that do not support strides, expanded tensors or negative bits. If a size is 1,
    torch considers any stride contiguous, but oneDNN does not.
    """
    if torch.compiler.is_compiling():
        return t.contiguous()
    t = t.resolve_neg()
    if not t.is_contiguous():
        return t.contiguous()
    sizes = [max(size, 1) for size in t.shape]
    strides = tuple(math.prod(sizes[place + 1 :]) for place in range(t.dim()))
    return t if t.stride() == strides else t.as_strided(t.shape, strides)


@dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized weight of logical shape ``(N, K)``, or E of them, ``(E, N, K)``, in a neutral, self-describing form.

    **Fields:**

    - ``data``: the codes in ``format.layout``, first dimension N.
    - ``scale``: ``(G, N)``: float32, bfloat16 or float16, or as ``format.scale`` specifies; finite.
    - ``zero``: None, or ``(G, N)``: int8 for `ZeroPoint.INT`, the scale's dtype for `ZeroPoint.FLOAT`.
    - ``shape``: ``(N, K)`` or ``(E, N, K)``; with E weights every other tensor has a leading dimension E, too.
    - ``format``: see `Format`.
    - ``quantizer``: the name of the quantizer that produced the codes, None if unknown.
    - ``order``: None, or int32 ``(K,)``: stored column j multiplies feature ``order[j]`` of x (GPTQ's act-order).
    - ``global_scale``: float32 ``()`` (``(E,)``) for the scale types that have one, else None.

    Construction validates; raises `FormatError`. Tensors on ``meta`` are checked for dtype and shape only. The tensors
    are contiguous: those that are not (a transposed scale, say) are copied.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    shape: tuple[int, ...]
    format: Format
    quantizer: str | None = None
    order: Tensor | None = None
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3):
            raise FormatError(f"shape is {tuple(self.shape)}; a quantized weight has shape (N, K) or (E, N, K).")
        object.__setattr__(self, "shape", torch.Size(self.shape))
        given: Any = (self.format, self.scale)  # anything at all, until it is validated
        if isinstance(given[0], Format) and isinstance(given[1], Tensor):
            object.__setattr__(self, "scale", self.format.scale.normalized(self.scale))
        if isinstance(self.global_scale, Tensor) and self.global_scale.numel() == 1 and len(self.shape) == 2:
            object.__setattr__(self, "global_scale", self.global_scale.reshape(()))
        self.validate()
        self._keep_contiguous()

    def _keep_contiguous(self) -> None:
        for name, value in self.tensors().items():
            object.__setattr__(self, name, contiguous(value))

    def __getstate__(self) -> dict[str, Any]:
        # torch cannot unpickle float8, so its bytes are pickled and reinterpreted afterwards.
        state = {name: getattr(self, name) for name in QTensor.__dataclass_fields__}
        state["scale"] = raw(self.scale)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle is input like any other: its content is validated before a kernel sees it.
        QTensor.__init__(self, **state)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        read = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, QTensor))
        raise TypeError(
            f"torch function {name!r} was called with a QTensor, which is not a torch.Tensor.\n"
            f"Use qcore.linear(x, weight, bias), or weight.dequantize() for a dense copy.{read._exclusion()}"  # noqa: SLF001 - of this class
        )

    def _exclusion(self) -> str:
        """What to do about a model that reads this weight."""
        return (
            f" A model that reads the weight of a layer itself needs this layer in floats: "
            f"quantize_(model, scheme, exclude={self._pattern()!r})."
        )

    def _pattern(self) -> str:
        """What to pass to `quantize_` as ``exclude`` for the layer whose weight this is."""
        return "*.layer"

    def __matmul__(self, other: Any) -> Any:
        return self.__torch_function__(torch.matmul, (), (self, other))

    __rmatmul__ = __matmul__

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        format: Format,
        quantizer: str | None = None,
        order: Tensor | None = None,
        global_scale: Tensor | None = None,
    ) -> QTensor:
        """Build from raw codes ``(N, K)`` or ``(E, N, K)``: int8 of integer elements, uint8 of tables.

        **Arguments:** ``scale``: ``(G, N)``; ``zero``: ``(G, N)``, in the domain of the codes if it is an integer; the
        others are the fields of `QTensor`.

        Raises `FormatError`, also for codes outside the range of the format's element type, and for codes that
        represent NaN or Inf.
        """
        if not isinstance(format, Format):
            raise FormatError(f"format is {format!r}; it must be a qcore.Format, or Format.parse(text).")
        check_codes(codes, format)
        stored = format.codec.encode_zero(zero) if zero is not None and format.zero is ZeroPoint.INT else zero
        data = _encode(format, codes)
        return cls(data, scale, stored, tuple(codes.shape), format, quantizer, order, global_scale)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], shape: Sequence[int], format: Format, quantizer: str | None = None
    ) -> QTensor:
        """The inverse of `tensors`: build from ``tensors`` by name, other names ignored. Raises `FormatError`."""
        # Each is looked up: what a plugin gives may be no mapping, and without an end.
        if missing := [name for name in ("data", "scale") if tensors.get(name) is None]:
            raise FormatError(f"a weight needs data and scale; {' and '.join(missing)} is missing.")
        fields: Any = {name: tensors.get(name) for name in WEIGHT_TENSORS}
        return cls(**fields, shape=tuple(shape), format=format, quantizer=quantizer)

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that computations with this weight use by default: a float scale's, else float32."""
        return self.scale.dtype if self.format.scale is ScaleType.FLOAT else torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def dim(self) -> int:
        """2, or 3 for E weights."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Like `torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """N * K, times E."""
        return math.prod(self.shape)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field name: ``data``, ``scale``, and ``zero``, ``order``, ``global_scale`` if they exist."""
        found = ((name, getattr(self, name)) for name in WEIGHT_TENSORS)
        return {name: value for name, value in found if value is not None}

    def validate(self) -> None:
        """Raise `FormatError` unless dtypes, shapes, scales and ranges match the format."""
        self._check_form()
        if has_values(self.data):
            fmt = self.format
            check_values(fmt, self.scale, self.global_scale, self.zero, self.integer_zero())
            element = fmt.element
            if element.has_invalid_codes:
                check_valid_codes(self.codes(), element)
            if element.bits < element.container_bits:  # the bits of a container hold other codes, too
                check_codes(self.codes(), fmt)

    def _check_form(self) -> None:
        if not isinstance(self.format, Format):
            raise FormatError(f"format is {self.format!r}; it must be a qcore.Format, or Format.parse(text).")
        *lead, n, k = self.shape
        check_tensors(self.tensors())
        first = self.data
        if lead:
            if first.dim() < 2 or first.shape[0] != lead[0]:
                raise FormatError(
                    f"data has shape {tuple(first.shape)}; for {lead[0]} weights its first dimension must be {lead[0]}."
                )
            first = first[0] if lead[0] else first.new_empty(first.shape[1:])
        self.format.codec.check(first, n, k)
        groups, dims = (*lead, self.format.groups(k), n), "(E, G, N)" if lead else "(G, N)"
        check_parameter("scale", self.scale, self.format.scale.dtypes, groups, dims)
        check_zero(self.zero, self.format, self.scale, groups, dims)
        check_order(self.order, tuple(lead), k)
        check_global_scale(self.global_scale, self.format, tuple(lead))

    def integer_zero(self) -> Tensor | None:
        """The `ZeroPoint.INT` zero point in the domain of the codes, int8 ``(G, N)``; None for other kinds."""
        if self.zero is None or self.format.zero is not ZeroPoint.INT:
            return None
        return self.format.codec.decode_zero(self.zero)

    def codes(self) -> Tensor:
        """The raw codes ``(N, K)`` as stored: int8 of integer elements, uint8 of tables."""
        k = self.shape[-1]
        if self.dim() == 2:
            return self.format.codec.decode(self.data, k)
        if not self.numel():  # of any number of experts: a file can claim billions that take no bytes
            return self.data.new_empty(tuple(self.shape), dtype=self.format.element.code_dtype)
        return torch.stack([self.format.codec.decode(data, k) for data in self.data])

    def encode(self, codes: Tensor) -> Tensor:
        """Other raw codes ``(N, K)`` or ``(E, N, K)`` in this weight's layout."""
        return _encode(self.format, codes)

    def values(self) -> Tensor:
        """The values of the codes before scales and zero points, float32 ``(N, K)``, columns as stored."""
        return self.format.element.decode(self.codes())

    def scales(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that the stored scales represent, ``(G, N)`` in float32 or float64; see `effective_scale`."""
        return effective_scale(self.format.scale, self.scale, self.global_scale, dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight ``(N, K)``: `ZeroPoint` gives the formula, computed in float32 and rounded once.

        ``dtype``: of the result, default `dtype`; float64 is computed in float64. An order is undone.
        """
        out = self.dtype if dtype is None else dtype
        compute = torch.float64 if out == torch.float64 else torch.float32
        if self.dim() == 3:
            if not self.numel():
                return torch.empty(tuple(self.shape), dtype=out, device=self.device)
            return torch.stack([self[e].dequantize(out) for e in range(self.shape[0])])
        added = self.zero if self.format.zero is ZeroPoint.FLOAT else None
        values = self.format.element.decode(self.codes(), compute)
        group = self.format.group(self.shape[-1])
        dense = dequantize_codes(values, self.scales(compute), self.integer_zero(), added, group).to(out)
        return dense if self.order is None else dense.index_select(1, torch.argsort(self.order))

    def convert(self, layout: Layout) -> QTensor:
        """The same codes, scales and zero points in another layout; nothing is requantized."""
        if layout == self.format.layout:
            return self
        target = self.format.with_layout(layout)
        zero = self.integer_zero() if self.format.zero is ZeroPoint.INT else self.zero
        return QTensor.from_codes(self.codes(), self.scale, zero, target, self.quantizer, self.order, self.global_scale)

    def to(self, device: torch.device | str) -> QTensor:
        """A copy on ``device``; dtypes never change."""
        if isinstance(device, torch.dtype):
            raise FormatError(
                f"a QTensor cannot be cast to {device}: its dtypes are part of its format.\nUse dequantize({device})."
            )
        return self.derived(**{name: t.to(device) for name, t in self.tensors().items()})

    def map(self, fn: Any) -> QTensor:
        """Apply ``fn`` to each tensor; it must keep dtype and shape. Validates the result."""
        changed = self.derived(**{name: fn(t) for name, t in self.tensors().items()})
        changed.validate()
        return changed

    def derived(self, **changes: Any) -> QTensor:
        """A copy with changed fields whose values are known to be valid: only dtypes and shapes are checked."""
        # Not dataclasses.replace: a subclass that unpacks its tensors on demand must become a plain QTensor.
        made = object.__new__(QTensor)
        for name in QTensor.__dataclass_fields__:
            object.__setattr__(made, name, changes[name] if name in changes else getattr(self, name))
        object.__setattr__(made, "shape", torch.Size(made.shape))
        made._check_form()
        made._keep_contiguous()
        return made

    def __getitem__(self, expert: int) -> QTensor:
        """One of E weights, ``(N, K)``: a view of its tensors."""
        if self.dim() != 3 or isinstance(expert, bool) or not isinstance(expert, int):
            raise FormatError("qt[e] selects weight e of a QTensor of shape (E, N, K); e must be an int.")
        if not -self.shape[0] <= expert < self.shape[0]:
            raise IndexError(f"expert {expert} is out of range: the QTensor has {self.shape[0]} experts.")
        return self.derived(**{name: t[expert] for name, t in self.tensors().items()}, shape=self.shape[1:])

    def __len__(self) -> int:
        """E, or N of a single weight."""
        return int(self.shape[0])

    def experts(self, which: slice) -> QTensor:
        """A slice of the E weights, as a `QTensor` of three dimensions."""
        found = {name: t[which] for name, t in self.tensors().items()}
        return self.derived(**found, shape=(int(found["data"].shape[0]), *self.shape[1:]))

    @staticmethod
    def stack(tensors: Sequence[QTensor]) -> QTensor:
        """Stack E weights of one format and shape into one of shape ``(E, N, K)``."""
        if not tensors:
            raise FormatError("stack needs at least one QTensor.")
        lifted = [
            t.derived(**{name: part.unsqueeze(0) for name, part in t.tensors().items()}, shape=(1, *t.shape))
            for t in tensors
        ]
        return slicing.cat(lifted, 0)

    def narrow(self, dim: int, start: int, length: int) -> QTensor:
        """Rows (``dim`` -2) or columns (``dim`` -1) ``start .. start+length``; of E weights also experts (``dim`` 0).

        Columns must be cut at group borders, because codes in a group share a scale; otherwise `FormatError` names the
        nearest legal cuts. If the cut falls between bytes, they are sliced without decoding.
        """
        return slicing.narrow(self, dim, start, length)

    def regroup(self, group_size: int) -> QTensor:
        """The same weight in finer groups, exactly: scales and zero points are repeated.

        Raises `FormatError` unless ``group_size`` divides the current one; per-channel weights accept any.
        """
        return slicing.regroup(self, group_size)

    @staticmethod
    def cat(tensors: Sequence[QTensor], dim: int = 0) -> QTensor:
        """Join weights along output features (``dim`` -2), input features (``dim`` -1) or, of E weights, experts (0).

        Along K every part but the last must end at a group border; per-channel parts must share their scales.
        Raises `FormatError` if formats or shapes differ.
        """
        return slicing.cat(tensors, dim)

    def __repr__(self) -> str:
        made = f", quantizer={self.quantizer!r}" if self.quantizer else ""
        made += ", order" if self.order is not None else ""
        where = f"scale={self.scale.dtype}, device={str(self.device)!r}"
        return f"QTensor({tuple(self.shape)}, {str(self.format)!r}, {where}{made})"


def _encode(format: Format, codes: Tensor) -> Tensor:
    if codes.dim() == 2:
        return format.codec.encode(codes)
    if not codes.numel():
        one = format.codec.encode(codes.new_empty(codes.shape[1:]))
        return one.expand(codes.shape[0], *one.shape).contiguous()
    return torch.stack([format.codec.encode(part) for part in codes])


def dequantize_codes(values: Tensor, scale: Tensor, zero: Tensor | None, added: Tensor | None, group: int) -> Tensor:
    """The dense weight ``(N, K)`` in the scale's dtype: ``(value - zero) * scale + added``, per group of K.

    ``scale``, ``zero`` (subtracted, integer) and ``added`` (float) have shape ``(G, N)``.
    """
    n, k = values.shape
    groups = scale.shape[0]
    ragged = groups * group - k
    values = torch.nn.functional.pad(values, (0, ragged)) if ragged else values
    weight = values.to(scale.dtype).reshape(n, groups, group)
    if zero is not None:
        weight = weight - zero.t().to(scale.dtype).unsqueeze(-1)
    weight = weight * scale.t().unsqueeze(-1)
    if added is not None:
        weight = weight + added.t().to(scale.dtype).unsqueeze(-1)
    return weight.reshape(n, groups * group)[:, :k]
