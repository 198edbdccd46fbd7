"""Whether a copy does for a view in a recorded graph: nothing writes to its memory, and nobody sees where it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .states import version


def value_of(node: Any) -> Any:
    """What Dynamo has recorded of a node; None if it is none."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def name_of(node: fx.Node) -> str:
    """The name of what a node calls."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def plain(name: str) -> str:
    """The name of an operator of Python, as Dynamo records it under a mode such as `torch.device`: ``eq`` of __eq__."""
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def written_in(graph: fx.Graph) -> set[int]:
    """The memories (`memory_of`) that a call of ``graph`` may write to."""
    found = {one for node in graph.nodes for given in written_by(node) for one in _memories(value_of(given))}
    return found | {one for node in graph.nodes if _has_changed(node) for one in _memories(value_of(node))}


def may_be_copy(node: fx.Node, written: set[int]) -> bool:
    """Whether a view that ``node`` takes of its first argument may be a copy, contiguous, of the same values.

    ``written``: of `written_in`. Not if the view is returned: the caller may write to it, or to what it is a view of.
    """
    value, memory = value_of(node), memory_of(value_of(node.args[0]))
    if memory is None or memory in written:
        return False
    return is_in_order(value) and not _is_seen(node, memory)


def is_in_order(x: Tensor) -> bool:
    """Whether no dimension is outside of an earlier one in memory: what is computed of others is in their order."""
    steps = [step for step, count in zip(x.stride(), x.shape, strict=True) if count != 1]
    return steps == sorted(steps, reverse=True)


def memory_of(value: Any) -> int | None:
    """What tells the memory of a tensor from others; None without one: of sparse tensors, and within `torch.func`."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    try:
        return int(value.untyped_storage()._cdata)  # noqa: SLF001 - its identity
    except (NotImplementedError, RuntimeError):
        return None


def _memories(value: Any) -> Iterator[int]:
    for one in value if isinstance(value, (list, tuple)) else [value]:
        memory = memory_of(one)
        if memory is not None:
            yield memory


def _is_seen(node: fx.Node, memory: int) -> bool:
    """Whether a view, or one of it, is returned, or is asked for its place in memory."""
    views = [user for user in node.users if user.op == "output" or memory in _memories(value_of(user))]
    return any(user.op == "output" or name_of(user) == "as_strided" or _is_seen(user, memory) for user in views)


def _has_changed(node: fx.Node) -> bool:
    """Whether Dynamo's own run has written to a node's tensor: views share the count."""
    value = value_of(node)
    return memory_of(value) is not None and version(value) > 0


def written_by(node: fx.Node) -> Sequence[fx.Node]:
    """The arguments that a call may write to. Not all change a version: ``torch._foreach_add_``, running averages."""
    name, target = name_of(node), node.target
    overloads: Any = [target] if isinstance(target, torch._ops.OpOverload) else []  # noqa: SLF001 - no public name
    if isinstance(target, torch._ops.OpOverloadPacket):  # noqa: SLF001
        overloads = [getattr(target, one) for one in target._overload_names]  # noqa: SLF001
    if (
        any(one._schema.is_mutable for one in overloads)  # noqa: SLF001
        or isinstance(target, torch._ops.HigherOrderOperator)  # noqa: SLF001 - what its graphs do is not looked at
        or node.op == "call_module"
        or "out" in node.kwargs
        or node.kwargs.get("inplace")
        or any(one in name for one in _UPDATING)
    ):
        return node.all_input_nodes
    if name not in IN_PLACE and not (name.endswith("_") and not name.endswith("__")):
        return ()
    first: list[fx.Node] = []
    fx.node.map_arg(node.args[:1], first.append)
    return first


_OPERATORS = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift",
    "irshift", "setitem",
)  # fmt: skip
IN_PLACE = frozenset((*_OPERATORS, *(f"__{one}__" for one in _OPERATORS)))
"""Names of operators that write to their first operand."""
_UPDATING = ("batch_norm", "instance_norm", "moving_avg")
"""Parts of the names of functions that update averages."""
