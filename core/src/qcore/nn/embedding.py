"""`QuantizedEmbedding`."""

# ruff: noqa: ARG002 - methods of the base class take arguments about activations and gradients, which a table lacks

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..contracts import EmbeddingRequest
from ..contracts.embedding import INDEX_DTYPES, check_index_dtype
from ..errors import UnsupportedError
from ..formats.tracing import is_transformed
from ..functional.checks import FLOAT_DTYPES, check_dense, check_module
from ..resolving.binding import WeightStore
from ..weights.qtensor import QTensor
from ..weights.quantizers import quantize
from ..weights.schemes import Scheme
from .base import QuantizedModule, adopt


class QuantizedEmbedding(QuantizedModule):
    """Looks up rows of a quantized table and dequantizes only those; replaces `torch.nn.Embedding`.

    ``indices``: int64 or int32 of any shape; result: ``(*indices.shape, embedding_dim)`` of the layer's dtype.
    An index out of range raises `IndexError`, one of another dtype `FormatError`. Only the weight part of a scheme
    applies.
    """

    # Attributes that adapters read from an embedding, with values that switch these features off.
    max_norm: None = None
    norm_type = 2.0
    scale_grad_by_freq = sparse = False
    _dtypes = FLOAT_DTYPES  # nothing tells that of the result but the layer, in a model of float64, too

    def __init__(self, store: WeightStore, scheme: Scheme, dtype: torch.dtype, padding_idx: int | None = None) -> None:
        self.num_embeddings, self.embedding_dim = store.shape
        self.padding_idx = padding_idx
        super().__init__(store, Scheme(scheme.weight, scheme.quantizer), None, dtype)

    @classmethod
    def from_float(
        cls, module: nn.Embedding, scheme: Scheme | str, *, name: str = "weight", moments: Tensor | None = None
    ) -> QuantizedEmbedding:
        """Quantize a `torch.nn.Embedding`. Raises `UnsupportedError` for ``max_norm``, which rewrites the table.

        A table has no activations for ``@gptq`` to use, so ``mse`` replaces it, also in the layer's scheme.
        ``moments``: of a linear layer that shares the table, if there is one.
        """
        check_module(module, "from_float")
        if module.max_norm is not None:
            raise UnsupportedError("max_norm rewrites its table while the embedding runs; it cannot be quantized.")
        wanted = Scheme.parse(scheme)
        if wanted.needs_moments and moments is None:
            wanted = replace(wanted, quantizer="mse")
        weight = quantize(module.weight, wanted.weight, wanted.quantizer, moments=moments, name=name)
        made = cls(WeightStore(weight), wanted, module.weight.dtype, module.padding_idx)
        adopt(made, module)
        return made

    @classmethod
    def from_qtensor(
        cls, weight: QTensor, *, dtype: torch.dtype | None = None, padding_idx: int | None = None
    ) -> QuantizedEmbedding:
        """Wrap a quantized table ``(V, D)``; ``dtype``: of the result, default the scale's dtype."""
        return cls(WeightStore(weight), Scheme(weight.format), dtype or weight.dtype, padding_idx)

    def _request(self, x_dtype: torch.dtype, training: bool) -> EmbeddingRequest:
        sizes = (self.num_embeddings, self.embedding_dim)
        return EmbeddingRequest(self._store.device, self.out_dtype or self._dtype, *sizes, self.scheme.weight)

    def _check(self, x: Tensor) -> None:
        self._follow()
        check_dense("indices", x, self._store.device)
        check_index_dtype(x)

    def _compute_dtype(self, x: Tensor) -> torch.dtype:
        # Lookups ignore autocast and run in the layer's own dtype, as in torch.nn.Embedding.
        return self._dtype

    def _needs_grad(self, x: Tensor) -> bool:
        # A table has no gradient; only `call_differentiably` looks up batches of vmap at once.
        return not torch.compiler.is_compiling() and is_transformed()

    def _run_traced(self, x: Tensor, **params: Tensor) -> Tensor:
        return super()._run_traced(x, **params).to(self.out_dtype or self._dtype)

    def forward(self, indices: Tensor) -> Tensor:
        """Look up rows: ``(*indices.shape, embedding_dim)`` of the layer's dtype."""
        if (
            torch.compiler.is_compiling()
            or type(indices) is not Tensor
            or (bound := self._primary) is None
            or not bound.proven
            or (self._store.watch.handed and self._store.watch.is_changed())
            or not self._has_own_buffers()
            or indices.dtype not in INDEX_DTYPES
            or indices.device != self._store.device
            or indices.layout is not torch.strided
            or indices.is_nested
            or is_transformed()
        ):
            return self._run(indices)
        return bound.call(indices)

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        bound_kernel = "not bound" if self._primary is None else self._primary.name
        return f"{self.num_embeddings}, {self.embedding_dim}, scheme={self.scheme}, kernel={bound_kernel}"
