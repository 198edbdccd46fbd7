"""The place where pytest collects the conformance kit: ``pytest --qcore-backend=NAME`` (or ``--pyargs`` this module).

Holds nothing itself: `qcore.testing.pytest_kit` puts an item for every case and law here.
"""
