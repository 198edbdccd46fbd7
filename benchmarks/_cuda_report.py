"""The result of the CUDA benchmark as Markdown and JSON, written anew after every step: a cut run leaves a result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _cuda_targets import Cell, Size, goal, verdicts
from _table import header, markdown

Row = tuple[str, ...]

BASE = "bf16 F.linear"
WORST = {"a16": 1e-2, "a8": 5e-2}
"""Relative errors beyond these are pointed out; rounding to bfloat16 alone is 1.7e-3, int8 activations 1e-2."""


class Report:
    """Collects what is measured. ``facts``: lines of the head; ``parts``: further sections by title."""

    def __init__(self, output: Path | None, data: Path | None) -> None:
        self.output, self.data = output, data
        self.facts: list[str] = []
        self.cells: list[Cell] = []
        self.host: dict[str, float] = {}
        self.conv: dict[str, float] = {}
        self.parts: dict[str, str] = {}
        self.notes: list[str] = []

    def section(self, title: str, columns: Sequence[str], rows: Iterable[Row], text: str = "") -> None:
        table = markdown(columns, rows)
        self.parts[title] = f"{text}\n\n{table}" if text else table

    def text(self) -> str:
        """The whole result."""
        title = f"Quantized linears on {torch.cuda.get_device_name()}"
        parts = [header(title) + "".join(f"\n- {fact}" for fact in self.facts)]
        parts.append("## Targets\n\n" + self._targets())
        parts += [f"## {title}\n\n{text}" for title, text in self.parts.items()]
        sizes = dict.fromkeys((c.k, c.n) for c in self.cells)
        parts += [f"## K x N = {k} x {n}\n\n{self._table((k, n))}" for k, n in sizes]
        if self.notes:
            parts.append("## Not measured\n\n" + "\n".join(f"- {note}" for note in dict.fromkeys(self.notes)))
        return "\n\n".join(parts) + "\n"

    def _targets(self) -> str:
        columns = ("target", "asked for", "found", "met", "best peer of this run")
        return markdown(columns, (v.row() for v in verdicts(self.cells, self.host, self.conv)))

    def _table(self, size: Size) -> str:
        cells = [c for c in self.cells if (c.k, c.n) == size]
        rows = sorted({c.rows for c in cells})
        names = dict.fromkeys(c.name for c in cells)
        found = {(c.name, c.rows): c for c in cells}
        lines = [(name, *(_text(found.get((name, m)), size) for m in rows)) for name in names]
        return markdown(("", *(f"M = {m}" for m in rows)), lines)

    def write(self) -> None:
        """Write both files."""
        if self.output:
            self.output.write_text(self.text(), encoding="utf-8")
        if self.data:
            self.data.write_text(json.dumps(self._record(), indent=1) + "\n", encoding="utf-8")

    def _record(self) -> Mapping[str, Any]:
        cells = [cell.record() for cell in self.cells]
        figures = {"host_us": self.host, "conv_ratio": self.conv, "cells": cells}
        return {"device": torch.cuda.get_device_name(), "facts": self.facts, **figures, "notes": self.notes}


def _text(cell: Cell | None, size: Size) -> str:
    if cell is None:
        return ""
    if cell.name == BASE:
        return f"{cell.us:.1f} us, {cell.share:.0%}"
    text = f"{cell.ratio:.2f} x, {cell.us:.1f} us, {cell.share:.0%}"
    wanted = goal(cell.name, cell.rows, size)
    if wanted is not None:
        text += f"; target {wanted:.2f} " + ("met" if cell.ratio >= wanted else "**missed**")
    limit = WORST["a8" if "a8" in cell.competes else "a16"]
    text += "" if cell.error <= limit else f"; **error {cell.error:.1e}**"
    return f"{text}; **{cell.note}**" if cell.note else text
