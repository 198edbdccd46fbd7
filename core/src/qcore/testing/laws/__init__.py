"""The laws of the kit: what must hold beside right numbers, each under a name of its own.

May import: nn, functional, resolving and what lies below, and `qcore.testing`'s ways to run a kernel.
Imported by: the runner and the reports.
"""

from . import kernel, large, plugin
from .base import EVERYWHERE, Law, LawItem, Samples, check_law, everywhere, law_items

LAWS: tuple[Law, ...] = (*plugin.LAWS, *kernel.LAWS, *large.LAWS)
"""Every law that is checked apart from the cases."""

__all__ = ["EVERYWHERE", "LAWS", "Law", "LawItem", "Samples", "check_law", "everywhere", "law_items"]
