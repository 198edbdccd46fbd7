"""The file that pytest collects for the conformance kit: ``pytest --qcore-backend=NAME`` (or ``--pyargs`` this module).

It is empty: `qcore.testing.pytest_kit` generates an item for every case and law.
"""
