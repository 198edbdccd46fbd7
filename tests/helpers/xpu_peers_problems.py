"""Problems of the contract `linear` as operands of the XPU op for int4, and mistakes that must show in its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qcore import PLAIN_INT32, Format, QTensor, Scheme, ZeroPoint
from qcore.contracts import LINEAR, Problem
from qcore.contracts.inputs import Draw, Shape

INT4 = ("w4a16", "w4a16-asym", "w4a16-g32-asym", "w4a16-g128", "w4a16-g128-asym")
"""Schemes whose zero point is one that the op knows: none, or whole numbers."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Operands:
    """The weight ``(N, K)`` as `_weight_int4pack_mm_with_scales_and_zeros` takes it.

    ``words``: int32 ``(N, K/8)``; ``scale``: ``(K/group, N)``; ``zeros``: int8 ``(K/group, N)``, in 0..15.
    """

    words: Tensor
    scale: Tensor
    zeros: Tensor
    group: int

    def given_to(self, op: Callable[..., Tensor], x: Tensor) -> Tensor:
        """The result of an op with the arguments of that one."""
        return op(x, self.words, self.group, self.scale, self.zeros)


def operands(weight: QTensor, scale_dtype: torch.dtype | None = None) -> Operands:
    """The neutral bytes of an int4 weight: `PLAIN_INT32` as it is; ``scale_dtype``: default the stored one."""
    plain = weight.convert(PLAIN_INT32)
    zeros = torch.full_like(plain.scale, 8, dtype=torch.int8) if plain.zero is None else plain.zero
    # Per channel the group may be longer than K: no column looks into a second one.
    group = weight.format.group_size or -(-weight.shape[1] // 8) * 8
    return Operands(plain.data, plain.scale.to(scale_dtype or plain.scale.dtype), zeros, group)


def problems(scheme: str, dtype: torch.dtype, seed: int, *without: str) -> Iterator[tuple[str, Problem]]:
    """Every case of the contract that has rows, with random numbers, by its name; ``without``: shape classes."""
    wanted = Scheme.parse(scheme)
    for case in LINEAR.cases([wanted], [dtype]):
        # The contract adds schemes of its own to those it is asked for.
        if case.scheme == str(wanted.blank()) and not case.id.endswith(tuple(f"-{n}]" for n in ("rows-0", *without))):
            yield case.id, case.build(seed)


def for_the_op(problem: Problem) -> Problem:
    """The problem as a caller of the op has to put it: x in two dimensions and dense, no bias."""
    x = problem.x.reshape(-1, problem.request.k).contiguous()
    return replace(problem, request=replace(problem.request, bias=False), x=x, bias=None)


def made(scheme: str, m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> Problem:
    """A problem of these sizes, with weights that lean to one side."""
    draw = Draw(torch.Generator().manual_seed(seed))
    filled = draw.fill(Scheme.parse(scheme))
    request = LINEAR.request_for(filled, torch.device("cpu"), dtype, n, k)
    return draw.linear(request, Shape("case", (m,), n, k), dtype=dtype)


def every_code(scale_dtype: torch.dtype) -> QTensor:
    """A weight that holds each code at each place of a word, against each zero point.

    ``(16, 512)``, groups of 32: group g has the zero point g - 8, and down a column codes run through all sixteen.
    Scales use all the bits that ``scale_dtype`` has.
    """
    n, k, g = 16, 512, 32
    codes = ((torch.arange(n)[:, None] + torch.arange(k)[None]) % 16 - 8).to(torch.int8)
    zero = (torch.arange(k // g) - 8).to(torch.int8)[:, None].expand(-1, n).contiguous()
    scale = (torch.rand(k // g, n, generator=torch.Generator().manual_seed(3)) + 0.5).to(scale_dtype)
    return QTensor.from_codes(codes, scale, zero, Format("int4", g, ZeroPoint.INT))


def transposed(parameter: Tensor) -> Tensor:
    """``(G, N)`` values in the order of ``(N, G)``."""
    return parameter.t().reshape(parameter.shape).contiguous()


def _bytes(words: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(words.view(torch.uint8)).contiguous().view(torch.int32)


def _swap(data: Tensor) -> Tensor:
    return (data << 4) | (data >> 4)


def _reverse(data: Tensor) -> Tensor:
    return data.view(data.shape[0], -1, 4).flip(-1).reshape(data.shape)


MISTAKES: dict[str, Callable[[Operands], Operands]] = {
    "nibbles of a byte swapped": lambda w: replace(w, words=_bytes(w.words, _swap)),
    "bytes of a word reversed": lambda w: replace(w, words=_bytes(w.words, _reverse)),
    "highest bits first": lambda w: replace(w, words=_bytes(w.words, lambda d: _reverse(_swap(d)))),
    "codes in two's complement": lambda w: replace(w, words=_bytes(w.words, lambda d: d ^ 0x88)),
    "zero point of the other sign": lambda w: replace(w, zeros=16 - w.zeros),
    "zero point without its offset": lambda w: replace(w, zeros=w.zeros - 8),
    "zero point left out": lambda w: replace(w, zeros=torch.full_like(w.zeros, 8)),
    "zero points transposed": lambda w: replace(w, zeros=transposed(w.zeros)),
    "scales transposed": lambda w: replace(w, scale=transposed(w.scale)),
    "scales one group late": lambda w: replace(w, scale=w.scale.roll(1, 0).contiguous()),
}
"""What is wrong: how operands become so."""


@dataclass
class Record:
    """The largest errors that each peer made, for the end of the report."""

    worst: dict[str, tuple[int, float, float]] = field(default_factory=dict)

    def judge(self, peer: str, name: str, problem: Problem, y: Tensor, seed: int) -> None:
        """Hold ``y`` against the contract, and remember how near to its tolerance it came."""
        verdict = LINEAR.judge(problem, y)
        assert verdict.ok, f"{name} on {peer}: {verdict.message}\nRepeat it with XPU_PEERS_SEED={seed}"
        count, share, error = self.worst.get(peer, (0, 0.0, 0.0))
        self.worst[peer] = (count + 1, max(share, verdict.worst), max(error, _relative(problem, y)))

    def lines(self) -> list[str]:
        """One line for each peer."""
        return [
            f"{peer}: {count} problems, error at most {share:.2f} of what the contract allows"
            + (f", relative {error:.1e}" if error else "")
            for peer, (count, share, error) in sorted(self.worst.items())
        ]


def _relative(problem: Problem, y: Tensor) -> float:
    """The error of a float result as a whole, in the Frobenius norm."""
    reference = LINEAR.reference(problem).double()
    if y.dtype == torch.int8 or not bool(torch.isfinite(y).all()) or not reference.any():
        return 0.0
    return float((y.double() - reference).norm() / reference.norm())
