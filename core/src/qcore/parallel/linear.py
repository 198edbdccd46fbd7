"""`ColumnParallelLinear` and `RowParallelLinear`: one rank's part of a quantized linear layer."""

# ruff: noqa: SLF001 - made from layers of qcore.nn, whose store and dtype they take

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..contracts import LinearRequest
from ..errors import FormatError, UnsupportedError
from ..functional.autograd import call_differentiably
from ..functional.checks import check_last_dimension
from ..nn.base import FLOATS, adopt
from ..nn.linear import QuantizedLinear
from ..nn.parts import mark_part
from ..nn.siblings import RowsStore, SiblingLinear
from ..resolving.binding import Bound, WeightStore
from ..weights.activations import DynamicFP8, DynamicInt8, StaticInt8, dynamic_parameters, quantize_int8
from ..weights.qtensor import QTensor
from ..weights.schemes import Scheme
from .cutting import (
    Cut,
    Share,
    check_dims,
    cut_columns,
    cut_ordered,
    cut_rows,
    cut_values,
    group_of,
    scheme_of_cut,
    shares,
)
from .ranks import AllReduce, Ranks

LOCAL, GLOBAL = "local", "global"
_FACTS = ("ranks", "share", "gathers", "sum_dtype", "scales")
OVERLAPPED_ROWS = 2048
"""Rows from which a sum over ranks is worth two products: below, halves take longer than the sum that they hide."""


class _Parallel(QuantizedLinear):
    """What both kinds share: the ranks, and this rank's share of the features that are cut."""

    ranks: Ranks
    share: Share

    @classmethod
    def from_float(
        cls, module: nn.Linear, scheme: Scheme | str, *, name: str = "weight", moments: Tensor | None = None, **cut: Any
    ) -> Any:
        """Quantize a whole `torch.nn.Linear` and keep this rank's part; ``cut``: arguments of `from_linear`."""
        return cls.from_linear(QuantizedLinear.from_float(module, scheme, name=name, moments=moments), **cut)

    @classmethod
    def from_qtensor(
        cls,
        weight: QTensor,
        bias: Tensor | None = None,
        scheme: Scheme | str | None = None,
        *,
        dtype: torch.dtype | None = None,
        **cut: Any,
    ) -> Any:
        """Keep this rank's part of a whole weight ``(N, K)`` and bias ``(N,)``; ``cut``: as for `from_linear`."""
        check_dims(weight)
        wanted = Scheme(weight.format) if scheme is None else Scheme.parse(scheme)
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise FormatError(f"bias has shape {tuple(bias.shape)}; this weight needs ({weight.shape[0]},).")
        return cls._cut(weight, bias, wanted, dtype or weight.dtype, **cut)

    @classmethod
    def from_linear(cls, layer: QuantizedLinear, **cut: Any) -> Any:
        """Cut a whole layer, which is left unchanged. Hooks and mode are kept."""
        _check_whole(layer)
        made = cls._cut(layer._store.neutral(), layer.bias, layer.scheme, layer._dtype, **cut)
        adopt(made, layer)
        if layer.out_dtype is not None:
            made.out_dtype = layer.out_dtype
        return made

    @classmethod
    def _cut(cls, *whole: Any, **cut: Any) -> Any:
        """Make this rank's part of a whole weight and bias, of a scheme and a compute dtype."""
        raise NotImplementedError

    @classmethod
    def _made(cls, store: WeightStore, scheme: Scheme, bias: Tensor | None, dtype: torch.dtype, **facts: Any) -> Any:
        """Construct with attributes that binding reads."""
        made = cls.__new__(cls)
        for name, value in facts.items():
            object.__setattr__(made, name, value)
        made.__init__(store, replace(scheme, weight=store.format), bias, dtype)  # type: ignore[misc]
        mark_part(made, made.ranks.rank, made.ranks.size)
        return made

    def _remade(self, store: WeightStore, scheme: Scheme) -> Any:
        """Make the same part of another weight."""
        kept = {name: value for name, value in vars(self).items() if name in _FACTS}
        made = self._made(store, scheme, self.bias, self._dtype, **kept)
        if "columns" in self._buffers:
            made.register_buffer("columns", self.columns)
        return made

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        share = f"{self.share.start}..{self.share.stop} of {self.share.total}"
        return f"{super().extra_repr()}, rank={self.ranks.rank} of {self.ranks.size}, features={share}"


