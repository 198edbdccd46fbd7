"""The version, single-sourced: hatchling reads it here."""

__version__ = "26.11.0"
