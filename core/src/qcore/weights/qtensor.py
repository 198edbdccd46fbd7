"""`QTensor`: a quantized weight as plain tensors plus the `Format` that says what they mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError
from ..formats import Format, Layout, ZeroPoint
from ..formats.bits import has_values

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT8_MAX = 127


def contiguous(t: Tensor) -> Tensor:
    """``t`` with the strides of a new tensor and plain values: itself, or a view or copy of it.

    Kernels hand addresses to libraries that know of no strides, expanded tensors or negative bits. Where a size is 1,
    torch takes any stride for contiguous, but oneDNN does not.
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
    """A quantized weight of logical shape ``(N, K)`` in a neutral, self-describing form.

    **Fields:**

    - ``data``: the codes in ``format.layout``, first dimension N.
    - ``scale``: ``(G, N)``, float32, bfloat16 or float16, finite.
    - ``zero``: None, or ``(G, N)``: int8 for `ZeroPoint.INT`, the scale's dtype for `ZeroPoint.FLOAT`.
    - ``shape``: ``(N, K)``.
    - ``format``: see `Format`.
    - ``quantizer``: the name of the rule that made the codes, None where it is not known.

    Construction validates; raises `FormatError`. Tensors on ``meta`` are checked for dtype and shape only. The tensors
    are contiguous: those that are not (a transposed scale, say) are copied.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    shape: tuple[int, int]
    format: Format
    quantizer: str | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != 2:
            raise FormatError(f"shape is {tuple(self.shape)}; a quantized weight has shape (N, K).")
        object.__setattr__(self, "shape", torch.Size(self.shape))
        self.validate()
        for name, value in self.tensors().items():
            object.__setattr__(self, name, contiguous(value))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle is input like any other: what it holds is validated before a kernel sees it.
        QTensor.__init__(self, **state)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise TypeError(
            f"torch function {name!r} was called with a QTensor, which is not a torch.Tensor.\n"
            f"Use qcore.linear(x, weight, bias), or weight.dequantize() for a dense copy."
        )

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        format: Format,
        quantizer: str | None = None,
    ) -> QTensor:
        """Build from signed int8 codes ``(N, K)``, scale ``(G, N)`` and zero ``(G, N)`` in the domain of the codes.

        Raises `FormatError`, also for codes outside the range of the format's element type.
        """
        _check_codes(codes, format)
        stored = format.codec.encode_zero(zero) if zero is not None and format.zero is ZeroPoint.INT else zero
        shape = (int(codes.shape[0]), int(codes.shape[1]))
        return cls(format.codec.encode(codes), scale, stored, shape, format, quantizer)

    @property
    def device(self) -> torch.device:
        """Where the data is."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that computations with this weight use by default: the scale's."""
        return self.scale.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of data, scale and zero together."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def dim(self) -> int:
        """Always 2."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Like `torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """N * K."""
        return self.shape[0] * self.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field name: ``data``, ``scale`` and, where there is one, ``zero``."""
        found = {"data": self.data, "scale": self.scale}
        return found if self.zero is None else {**found, "zero": self.zero}

    def validate(self) -> None:
        """Raise `FormatError` unless dtypes, shapes, scales and ranges fit the format."""
        if not isinstance(self.format, Format):
            raise FormatError(f"format is {self.format!r}; it must be a qcore.Format, or Format.parse(text).")
        n, k = self.shape
        _check_tensors(self.tensors())
        self.format.codec.check(self.data, n, k)
        groups = (self.format.groups(k), n)
        _check_parameter("scale", self.scale, SCALE_DTYPES, groups)
        self._check_zero(groups)
        if has_values(self.data):
            self._check_values()

    def _check_zero(self, groups: tuple[int, int]) -> None:
        kind = self.format.zero
        if (self.zero is None) != (kind is ZeroPoint.NONE):
            have = "no zero point" if self.zero is None else "a zero point"
            raise FormatError(f"format {self.format} has zero {kind.name}, but {have} was given.")
        if self.zero is not None:
            allowed = (torch.int8,) if kind is ZeroPoint.INT else (self.scale.dtype,)
            _check_parameter("zero", self.zero, allowed, groups)

    def _check_values(self) -> None:
        if not bool(torch.isfinite(self.scale).all()):
            raise FormatError("scale holds NaN or Inf; a quantized weight needs finite scales.")
        zero = self.integer_zero()
        if zero is not None and zero.numel():
            low, high = self.format.code_range
            found_low, found_high = (int(v) for v in torch.aminmax(zero))
            if found_low < low or found_high > high:
                raise FormatError(
                    f"zero points span {found_low}..{found_high}; {self.format.dtype} codes allow {low}..{high}."
                )
        elif self.zero is not None and not bool(torch.isfinite(self.zero).all()):
            raise FormatError("zero holds NaN or Inf; a float zero point must be finite.")

    def integer_zero(self) -> Tensor | None:
        """The `ZeroPoint.INT` zero point in the domain of the codes, int8 ``(G, N)``; None for other kinds."""
        if self.zero is None or self.format.zero is not ZeroPoint.INT:
            return None
        return self.format.codec.decode_zero(self.zero)

    def codes(self) -> Tensor:
        """The signed codes, int8 ``(N, K)``."""
        return self.format.codec.decode(self.data, self.shape[1])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight ``(N, K)``: `ZeroPoint` gives the formula, computed in float32 and rounded once.

        ``dtype``: of the result, default the scale's; float64 is computed in float64.
        """
        out = self.dtype if dtype is None else dtype
        compute = torch.float64 if out == torch.float64 else torch.float32
        scale, zero = self.scale.to(compute), self.integer_zero()
        added = self.zero if self.format.zero is ZeroPoint.FLOAT else None
        return dequantize_codes(self.codes(), scale, zero, added, self.format.group(self.shape[1])).to(out)

    def convert(self, layout: Layout) -> QTensor:
        """The same codes, scales and zero points in another layout; nothing is requantized."""
        if layout == self.format.layout:
            return self
        target = self.format.with_layout(layout)
        zero = self.integer_zero() if self.format.zero is ZeroPoint.INT else self.zero
        return QTensor.from_codes(self.codes(), self.scale, zero, target, self.quantizer)

    def to(self, device: torch.device | str) -> QTensor:
        """A copy on ``device``; dtypes never change."""
        if isinstance(device, torch.dtype):
            raise FormatError(
                f"a QTensor cannot be cast to {device}: its dtypes are part of its format.\nUse dequantize({device})."
            )
        return self.map(lambda t: t.to(device))

    def map(self, fn: Any) -> QTensor:
        """Apply ``fn`` to each tensor; it must keep dtype and shape."""
        return self._with(**{name: fn(t) for name, t in self.tensors().items()})

    def narrow(self, dim: int, start: int, length: int) -> QTensor:
        """Rows (``dim`` 0) or columns (``dim`` 1) ``start .. start+length``.

        Columns must be cut at group borders, because codes inside a group share a scale; otherwise `FormatError`
        names the nearest legal cut.
        """
        dim = _dimension(dim)
        if start < 0 or length < 0 or start + length > self.shape[dim]:
            raise FormatError(f"narrow(dim={dim}, {start}, {length}) leaves the weight of shape {tuple(self.shape)}.")
        stop = start + length
        if dim == 0:
            zero = None if self.zero is None else self.zero[:, start:stop].contiguous()
            scale = self.scale[:, start:stop].contiguous()
            return self._with(data=self.data[start:stop], scale=scale, zero=zero, shape=(length, self.shape[1]))
        return self._narrow_columns(start, stop)

    def _with(self, **changes: Any) -> QTensor:
        # Not dataclasses.replace: a subclass that fetches its tensors late must come out as a plain QTensor.
        same = {name: getattr(self, name) for name in QTensor.__dataclass_fields__ if name not in changes}
        return QTensor(**same, **changes)

    def _narrow_columns(self, start: int, stop: int) -> QTensor:
        k, g = self.shape[1], self.format.group_size
        codes = self.codes()[:, start:stop]
        zero = self.integer_zero() if self.format.zero is ZeroPoint.INT else self.zero
        if g is None:
            return QTensor.from_codes(codes, self.scale, zero, self.format, self.quantizer)
        for cut in (start, stop):
            if cut % g and cut != k:
                below, above = cut // g * g, min(cut // g * g + g, k)
                raise FormatError(
                    f"cannot cut K at {cut}: groups of {g} codes share a scale.\n"
                    f"The nearest legal cuts are {below} and {above}."
                )
        groups = slice(-(-start // g), -(-stop // g))  # an empty cut at the ragged end has no group
        part = None if zero is None else zero[groups]
        return QTensor.from_codes(codes, self.scale[groups], part, self.format, self.quantizer)

    @staticmethod
    def cat(tensors: Sequence[QTensor], dim: int = 0) -> QTensor:
        """Join weights along output features (``dim`` 0) or input features (``dim`` 1).

        Along K every part but the last must end at a group border; per-channel parts must share their scales.
        Raises `FormatError` where formats or shapes differ.
        """
        if not tensors:
            raise FormatError("cat needs at least one QTensor.")
        first, dim = tensors[0], _dimension(dim)
        for other in tensors[1:]:
            if other.format != first.format or other.shape[1 - dim] != first.shape[1 - dim]:
                raise FormatError(
                    f"cannot join {first.format} {tuple(first.shape)} and {other.format} {tuple(other.shape)}\n"
                    f"along dim {dim}: formats and the other dimension must be equal."
                )
        return _cat_rows(tensors) if dim == 0 else _cat_columns(tensors)

    def __repr__(self) -> str:
        made = f", quantizer={self.quantizer!r}" if self.quantizer else ""
        where = f"scale={self.scale.dtype}, device={str(self.device)!r}"
        return f"QTensor({tuple(self.shape)}, {str(self.format)!r}, {where}{made})"


def dequantize_codes(codes: Tensor, scale: Tensor, zero: Tensor | None, added: Tensor | None, group: int) -> Tensor:
    """Codes ``(N, K)`` to the dense weight in the scale's dtype: ``(q - zero) * scale + added``, per group of K.

    ``scale``, ``zero`` (subtracted, integer) and ``added`` (float) have shape ``(G, N)``.
    """
    n, k = codes.shape
    groups = scale.shape[0]
    ragged = groups * group - k
    values = torch.nn.functional.pad(codes, (0, ragged)) if ragged else codes
    weight = values.to(scale.dtype).reshape(n, groups, group)
    if zero is not None:
        weight = weight - zero.t().to(scale.dtype).unsqueeze(-1)
    weight = weight * scale.t().unsqueeze(-1)
    if added is not None:
        weight = weight + added.t().to(scale.dtype).unsqueeze(-1)
    return weight.reshape(n, groups * group)[:, :k]


def _check_tensors(tensors: dict[str, Tensor]) -> None:
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise FormatError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor.")
        # A trace through a backward pass may not ask for a layout.
        if not torch.compiler.is_compiling() and value.layout != torch.strided:
            raise FormatError(f"{name} has the layout {value.layout}; it must be dense. Use {name}.to_dense().")
    devices = {name: str(value.device) for name, value in tensors.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise FormatError(f"a quantized weight is on one device; got {where}.")


def _check_codes(codes: Tensor, format: Format) -> None:
    if codes.dim() != 2 or codes.dtype != torch.int8:
        raise FormatError(
            f"codes have dtype {codes.dtype} and shape {tuple(codes.shape)};\nthey must be int8 of shape (N, K)."
        )
    low, high = format.code_range
    if high < INT8_MAX and codes.numel() and has_values(codes):
        found_low, found_high = (int(v) for v in torch.aminmax(codes))
        if found_low < low or found_high > high:
            raise FormatError(f"codes span {found_low}..{found_high}; {format.dtype} allows {low}..{high}.")


def _check_parameter(name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, int]) -> None:
    if value.dtype not in dtypes or tuple(value.shape) != shape:
        allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise FormatError(
            f"{name} has dtype {value.dtype} and shape {tuple(value.shape)};\n"
            f"this format needs {allowed} and (G, N) = {shape}."
        )


def _dimension(dim: int) -> int:
    if dim not in (-2, -1, 0, 1):
        raise FormatError(f"dim is {dim}; a QTensor has dimensions 0 (output features) and 1 (input features).")
    return dim % 2


def _cat_rows(tensors: Sequence[QTensor]) -> QTensor:
    first = tensors[0]
    data = torch.cat([t.data for t in tensors])
    scale = torch.cat([t.scale for t in tensors], dim=1)
    zero = None if first.zero is None else torch.cat([t.zero for t in tensors if t.zero is not None], dim=1)
    shape = (sum(t.shape[0] for t in tensors), first.shape[1])
    return QTensor(data, scale, zero, shape, first.format, _common_quantizer(tensors))


def _common_quantizer(tensors: Sequence[QTensor]) -> str | None:
    names = {t.quantizer for t in tensors}
    return names.pop() if len(names) == 1 else None


def _cat_columns(tensors: Sequence[QTensor]) -> QTensor:
    first, g, quantizer = tensors[0], tensors[0].format.group_size, _common_quantizer(tensors)
    zeros = [t.integer_zero() if t.format.zero is ZeroPoint.INT else t.zero for t in tensors]
    codes = torch.cat([t.codes() for t in tensors], dim=1)
    if g is None:
        if not all(_equal(t.scale, first.scale) and _equal(z, zeros[0]) for t, z in zip(tensors, zeros, strict=True)):
            raise FormatError(
                "cannot join per-channel weights along K: their scales differ.\nRequantize the joined weight."
            )
        return QTensor.from_codes(codes, first.scale, zeros[0], first.format, quantizer)
    for part in tensors[:-1]:
        if part.shape[1] % g:
            raise FormatError(
                f"cannot join along K: a part has K={part.shape[1]}, which does not end at a group of {g}.\n"
                f"Only the last part may; narrow the others, or requantize the joined weight."
            )
    scale = torch.cat([t.scale for t in tensors])
    zero = None if zeros[0] is None else torch.cat([z for z in zeros if z is not None])
    return QTensor.from_codes(codes, scale, zero, first.format, quantizer)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two parameters are the same; those without values (meta) are taken to be."""
    if a is None or b is None or a.dtype != b.dtype:
        return a is b
    return not has_values(a) or torch.equal(a, b)
