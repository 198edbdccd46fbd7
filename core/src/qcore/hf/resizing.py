"""``resize_token_embeddings`` of models with quantized embeddings and heads.

Existing rows keep their codes; added rows are those that transformers creates for a float layer, quantized.
"""

# ruff: noqa: SLF001 - the private names are those of transformers' interface and of qcore's own modules

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..formats import PLAIN
from ..nn import QuantizedEmbedding, QuantizedLinear
from ..nn.base import QuantizedModule, adopt
from ..nn.counterparts import rebuild
from ..resolving.binding import WeightStore
from ..weights.qtensor import QTensor
from ..weights.quantizers import quantize

_EMBEDDINGS, _HEAD = "_get_resized_embeddings", "_get_resized_lm_head"
_TIES = "get_expanded_tied_weights_keys"

_RESIZED: WeakKeyDictionary[WeightStore, WeightStore] = WeakKeyDictionary()
"""Maps each weight to its resized weight, so that tied layers stay tied."""


def make_resizable(model: Any) -> None:
    """Make ``model.resize_token_embeddings`` resize quantized layers, too."""
    setattr(model, _EMBEDDINGS, functools.partial(_resized_embeddings, model))
    setattr(model, _HEAD, functools.partial(_resized_head, model))
    setattr(model, _TIES, functools.partial(_expanded_ties, model))


def _expanded_ties(model: Any, all_submodels: bool = False) -> dict[str, str]:
    """As transformers' method of this name, which looks for patterns among parameters: quantized weights are none.

    The names are those that were found while all weights were float.
    """
    try:
        return dict(type(model).get_expanded_tied_weights_keys(model, all_submodels))
    except ValueError:
        return dict(model.all_tied_weights_keys)


def _resized_embeddings(
    model: Any,
    old_embeddings: nn.Module,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> Any:
    """As transformers' method of this name; a quantized layer is replaced."""
    own = functools.partial(type(model)._get_resized_embeddings, model)
    if not isinstance(old_embeddings, QuantizedEmbedding):
        return own(old_embeddings, new_num_tokens, pad_to_multiple_of, mean_resizing)
    rows = old_embeddings.num_embeddings
    if new_num_tokens is None and pad_to_multiple_of is None:
        return old_embeddings
    wanted = rows if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted += -wanted % pad_to_multiple_of

    def grown() -> Tensor:
        table = nn.Embedding(rows, old_embeddings.embedding_dim, device="meta")
        table.weight = nn.Parameter(old_embeddings.weight.dequantize(), requires_grad=False)
        return own(table, wanted, None, mean_resizing).weight  # type: ignore[no-any-return]

    store = _resized(old_embeddings, wanted, grown)
    padding = old_embeddings.padding_idx
    padding = padding if padding is None or padding < wanted else None
    made: Any = rebuild(old_embeddings, store, old_embeddings.scheme)
    made.padding_idx = padding
    return made


def _resized_head(
    model: Any, old_lm_head: nn.Module, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """As transformers' method of this name; a quantized layer is replaced."""
    own = functools.partial(type(model)._get_resized_lm_head, model)
    if not isinstance(old_lm_head, QuantizedLinear) or new_num_tokens is None:
        return own(old_lm_head, new_num_tokens, *args, **kwargs)
    n, bias, wanted = old_lm_head.out_features, old_lm_head.bias, new_num_tokens

    def grown() -> Tensor:
        head = nn.Linear(old_lm_head.in_features, n, bias=False)
        head.weight = nn.Parameter(old_lm_head.weight.dequantize(), requires_grad=False)
        return own(head, wanted, *args, **kwargs).weight  # type: ignore[no-any-return]

    store = _resized(old_lm_head, wanted, grown)
    if bias is not None:
        kept = bias.detach()[:wanted]
        bias = nn.Parameter(torch.cat([kept, kept.new_zeros(wanted - len(kept))]), bias.requires_grad)
    made = QuantizedLinear(store, old_lm_head.scheme, bias, old_lm_head._dtype)
    adopt(made, old_lm_head)
    return made


def _resized(layer: QuantizedModule, rows: int, grown: Any) -> WeightStore:
    """The weight of a layer with ``rows`` rows. ``grown``: computes the float weight with rows added."""
    store, weight = layer._store, layer.weight.convert(PLAIN)
    if rows == weight.shape[0]:
        return store
    found = _RESIZED.get(store)
    if found is None or found.shape[0] != rows:
        made = weight.narrow(0, 0, rows) if rows < weight.shape[0] else _with_rows(weight, grown())
        found = _RESIZED[store] = WeightStore(made)
    return found


def _with_rows(weight: QTensor, wanted: Tensor) -> QTensor:
    """The weight with the quantized rows of ``wanted`` appended."""
    if weight.global_scale is not None or weight.order is not None:
        what = "a global scale" if weight.order is None else "an order of its columns"
        raise UnsupportedError(
            f"rows cannot be added to a weight {weight.format} with {what}, which applies to all rows.\n"
            f"Resize the float model before it is quantized, or exclude its embeddings."
        )
    rows = quantize(wanted[weight.shape[0] :].detach(), weight.format, scale_dtype=weight.scale.dtype, name="new rows")
    return QTensor.cat([weight, rows])
