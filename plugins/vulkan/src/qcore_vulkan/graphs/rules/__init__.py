"""Rules: how each op becomes steps of a program; see `registry`.

Public: `RULES`, `REFUSALS`, `rule_name`, `rule_of`. May import: steps, and the modules of `qcore_vulkan.graphs`.
"""

from . import (  # noqa: F401 - they register rules
    convolutions,
    elementwise,
    gathers,
    moves,
    ordering,
    products,
    quantized,
    reductions,
    scatters,
    views,
)
from .registry import REFUSALS, RULES, rule_name, rule_of

__all__ = ["REFUSALS", "RULES", "rule_name", "rule_of"]
