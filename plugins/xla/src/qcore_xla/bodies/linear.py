"""``y = A(x) @ W^T + bias`` with W of 8 or 4 bits, per channel or in groups, with or without zero points.

With ``x = s_x (q_x - z_x)`` per token and ``W = s q + added`` per group (an integer zero point z means added = -s z)::

    y = s_x * (sum over groups of s * (q_x @ q - z_x * sums)  +  xsum @ added) + bias

where xsum holds the sums of ``q_x - z_x`` per group and sums those of q. Scales follow the products of codes, which
are exact int32 sums if activations are int8, including zero points: x of zeros gives zeros. Float activations are
the case ``s_x = 1, z_x = 0``, and fp8 ones the case ``z_x = 0``, with q_x numbers of e4m3; if each group of x has a
scale of its own, s_x stands inside the sum over groups.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..codes import Codes, coded, length, planes, times_global
from .form import Form
from .quantize import activations, requantized
from .varying import varying_like

if TYPE_CHECKING:
    from ..pallas.skinny_gemm import SkinnyTiles


def linear(
    x: Array, data: Array, scale: Array, zero: Array | None, bias: Array | None,
    sums: Array | None = None, mask: Array | None = None,
    x_scale: Array | None = None, x_zero: Array | None = None,
    out_scale: Array | None = None, out_zero: Array | None = None, factor: Array | None = None,
    *, form: Form,
) -> Array:  # fmt: skip
    """Multiply x ``(M, K)``, float or int8 codes, with a packed weight, giving ``(M, N)``.

    ``data``: codes as in `codes`, ``(N, K)`` per channel, or ``(S, b, N)``: S slices of b along K, each a group or
    a part of one; ``(N, S, b)`` if ``form.rows``, for float activations. ``scale``, ``zero``: ``(G, N)``, S a multiple
    of G; zero int8 is subtracted from codes, a float is added to ``q * s``. ``bias``: ``(N,)``. ``sums``: ``(G, N)``
    int32, sums of codes, if activations have zero points.
    ``mask``: int8 ``(K,)``, 0 for columns of x that are padding: 0 has the code z_x, which must not count in xsum.
    ``x_scale``, ``x_zero``, ``out_scale``, ``out_zero``: ``(M,)`` or ``(1,)``, if they are given. Columns of data
    beyond those of x are 0. ``factor``: ``(1, N)``, the global scale if there is one.
    """
    weight = coded(data, form.encoding)
    x, s_x, each, moved = _quantized(x, weight, scale, sums, mask, x_scale, x_zero, form)
    alone = all(part is None for part in (zero, bias, s_x, factor)) and not form.axis
    y, columns = _product(x, weight, scale, moved, each, form, alone)
    if zero is not None:
        y = y + _dot(_moved_sums(columns, moved, each, mask, scale.shape[0], x.shape[1]), added_by_zero(scale, zero))
    y = times_global(y, factor, form.encoding)
    if s_x is not None and form.local:
        y, s_x = y * s_x, None
    if form.axis:
        y = lax.psum(y, form.axis)
    if s_x is not None:
        y = y * s_x
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return requantized(y, out_scale, out_zero) if form.requantize else y.astype(form.out_dtype)


def _quantized(
    x: Array, data: Codes, scale: Array, sums: Array | None, mask: Array | None,
    x_scale: Array | None, x_zero: Array | None, form: Form,
) -> tuple[Array, Array | None, Array | None, Moved | None]:  # fmt: skip
    """Codes of x, the scale of each token, or, if there are several, of each group ``(M, G)``, and its zero point."""
    if not form.encoding.fits(x.dtype):  # NF4's numbers have more digits than 16-bit floats
        x = x.astype(jnp.float32)
    if form.activation == "fp8-groups":  # groups of x are those of the columns of data
        x = _padded(x, _columns(data, form))
    axis = "" if form.local else form.axis
    codes, s, z = activations(x, form.activation, x_scale, x_zero, scale.shape[0], axis)
    if mask is not None:
        codes = codes * mask
    moved = None
    if z is not None:
        assert sums is not None
        moved = Moved(z.astype(jnp.int32), sums)
    by_group = s is not None and s.shape[1] > 1
    return codes, None if by_group else s, s if by_group else None, moved


def _moved_sums(
    x: Array, moved: Moved | None, each: Array | None, mask: Array | None, groups: int, columns: int
) -> Array:
    """Sums of x over each group, minus its zero point, ``(M, G)`` float32; ``columns``: of x without padding."""
    total = _group_sums(x, groups)
    if moved is not None:
        there = jnp.ones((1, columns), jnp.int32) if mask is None else mask[None]
        total = total - moved.zero * _group_sums(_padded(there, x.shape[1]), groups)
    wide: Array = total.astype(jnp.float32)
    return wide if each is None else wide * each


def grouped(
    x: Array, data: Array, scale: Array, zero: Array | None, bias: Array | None,
    sums: Array | None = None, mask: Array | None = None,
    x_scale: Array | None = None, x_zero: Array | None = None,
    out_scale: Array | None = None, out_zero: Array | None = None, factor: Array | None = None,
    *, form: Form,
) -> Array:  # fmt: skip
    """`linear` for H channel groups at once: x ``(H, M, K)``, each with its own weight, scales and bias."""
    optional = [None if part is None else 0 for part in (zero, bias, sums, factor)]
    axes = [0, 0, 0, *optional[:3], *[None] * 5, optional[3]]
    arrays = (x, data, scale, zero, bias, sums, mask, x_scale, x_zero, out_scale, out_zero, factor)
    y: Array = jax.vmap(partial(linear, form=form), in_axes=axes)(*arrays)
    return y


def added_by_zero(scale: Array, zero: Array) -> Array:
    """The term that a zero point adds to each weight of a group, ``(G, N)`` float32."""
    wide = zero.astype(jnp.float32)
    return -wide * scale.astype(jnp.float32) if zero.dtype == jnp.int8 else wide


class Moved(NamedTuple):
    """A zero point of activations, int32 ``(M, 1)``, and the sums of codes that it multiplies, ``(G, N)``."""

    zero: Array
    sums: Array

    def of(self, group: int) -> Moved:
        """The part of one group, sums ``(N,)``."""
        return Moved(self.zero, self.sums[group])

    def less(self, total: Array, codes: int) -> Array:
        """Products ``(..., M, N)`` over ``codes`` codes minus the zero point's part: exact if that fits int32."""
        if codes > _EXACT:
            return total.astype(jnp.float32) - self.zero.astype(jnp.float32) * self.sums.astype(jnp.float32)
        return total - self.zero * self.sums


