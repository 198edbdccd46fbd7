"""Quantized layers inside a program: the plugin's own bodies, with x padded and y cropped in the program.

`Layer` describes a layer without its weight, so that layers of one kind and shape share a program; `packed` gives the
arrays of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax
from jax.sharding import PartitionSpec
from torch import Tensor

from qcore import DynamicFP8, Format, QTensor, Scheme
from qcore.plugin_api import given_numbers

from .. import packing, tables
from ..bodies import linear_in_x
from ..bodies.embedding import embedding
from ..bodies.experts import by_experts
from ..bodies.form import Form, is_int8
from ..bodies.linear import grouped, linear
from ..calls import bucket, call_of, form_of, has_zeros, kind_of, table_form
from ..packing import Plan
from ..tables import TablePlan
from .meshes import MeshCut

Arrays = dict[str, Any]
"""A packed weight: ``data``, ``scale``, and ``zero``, ``factor`` and ``sums`` if there are any."""


@dataclass(frozen=True)
class Layer:
    """How the weight of a quantized layer is packed and multiplied on a platform.

    **Fields:** ``kind``: the contract; ``n``, ``k``: of the weight; ``scheme``; ``heads``: channel groups of a
    convolution; ``experts``: E of a grouped linear layer, 0 for others; ``platform``: a type of torch device, or
    "tpu"; ``straight``: whether x is multiplied as it is, whatever the scheme: linear in x, for its gradient;
    ``cut``: over a mesh, then arrays hold the parts along a first dimension; ``axis``, ``local``: of a
    part of a weight that is cut along K, see `Form`.
    """

    kind: str
    n: int
    k: int
    scheme: Scheme
    heads: int
    experts: int
    platform: str
    straight: bool = False
    cut: MeshCut | None = None
    axis: str = ""
    local: bool = False

    @property
    def format(self) -> Format:
        """The format of the weight."""
        return self.scheme.weight

    @property
    def plan(self) -> Plan:
        """The layout of a weight for products."""
        plan: Plan = self._call(torch.float32).plan
        return plan

    @property
    def table(self) -> TablePlan:
        """The layout of an embedding table, whose number of rows is not part of the layout."""
        return tables.plan_of_table(0, self.k, self.format)

    def _call(self, out_dtype: torch.dtype) -> Any:
        # torch knows no device "tpu" unless torch_tpu is there; a layout differs on GPUs only.
        device = torch.device("xla" if self.platform == "tpu" else self.platform)
        return call_of(device, self.n, self.k, str(self.scheme), self.heads, out_dtype)

    def form(self, out_dtype: torch.dtype) -> Form:
        """The form of the body."""
        if self.kind == "embedding":
            return table_form(self.format, torch.float32 if self.platform == "cpu" else out_dtype)  # type: ignore[no-any-return]
        made: Form = replace(form_of(self._call(out_dtype), self.platform), axis=self.axis, local=self.local)
        return replace(made, activation="float", requantize=False, pallas=False) if self.straight else made

    @property
    def part(self) -> Layer:
        """One device's part of a layer that is cut."""
        cut = self.cut
        assert cut is not None
        if cut.kind == "column":
            return replace(self, n=self.n // cut.size, cut=None)
        group = cut.group(self.k, self.format.group_size)
        activation, local = self.scheme.activation, cut.scales == "local"
        if isinstance(activation, DynamicFP8) and activation.group is not None:
            activation = DynamicFP8(group)  # of the weight, also if the cut makes them finer
            local = True  # groups of x are a device's own, also the only one that it has
        scheme = replace(self.scheme, weight=replace(self.format, group_size=group), activation=activation)
        return replace(self, k=self.k // cut.size, scheme=scheme, cut=None, axis=cut.axis, local=local)

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """The arrays' tensors, experts stacked along a first dimension."""
        if self.cut is not None:
            return packing.stacked([self.part.pack(part) for part in self.cut.parts(weight)])
        if self.kind == "embedding":
            return tables.pack_table(weight, replace(self.table, v=weight.shape[0]))
        if weight.order is not None:
            return {**self.pack(weight.derived(order=None)), "order": weight.order.to(torch.int32)}
        return packing.pack(weight, self.plan, sums=has_zeros(self.scheme.activation))


@lru_cache(maxsize=1024)
def layer(
    kind: str, n: int, k: int, scheme: str, heads: int, experts: int, platform: str, cut: MeshCut | None = None
) -> Layer:
    """A `Layer` by the text of its scheme."""
    return Layer(kind, n, k, Scheme.parse(scheme), heads, experts, platform, cut=cut)


def _filled(x: Array, of: Plan, count: int) -> Array:
    """Pad x ``(..., M, K)`` with 0 to the shape that the product takes, ``(..., count, columns)``."""
    lead, rows = x.shape[:-2], count - x.shape[-2]
    if of.dense:
        return _zeros_around(x, rows, of.columns - of.k)
    x = _zeros_around(x, rows, of.groups * of.group - of.k).reshape(*lead, count, of.groups, of.group)
    return _zeros_around(x, of.filled - of.groups, of.width - of.group).reshape(*lead, count, of.columns)


def _zeros_around(x: Array, rows: int, columns: int) -> Array:
    if not (rows or columns):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 2) + [(0, rows, 0), (0, columns, 0)])


