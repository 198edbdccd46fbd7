"""Weight quantizers: float weight ``(N, K)`` in, `QTensor` out.

"Symmetric int4" means at least four things in the field, so a quantizer has a name and the name is stored:

- ``absmax``: ``s = max|w| / 7`` (int8: ``/ 127``); codes -7..7 (-127..127). Zero NONE.
- ``absmax_full``: ``s = max(max(w)/7, min(w)/-8)``: the negative end may use -8 (-128). Zero NONE.
- ``minmax``: ``s = (max - min) / 15`` (``/ 255``) over ``[min(w, 0), max(w, 0)]``; zero INT. For zero FLOAT the
  range need not contain 0 and ``z = min + 8 s`` (``+ 128 s``).
- ``mse``: searches, per group, the fraction of the full range that minimises the squared error. Any zero.
- ``als``: alternates between the nearest codes and least-squares scales and zero points, from several starts, with
  scales of either sign if there is no zero point, and errors of large weights count more; see `least_squares`. Any
  zero.
- ``awq``: like ``als``, but weights the errors by the magnitude of the inputs; see `importance`. Any zero.
- ``gptq``: group parameters as in ``awq``, codes column by column, largest inputs first, each error compensated by the
  remaining columns; see `gptq`. Any zero.

``awq`` and ``gptq`` need the second moments of the layer's inputs.

For tables (fp8, fp4, nf4) ``absmax`` maps the largest magnitude of a group to the largest value of the table; scales of
type e8m0 and e4m3 are rounded as described in `targets`, and ``mse`` searches the scales that can be stored. Plugins
add quantizers with the hook ``qcore_quantizers``.

Arithmetic is float32. The scale (and a FLOAT zero) is rounded to its stored dtype before the codes are computed;
codes round half to even. An all-zero group dequantizes to exact zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import FormatError, QcoreWarning
from ..formats import FLOAT_SCALES, Format, ScaleType, ZeroPoint
from ..formats.bits import has_values, raw
from .gptq import Order, compensate
from .importance import activation_aware, importance_of
from .least_squares import alternating, refined
from .qtensor import QTensor
from .ranges import absmax, absmax_full, affine, range_of, search_clip
from .registered_quantizers import apply_registered, check_registered, find_quantizer, fitting
from .targets import Parameters, Target, global_scale_of

_CHUNK_ELEMENTS = 1 << 19
"""Elements quantized at a time (2 MiB of float32), so that the many passes over a chunk stay in a core's cache."""

_LARGE_CHUNK_ELEMENTS = 1 << 24
"""The same for ``gptq``, whose passes are over single columns, and for accelerators: if columns were short, the calls
would cost more than the work."""
_LEAST_HALF, _MOST_FLOORED = torch.finfo(torch.float16).smallest_normal, 0.01
"""The least scale in float16, and the share of scales at it from which on a warning says so."""


@dataclass(frozen=True)
class _Quantizer:
    parameters: Callable[[Tensor, Target], Parameters]
    zeros: tuple[ZeroPoint, ...]
    full_range: bool = True


_FEW_BITS = 4
_BLOCKWISE = ("nf4", "fp4_bnb")
"""Elements of bitsandbytes, which quantizes them with absmax."""

_SYMMETRIC, _AFFINE = (ZeroPoint.NONE,), (ZeroPoint.INT, ZeroPoint.FLOAT)

_QUANTIZERS: dict[str, _Quantizer] = {
    "absmax": _Quantizer(lambda groups, t: absmax(range_of(groups, t.zero), t), _SYMMETRIC, full_range=False),
    "absmax_full": _Quantizer(lambda groups, t: absmax_full(range_of(groups, t.zero), t), _SYMMETRIC),
    "minmax": _Quantizer(lambda groups, t: affine(*range_of(groups, t.zero), t), _AFFINE),
    "mse": _Quantizer(search_clip, (*_SYMMETRIC, *_AFFINE)),
    "als": _Quantizer(refined, (*_SYMMETRIC, *_AFFINE)),
    "awq": _Quantizer(alternating, (*_SYMMETRIC, *_AFFINE)),
    "gptq": _Quantizer(alternating, (*_SYMMETRIC, *_AFFINE)),
}

NEEDS_MOMENTS: tuple[str, ...] = ("awq", "gptq")
"""The quantizers that need the second moments of a layer's inputs."""

QUANTIZERS: tuple[str, ...] = tuple(_QUANTIZERS)
"""The names of the quantizers."""


def default_quantizer(format: Format) -> str:
    """``mse`` for up to 4 bits; else, and for bitsandbytes' tables, ``absmax`` or, with a zero point, ``minmax``."""
    if format.bits <= _FEW_BITS and format.dtype not in _BLOCKWISE:
        return "mse"
    return "absmax" if format.zero is ZeroPoint.NONE else "minmax"