_EXACT = 1 << 16
"""Codes in a group whose products with differences of codes and zero points, 255 * 128 each, add up within int32."""


def _columns(data: Codes, form: Form) -> int:
    """Columns of x in the product."""
    runs = 1 if data.ndim == 2 else data.shape[1 if form.rows else 0]
    return runs * length(data, 2 if form.rows and data.ndim > 2 else 1)


def _product(
    x: Array, data: Codes, scale: Array, moved: Moved | None, each: Array | None, form: Form, alone: bool
) -> tuple[Array, Array]:
    """``sum over groups of scale * (x @ codes)`` ``(M, N)``, and x padded to the columns of data.

    ``moved``: a zero point of x, which is subtracted. ``each``: scales of x by group, ``(M, G)``. ``alone``: nothing is
    done to the product any more, which then may have the dtype of the result instead of float32.
    """
    s = scale.astype(jnp.float32)
    if form.rows:
        slices = data.reshape(data.shape[0], -1, data.shape[-1])
        cut = _skinny_tiles(x, slices, form)
        if data.ndim == 3 or cut is not None:
            x = _padded(x, slices.shape[1] * length(slices, 2))
            narrow = alone and x.dtype == jnp.bfloat16 and form.out_dtype == "bfloat16"
            return _by_rows(x, slices, scale, cut, narrow), x
    if data.ndim == 2:
        x = _padded(x, length(data, 1))
        total = _per_channel(x, data, form)
        total = total if moved is None else moved.of(0).less(total, x.shape[1])
        return s[0] * total.astype(jnp.float32), x
    x = _padded(x, data.shape[0] * length(data, 1))
    if form.pallas:
        from ..pallas.product import product

        assert isinstance(data, Array)  # see `Form.pallas`
        y = product(x, data, s)
        return (y if moved is None else y - moved.zero * jnp.sum(s * moved.sums, axis=0)), x
    slices = x.reshape(x.shape[0], data.shape[0], -1)
    return (_in_turn if form.scan else _at_once)(slices, data, s, moved, each), x


