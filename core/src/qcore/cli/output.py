"""Prints the result of a command: one JSON document, rich tables on a terminal, plain text elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

OK, FAILED, WRONG_USAGE, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141
"""Exit codes: done; a check failed; wrong usage or bad input; Ctrl-C; the output's pipe was closed (128 + SIGPIPE)."""

_WRAPPED, _GAP = 20, 3
"""The least width of a column that wraps, and the space between columns of rich."""

STYLES = {
    "available": "green",
    "selected": "green",
    "quantized": "green",
    "passed": "green",
    "blocked": "dim",
    "outranked": "dim",
    "unavailable": "dim",
    "excluded": "dim",
    "copied": "dim",
    "refused": "yellow",
    "note": "yellow",
}
"""The style of each state on a terminal; other states are red."""


@dataclass(frozen=True)
class Table:
    """A text table. ``state``: index of the column that `STYLES` applies to; ``right``: right-aligned columns."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    state: int | None = None
    right: frozenset[int] = frozenset()

    def plain(self) -> str:
        """Aligned columns without any markup."""
        from ..resolving.decision import format_table

        rows = [tuple(self.header), *(tuple(row) for row in self.rows)]
        widths = {i: max(len(row[i]) for row in rows) for i in self.right}
        padded = [[cell.rjust(widths.get(i, 0)) for i, cell in enumerate(row)] for row in rows]
        return "\n".join(format_table(padded[0], padded[1:]))

    def least_width(self) -> int:
        """The width that `rich` needs to show every cell whole: its last column wraps."""
        from rich.cells import cell_len

        rows = [tuple(self.header), *(tuple(row) for row in self.rows)]
        widths = [max(cell_len(row[i]) for row in rows) for i in range(len(self.header))]
        return sum(widths[:-1]) + min(widths[-1], _WRAPPED) + _GAP * len(widths)

    def rich(self) -> Any:
        """The table as a `rich.table.Table`."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
        for i, name in enumerate(self.header):
            wraps = i == len(self.header) - 1
            table.add_column(
                name,
                justify="right" if i in self.right else "left",
                no_wrap=not wraps,
                overflow="fold" if wraps else "ellipsis",
            )
        for row in self.rows:
            table.add_row(*(Text(cell, style=self._style(i, cell)) for i, cell in enumerate(row)))
        return table

    def _style(self, column: int, cell: str) -> str:
        return STYLES.get(cell, "red") if column == self.state and cell else ""


@dataclass(frozen=True)
class CommandResult:
    """The result of a command. ``data``: for ``--json``; ``blocks``: text and tables; ``code``: exit code."""

    data: Any
    blocks: Sequence[str | Table] = ()
    code: int = OK


def show(result: CommandResult, as_json: bool) -> None:
    """Print a result to standard output."""
    if as_json:
        print(json.dumps(result.data, indent=2, default=str))
    elif is_terminal(sys.stdout):
        _show_rich(result)
    else:
        for block in result.blocks:
            print(block.plain() if isinstance(block, Table) else block)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether ``stream`` is an interactive terminal. Processes without a console have None in its place."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # an object that can only write; a closed stream
        return False


@contextlib.contextmanager
def any_text_printed() -> Iterator[None]:
    """Let the standard streams take any text: they escape what they cannot encode, and drop it if they do not exist."""
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:
                stack.callback(setattr, sys, name, None)
                setattr(sys, name, stack.enter_context(Path(os.devnull).open("w", encoding="utf-8")))
            elif isinstance(stream, io.TextIOWrapper) and _can_fail(stream):
                stack.callback(_reconfigure, stream, stream.errors)
                _reconfigure(stream, "backslashreplace")
        yield


def _can_fail(stream: io.TextIOWrapper) -> bool:
    is_unicode = stream.encoding.lower().startswith("utf")
    return stream.errors == "strict" or (stream.errors == "surrogateescape" and not is_unicode)


def _reconfigure(stream: io.TextIOWrapper, errors: str | None) -> None:
    with contextlib.suppress(OSError, ValueError):  # it flushes, which can fail; closed meanwhile
        stream.reconfigure(errors=errors)


def _show_rich(result: CommandResult) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for block in result.blocks:
        if isinstance(block, Table) and block.least_width() <= console.width:
            console.print(block.rich())
        else:  # the terminal wraps long lines; rich would cut the cells, and leave columns out
            console.print(block.plain() if isinstance(block, Table) else block, markup=False, soft_wrap=True)


@contextlib.contextmanager
def stdout_kept_clean(enabled: bool) -> Iterator[None]:
    """Redirect the output of plugins and libraries to standard error, so that stdout contains only JSON."""
    if not enabled:
        yield
        return
    with _descriptor_redirected(), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _descriptor_redirected() -> Iterator[None]:
    # Native libraries write to the descriptor, not to sys.stdout.
    sys.stdout.flush()
    if not (_is_open(1) and _is_open(2)):
        yield
        return
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Suppress qcore's own warnings if the result contains the same information."""
    from ..errors import QcoreWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QcoreWarning)
        yield


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Show only the message of a warning: the source line in qcore does not help users of a command."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        yield


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    del line
    from ..errors import QcoreWarning

    where = "" if issubclass(category, QcoreWarning) else f" ({category.__name__}, {filename}:{lineno})"
    print(f"warning: {message}{where}", file=file or sys.stderr)


def size(count: float) -> str:
    """Bytes in readable form: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def plugin_table(statuses: list[Any], *, brief: bool = False) -> Table:
    """One row per plugin; ``brief``: omit the reasons, which are listed elsewhere."""
    rows = [(s.name, str(s.state), f"{s.dist} {s.version}", f"{s.seconds:.2f}", _details(s, brief)) for s in statuses]
    return Table(
        ("plugin", "state", "version", "seconds", "device and driver, or reason"), rows, state=1, right=frozenset({3})
    )


def _details(status: Any, brief: bool) -> str:
    if status.broken and brief:
        return "see below"
    found = (status.device, status.driver, *(f"{name}={value}" for name, value in status.details.items()))
    return str(status.reason) or "; ".join(filter(None, found))
