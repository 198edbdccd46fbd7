"""The laws of the kit: named properties that must hold in addition to correct results.

May import: nn, functional, resolving and the floors below, and the modules of `qcore.testing` that run a kernel.
Imported by: kit, html_report.
"""

from . import inputs, kernel, large, plugin
from .base import EVERYWHERE, Law, LawItem, Samples, check_law, everywhere, law_items

LAWS: tuple[Law, ...] = (*plugin.LAWS, *kernel.LAWS, *inputs.LAWS, *large.LAWS)
"""Every law that is checked separately from the cases."""

__all__ = ["EVERYWHERE", "LAWS", "Law", "LawItem", "Samples", "check_law", "everywhere", "law_items"]
