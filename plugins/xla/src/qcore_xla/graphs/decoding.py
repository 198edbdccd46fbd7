"""Steps of one token on GPUs: what XLA makes many small kernels of becomes few, by `qcore_xla.pallas`.

A decode step of a large model is some hundred launches, each of which takes the host several microseconds and the GPU
about two, whatever little it does. So

* the splits of a product of one row are added up by what reads it: an RMS norm, an attention, or a fusion of XLA's;
* an RMS norm is one kernel with the residual that is added before it;
* rotation, the write of key and value, and attention over the cache are two.

Everything else is traced as ever; what a kernel has taken over is then used by nobody, and XLA drops it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from torch import fx

from qcore.plugin_api import base_name, is_whole

from .. import calls
from ..pallas import decode, norm, skinny_gemm
from .layers import Siblings
from .quantized import Arrays, Layer


@dataclass(frozen=True)
class _Product:
    """Columns ``start`` to ``start + n`` of a product's splits ``(S, N)``."""

    parts: Array
    start: int
    n: int


def serves(platform: str) -> bool:
    """Whether there are such kernels for a platform."""
    return platform == "cuda" and calls.triton()


class OneRow:
    """What is known, while a program is traced, of products of one row whose splits are not added up yet."""

    def __init__(self, nodes: Sequence[fx.Node] = ()) -> None:
        """``nodes``: of the program; the places of all its caches are read at once, if they are plain counters."""
        steps = [_decoding(*node.args[:3]) for node in nodes if _called(node, "attention")]
        counters = [_counter(step.place) for step in steps if step is not None]
        self._counters = [one for one in dict.fromkeys(counters) if one is not None]
        self._places: Array | None = None
        self._products: dict[fx.Node, _Product] = {}
        self._sums: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}

    def product(self, node: fx.Node, layer: Layer, known: Mapping[fx.Node, Any]) -> Any:
        """The result of a quantized linear layer of one row; None if it is not for here."""
        x, weight, bias, *_, dtype = node.args
        parts = _parts(known[x], known[weight][layer], layer, dtype) if bias is None else None  # type: ignore[index]
        if parts is None:
            return None
        self._products[node] = _Product(parts, 0, layer.n)
        return _added(parts, known[x])  # type: ignore[index]

    def siblings(self, of: Siblings, known: Mapping[fx.Node, Any]) -> list[Any] | None:
        """The results of siblings, see `product`."""
        x, weight, dtype = of.nodes[0].args[0], known[of.weights[0]][of.whole], of.nodes[0].args[5]
        parts = None if isinstance(weight, list) else _parts(known[x], weight, of.whole, dtype)  # type: ignore[index]
        if parts is None:
            return None
        y = _added(parts, known[x])  # type: ignore[index]
        ends = list(itertools.accumulate(layer.n for layer in of.layers))
        for node, layer, end in zip(of.nodes, of.layers, ends, strict=True):
            self._products[node] = _Product(parts, end - layer.n, layer.n)
        return list(jnp.split(y, ends[:-1], axis=-1))

    def other(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        """The result of another node; None if it is not for here. It may replace values that nobody has used yet."""
        name = base_name(node.target)
        if not is_whole(node.target):
            if name == "add":
                self._note_sum(node)
            return None
        if name == "rms_norm":
            return self._rms_norm(node, known)
        return self._attention(node, known) if name == "attention" else None

    def _note_sum(self, node: fx.Node) -> None:
        if len(node.args) == 2 and not node.kwargs and all(isinstance(one, fx.Node) for one in node.args):
            x, y = node.args
            for residual, product in ((x, y), (y, x)):
                of = self._products.get(product)  # type: ignore[arg-type]
                if of is not None and of.parts.shape[1] == of.n and _alike(node, residual, product):
                    self._sums[node] = residual, product  # type: ignore[assignment]

    def _rms_norm(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        of, weight, eps = node.args
        x = known[of]  # type: ignore[index]
        n = x.shape[-1]
        w = None if weight is None else known[weight]  # type: ignore[index]
        if x.size != n or x.dtype != jnp.bfloat16 or not norm.chunk(n) or (w is not None and w.dtype != x.dtype):
            return None
        residual, parts = x, None
        if of in self._sums:
            before, product = self._sums[of]  # type: ignore[index]
            residual, parts = known[before], self._products[product].parts
        h, y = norm.rms_norm(residual.reshape(n), parts, w, eps)  # type: ignore[arg-type]
        if parts is not None:
            known[of] = h.reshape(x.shape)  # type: ignore[index]
        return y.reshape(x.shape)

    def _attention(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        q, k, v, mask, is_causal, scale = node.args
        found = _decoding(q, k, v)
        if found is None or is_causal or mask is None:
            return None
        one, (cos, sin), place, caches = found.products, found.angles, found.place, found.caches
        ours = [self._products.get(product) for product in one]
        keys, values = (known[cache] for cache in caches)
        seen, heads, size = known[mask], known[q].shape[1], keys.shape[-1]  # type: ignore[index]
        ends = (0, heads * size, (heads + keys.shape[1]) * size)
        cut = decode.cut_of(heads, keys.shape[1:], keys.dtype)
        fits = (
            cut is not None and keys.shape == values.shape and keys.shape[0] == 1 and known[q].size == heads * size  # type: ignore[index]
            and all(own is not None and own.parts is ours[0].parts and own.start == end  # type: ignore[union-attr]
                    for own, end in zip(ours, ends, strict=True))
            and seen.size == seen.shape[-1] == keys.shape[2] and keys.dtype == values.dtype == known[q].dtype  # type: ignore[index]
            and known[place].size == 1 and all(known[angle].size == size for angle in (cos, sin))
        )  # fmt: skip
        if not fits or ours[0] is None or cut is None:
            return None
        places, layer = self._places_of(place, known)
        bias = jnp.where(seen, 0.0, -jnp.inf) if seen.dtype == jnp.bool_ else seen.astype(jnp.float32)
        y, keys, values = decode.attention(
            ours[0].parts, known[cos].reshape(-1), known[sin].reshape(-1), keys[0], values[0],
            places, bias.reshape(-1), heads, size**-0.5 if scale is None else scale, cut, layer,  # type: ignore[arg-type]
        )  # fmt: skip
        known[k], known[v] = keys[None], values[None]  # type: ignore[index]
        return y.reshape(known[q].shape)  # type: ignore[index]

    def _places_of(self, place: fx.Node, known: Mapping[fx.Node, Any]) -> tuple[Array, int]:
        """Places in one array, and which of them is ``place``."""
        counter = _counter(place)
        if counter is None:
            return known[place].astype(jnp.int32).reshape(1), 0
        if self._places is None:
            self._places = jnp.stack([known[one].astype(jnp.int32).reshape(()) for one in self._counters])
        return self._places, self._counters.index(counter)


def _parts(x: Array, weight: Arrays, of: Layer, dtype: Any) -> Array | None:
    """The splits of the product of one row with a weight ``(N, K)``, ``(S, N)``; None if another kernel serves it."""
    form, data = of.form(dtype), weight["data"]
    row = x.size == of.k and x.dtype == jnp.bfloat16 and form.out_dtype == "bfloat16" and not form.requantize
    if not (row and form.pallas and form.rows and data.dtype == jnp.int32 and of.cut is None and of.heads == 1):
        return None
    if weight.keys() - {"data", "scale"} or data.shape[0] != of.n:
        return None
    slices = data.reshape(of.n, -1, data.shape[-1])
    if slices.shape[1] * slices.shape[2] * 8 != of.k:
        return None
    cut = skinny_gemm.tiles(1, *slices.shape)
    if cut is None:
        return None
    return skinny_gemm.partial_sums(x.reshape(1, of.k), slices, weight["scale"], cut)[:, 0]


def _added(parts: Array, x: Array) -> Array:
    return jnp.sum(parts, axis=0).astype(x.dtype).reshape(*x.shape[:-1], parts.shape[1])


def _alike(node: fx.Node, *sources: Any) -> bool:
    own = node.meta["val"]
    return all((one.meta["val"].shape, one.meta["val"].dtype) == (own.shape, own.dtype) for one in sources)


@dataclass(frozen=True)
class _Decoding:
    """What an attention over a cache reads: queries', keys' and values' products, angles, the place, the caches."""

    products: tuple[fx.Node, fx.Node, fx.Node]
    angles: tuple[fx.Node, fx.Node]
    place: fx.Node
    caches: tuple[fx.Node, fx.Node]


def _decoding(q: Any, k: Any, v: Any) -> _Decoding | None:
    """The pattern ``attention(rope(q), index_copy(keys, 2, place, rope(k)), index_copy(values, 2, place, v))``."""
    turned_q = _called(q, "rope")
    copies = [_called(one, "index_copy") for one in (k, v)]
    if turned_q is None or copies[0] is None or copies[1] is None:
        return None
    keys, dim, place, new_key = copies[0]
    values, _, _, new_value = copies[1]
    turned_k = _called(new_key, "rope")
    if turned_k is None or turned_k[1:] != turned_q[1:] or dim != 2 or tuple(copies[1][1:3]) != (dim, place):
        return None
    sources = [_unviewed(one) for one in (turned_q[0], turned_k[0], new_value)]
    ready = all(len(one.users) == 2 for one in (k, v))  # the attention, and the program's result
    if not ready or any(one is None for one in sources):
        return None
    return _Decoding(tuple(sources), tuple(turned_q[1:]), place, (keys, values))  # type: ignore[arg-type]


def _counter(place: fx.Node) -> fx.Node | None:
    """The input of the graph that ``place`` is: ``arange(0, 1) + counter``, as transformers' static caches have it."""
    added = _called(place, "add")
    if added is None or len(added) != 2:
        return None
    for start, counter in (added, added[::-1]):
        plain = isinstance(counter, fx.Node) and counter.op == "placeholder" and counter.meta["val"].dim() == 0
        if plain and isinstance(start, fx.Node) and base_name(start.target) == "arange" and tuple(start.args) == (0, 1):
            return counter  # type: ignore[no-any-return]
    return None


def _called(node: Any, name: str) -> tuple[Any, ...] | None:
    """The arguments of a node that calls an op; None for another."""
    ours = isinstance(node, fx.Node) and node.op == "call_function" and base_name(node.target) == name
    return node.args if ours and not node.kwargs else None


def _unviewed(node: Any) -> fx.Node | None:
    """The ``(..., heads * E)`` whose heads of one token are ``node``."""
    permuted = _called(node, "permute")
    if permuted is None or list(permuted[1]) != [0, 2, 1, 3]:
        return None
    viewed = _called(permuted[0], "view")
    return None if viewed is None else viewed[0]
