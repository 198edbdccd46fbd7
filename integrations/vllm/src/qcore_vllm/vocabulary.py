"""vLLM's embeddings and heads over qcore, tied or not, cut by the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from qcore import QTensor, UnsupportedError
from qcore.nn import QuantizedEmbedding, QuantizedLinear

from .layer_weight import LayerWeight
from .methods import empty

if TYPE_CHECKING:
    from .config import QcoreConfig


class QcoreVocabularyMethod(QuantizeMethodBase):  # type: ignore[misc, unused-ignore]
    """Loads a table of the vocabulary through qcore. One that stays float goes back to vLLM's own method."""

    def __init__(self, config: QcoreConfig, prefix: str) -> None:
        super().__init__()
        self.config, self.prefix = config, prefix

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parameter ``weight``, which has no memory: this rank's rows, padded with zeros."""
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = self.config.layer_weight(self.prefix, shape, params_dtype)
        layer.register_parameter("weight", weight.parameter(input_dim=1, output_dim=0, **extra_weight_attrs))

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Let a head use the weight of an embedding."""
        weight: LayerWeight | None = getattr(embed_tokens.weight, "layer_weight", None)
        layer.weight = embed_tokens.weight
        if weight is None:  # the model makes this embedding without qcore
            layer.quant_method = UnquantizedEmbeddingMethod()
        else:
            weight.names.append(self.prefix)
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack what was loaded for the device. A second call changes nothing."""
        weight: LayerWeight | None = getattr(layer.weight, "layer_weight", None)
        if weight is None:
            return
        if id(weight) not in self.config.shared:
            self.config.shared[id(weight)] = Shared(weight)
        shared: Shared = self.config.shared[id(weight)]
        if shared.table is None:
            _serve_float(layer, shared.dense)
            return
        layer.qcore = self.config.bound(lambda: shared.layer(isinstance(layer, ParallelLMHead)), weight)
        layer.weight = empty(weight)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """The rows of these ids, which are of this rank."""
        return layer.qcore(input_)  # type: ignore[no-any-return]

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The logits of this rank's part of the vocabulary."""
        if isinstance(layer.qcore, QuantizedEmbedding):  # some models compute logits with the embedding itself
            layer.qcore_head = getattr(layer, "qcore_head", None) or _head_of(layer.qcore)
            y = layer.qcore_head(x)
        else:
            y = layer.qcore(x)
        return y if bias is None else y + bias  # type: ignore[no-any-return]


class Shared:
    """A table and the layers that use it: an embedding, a head, or both. ``table``: None if it is float."""

    def __init__(self, weight: LayerWeight) -> None:
        self.dtype, self.weight = weight.dtype, weight
        self.table: QTensor | None = None
        self.dense: nn.Parameter | None = None
        if weight.is_float:
            self.dense = nn.Parameter(weight.dense(), requires_grad=False)
            weight.clear()
            return
        parts = weight.parts()
        if len(parts) > 1 or not isinstance(parts[0].weight, QTensor):
            raise UnsupportedError(f"{weight.names[0]}: its rows have different formats: {'; '.join(map(str, parts))}.")
        self.table, self.scheme = parts[0].weight, parts[0].scheme
        self.layers: list[QuantizedEmbedding | QuantizedLinear] = []

    def layer(self, is_head: bool) -> QuantizedEmbedding | QuantizedLinear:
        """Another layer over the table; all share its memory."""
        assert self.table is not None
        made: QuantizedEmbedding | QuantizedLinear
        if is_head:
            made = QuantizedLinear.from_qtensor(self.table, None, self.scheme, dtype=self.dtype)
        else:
            made = QuantizedEmbedding.from_qtensor(self.table, dtype=self.dtype)
        if self.layers:
            made.weight = self.layers[0].weight  # type: ignore[misc]
        self.layers.append(made)
        self.table = made.weight  # the neutral tensors are freed as soon as they are packed
        return made


def _head_of(table: QuantizedEmbedding) -> QuantizedLinear:
    made = QuantizedLinear.from_qtensor(table.weight, None, dtype=table.weight.dtype)
    made.weight = table.weight  # type: ignore[misc]
    return made


def _serve_float(layer: Any, dense: nn.Parameter | None) -> None:
    layer.weight = dense
    layer.quant_method = UnquantizedEmbeddingMethod()
    layer.quant_method.process_weights_after_loading(layer)