def product(x: Array, weight: Arrays, bias: Array | None, of: Layer, out_dtype: torch.dtype) -> Array:
    """``A(x) @ W^T + bias``: x ``(M, K)`` to ``(M, N)``, or ``(H, M, K)`` to ``(H, M, N/H)`` for channel groups."""
    plan, form, rows = of.plan, of.form(out_dtype), x.shape[-2]
    if "order" in weight:  # GPTQ's act-order: the stored columns are in another order than x's
        x = jnp.take(x, weight["order"], axis=-1)
    if of.platform == "cpu" and x.dtype != jnp.int8:
        x = x.astype(jnp.float32)
    # Padding to 4 rows serves int8 products only; 1 row of floats takes two thirds of the time of 4.
    int8 = is_int8(kind_of(of.scheme.activation))
    filled = _filled(x, plan, bucket(rows, 4 if int8 and not plan.by_rows else 1))
    mask, sums = None, weight.get("sums")
    if sums is not None and weight.get("zero") is not None and plan.columns != plan.k:
        mask = _filled(jnp.ones((1, plan.k), jnp.int8), plan, 1)[0]
    numbers = [*given_numbers(of.scheme.activation), *given_numbers(of.scheme.output)]
    given = [None if one is None else jnp.full((1,), float(one), jnp.float32) for one in numbers]
    if numbers[0] is None:
        given[1] = None
    if numbers[2] is None:
        given[3] = None
    padded = None if bias is None else _bias(bias, plan)
    if of.straight:
        return _linear_in_x(filled, weight, form)[..., :rows, : plan.n // plan.heads]
    body = grouped if plan.heads > 1 else linear
    parts = (weight["data"], weight["scale"], weight.get("zero"), padded, sums, mask, *given, weight.get("factor"))
    y = body(filled, *parts, form=form)
    n = plan.n // plan.heads
    return y[..., :rows, :n]


def _linear_in_x(x: Array, weight: Arrays, form: Form) -> Array:
    """The product of floats x, whose gradient keeps no dequantized weight."""
    parts = (weight["data"], weight["scale"], weight.get("zero"), weight.get("factor"))
    y = linear_in_x.product(x, parts, replace(form, axis=""))  # JAX transposes the sum over a mesh
    return lax.psum(y, form.axis) if form.axis else y


def _bias(bias: Array, plan: Plan) -> Array:
    split = bias.astype(jnp.float32).reshape(plan.heads, -1)
    split = _zeros_around(split, 0, plan.rows - split.shape[1])
    return split if plan.heads > 1 else split[0]


def dense_rows(x: Array, weight: Arrays, bias: Array | None, of: Layer, out_dtype: torch.dtype) -> Array:
    """A linear layer: x ``(..., K)`` to ``(..., N)``."""
    lead, flat = x.shape[:-1], x.reshape(-1, of.k)
    multiply = product if of.cut is None else _by_parts
    return multiply(flat, weight, bias, of, out_dtype).reshape(*lead, of.n)


def _by_parts(x: Array, weight: Arrays, bias: Array | None, of: Layer, out_dtype: torch.dtype) -> Array:
    """`product` on every device of a mesh with its part of the weight."""
    cut = of.cut
    assert cut is not None

    def one(x: Array, weight: Arrays, bias: Array | None) -> Array:
        own = jax.tree.map(lambda parts: parts[0], weight)
        return product(x, own, bias, of.part, out_dtype)

    whole, parts, last = PartitionSpec(), PartitionSpec(cut.axis), PartitionSpec(None, cut.axis)
    given, made = ((whole, parts, parts), last) if cut.kind == "column" else ((last, parts, whole), whole)
    y: Array = jax.shard_map(one, mesh=cut.mesh, in_specs=given, out_specs=made, check_vma=False)(x, weight, bias)
    return y


def gathered(indices: Array, weight: Arrays, of: Layer, out_dtype: torch.dtype) -> Array:
    """Rows of a table: indices of any shape to ``(*indices.shape, D)``."""
    table, flat = of.table, indices.reshape(-1).astype(jnp.int32)
    parts = (weight["data"], weight["scale"], weight.get("zero"), weight.get("factor"))
    rows = embedding(flat, *parts, form=of.form(out_dtype))
    if table.width != table.group and table.groups > 1:
        rows = rows.reshape(-1, table.groups, table.width)[:, :, : table.group]
        rows = rows.reshape(flat.shape[0], table.groups * table.group)
    return rows[:, : table.d].reshape(*indices.shape, table.d)


def convolved(
    x: Array, weight: Arrays, bias: Array | None, of: Layer, out_dtype: torch.dtype,
    kernel: Any, stride: Any, padding: Any, dilation: Any,
) -> Array:  # fmt: skip
    """A convolution of x ``(B, IC, H, W)``, giving ``(B, OC, OH, OW)``: a product of columns in (KH, KW, IC) order."""
    batch, channels, _, _ = x.shape
    filling = given_numbers(of.scheme.activation)[1] if x.dtype == jnp.int8 else 0
    (ph, pw), image = padding, jnp.moveaxis(x, 1, -1)
    image = lax.pad(image, jnp.asarray(filling, x.dtype), [(0, 0, 0), (ph, ph, 0), (pw, pw, 0), (0, 0, 0)])
    height, width = image.shape[1:3]
    spans = [(kernel[i] - 1) * dilation[i] + 1 for i in (0, 1)]
    oh, ow = (height - spans[0]) // stride[0] + 1, (width - spans[1]) // stride[1] + 1
    windows = [
        lax.slice(
            image,
            (0, i * dilation[0], j * dilation[1], 0),
            (batch, i * dilation[0] + (oh - 1) * stride[0] + 1, j * dilation[1] + (ow - 1) * stride[1] + 1, channels),
            (1, stride[0], stride[1], 1),
        )
        for i in range(kernel[0])
        for j in range(kernel[1])
    ]
    heads = of.heads
    columns = jnp.stack(windows, axis=3).reshape(batch * oh * ow, len(windows), heads, channels // heads)
    columns = jnp.moveaxis(columns, 2, 0).reshape(heads, batch * oh * ow, of.k)
    y = product(columns if heads > 1 else columns[0], weight, bias, of, out_dtype)
    y = jnp.moveaxis(y, 0, 1).reshape(-1, of.n) if heads > 1 else y
    return jnp.moveaxis(y.reshape(batch, oh, ow, of.n), -1, 1)


def experts(x: Array, ends: Array, weight: Arrays, bias: Array | None, of: Layer, out_dtype: torch.dtype) -> Array:
    """Rows x ``(T, K)``, sorted by expert, each with its expert's weight; rows after the last end give 0."""

    def multiply(rows: Array, own: tuple[Arrays, Array | None]) -> Array:
        return product(rows, *own, of, out_dtype)

    return by_experts(multiply, x, ends, (weight, bias))
