"""``torch.plain.grouped_linear``: one product for each expert that has rows, by `PlainLinear`.

On a GPU of compute capability 9.0 or newer, bfloat16 products of all experts run in one
`torch.nn.functional.grouped_mm` on weights dequantized a chunk of experts at a time.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..contracts import GroupedLinearRequest, LinearRequest
from ..contracts.grouped import check_ends, check_offsets, expert_rows, read_ends
from ..discovery.kernels import Kernel, Packed, check_weight
from ..errors import FormatError
from ..formats.bits import has_values
from ..weights.qtensor import QTensor
from ..weights.schemes import Scheme
from .ops import op
from .plain_linear import PlainLinear

_MOST_DENSE = 1 << 27
"""Weights dequantized at a time for `grouped_mm`: 256 MiB of bfloat16."""
_ALIGNMENT = 8
"""`grouped_mm` reads 16 bytes at a time: rows of N and K must be multiples of this many bfloat16 numbers."""
_FEWEST_EXPERTS = 4
"""For fewer experts, one product each is as fast."""


class PlainGroupedLinear(Kernel):
    """`grouped_linear` in plain torch ops, on the neutral tensors."""

    def __init__(self, request: GroupedLinearRequest) -> None:
        self.name = "torch.plain.grouped_linear"
        self.experts, self.n, self.k, self.format = request.experts, request.n, request.k, request.weight
        self.out_dtype = request.out_dtype
        self.scheme = str(Scheme(request.weight, activation=request.activation))
        sizes = (request.x_dtype, request.out_dtype, request.n, request.k, None)
        self.linear = PlainLinear(
            LinearRequest(
                request.device, *sizes, request.weight, request.activation, None, request.bias, request.training
            )
        )
        bfloat16 = request.x_dtype == request.out_dtype == torch.bfloat16 and request.activation is None
        aligned = request.n % _ALIGNMENT == 0 and request.k % _ALIGNMENT == 0 and request.n * request.k > 0
        many = self.experts >= _FEWEST_EXPERTS and self.linear.compute == torch.bfloat16
        self.grouped_mm = bfloat16 and aligned and many and _has_grouped_mm(request.device)
        self._traced = op(grouped_linear, _fake, ("CompositeExplicitAutograd",))

    @property
    def packing(self) -> str:
        """The neutral tensors."""
        return "torch.plain"

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """The tensors of ``weight`` ``(E, N, K)``, unchanged; raises `FormatError` for another format or shape."""
        check_weight(self.name, weight, self.format, self.experts, self.n, self.k)
        return weight.tensors()

    def unpack(self, packed: Packed) -> QTensor:
        """The weight ``(E, N, K)``."""
        return QTensor.from_tensors(packed, (self.experts, self.n, self.k), self.format)

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **runtime_params: Tensor) -> Tensor:
        """Run on x ``(T, K)`` with ``offsets`` int32 ``(E,)``, giving ``(T, N)``."""
        offsets = runtime_params["offsets"]
        if torch.compiler.is_compiling():
            parts = (packed.get("zero"), packed.get("global_scale"))
            form = (self.scheme, self.out_dtype, self.n, self.k)
            return self._traced(x, packed["data"], packed["scale"], *parts, bias, offsets, *form)
        if x.dim() != 2 or x.shape[1] != self.k:
            raise FormatError(f"{self.name}: x has shape {tuple(x.shape)}; it must be (T, K) with K={self.k}.")
        check_offsets(offsets, self.experts, x.shape[0])
        if not has_values(offsets):
            return x.new_empty(x.shape[0], self.n, dtype=self.out_dtype)
        return self.run(x, packed, bias, offsets)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, offsets: Tensor) -> Tensor:
        """The products; raises `FormatError` for ends that descend, which are read here anyway."""
        ends = read_ends(offsets)
        check_ends(ends, x.shape[0])
        y = x.new_zeros(x.shape[0], self.n, dtype=self.out_dtype)
        if self.grouped_mm and x.shape[0]:
            return self._in_chunks(x.contiguous(), packed, bias, ends, y)
        for expert, rows in expert_rows(ends):
            own = {name: tensor[expert] for name, tensor in packed.items()}
            y[rows] = self.linear(x[rows], own, None if bias is None else bias[expert])
        return y

    def _in_chunks(self, x: Tensor, packed: Packed, bias: Tensor | None, ends: list[int], y: Tensor) -> Tensor:
        """One `grouped_mm` per chunk of experts that have rows; experts without rows are skipped."""
        step = max(1, _MOST_DENSE // (self.n * self.k))
        busy = list(expert_rows(ends))
        for first in range(0, len(busy), step):
            chunk = busy[first : first + step]
            start, stop = chunk[0][1].start, chunk[-1][1].stop
            dense = torch.stack([self._dense(packed, expert) for expert, _ in chunk])
            offsets = torch.tensor([rows.stop - start for _, rows in chunk], dtype=torch.int32, device=x.device)
            part = torch.nn.functional.grouped_mm(x[start:stop], dense.transpose(1, 2), offs=offsets)
            if bias is not None:
                counts = torch.tensor([rows.stop - rows.start for _, rows in chunk], device=x.device)
                experts = torch.tensor([expert for expert, _ in chunk], device=x.device)
                added = bias.index_select(0, experts).repeat_interleave(counts, dim=0, output_size=stop - start)
                part = part.float() + added.float()
            y[start:stop] = part.to(y.dtype)
        return y

    def _dense(self, packed: Packed, expert: int) -> Tensor:
        """The weight of one expert, bfloat16 ``(N, K)``, columns in the order of x."""
        own = {name: tensor[expert] for name, tensor in packed.items()}
        factor = own.get("global_scale")
        reader = self.linear.reader
        rows = [reader.dense(*chunk, torch.bfloat16, factor) for chunk in reader.chunks(own)]
        return reader.restore_order(rows[0] if len(rows) == 1 else torch.cat(rows))


@lru_cache(maxsize=16)
def _has_grouped_mm(device: torch.device) -> bool:
    if device.type != "cuda" or not hasattr(torch.nn.functional, "grouped_mm") or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache(maxsize=256)
def _kernel(
    scheme: str, device: torch.device, x_dtype: torch.dtype, out: torch.dtype, e: int, n: int, k: int, bias: bool
) -> PlainGroupedLinear:
    asked = Scheme.parse(scheme)
    return PlainGroupedLinear(
        GroupedLinearRequest(device, x_dtype, out, e, n, k, asked.weight, asked.activation, bias, False)
    )


def grouped_linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor,
    scheme: str,
    out_dtype: torch.dtype,
    n: int,
    k: int,
) -> Tensor:
    """The op that a compiled graph calls: the number of rows of an expert is unknown while a graph is traced."""
    kernel = _kernel(scheme, x.device, x.dtype, out_dtype, data.shape[0], n, k, bias is not None)
    packed = {"data": data, "scale": scale, "zero": zero, "global_scale": global_scale}
    return kernel(x, {name: t for name, t in packed.items() if t is not None}, bias, offsets=offsets)


def _fake(x: Tensor, *arguments: object) -> Tensor:
    *_, out_dtype, n, _k = arguments
    return x.new_empty(x.shape[0], n, dtype=out_dtype)  # type: ignore[call-overload, no-any-return]
