"""The table of formats of other tools is what the frozen layers give today."""

from foreign_table import table
from pages import DOCS


def test_the_table_of_formats():
    assert table() in (DOCS / "how-to" / "foreign-checkpoints.md").read_text(encoding="utf-8")
