"""The conformance kit, which tests that a plugin fulfils the contracts.

``qcore.testing.run("cuda")``, ``qcore conformance cuda`` and ``pytest --qcore-backend=cuda`` are equivalent: they
request every case of every contract from the plugin, check the results of each kernel that it offers, and check the
laws.

May import: checkpoint and the floors below it. Imported by: cli. It does so when a command runs.
"""

from __future__ import annotations

from .certificate import Certificate, schema
from .results import Outcome, Result
from .runner import run

__all__ = ["Certificate", "Outcome", "Result", "run", "schema"]