def checked_quantizer(quantizer: str, format: Format) -> str:
    """``quantizer`` itself; raises `FormatError` if it is unknown or does not support ``format``'s zero point."""
    if quantizer not in _QUANTIZERS:
        return check_registered(quantizer, format, QUANTIZERS)
    if format.zero not in _QUANTIZERS[quantizer].zeros:
        able = [*(name for name, q in _QUANTIZERS.items() if format.zero in q.zeros), *fitting(format)]
        raise FormatError(
            f"quantizer {quantizer!r} does not support zero points of kind {format.zero.name}.\n"
            f"For {format} use one of: {', '.join(able)}."
        )
    return quantizer


def needs_moments(quantizer: str) -> bool:
    """Whether a quantizer, of qcore or of a plugin, needs the second moments of a layer's inputs."""
    if quantizer in _QUANTIZERS:
        return quantizer in NEEDS_MOMENTS
    found = find_quantizer(quantizer)
    return found is not None and found.needs_moments


def quantize(
    weight: Tensor,
    format: Format | str,
    quantizer: str | None = None,
    *,
    moments: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
    name: str = "weight",
) -> QTensor:
    """Quantize a dense weight.

    **Arguments:**

    - ``weight``: floating point, ``(N, K)``; on any device, or on ``meta``.
    - ``format``: a `Format` or its text, e.g. ``"int4-g128-asym/plain"``.
    - ``quantizer``: a name from `QUANTIZERS`; default ``mse`` for 4 bits, ``absmax`` or ``minmax`` for 8.
    - ``moments``: for ``awq`` and ``gptq``: float ``(K, K)``, the sum of ``x x^T`` over the inputs x of the layer.
    - ``scale_dtype``: float32, bfloat16 or float16; default the weight's dtype (float32 for float64). Scales in float16
      are 6e-5 or more, its least normal number; a `QcoreWarning` says if that costs accuracy and was not asked for.
    - ``name``: the name of the tensor in errors.

    Raises `FormatError` for NaN or Inf in the weight, a wrong shape or dtype, a quantizer that does not support the
    format, or missing moments.
    """
    _check_dense(weight, name)
    fmt = Format.parse(format) if isinstance(format, str) else format
    chosen = checked_quantizer(quantizer or default_quantizer(fmt), fmt)
    stored = scale_dtype or (weight.dtype if weight.dtype in FLOAT_SCALES else torch.float32)
    _check_weight(weight, stored, name)
    weight = weight.detach()
    moments = _checked_moments(weight, chosen, moments, name)
    if chosen not in _QUANTIZERS:
        return _by_plugin(weight, fmt, chosen, stored, moments, name)
    with torch.no_grad():
        inputs = None if moments is None else _inputs(weight, chosen, moments, name)
        chunks = _row_chunks(weight, _LARGE_CHUNK_ELEMENTS if inputs and inputs.order else _chunk_elements(weight))
        target = Target(fmt, stored, global_scale_of(weight, fmt))
        parts = [_quantize_rows(rows, target, chosen, name, inputs) for rows in chunks]
    codes = torch.cat([part[0] for part in parts])
    scale = _across([part[1] for part in parts])
    zeros = [part[2] for part in parts if part[2] is not None]
    zero = _across(zeros) if zeros else None
    if scale_dtype is None and stored is torch.float16:
        _warn_of_floored(weight, scale, fmt, name)
    return QTensor.from_codes(codes, scale, zero, fmt, chosen, global_scale=target.global_scale)


def _warn_of_floored(weight: Tensor, scale: Tensor, fmt: Format, name: str) -> None:
    """Say that groups are too small for scales in float16: they have less than half of the codes."""
    if scale.dtype != torch.float16 or not has_values(scale):
        return
    floored = scale == _LEAST_HALF
    if not scale.numel() or float(floored.float().mean()) <= _MOST_FLOORED:
        return
    (n, k), reach = weight.shape, max(map(abs, fmt.element.value_range))
    padded = torch.nn.functional.pad(weight.abs(), (0, -k % fmt.group(k)))
    largest = padded.view(n, -1, fmt.group(k)).amax(-1).t()
    share = float((floored & (largest < _LEAST_HALF * reach / 2)).float().mean())
    if share > _MOST_FLOORED:
        what = f"{name}: {share:.0%} of its groups are too small for scales in float16, which costs accuracy."
        remedy = "Quantize a float32 or bfloat16 model, or this weight with scale_dtype=torch.float32."
        warnings.warn(f"{what}\n{remedy}", QcoreWarning, stacklevel=3)


