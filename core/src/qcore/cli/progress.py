"""A progress bar on standard error if that is a terminal; standard output is for results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .output import is_terminal


@dataclass
class Progress:
    """A progress bar. ``title``: the activity; ``unit``: ``bytes``, or the plural of the counted items.

    ``forced``: draw the bar even if standard error is not a terminal.
    """

    title: str
    unit: str = "bytes"
    forced: bool = False
    _update: Callable[[int, int, str], None] | None = field(default=None, init=False)
    _so_far: str = field(default="", init=False)

    def __call__(self, done: int, total: int, name: str) -> None:
        """Report ``done`` of ``total`` units; ``name``: the current item."""
        self._so_far = f"{self.title}: stopped after {done} of {total} {self.unit}" + (f", at {name}" if name else "")
        if self._update is not None:
            self._update(done, total, name)

    @contextlib.contextmanager
    def shown(self) -> Iterator[Progress]:
        """Draw the bar while the block runs, then erase it; on Ctrl-C, print the progress so far."""
        try:
            with self._drawn():
                yield self
        except KeyboardInterrupt:
            if self._so_far:
                print(self._so_far, file=sys.stderr)
            raise

    @contextlib.contextmanager
    def _drawn(self) -> Iterator[Progress]:
        if not (self.forced or is_terminal(sys.stderr)):
            yield self
            return
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(
            *self._columns(), console=Console(stderr=True, force_terminal=self.forced or None), transient=True
        ) as bar:
            task = bar.add_task("", total=None, name="")
            self._update = lambda done, total, name: bar.update(task, completed=done, total=total, name=name)
            try:
                yield self
            finally:
                self._update = None

    def _columns(self) -> list[Any]:
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.table import Column

        counted = DownloadColumn(binary_units=True) if self.unit == "bytes" else MofNCompleteColumn()
        # On a narrow terminal the name is shortened first.
        name = TextColumn("{task.fields[name]}", style="dim", markup=False, table_column=Column(no_wrap=True, ratio=1))
        return [TextColumn(self.title), BarColumn(), counted, TimeRemainingColumn(), name]
