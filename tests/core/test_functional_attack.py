"""An attack on the functional forms: valid calls with one argument replaced by something else, drawn at random.

Each call gives a result within its contract's tolerance or an error that blames the argument. Afterwards the valid call
is served by the same kernel as before: a wrong argument takes none out of use.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from grids import draws
from torch import Tensor

import qcore
from qcore import DynamicInt8, OutputInt8, StaticInt8, contracts
from qcore.contracts import Conv2dRequest, EmbeddingRequest, LinearRequest, Problem
from qcore.discovery.kernels import Offer
from qcore.functional.calls import entry_for

FORMATS = ("int8", "int8-asym", "int4-g32", "int4-g32-asym", "int4-g32-fzp", "int8-g64")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:.*Sparse CSR tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:.*quantize_per_tensor"),
]


@dataclass
class Call:
    """A call of a functional form: its arguments and, where they mean something, the problem that it solves."""

    contract: str
    weight: Any
    x: Any
    bias: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Tensor:
        if self.contract == "embedding":
            return qcore.embedding(self.x, self.weight, **self.options)
        call = qcore.linear if self.contract == "linear" else qcore.conv2d
        return call(self.x, self.weight, self.bias, **self.options)

    def problem(self) -> Problem:
        options = dict(self.options)
        given = {name: options.pop(name) for name in contracts.GIVEN_NAMES if name in options}
        return Problem(self._request(options), self.x, self.weight, self.bias, given)

    def _request(self, options: dict[str, Any]) -> Any:
        weight, x = self.weight, self.x
        if self.contract == "embedding":
            return EmbeddingRequest(
                weight.device, options.get("out_dtype") or weight.dtype, *weight.shape, weight.format
            )
        activation, output = options.get("activation"), options.get("output")
        out = torch.float32 if x.dtype == torch.int8 else x.dtype
        out = torch.int8 if output else options.get("out_dtype") or out
        ends = (weight.format, activation, output, self.bias is not None, False)
        if self.contract == "linear":
            return LinearRequest(weight.device, x.dtype, out, *weight.shape, None, *ends)
        pairs = (options[name] for name in ("kernel_size", "stride", "padding", "dilation"))
        sizes = (x.shape[1], weight.shape[0], *pairs, options["groups"])
        return Conv2dRequest(weight.device, x.dtype, out, *sizes, *ends)

    def serving(self) -> set[str]:
        """The kernels that serve this weight."""
        return {bound.kernel.name for bound in entry_for(self.weight)._bounds.values()}


def draw_linear(rng: random.Random) -> Call:
    n, k, rows = rng.choice((16, 48)), rng.choice((64, 128)), rng.choice((1, 3, 20))
    weight = qcore.quantize(torch.randn(n, k), rng.choice(FORMATS))
    x = torch.randn(rows, k, dtype=rng.choice((torch.float32, torch.bfloat16, torch.float64)))
    options: dict[str, Any] = {}
    kind = rng.choice(("float", "float", "dynamic", "static", "token", "codes"))
    if kind == "dynamic":
        options["activation"] = DynamicInt8(rng.random() < 0.7)
    elif kind in ("static", "codes"):
        options["activation"] = StaticInt8(0.02, rng.randint(-9, 9))
    elif kind == "token":
        options |= {"activation": StaticInt8(per_token=True), **draw_given("x", rows)}
    if kind in ("codes", "token"):
        x = torch.randint(-128, 128, (rows, k)).to(torch.int8)
    if kind == "dynamic" and rng.random() < 0.3:
        options["output"] = OutputInt8(0.1, 3)
    return Call("linear", weight, x, torch.randn(n) if rng.random() < 0.7 else None, options)


def draw_given(prefix: str, tokens: int) -> dict[str, Tensor]:
    return {f"{prefix}_scale": torch.rand(tokens) + 0.1, f"{prefix}_zero_point": torch.randint(-9, 9, (tokens,)).int()}


def draw_conv2d(rng: random.Random) -> Call:
    channels, out, groups = rng.choice((2, 4)), rng.choice((4, 8)), rng.choice((1, 2))
    sides = {name: (rng.randint(1, 3), rng.randint(1, 3)) for name in ("kernel_size", "stride", "dilation")}
    options: dict[str, Any] = {**sides, "padding": (rng.randint(0, 1), rng.randint(0, 1)), "groups": groups}
    h, w = options["kernel_size"]
    weight = qcore.quantize(torch.randn(out, h * w * channels // groups), rng.choice(("int8", "int4")))
    x = torch.randn(2, channels, 7, 8)
    if rng.random() < 0.3:
        options["activation"] = DynamicInt8()
    return Call("conv2d", weight, x, torch.randn(out) if rng.random() < 0.5 else None, options)


def draw_embedding(rng: random.Random) -> Call:
    rows = rng.choice((5, 40))
    weight = qcore.quantize(torch.randn(rows, 64), rng.choice(FORMATS))
    indices = torch.randint(0, rows, (2, 3), dtype=rng.choice((torch.int64, torch.int32)))
    return Call("embedding", weight, indices)


DRAWS = {"linear": draw_linear, "conv2d": draw_conv2d, "embedding": draw_embedding}

NOT_DENSE = {
    "sparse": lambda t: t.float().to_sparse(),
    "csr": lambda t: t.float().reshape(1, -1).to_sparse_csr(),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)]),
    "jagged": lambda t: torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)], layout=torch.jagged),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "meta": lambda t: t.to("meta"),
    "numpy": lambda t: t.float().numpy(),
    "list": lambda t: t.tolist(),
    "number": lambda t: 3.0,
}
WRONG_NUMBERS = {
    "complex": lambda t: torch.complex(t.float(), t.float()),
    "bool": lambda t: t > 0,
    "int16": lambda t: t.to(torch.int16),
    "uint8": lambda t: t.to(torch.uint8),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
}
WRONG_X = {
    **NOT_DENSE,
    **WRONG_NUMBERS,
    "none": lambda t: None,
    "scalar": lambda t: t.flatten()[0],
    "longer": lambda t: torch.cat([t, t], 1)[:, : t.shape[1] + 1] if t.dim() == 2 else t[0, 0],
}
WRONG_INDICES = {
    **NOT_DENSE,
    **WRONG_NUMBERS,
    "none": lambda t: None,
    "float": lambda t: t.float(),
    "int8": lambda t: t.to(torch.int8),
    "above": lambda t: t + 1000,
    "below": lambda t: -1 - t,
    "far": lambda t: t.long() + (1 << 40),
}
WRONG_BIAS = {
    **NOT_DENSE,
    **WRONG_NUMBERS,
    "one": lambda t: t[:1],
    "short": lambda t: t[:-1],
    "long": lambda t: torch.cat([t, t]),
    "rows": lambda t: t.expand(3, -1),
    "column": lambda t: t[:, None],
    "scalar": lambda t: t[0],
    "int64": lambda t: t.long(),
}
WRONG_GIVEN = {
    **NOT_DENSE,
    "complex": WRONG_NUMBERS["complex"],
    "bool": WRONG_NUMBERS["bool"],
    "float8": WRONG_NUMBERS["float8"],
    "none": lambda t: None,
    "column": lambda t: t[:, None],
    "longer": lambda t: torch.cat([t, t]),
    "nan": lambda t: t * torch.nan,
    "large": lambda t: t.double() + 1e39,
    "negative": lambda t: -200 - t.float(),
}
WRONG_OPTIONS: dict[str, tuple[Any, ...]] = {
    "out_dtype": (torch.int32, torch.complex64, torch.bool, torch.float8_e4m3fn, "float32", float, torch.qint8),
    "activation": ("int8", StaticInt8(), DynamicInt8, 1, StaticInt8(per_token=True)),
    "output": (OutputInt8(), OutputInt8, 0.1, OutputInt8(per_token=True)),
    "x_scale": (torch.ones(3),),
}
WRONG_GEOMETRY: dict[str, tuple[Any, ...]] = {
    "kernel_size": ((0, 3), (-3, -3), (3,), (9, 9), (3.0, 3), "33", None, (1, 1, 1)),
    "stride": ((0, 1), (1, -1), (1.0, 1), (1, 1, 1), None, "1"),
    "padding": ((-1, 0), (0.0, 0), (0, 0, 0), "same", None),
    "dilation": ((0, 1), (1.0, 1), -1, (40, 40)),
    "groups": (0, -1, 3, 1000),
}
VALID_X = {
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda t: t[:1].expand(t.shape),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "empty": lambda t: t[:0],
}
VALID_BIAS = {
    "strided": lambda t: torch.stack([t, -t], 1).flatten()[::2],
    "expanded": lambda t: t[:1].expand(t.shape),
    "float64": lambda t: t.double(),
    "bfloat16": lambda t: t.bfloat16(),
    "parameter": torch.nn.Parameter,
}


def attacks(call: Call) -> list[tuple[str, Call, bool]]:
    """Every replacement of one argument: its name, the call, and whether it still means something."""
    found = [("weight", replace(call, weight=w), False) for w in (None, torch.randn(16, 64), "int8")]
    wrong_x = WRONG_INDICES if call.contract == "embedding" else WRONG_X
    found += [(f"x {name}", replace(call, x=make(call.x)), False) for name, make in wrong_x.items()]
    found += [(f"x {name}", replace(call, x=make(call.x)), True) for name, make in VALID_X.items() if fits(name, call)]
    if call.bias is not None:
        found += [(f"bias {name}", replace(call, bias=make(call.bias)), False) for name, make in WRONG_BIAS.items()]
        found += [(f"bias {name}", replace(call, bias=make(call.bias)), True) for name, make in VALID_BIAS.items()]
    for name in contracts.GIVEN_NAMES:
        if name in call.options:
            found += [(f"{name} {how}", with_option(call, name, make(call.options[name])), False)
                      for how, make in WRONG_GIVEN.items()]  # fmt: skip
    wrong = WRONG_GEOMETRY if call.contract == "conv2d" else WRONG_OPTIONS
    wrong = {"out_dtype": WRONG_OPTIONS["out_dtype"]} if call.contract == "embedding" else wrong
    found += [
        (f"{n} {v}", with_option(call, n, v), False) for n, vs in wrong.items() for v in vs if differs(call, n, v)
    ]
    if call.contract != "embedding" and "activation" not in call.options:
        found.append(("x int8", replace(call, x=call.x.to(torch.int8)), False))
    return found


def fits(name: str, call: Call) -> bool:
    """A call with parameters per token needs one for each, so that it has no fewer rows."""
    return name != "empty" or "x_scale" not in call.options


def differs(call: Call, name: str, value: Any) -> bool:
    if name == "x_scale":
        return name not in call.options  # parameters per token are wrong where nobody asked for them
    harmless = value == (40, 40) and call.options["kernel_size"] == (1, 1)
    return call.options.get(name) != value and not harmless


def with_option(call: Call, name: str, value: Any) -> Call:
    return replace(call, options={**call.options, name: value})


def check(call: Call) -> None:
    result = call.run()
    with torch.no_grad():
        verdict = contracts.CONTRACTS[call.contract].judge(call.problem(), result)
    assert verdict.ok, verdict.message


def refuses(attack: Call, what: str) -> None:
    """The call raises an error that is not about kernels."""
    try:
        result = attack.run()
    except (qcore.FormatError, IndexError):
        return
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    raise AssertionError(f"{what}: accepted, giving {result.dtype} {tuple(result.shape)}")


def run_attack(contract: str, seed: int, plugin: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    call = DRAWS[contract](rng)
    fresh = rng.random() < 0.5
    if not fresh:
        check(call)  # the kernel is known to work; otherwise the attack is its first call
    chosen = attacks(call)
    for name, attack, valid in rng.sample(chosen, 6):
        what = f"{contract}, seed {seed}, {name}"
        if valid:
            check(attack)
            continue
        refuses(attack, what)
    check(call)
    assert all(name.startswith(plugin) for name in call.serving()), f"{contract}, seed {seed}: {call.serving()}"


def strict_stub(stub: Any) -> Any:
    """A kernel that, unlike plain torch ops, raises for whatever is not what it was made for."""

    class Strict(stub):  # type: ignore[misc]
        def __call__(self, x, packed, bias, **given):
            for value in (x, *given.values(), *(() if bias is None else (bias,))):
                if not isinstance(value, Tensor) or value.dtype in (torch.complex64, torch.bool, torch.uint8):
                    raise RuntimeError(f"{self.name}: no such instruction")
            return super().__call__(x, packed, bias, **given)

    return Strict


@pytest.mark.parametrize("seeds", draws(40, few=12))
@pytest.mark.parametrize("contract", DRAWS)
def test_an_attack_on_the_functional_forms(contract, seeds, add_plugin, stub):
    made: dict[Any, Any] = {}
    strict = strict_stub(stub)
    add_plugin("mine", **{contract: lambda request: made.setdefault(request, Offer(strict("mine.kernel", request)))})
    for seed in seeds:
        run_attack(contract, seed, "mine")


@pytest.mark.parametrize("numbers", draws(20, few=6))
@pytest.mark.parametrize("contract", DRAWS)
def test_an_attack_on_the_built_in_kernels(contract, numbers):
    for number in numbers:
        run_attack(contract, 1000 + number, "torch.")