def _across(rows: list[Tensor]) -> Tensor:
    """``(rows, G)`` parameters of all chunks to ``(G, N)``."""
    return torch.cat([raw(part) for part in rows]).t().contiguous().view(rows[0].dtype)


def _check_dense(weight: object, name: str) -> None:
    if not isinstance(weight, Tensor):
        raise FormatError(f"cannot quantize {name}: it must be a torch.Tensor, not a {type(weight).__name__}.")
    if weight.is_nested or weight.layout is not torch.strided:
        kind = "it is nested" if weight.is_nested else f"its layout is {weight.layout}"
        raise FormatError(f"cannot quantize {name}: {kind}.\nPass a dense tensor: to_dense(), or its parts one by one.")


def _check_weight(weight: Tensor, scale_dtype: torch.dtype, name: str) -> None:
    if weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise FormatError(
            f"cannot quantize {name}: dtype {weight.dtype}, shape {tuple(weight.shape)}.\n"
            f"A weight must be floating-point, of shape (N, K) = (output features, input features)."
        )
    if scale_dtype not in FLOAT_SCALES:
        raise FormatError(f"scale_dtype is {scale_dtype}; it must be float32, bfloat16 or float16.")


@dataclass(frozen=True)
class _Inputs:
    """Second moments ``(K, K)`` of a layer's inputs, and for ``gptq`` the order and factor derived from them."""

    moments: Tensor
    order: Order | None

    def blocks(self, fmt: Format) -> list[Tensor]:
        """The moments of each group's inputs, ``(G, g, g)``, split as `_grouped` splits columns."""
        k = len(self.moments)
        g = fmt.group(k)
        starts = range(0, k // g * g, g)
        whole = torch.stack([self.moments[at : at + g, at : at + g] for at in starts])
        rest = self.moments[k // g * g :, k // g * g :]
        return [whole, rest.unsqueeze(0)] if len(rest) else [whole]


def _by_plugin(
    weight: Tensor, fmt: Format, quantizer: str, scale_dtype: torch.dtype, moments: Tensor | None, name: str
) -> QTensor:
    with torch.no_grad():
        if has_values(weight) and weight.numel():
            return apply_registered(quantizer, weight, fmt, scale_dtype, moments, name)
    # Without values, only dtypes and shapes matter, and these follow from the format.
    blank = quantize(weight, fmt, "absmax" if fmt.zero is ZeroPoint.NONE else "minmax", scale_dtype=scale_dtype)
    return blank.derived(quantizer=quantizer)


def _checked_moments(weight: Tensor, quantizer: str, moments: Tensor | None, name: str) -> Tensor | None:
    """The moments; raises `FormatError` if they are missing, not needed or of another shape."""
    if not needs_moments(quantizer):
        if moments is not None:
            raise FormatError(
                f"quantizer {quantizer!r} for {name} takes no moments; they are for {' and '.join(NEEDS_MOMENTS)}."
            )
        return None
    k = weight.shape[1]
    if moments is None:
        raise FormatError(
            f"quantizer {quantizer!r} for {name} needs the second moments of the layer's inputs.\n"
            f"Use qcore.quantize_(model, scheme, calibration=batches), or pass moments=H, the sum of x x^T."
        )
    if tuple(moments.shape) != (k, k) or not moments.dtype.is_floating_point:
        raise FormatError(
            f"moments for {name}: dtype {moments.dtype}, shape {tuple(moments.shape)}.\n"
            f"They must be the sum of x x^T over inputs x of this weight: floating-point, ({k}, {k})."
        )
    return moments.detach()


def _inputs(weight: Tensor, quantizer: str, moments: Tensor, name: str) -> _Inputs | None:
    """The moments in the form that the quantizer needs; None if there are no values."""
    if not has_values(weight):
        return None  # on meta only shapes count, and they do not depend on the quantizer
    moved = moments.to(weight.device, torch.float32)
    # The factor is also the check that the moments are finite and a sum of x x^T.
    order = Order.of(moved, name)
    return _Inputs(moved, order if quantizer == "gptq" else None)


def _chunk_elements(weight: Tensor) -> int:
    return _CHUNK_ELEMENTS if weight.device.type == "cpu" else _LARGE_CHUNK_ELEMENTS


def _row_chunks(weight: Tensor, elements: int) -> tuple[Tensor, ...]:
    rows = max(1, elements // max(1, weight.shape[1]))
    return torch.split(weight, rows) if weight.shape[0] else (weight,)


def _quantize_rows(
    rows: Tensor, target: Target, quantizer: str, name: str, inputs: _Inputs | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    k, fmt = rows.shape[1], target.format
    if not k:
        parts = [_empty_part(rows, target)]
    elif inputs is None:
        parts = [_quantize_part(groups, target, quantizer) for groups in _grouped(rows.float(), fmt)]
    elif inputs.order is None:
        pairs = zip(_grouped(rows.float(), fmt), inputs.blocks(fmt), strict=True)
        parts = [_activation_aware(groups, target, own) for groups, own in pairs]
    else:
        parts = [_compensated(rows.float(), inputs, inputs.order, target)]
    codes = torch.cat([part for part, _ in parts], dim=1)
    scale, zero = (torch.cat([getattr(p, part) for _, p in parts], dim=1).squeeze(-1) for part in ("scale", "zero"))
    # An e8m0 scale is finite even if it was computed from Inf.
    _check_finite(rows.float() if fmt.scale is ScaleType.E8M0 else scale + zero, rows, target, name)
    return codes, target.stored_scale(scale), _stored_zero(zero, target)


def _activation_aware(groups: Tensor, target: Target, moments: Tensor) -> tuple[Tensor, Parameters]:
    parameters = activation_aware(groups, target, moments)
    return target.codes(groups, parameters).to(target.element.code_dtype).flatten(1), parameters


def _empty_part(rows: Tensor, target: Target) -> tuple[Tensor, Parameters]:
    n = rows.shape[0]
    scale = rows.new_ones((n, target.format.groups(0), 1), dtype=torch.float32)
    return rows.new_empty((n, 0), dtype=target.element.code_dtype), target.empty(scale)


def _quantize_part(groups: Tensor, target: Target, quantizer: str) -> tuple[Tensor, Parameters]:
    rule = _QUANTIZERS[quantizer]
    parameters = rule.parameters(groups, target)
    codes = target.codes(groups, parameters, None if rule.full_range else -target.high)
    return codes.to(target.element.code_dtype).flatten(1), parameters


@dataclass(frozen=True)
class _Grid:
    """Rounds a column for `gptq`, with parameters ``(n, 1)``."""

    target: Target

    @property
    def code_dtype(self) -> torch.dtype:
        return self.target.element.code_dtype

    def round(self, column: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor]:
        codes = self.target.codes(column.unsqueeze(1), parameters)
        stored = codes.flatten().to(self.target.element.code_dtype)
        return stored, self.target.restored(codes, parameters).flatten()


def _compensated(rows: Tensor, inputs: _Inputs, order: Order, target: Target) -> tuple[Tensor, Parameters]:
    chunks = [_fitted(part, inputs, target) for part in _row_chunks(rows, _chunk_elements(rows))]
    scale, zero = torch.cat([p.scale for p in chunks]), torch.cat([p.zero for p in chunks])
    each = [Parameters(scale[:, g], zero[:, g]) for g in range(scale.shape[1])]
    codes = compensate(rows, order, target.format.group(rows.shape[1]), _Grid(target), each)
    return codes, Parameters(scale, zero)


def _fitted(rows: Tensor, inputs: _Inputs, target: Target) -> Parameters:
    """Parameters of all groups, fitted before any column is rounded, with errors weighted by the inputs."""
    importance = _grouped(importance_of(inputs.moments).unsqueeze(0), target.format)
    pairs = zip(_grouped(rows, target.format), importance, strict=True)
    found = [alternating(groups, target, own[0]) for groups, own in pairs]
    return Parameters(torch.cat([p.scale for p in found], dim=1), torch.cat([p.zero for p in found], dim=1))


def _grouped(rows: Tensor, fmt: Format) -> list[Tensor]:
    """``(n, K)`` to ``(n, G, g)``, and a ragged last group as ``(n, 1, rest)``, since padding would distort ``mse``."""
    n, k = rows.shape
    g = fmt.group(k)
    whole = k // g * g
    parts = [rows[:, :whole].reshape(n, k // g, g)]
    return parts if whole == k else [*parts, rows[:, whole:].unsqueeze(1)]


def _stored_zero(zero: Tensor, target: Target) -> Tensor | None:
    if target.zero is ZeroPoint.NONE:
        return None
    dtype = torch.int8 if target.zero is ZeroPoint.INT else target.scale_dtype
    return zero.to(dtype)


def _check_finite(found: Tensor, rows: Tensor, target: Target, name: str) -> None:
    """Raise if ``found``, computed in float32 from ``rows``, is not finite."""
    if not has_values(rows) or torch.isfinite(found).all():
        return
    if not torch.isfinite(rows).all():
        raise FormatError(
            f"{name} holds NaN or Inf, which has no quantized form.\nRepair the weight, or exclude this layer."
        )
    kept = torch.float32 if target.format.scale is not ScaleType.FLOAT else target.scale_dtype
    remedy = "Rescale the weight" if kept == torch.float32 else "Pass scale_dtype=torch.float32"
    raise FormatError(f"{name} is too large for scales in {kept}.\n{remedy}, or exclude this layer.")
