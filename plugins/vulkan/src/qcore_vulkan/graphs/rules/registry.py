"""The table of rules: how nodes of the op list become steps of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from qcore.plugin_api import base_name, is_whole

from ..lowering import Rule

RULES: dict[str, Rule] = {}
"""Rules by the name of the op; ops of ``torch.ops.qcore_graph`` begin with ``qcore_graph.``."""
REFUSALS: dict[str, Callable[[fx.Node], str]] = {}
"""By the same names: why a rule does not take the arguments of a node, a sentence; empty if it does."""


def rule(*names: str, why_not: Callable[[fx.Node], str] | None = None) -> Callable[[Rule], Rule]:
    """Register a function as the rule of ops."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
            if why_not is not None:
                REFUSALS[name] = why_not
        return function

    return register


def rule_name(target: Any) -> str:
    """The name of an op in `RULES`."""
    name = base_name(target)
    return f"qcore_graph.{name}" if is_whole(target) else name


def rule_of(target: Any) -> Rule:
    """The rule of an op that `qcore_vulkan.graphs.support` has not refused."""
    return RULES[rule_name(target)]
