"""Rules of elementwise ops: operands are brought to one dtype of the device first."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...steps.norms import add_layer_norm, add_rms_norm
from ...steps.operand import Operand
from ...steps.pointwise import binary, convert, unary, where
from ..lowering import Lowering, Rule
from ..numbers import FLOATS, INTEGERS, SMALL, on_device
from .fusing import Prologue, deferred
from .registry import rule, rule_name

Number = Operand | float | int | bool


def _value(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, fx.Node) else node


def _why_not_small(node: fx.Node) -> str:
    """Arithmetic on short integers wraps around elsewhere than in torch."""
    small = next((one.meta["val"].dtype for one in node.all_input_nodes if one.meta["val"].dtype in SMALL), None)
    return "" if small is None else f"arithmetic on {small} has no kernel in qcore_vulkan"


def same(c: Lowering, x: Operand, node: fx.Node) -> Operand:
    """The operand in the dtype that torch gives the result of ``node``."""
    return c.cast(x, on_device(node.meta["val"].dtype))


# One operand.

_FLOAT_FUNCTIONS = (
    "exp", "exp2", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "sigmoid", "erf", "silu", "mish", "hardsigmoid", "hardswish", "floor", "ceil",
    "round", "trunc",
)  # fmt: skip


def _function(name: str) -> Rule:
    def apply(c: Lowering, node: fx.Node, x: Operand) -> Any:
        if on_device(node.meta["val"].dtype) != torch.float32:  # rounding of integers
            return x
        return _function_of(c, node, name, c.cast(x, torch.float32))

    return apply


def _why_not_decimals(node: fx.Node) -> str:
    return "rounding to decimals has no kernel in qcore_vulkan" if node.kwargs.get("decimals") else ""


_INTO_PRODUCTS = {"silu": "silu_mul", "gelu": "gelu_mul", "gelu_tanh": "gelu_tanh_mul"}
"""Functions that are computed within the product that reads them: gated layers."""


def _gates(node: fx.Node) -> bool:
    """Whether the only reader of a function is a product by another value."""
    user = next(iter(node.users), None)
    if len(node.users) != 1 or user is None or user.op != "call_function" or rule_name(user.target) != "mul":
        return False
    others = [one for one in user.args if one is not node]
    return len(others) == 1 and isinstance(others[0], fx.Node) and user.meta["val"].is_floating_point()


def _function_of(c: Lowering, node: fx.Node, name: str, x: Operand) -> Any:
    """The function of x, or its fused form and x: see `_gates`."""
    if name in _INTO_PRODUCTS and _gates(node):
        return _INTO_PRODUCTS[name], x
    return unary(c.b, name, x)


for _name in _FLOAT_FUNCTIONS:
    rule(_name, why_not=_why_not_decimals if _name == "round" else _why_not_small)(_function(_name))


def _signed(name: str) -> Rule:
    def apply(c: Lowering, node: fx.Node, x: Operand) -> Operand:
        return unary(c.b, name, same(c, x, node))

    return apply


def _why_not_wide_abs(node: fx.Node) -> str:
    wide = node.meta["val"].dtype == torch.int64
    return "the absolute values of torch.int64 have no kernel in qcore_vulkan" if wide else _why_not_small(node)


rule("abs", why_not=_why_not_wide_abs)(_signed("abs"))
for _name in ("sign", "relu"):
    rule(_name, why_not=_why_not_small)(_signed(_name))


@rule("neg", why_not=_why_not_small)
def _neg(c: Lowering, node: fx.Node, x: Operand) -> Operand:
    if node.meta["val"].dtype == torch.int64:
        return binary(c.b, "sub", 0, same(c, x, node), bad=c.flags)
    return unary(c.b, "neg", same(c, x, node))


@rule("isnan", "isinf")
def _tested(c: Lowering, node: fx.Node, x: Operand) -> Operand:
    return unary(c.b, rule_name(node.target), c.cast(x, torch.float32))


@rule("logical_not")
def _logical_not(c: Lowering, node: fx.Node, x: Operand) -> Operand:
    return unary(c.b, "logical_not", c.cast(x, torch.bool))


@rule("bitwise_not", why_not=_why_not_small)
def _bitwise_not(c: Lowering, node: fx.Node, x: Operand) -> Operand:
    return _logical_not(c, node, x) if x.dtype == torch.bool else unary(c.b, "bitwise_not", x)


@rule("gelu")
def _gelu(c: Lowering, node: fx.Node, x: Operand, *, approximate: str = "none") -> Any:
    return _function_of(c, node, "gelu" if approximate == "none" else "gelu_tanh", x)


@rule("leaky_relu")
def _leaky_relu(c: Lowering, node: fx.Node, x: Operand, slope: float = 0.01) -> Operand:
    return unary(c.b, "leaky_relu", x, p=slope)


def _why_not_scaled_elu(node: fx.Node) -> str:
    return "elu with scales has no kernel in qcore_vulkan" if any(one != 1 for one in node.args[2:]) else ""


@rule("elu", why_not=_why_not_scaled_elu)
def _elu(c: Lowering, node: fx.Node, x: Operand, alpha: float = 1.0, *_: Any) -> Operand:
    return unary(c.b, "elu", x, p=alpha)


@rule("softplus")
def _softplus(c: Lowering, node: fx.Node, x: Operand, beta: float = 1.0, threshold: float = 20.0) -> Operand:
    return unary(c.b, "softplus", x, p=beta, q=threshold)


@rule("clamp", "hardtanh", why_not=_why_not_small)
def _clamp(c: Lowering, node: fx.Node, x: Operand, least: Any = None, most: Any = None) -> Operand:
    if rule_name(node.target) == "hardtanh":
        least, most = -1.0 if least is None else least, 1.0 if most is None else most
    y = same(c, x, node)
    numbers = not any(isinstance(one, Operand) or one != one for one in (least, most))  # noqa: PLR0124 - NaN is a limit
    if numbers and y.dtype == torch.float32:
        low, high = -math.inf if least is None else float(least), math.inf if most is None else float(most)
        return unary(c.b, "clamp", y, p=low, q=high)
    for name, limit in (("maximum", least), ("minimum", most)):
        if limit is not None:
            y = binary(c.b, name, y, same(c, limit, node) if isinstance(limit, Operand) else limit)
    return y


def _why_not_cast(node: fx.Node) -> str:
    dtype = node.meta["val"].dtype
    return f"casts to {dtype} have no kernel in qcore_vulkan" if dtype in SMALL else ""


@rule("_to_copy", why_not=_why_not_cast)
def _to_copy(c: Lowering, node: fx.Node, x: Operand, **_: Any) -> Operand:
    if x.dtype == torch.float32 and node.meta["val"].dtype == torch.int64:
        # Torch leaves the conversion of infinities undefined; models select among others afterwards.
        near = unary(c.b, "clamp", x, p=-(2.0**31), q=2.0**31 - 128)
        finite = where(c.b, unary(c.b, "isinf", x), near, x)
        return convert(c.b, finite, torch.int32, bad=c.flags)
    return same(c, x, node)


@rule("copy", why_not=_why_not_cast)
def _copy(c: Lowering, node: fx.Node, x: Operand, source: Operand, *_: Any) -> Operand:
    return same(c, source.broadcast_to(x.shape), node)


# Two operands.


def _both(c: Lowering, x: Number, y: Number, dtype: torch.dtype) -> tuple[Any, Any]:
    """Operands in ``dtype``; numbers as they are."""
    return tuple(c.cast(one, dtype) if isinstance(one, Operand) else one for one in (x, y))  # type: ignore[return-value]


def _promoted(node: fx.Node) -> torch.dtype:
    """The dtype in which torch compares the first two arguments of a node."""
    return on_device(torch.result_type(_value(node.args[0]), _value(node.args[1])))


def _rounded(node: fx.Node, number: Number) -> Number:
    """An argument of a node, a Python number as torch rounds it: to the dtype in which it compares."""
    dtype = torch.result_type(_value(node.args[0]), _value(node.args[1]))
    if isinstance(number, Operand) or dtype not in FLOATS:
        return number
    return torch.tensor(number, dtype=dtype, device="cpu").item()


def computed(c: Lowering, name: str, x: Number, y: Number, dtype: torch.dtype, *, wide: bool = False) -> Operand:
    """A binary op in a dtype of the device; bool is computed as int32. ``wide``: integers must fit 32 bits."""
    x, y = _both(c, x, y, torch.int32 if dtype == torch.bool else dtype)
    return binary(c.b, name, x, y, bad=c.flags if wide else None)


def _arithmetic(name: str) -> Rule:
    def apply(c: Lowering, node: fx.Node, x: Number, y: Number, *, alpha: Any = 1, **_: Any) -> Any:
        if name == "mul" and (isinstance(x, tuple) or isinstance(y, tuple)):
            return _gated(c, node, x, y)
        dtype, wide = on_device(node.meta["val"].dtype), _is_wide(node) and name in _OVERFLOWING
        if name == "mul" and isinstance(x, Operand) and x.dtype == dtype and not isinstance(y, Operand) and y == 1:
            return x  # as transformers scale the angles of rotary embeddings
        if name in _ROUNDING:
            x, y = _rounded(node, x), _rounded(node, y)
        if alpha != 1:
            y = computed(c, "mul", y, alpha, dtype, wide=wide) if isinstance(y, Operand) else y * alpha
        if name == "add" and (total := _added_before_norm(c, node, x, y)) is not None:
            return total
        return same(c, computed(c, name, x, y, dtype, wide=wide), node)

    return apply


def _added_before_norm(c: Lowering, node: fx.Node, x: Number, y: Number) -> Operand | None:
    """The sum of two floats of equal shape, together with a norm that reads it; None if there is none."""
    norm = next((user for user in node.users if user.target in _NORMS and user.args[0] is node), None)
    if norm is None or not isinstance(x, Operand) or not isinstance(y, Operand):
        return None
    given = [c.known(one) for one in norm.args[1:]]
    ready = all(given[i] is not None or one is None for i, one in enumerate(norm.args[1:]))
    if not ready or x.shape != y.shape or {x.dtype, y.dtype} != {torch.float32}:
        return None
    normed: Operand
    total: Operand
    normed, total = _NORMS[norm.target](c.b, x, y, *given)
    c.ahead[norm] = normed
    return total


_NORMS: dict[Any, Any] = {
    torch.ops.qcore_graph.rms_norm.default: add_rms_norm,
    torch.ops.qcore_graph.layer_norm.default: add_layer_norm,
}


def _gated(c: Lowering, node: fx.Node, x: Any, y: Any) -> Operand | Prologue:
    """A product with a function that is computed in it, or two."""
    (name, gate), other = (x, y) if isinstance(x, tuple) else (y, x)
    if isinstance(other, tuple):
        other = unary(c.b, other[0].removesuffix("_mul"), other[1])
    other = c.cast(other, torch.float32)
    made = deferred(c, node, name, gate, other) if gate.shape == other.shape else None
    return made or binary(c.b, name, gate, other)


_OVERFLOWING = frozenset({"add", "sub", "mul"})
_ROUNDING = frozenset({"remainder", "fmod"})


def _is_wide(node: fx.Node) -> bool:
    """Whether torch computes the node in integers of 64 bits."""
    return bool(node.meta["val"].dtype == torch.int64)


def _why_not_arithmetic(node: fx.Node) -> str:
    result = node.meta["val"].dtype
    if result in SMALL or any(_value(one).dtype in SMALL for one in node.all_input_nodes):
        return _why_not_small(node) or f"arithmetic in {result} has no kernel in qcore_vulkan"
    return ""


for _name in ("add", "sub", "mul", "maximum", "minimum"):
    rule(_name, why_not=_why_not_arithmetic)(_arithmetic(_name))


def _why_not_div(node: fx.Node) -> str:
    whole = not node.meta["val"].is_floating_point()
    if whole and (isinstance(node.args[1], fx.Node) or node.args[1] in {0, -1}):
        return "quotients of integers by a tensor, by 0 and by -1 have no kernel in qcore_vulkan"
    if node.kwargs.get("rounding_mode") == "trunc" and not node.meta["val"].is_floating_point():
        return "division of integers that truncates has no kernel in qcore_vulkan"
    return _why_not_arithmetic(node)


@rule("div", why_not=_why_not_div)
def _div(c: Lowering, node: fx.Node, x: Number, y: Number, *, rounding_mode: str | None = None) -> Operand:
    dtype = on_device(node.meta["val"].dtype)
    if rounding_mode == "floor":
        return computed(c, "floor_divide", x, y, dtype)
    quotient = computed(c, "div", x, y, dtype)
    return unary(c.b, "trunc", quotient) if rounding_mode == "trunc" and dtype == torch.float32 else quotient


def _why_not_integers(node: fx.Node) -> str:
    result = node.meta["val"].dtype
    return f"it has no kernel for {result} in qcore_vulkan" if result in INTEGERS | SMALL | {torch.bool} else ""


_ROOTS = {0.5: "sqrt", -0.5: "rsqrt"}
"""Powers that torch computes by other functions, but for float16: they differ for infinities and -0."""


@rule("pow", why_not=_why_not_integers)
def _pow(c: Lowering, node: fx.Node, x: Number, y: Number) -> Operand:
    if isinstance(y, float) and y in _ROOTS and isinstance(x, Operand) and node.meta["val"].dtype != torch.float16:
        return unary(c.b, _ROOTS[y], c.cast(x, torch.float32))
    if y == 2 and isinstance(x, Operand):
        return computed(c, "mul", x, x, torch.float32)
    return computed(c, "pow", x, y, torch.float32)


def _why_not_remainder(node: fx.Node) -> str:
    if not node.meta["val"].is_floating_point() and (isinstance(node.args[1], fx.Node) or node.args[1] in {0, -1}):
        return "remainders of integers by a tensor, by 0 and by -1 have no kernel in qcore_vulkan"
    return _why_not_arithmetic(node)


for _name in ("remainder", "fmod"):
    rule(_name, why_not=_why_not_remainder)(_arithmetic(_name))


def _comparison(name: str) -> Rule:
    def apply(c: Lowering, node: fx.Node, x: Number, y: Number) -> Operand:
        return c.cast(computed(c, name, _rounded(node, x), _rounded(node, y), _promoted(node)), torch.bool)

    return apply


def _why_not_comparison(node: fx.Node) -> str:
    """Torch wraps a number around in the bits of the short integers that it is compared with."""
    dtype = torch.result_type(_value(node.args[0]), _value(node.args[1]))
    if dtype not in SMALL or isinstance(node.args[1], fx.Node):
        return ""
    limits = torch.iinfo(dtype)
    fits = limits.min <= node.args[1] <= limits.max  # type: ignore[operator]
    return "" if fits else f"comparisons of {dtype} with {node.args[1]} have no kernel in qcore_vulkan"


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    rule(_name, why_not=_why_not_comparison)(_comparison(_name))


def _logical(name: str) -> Rule:
    def apply(c: Lowering, node: fx.Node, x: Operand, y: Operand) -> Operand:
        return binary(c.b, name, c.cast(x, torch.bool), c.cast(y, torch.bool))

    return apply


for _name in ("logical_and", "logical_or", "logical_xor"):
    rule(_name)(_logical(_name))


def _bitwise(name: str) -> Rule:
    def apply(c: Lowering, node: fx.Node, x: Number, y: Number) -> Operand:
        dtype = on_device(node.meta["val"].dtype)
        if dtype == torch.bool and isinstance(x, Operand) and isinstance(y, Operand):
            return binary(c.b, name.replace("bitwise", "logical"), x, y)
        return same(c, computed(c, name, x, y, dtype), node)

    return apply


for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    rule(_name, why_not=_why_not_arithmetic)(_bitwise(_name))


# Three operands.


@rule("where", why_not=_why_not_cast)
def _where(c: Lowering, node: fx.Node, condition: Operand, x: Number, y: Number) -> Operand:
    dtype = on_device(node.meta["val"].dtype)
    x, y = _both(c, x, y, dtype)
    if not isinstance(x, Operand) and not isinstance(y, Operand):
        x = c.filled(x, dtype)
    return where(c.b, c.cast(condition, torch.bool), x, y)


@rule("masked_fill", why_not=_why_not_cast)
def _masked_fill(c: Lowering, node: fx.Node, x: Operand, mask: Operand, value: Number) -> Operand:
    return _where(c, node, mask, value, x)  # type: ignore[no-any-return]