class ColumnParallelLinear(_Parallel):
    """The output features of one rank: ``y = A(x) @ W[start:stop]^T + bias[start:stop]``.

    ``x``: ``(..., K)``, the same on every rank; ``y``: ``(..., stop - start)``, or ``(..., N)``, equal on every rank,
    if ``gather``. Forward communicates only then; backward sums the gradient of x over the ranks.
    Make one with `from_linear`, `from_qtensor` or `from_float`, or whole models with `shard_`.

    **Arguments** of these, beside those of `QuantizedLinear`: ``group``: of torch.distributed, default all ranks;
    ``unit``, ``replicate``, ``parts``: see `Cut`; ``gather``.
    """

    gathers: tuple[int, ...] = ()

    @classmethod
    def _cut(
        cls,
        weight: QTensor,
        bias: Tensor | None,
        scheme: Scheme,
        dtype: torch.dtype,
        *,
        group: Any = None,
        unit: int = 1,
        replicate: bool = False,
        parts: int = 1,
        gather: bool = False,
        ranks: Ranks | None = None,
    ) -> Any:
        ranks = ranks or Ranks(group)
        n = weight.shape[0]
        if n % parts or (gather and (parts > 1 or replicate)):
            raise UnsupportedError(f"cannot cut {n} output features as {parts} parts; gather takes one part of each.")
        every = shares(n // parts, ranks.size, unit, replicate=replicate, what="output features")
        share = every[ranks.rank]
        facts: dict[str, Any] = {"ranks": ranks, "share": share}
        facts["gathers"] = tuple(s.length for s in every) if gather else ()
        own = cut_values(None if bias is None else bias.detach(), share, parts)
        kept = None if own is None else nn.Parameter(own, requires_grad=bool(bias is not None and bias.requires_grad))
        return cls._made(WeightStore(cut_rows(weight, share, parts)), scheme, kept, dtype, **facts)

    @staticmethod
    def sibling(layer: ColumnParallelLinear, store: RowsStore) -> SiblingLinear:
        """Make the sibling that `qcore.fuse_` replaces ``layer`` by."""
        if layer.gathers:
            raise FormatError("layers that gather their results cannot be joined.")
        made = _ColumnSibling(store, layer.scheme, layer.bias, layer._dtype)
        made.ranks, made.share = layer.ranks, layer.share
        mark_part(made, made.ranks.rank, made.ranks.size)
        return made

    def _run(self, x: Tensor, **params: Tensor) -> Tensor:
        return super()._run(self.ranks.shared(x), **params)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the part. Raises `FormatError` if the last dimension of x is not ``in_features``."""
        y = super().forward(x)
        return self.ranks.joined(y, self.gathers) if self.gathers else y


class _ColumnSibling(SiblingLinear):
    """A `ColumnParallelLinear` that shares its packed weight with siblings."""

    ranks: Ranks
    share: Share

    def _remade(self, store: WeightStore, scheme: Scheme) -> Any:
        return ColumnParallelLinear._made(store, scheme, self.bias, self._dtype, ranks=self.ranks, share=self.share)

    def _run(self, x: Tensor, **params: Tensor) -> Tensor:
        return super()._run(self.ranks.shared(x), **params)


class RowParallelLinear(_Parallel):
    """The input features of one rank, summed over the ranks: ``y = sum_r A(x_r) @ W[:, r]^T + bias``.

    ``x``: ``(..., stop - start)``, this rank's features, as a `ColumnParallelLinear` with the same shares returns them;
    ``y``: ``(..., N)``, equal on every rank. One all_reduce; bias, and int8 results, after the sum.

    **Arguments** of `from_linear`, `from_qtensor` and `from_float`, beside those of `QuantizedLinear`:

    - ``group``: of torch.distributed, default all ranks; ``unit``: see `Cut`; ``replicate``, ``parts``: unsupported.
    - ``sum_dtype``: of the partial sums and the all_reduce; None for the dtype of x, as engines do: each part is
      rounded to it. ``torch.float32`` rounds once, for twice the bytes of a half-precision model.
    - ``scales``: of activations that are quantized per token at run time. ``"local"``: from this rank's features, finer
      than one scale for all and without communication, so results depend on the number of ranks. ``"global"``: from all
      features, as on one device, by one more all_reduce of one float per token (two if asymmetric); int8 only.
    - ``all_reduce``: a function that replaces the sum over the group.

    Groups that a border cuts become finer, exactly. A weight with an order keeps the columns of its own features,
    sorted by group and padded; see `fold_order_` for a way without padding.
    """

    sum_dtype: torch.dtype | None = None
    scales: str = LOCAL
    overlaps_on = "cuda"
    """The type of device on which sums travel beside products: elsewhere both want the same processor."""
    columns: Tensor | None

    @classmethod
    def _cut(
        cls,
        weight: QTensor,
        bias: Tensor | None,
        scheme: Scheme,
        dtype: torch.dtype,
        *,
        group: Any = None,
        unit: int = 1,
        sum_dtype: torch.dtype | None = None,
        scales: str = LOCAL,
        all_reduce: AllReduce | None = None,
        ranks: Ranks | None = None,
    ) -> Any:
        ranks = ranks or Ranks(group, all_reduce)
        every = shares(weight.shape[1], ranks.size, unit, what="input features")
        check_sums(scheme, every, sum_dtype, scales)
        share = every[ranks.rank]
        columns = None
        if weight.order is not None:
            part, columns = cut_ordered(weight, share)
        else:
            part = cut_columns(weight, share)
        facts: dict[str, Any] = {"ranks": ranks, "share": share, "sum_dtype": sum_dtype, "scales": scales}
        made = cls._made(WeightStore(part), scheme_of_cut(scheme, part), bias, dtype, **facts)
        made.register_buffer("columns", columns)
        return made

    @property
    def _is_global(self) -> bool:
        return self.scales == GLOBAL and isinstance(self.scheme.activation, DynamicInt8)

    # Binding: a partial sum, without bias and as a float.

    def _request(self, x_dtype: torch.dtype, training: bool) -> LinearRequest:
        request = super()._request(x_dtype, training)
        given = {"x_dtype": torch.int8, "activation": StaticInt8(per_token=True)} if self._is_global else {}
        return replace(request, output=None, bias=False, **given)  # type: ignore[arg-type]

    def _out_dtype(self, x_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the partial sums."""
        return self.sum_dtype or self._fixed_out_dtype or (x_dtype if x_dtype.is_floating_point else self._dtype)

    def _call_bias(self) -> None:
        return None

    def _trace_dtype(self, bound: Bound, x: Tensor) -> torch.dtype:
        return self._dtype if self._is_global else super()._trace_dtype(bound, x)

    def _call(
        self, bound: Bound, packed: dict[str, Tensor], x: Tensor, training: bool, params: dict[str, Tensor]
    ) -> Tensor:
        kernel: Any = _Quantizing(bound.kernel) if self._is_global else bound.kernel
        if training:
            return call_differentiably(x, None, kernel, packed, bound.request, params)
        return kernel(x, packed, None, **params)  # type: ignore[no-any-return]

    # Running.

    def forward(self, x: Tensor) -> Tensor:
        """Apply the part and sum. Raises `FormatError` if the last dimension of x is not this rank's share."""
        if self.columns is not None:
            check_last_dimension(x, self.share.length, "this rank's input features")
            x = nn.functional.pad(x, (0, 1), value=self._zero_of(x)).index_select(-1, self.columns)
        wanted = self._fixed_out_dtype or (self._dtype if x.dtype == torch.int8 else self._compute_dtype(x))
        y = self._summed(x)
        if self.bias is not None:
            y = y + self.bias
        output = self.scheme.output
        if output is not None:
            assert output.scale is not None
            return quantize_int8(y, output.scale, output.zero_point)
        return y.to(wanted)

    def _summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks; many rows on a GPU in halves: one is summed while the other is multiplied."""
        rows = x.numel() // max(1, x.shape[-1])
        if self._is_global or x.device.type != self.overlaps_on or rows < OVERLAPPED_ROWS or not self.ranks.may_overlap:
            return self.ranks.sum(self._partial(x))
        # Halves of a multiple of 128 rows, the largest tile of a kernel.
        halves = torch.split(x.reshape(-1, x.shape[-1]), -(-rows // 256) * 128)
        return torch.cat(self.ranks.overlapped(map(self._partial, halves))).view(*x.shape[:-1], -1)

    def _zero_of(self, x: Tensor) -> int:
        """What stands for zero in x: of int8 codes it is their zero point."""
        activation = self.scheme.activation
        known = x.dtype == torch.int8 and isinstance(activation, StaticInt8)
        return (activation.zero_point or 0) if known else 0  # type: ignore[union-attr]

    def _partial(self, x: Tensor) -> Tensor:
        if self._is_global:
            return self._with_global_scales(x)
        if torch.compiler.is_compiling():
            return self._run(x)
        bound = self._fast_bound(x, None)
        return self._run(x) if bound is None else bound.call(x, None)

    def _with_global_scales(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self._check(x)
        activation = self.scheme.activation
        assert isinstance(activation, DynamicInt8)
        # Cast first, as a layer on one device does under autocast.
        x = x.to(self._compute_dtype(x))
        with torch.no_grad():
            scale, zero = self._token_parameters(x, activation.symmetric)
        return self._run_checked(x, x_scale=scale, x_zero_point=zero)

    def _token_parameters(self, x: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
        """Scale, float32, and zero point, int32, ``(tokens,)``, of each token over the features of all ranks."""
        flat = x.reshape(-1, x.shape[-1])
        high, low = (flat.abs().amax(-1), None) if symmetric else (flat.amax(-1), -flat.amin(-1))
        largest = self.ranks.max((high if low is None else torch.stack([high, low])).float())
        ends = largest.unsqueeze(-1) if symmetric else torch.stack([largest[0], -largest[1]], -1)
        scale, zero = dynamic_parameters(ends, symmetric)
        blank = torch.zeros_like(scale) if zero is None else zero
        return scale.flatten(), torch.where(blank.isfinite(), blank, 0).to(torch.int32).flatten()


class _Quantizing:
    """A kernel for int8 codes, given x and the parameters of its tokens."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.unpack: Callable[..., QTensor] = kernel.unpack

    def __call__(self, x: Tensor, packed: Any, bias: Tensor | None, *, x_scale: Tensor, x_zero_point: Tensor) -> Tensor:
        shape = (*x.shape[:-1], 1)
        codes = quantize_int8(x, x_scale.reshape(shape), x_zero_point.reshape(shape))
        return self._kernel(codes, packed, bias, x_scale=x_scale, x_zero_point=x_zero_point)  # type: ignore[no-any-return]


def _check_whole(layer: Any) -> None:
    if isinstance(layer, (_Parallel, _ColumnSibling)):
        raise UnsupportedError(f"a {type(layer).__name__} is cut already: shard_ each layer once.")
    if not isinstance(layer, QuantizedLinear):
        raise UnsupportedError(f"a {type(layer).__name__} is no QuantizedLinear; shard_ cuts layers of other kinds.")
    if len(layer._store.users) > 1 and not isinstance(layer, SiblingLinear):
        raise UnsupportedError("the layer shares its weight with another one (tied); untie it, or leave it whole.")


def check_sums(scheme: Scheme, every: Sequence[Share], sum_dtype: torch.dtype | None, scales: str) -> None:
    """Raise `UnsupportedError` for settings of `RowParallelLinear` that this scheme cannot have."""
    if sum_dtype is not None and sum_dtype not in FLOATS:
        raise UnsupportedError(f"sum_dtype is {sum_dtype}; it must be float32, bfloat16, float16 or None.")
    if scales not in (LOCAL, GLOBAL):
        raise UnsupportedError(f"scales is {scales!r}; it must be 'local' or 'global'.")
    activation = scheme.activation
    if scales == LOCAL or not isinstance(activation, DynamicFP8):
        return
    if activation.group is not None:
        if any(group_of(scheme.weight, share) != activation.group for share in every):
            raise UnsupportedError("global scales: activations in groups need cuts at whole groups.")
    else:
        raise UnsupportedError(
            f"scheme {str(scheme)!r}: fp8 scales per token cannot be given to a kernel, so they are local.\n"
            f"Use scales='local', or static activations."
        )


def column_arguments(cut: Cut) -> dict[str, Any]:
    """The arguments of `ColumnParallelLinear.from_linear` for a cut."""
    return {"unit": cut.unit or 1, "replicate": cut.replicate, "parts": cut.parts, "gather": cut.kind == "gather"}
