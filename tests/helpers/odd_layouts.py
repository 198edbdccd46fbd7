"""Problems whose tensors lie in memory in any way that torch has: strides, steps of 0, offsets, the negative bit.

What lies between the numbers is NaN, or a code that no test means, so that a wrong read shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from qcore import Kernel, Offer, QTensor
from qcore.contracts import CONTRACTS
from qcore.contracts.base import Problem, Request
from qcore.contracts.inputs import Draw, Shape
from qcore.weights.schemes import Scheme

SCHEMES = (
    "w8a16", "w4a16-g32-asym", "w8a16-g64-fzp", "w4a16-g64-fzp/plain_int32", "w8a8", "w8a8-aasym",
    "w4a8-g32-asym-aasym", "w8a8-static-o8", "w4a8-g32-asym-token", "w4a8-g32-asym-token-o8t",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ZEROS = (torch.int8, torch.int32, torch.int64, torch.float32)


def _junk(shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else 113, dtype=dtype)


def _stepped(tensor: Tensor, pick: random.Random) -> Tensor:
    """Twice the stride along one dimension."""
    if not tensor.dim():
        return tensor
    dim = pick.randrange(tensor.dim())
    return torch.stack((tensor, _junk([*tensor.shape], tensor.dtype)), dim + 1).select(dim + 1, 0)


def _inside(tensor: Tensor, pick: random.Random) -> Tensor:
    """A part of something larger, which starts on no multiple of 16 bytes."""
    del pick
    large = _junk([size + 3 for size in tensor.shape] or [1], tensor.dtype)
    view = large[tuple(slice(1, 1 + size) for size in tensor.shape)] if tensor.dim() else large[0]
    view.copy_(tensor)
    return view


def _permuted(tensor: Tensor, pick: random.Random) -> Tensor:
    order = pick.sample(range(tensor.dim()), tensor.dim())
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.dim())])


def _expanded(tensor: Tensor, pick: random.Random) -> Tensor:
    """The first of one dimension for all, by a stride of 0."""
    if not tensor.numel() or not tensor.dim():
        return tensor
    return tensor.narrow(pick.randrange(tensor.dim()), 0, 1).expand(tensor.shape)


def _negative(tensor: Tensor, pick: random.Random) -> Tensor:
    """The same numbers as the imaginary part of a conjugate has them: memory holds their opposites."""
    del pick
    return torch._neg_view(-tensor) if tensor.is_floating_point() else tensor


LAYOUTS = (_stepped, _inside, _permuted, _expanded, _negative)


def dense(tensor: Tensor) -> Tensor:
    """A copy without anything odd."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def problems(
    contract: str, seed: int, count: int, *, schemes: tuple[str, ...] = SCHEMES, columns: tuple[int, ...] = (32, 64)
) -> Iterator[tuple[str, Problem, Problem]]:
    """A description, a problem in odd layouts, and the same numbers without; ``count`` of them, drawn from ``seed``."""
    pick = random.Random(f"{contract} {seed}")
    for number in range(count):
        scheme = Scheme.parse(schemes[number % len(schemes)])
        if contract != "linear" and getattr(scheme.activation, "per_token", False):
            continue
        if contract == "embedding" and scheme.activation is not None:
            continue
        draw = Draw(torch.Generator().manual_seed(seed * 1009 + number))
        plain = _drawn(contract, draw, draw.fill(scheme), pick, columns)
        yield _made_odd(plain, pick)


def _drawn(contract: str, draw: Draw, scheme: Scheme, pick: random.Random, columns: tuple[int, ...]) -> Problem:
    dtype, bias = pick.choice(DTYPES), pick.choice(("none", "same", "float32"))
    n, k, of = pick.choice((16, 32)), pick.choice(columns), CONTRACTS[contract]
    request = of.request_for(scheme, torch.device("cpu"), dtype, n, k)
    if contract == "embedding":
        shape = pick.choice(((4,), (2, 3), (1,), ()))
        indices = draw.whole(0, n - 1, *shape).to(pick.choice((torch.int32, torch.int64)))
        return Problem(request, indices, draw.weight(n, k, request.weight))
    request = replace(request, bias=bias != "none")
    if contract == "linear":
        lead = pick.choice(((1,), (3,), (2, 5), (17,)))
        return draw.linear(request, Shape("odd", lead, n, k, bias), scheme.quantizer, dtype)
    request = replace(request, kernel_size=pick.choice(((1, 1), (2, 2), (1, 3))), padding=pick.choice(((0, 0), (1, 1))))
    x = draw.activations((pick.choice((1, 2)), k, 3, 4), request.x_dtype, "normal", "dense")
    weight = draw.weight(n, request.k, request.weight, "skewed", scheme.quantizer)
    return Problem(request, x, weight, draw.bias(n, bias, dtype))


