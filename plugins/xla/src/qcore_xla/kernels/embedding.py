"""The kernel of the contract ``embedding``: ``xla.embedding``."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from qcore import EmbeddingRequest, QTensor
from qcore.plugin_api import PLAIN, Packed, check_weight, runs_now

from .. import calls, ops
from ..packing import PackedKernel
from ..tables import pack_table, plan_of_table, unpack_table
from ..views import pack_whole


class XlaEmbedding(PackedKernel):
    """Gathers rows and dequantizes only those."""

    def __init__(self, request: EmbeddingRequest) -> None:
        super().__init__("xla.embedding", request.weight, request.n, request.k)
        self.table = plan_of_table(self.n, self.k, self.format)
        self.out_dtype = request.out_dtype
        plain = str(self.format.with_layout(PLAIN))
        self._constants = (self.n, self.k, plain, request.out_dtype)

    @property
    def packing(self) -> str:
        return "xla.table"

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        check_weight(self.name, weight, self.format, self.n, self.k)
        return pack_whole(weight, partial(pack_table, plan=self.table))

    def _unpacked(self, packed: Packed) -> QTensor:
        return unpack_table(packed, self.table, self.format)

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None = None, **_given: Tensor) -> Tensor:
        """Indices x, int32 or int64 of any shape, to ``(*x.shape, D)``; raises `IndexError` outside of ``0..V-1``."""
        del bias  # an embedding has none
        call = calls.embedding if runs_now(x) else ops.op_embedding
        weight = (packed["data"], packed["scale"], packed.get("zero"), packed.get("factor"))
        return call(x, *weight, *self._constants)
