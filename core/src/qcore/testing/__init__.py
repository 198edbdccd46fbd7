"""The conformance kit: what a plugin has to show.

``qcore.testing.run("cuda")``, ``qcore conformance cuda`` and ``pytest --qcore-backend=cuda`` do the same: put every
case of every contract to the plugin, judge each kernel that it offers, and check the laws.
"""

from __future__ import annotations

from .certificate import Certificate, schema
from .results import Outcome, Result
from .runner import run

__all__ = ["Certificate", "Outcome", "Result", "run", "schema"]