def _made_odd(problem: Problem, pick: random.Random) -> tuple[str, Problem, Problem]:
    said = []

    def odd(name: str, tensor: Tensor) -> Tensor:
        layout = pick.choice(LAYOUTS)
        said.append(f"{name} {layout.__name__[1:]}")
        return layout(tensor, pick)

    weight = problem.weight
    parts = {name: odd(name, tensor) for name, tensor in weight.tensors().items()}
    odd_weight = _weight_like(weight, parts)
    given = {}
    for name, tensor in problem.given.items():
        kinds = _SCALES if name.endswith("scale") else _ZEROS
        given[name] = odd(name, tensor.to(pick.choice(kinds)))
    bias = None if problem.bias is None else odd("bias", problem.bias)
    made = replace(problem, x=odd("x", problem.x), weight=odd_weight, bias=bias, given=given)
    plain = replace(
        made,
        x=dense(made.x),
        weight=_weight_like(weight, {name: dense(part) for name, part in odd_weight.tensors().items()}),
        bias=None if bias is None else dense(bias),
        given={name: dense(tensor) for name, tensor in given.items()},
    )
    return f"{problem.request.weight} x {tuple(made.x.shape)} {made.x.dtype}: {', '.join(said)}", made, plain


def _weight_like(weight: QTensor, parts: dict[str, Tensor]) -> QTensor:
    return QTensor(parts["data"], parts["scale"], parts.get("zero"), weight.shape, weight.format, weight.quantizer)


def wrong_layouts(
    contract: str, kernel_for, seed: int, count: int, *, device: str = "cpu", **more
) -> tuple[int, list[str]]:
    """How many problems a kernel served, and what it got wrong; ``kernel_for(request)`` gives None for a refusal."""
    there = torch.device(device)
    served, wrong = 0, []
    for label, made, dense_one in problems(contract, seed, count, **more):
        request = replace(made.request, device=there)
        kernel = kernel_for(request)
        if kernel is None:
            continue
        served += 1
        odd, plain = made if there.type == "cpu" else _moved(made, there), replace(dense_one, request=request)
        packed = kernel.pack(odd.weight)
        for turn in ("first", "second"):  # the second call may go a shorter way
            verdict = CONTRACTS[contract].judge(plain, kernel(odd.x, packed, odd.bias, **odd.given))
            if not verdict.ok:
                wrong.append(f"{kernel.name} {turn} {label}: {verdict.message}")
        back = kernel.unpack(packed).tensors()
        if any(not torch.equal(back[name].cpu(), part.cpu()) for name, part in plain.weight.tensors().items()):
            wrong.append(f"{kernel.name} unpack {label}")
    return served, wrong


def _moved(problem: Problem, device: torch.device) -> Problem:
    """On another device, lying there as it did here: the whole storage goes, and the same view of it is taken."""

    def moved(tensor: Tensor) -> Tensor:
        storage = tensor if not tensor.is_neg() else torch._neg_view(tensor)
        whole = torch.empty(0, dtype=tensor.dtype).set_(storage.untyped_storage()).to(device)
        view = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return torch._neg_view(view) if tensor.is_neg() else view

    parts = {name: moved(part) for name, part in problem.weight.tensors().items()}
    return replace(
        problem,
        x=moved(problem.x),
        weight=_weight_like(problem.weight, parts),
        bias=None if problem.bias is None else moved(problem.bias),
        given={name: moved(tensor) for name, tensor in problem.given.items()},
    )


def offered_by(plugin: ModuleType) -> Callable[[Request], Kernel | None]:
    """The kernel that a plugin's own hooks offer for a request, if any."""

    def kernel_for(request: Request) -> Kernel | None:
        answer = getattr(plugin, f"qcore_{request.contract}")(request=request)
        return answer.kernel if isinstance(answer, Offer) else None

    return kernel_for