_MANY_ROWS = 512
"""From this many rows on, dequantizing the weight before the product is faster on a GPU than converting it inside."""
_FEW_ROWS = 4
"""Up to this many rows, a GPU multiplies per group and reads only codes; with more, the sums per group take longer."""


def _per_channel(x: Array, data: Codes, form: Form) -> Array:
    """X ``(M, K)`` times data ``(N, K)``."""
    w = planes(data, 1, x.dtype)
    if form.rows and x.dtype != jnp.int8:
        if (
            x.shape[0] == 1 and w.shape[1] == 1
        ):  # a sum of products along rows reaches the memory's bandwidth, a dot does not
            return jnp.sum(w[:, 0].astype(jnp.float32) * x.astype(jnp.float32), axis=-1)[None]
        if x.shape[0] >= _MANY_ROWS:
            w = lax.optimization_barrier(w)
    return contract(x.reshape(x.shape[0], *w.shape[1:]), w, (1, 2), (1, 2))


def _by_rows(x: Array, data: Codes, scale: Array, cut: SkinnyTiles | None, narrow: bool) -> Array:
    """Float x ``(M, K)`` times data ``(N, S, b)``, S groups; ``cut``: tiles for `pallas.skinny_gemm`, or None.

    ``narrow``: a product by matrix units is rounded once to the dtype of x, and not written as float32 before.
    """
    rows, slices = x.shape[0], data.shape[1]
    if cut is None and rows <= _FEW_ROWS:
        w = planes(data, 2, x.dtype)
        products = contract(x.reshape(rows, slices, *w.shape[2:]), w, (2, 3), (2, 3), batch=(1, 1))
        return jnp.sum(products * scale.astype(jnp.float32)[:, None, :], axis=0)
    if x.dtype != jnp.float16:
        return _in_own_dtype(x, data, scale, cut, narrow)
    scale = scale.astype(jnp.float32)
    largest = jnp.max(jnp.abs(scale), axis=0)  # small weights would lose bits in float16's subnormal numbers
    largest = jnp.where(largest == 0, 1.0, largest)
    return largest * _in_own_dtype(x, data, scale / largest, cut)


def _in_own_dtype(x: Array, data: Codes, scale: Array, cut: SkinnyTiles | None, narrow: bool = False) -> Array:
    """The product with weights in the dtype of x: in registers, or in memory."""
    if cut is not None:
        from ..pallas.skinny_gemm import product

        assert isinstance(data, Array)  # see `Form.pallas`
        return product(x, data, scale, cut)
    # Otherwise XLA would dequantize the weights of all layers in one kernel, before the first is used.
    x, data = lax.optimization_barrier((x, data))
    w = planes(data, 2, jnp.dtype(jnp.float32)) * scale.astype(jnp.float32).T[:, :, None, None]
    w = w.astype(x.dtype).reshape(data.shape[0], -1)
    return contract(x, w, (1,), (1,), sums=x.dtype if narrow else None)


def _skinny_tiles(x: Array, data: Codes, form: Form) -> SkinnyTiles | None:
    """Tiles for `qcore_xla.pallas.skinny_gemm` if it is the fastest for x times data ``(N, S, b)``, else None."""
    if not (form.pallas and data.dtype == jnp.int32 and x.dtype in (jnp.bfloat16, jnp.float16)):
        return None
    from ..pallas.skinny_gemm import tiles

    return tiles(x.shape[0], *data.shape)


def _at_once(x: Array, data: Codes, scale: Array, moved: Moved | None, spread: Array | None) -> Array:
    """All slices of x ``(M, S, b)`` in one batched product; ``spread``: scales of x by group, ``(M, G)``."""
    w = planes(data, 1, x.dtype)
    parts = x.reshape(*x.shape[:2], *w.shape[1:3])
    products = contract(parts, w, (2, 3), (1, 2), batch=(1, 0))
    groups, each = scale.shape[0], data.shape[0] // scale.shape[0]
    if each > 1 and x.dtype == jnp.int8:  # slices of one group are added exactly
        products, each = products.reshape(groups, each, *products.shape[1:]).sum(1), 1
    if moved is not None:
        products = Moved(moved.zero, moved.sums[:, None, :]).less(products, x.shape[1] * x.shape[2] // groups)
    # Scale floats before any sum: otherwise XLA forms one long product, and rearranges the packed weight for it.
    repeated = partial(jnp.repeat, repeats=each, axis=0) if each > 1 else lambda one: one
    scaled = products.astype(jnp.float32) * repeated(scale)[:, None, :]
    of_x = _by_group(spread)
    return jnp.sum(scaled if of_x is None else scaled * repeated(of_x), axis=0)


def _by_group(spread: Array | None) -> Array | None:
    """Scales of x ``(M, G)`` as they are multiplied with products, ``(G, M, 1)``."""
    return None if spread is None else spread.T[:, :, None]


def _in_turn(x: Array, data: Codes, scale: Array, moved: Moved | None, spread: Array | None) -> Array:
    """Slice by slice of x ``(M, S, b)``; ``spread``: see `_at_once`."""
    groups, each = scale.shape[0], data.shape[0] // scale.shape[0]
    xs, ws = lax.transpose(x, (1, 0, 2)), data
    codes = x.shape[1] * x.shape[2] // groups
    if groups == 1:
        total = _sum_of_slices(xs, ws)
        return scale * (total if moved is None else moved.of(0).less(total, codes)).astype(jnp.float32)
    product = _slice_product
    if each > 1:  # a dimension of size 1 in between would cost a copy of the weight
        xs, ws = xs.reshape(groups, each, *xs.shape[1:]), ws.reshape(groups, each, *ws.shape[1:])
        product = _sum_of_slices

    def step(y: Array, group: tuple[Array, Codes, Array, Array | None, Array | None]) -> tuple[Array, None]:
        x_g, w_g, s_g, sums_g, spread_g = group
        total = product(x_g, w_g)
        if moved is not None and sums_g is not None:
            total = Moved(moved.zero, sums_g).less(total, codes)
        scaled = s_g * total.astype(jnp.float32)
        return y + (scaled if spread_g is None else scaled * spread_g), None

    parts = (xs, ws, scale, None if moved is None else moved.sums, _by_group(spread))
    start = varying_like(jnp.zeros((x.shape[0], data.shape[-1]), jnp.float32), parts, moved)
    y: Array = lax.scan(step, start, parts)[0]
    return y


def _sum_of_slices(x: Array, data: Codes) -> Array:
    """Sum over S of x ``(S, M, b)`` times data ``(S, b, N)``: int32 for codes, else float32."""
    if data.shape[0] == 1:
        return _slice_product(x[0], jax.tree.map(lambda codes: codes[0], data))

    def step(y: Array, part: tuple[Array, Codes]) -> tuple[Array, None]:
        return y + _slice_product(*part), None

    start = varying_like(jnp.zeros((x.shape[1], data.shape[-1]), _sum_dtype(x)), x, data)
    y: Array = lax.scan(step, start, (x, data))[0]
    return y


def _slice_product(x: Array, data: Codes) -> Array:
    w = planes(data, 0, x.dtype)
    return contract(x.reshape(x.shape[0], *w.shape[:2]), w, (1, 2), (0, 1))


def contract(
    x: Array, w: Array, x_dims: tuple[int, ...], w_dims: tuple[int, ...], batch: tuple[int, int] | None = None,
    sums: Any = None,
) -> Array:  # fmt: skip
    """The sum of products over dimensions of x and w, of dtype ``sums``: by default int32 for codes, else float32."""
    batches = ((), ()) if batch is None else ((batch[0],), (batch[1],))
    wide = x.dtype == jnp.float32  # otherwise an accelerator would round float32 operands to fewer bits
    return lax.dot_general(
        x, w, ((x_dims, w_dims), batches),
        precision=lax.Precision.HIGHEST if wide else None,
        preferred_element_type=_sum_dtype(x) if sums is None else sums,
    )  # fmt: skip


def _sum_dtype(x: Array) -> Any:
    return jnp.int32 if x.dtype == jnp.int8 else jnp.float32


def _dot(a: Array, b: Array) -> Array:
    return contract(a, b, (1,), (0,))


def _group_sums(x: Array, groups: int) -> Array:
    """Sum x ``(M, K)`` over each group: ``(M, G)``, int32 for codes, else float32."""
    wide = x if x.dtype == jnp.int32 else x.astype(_sum_dtype(x))
    return wide.reshape(x.shape[0], groups, -1).sum(-1)


def _padded(x: Array, columns: int) -> Array:
    missing = columns - x.shape[1]
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (0, missing, 0))) if missing else x
