"""What the demos are doing: a spinner on a terminal; elsewhere a line per step, and more lines while it lasts."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

WIDTH = 110
QUIET_SECONDS = 8.0
"""The longest silence within a step where there is no spinner: a log that stands still looks like a hang."""

CONSOLE = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)

Tell = Callable[[int, int, str], None]
"""What qcore takes as ``progress``: called with (done, total, name)."""


@contextmanager
def step(title: str) -> Iterator[Tell]:
    """Say that this is being done, until the block ends; gives a function to report progress to."""
    start, so_far, ended = time.perf_counter(), [""], threading.Event()
    if CONSOLE.is_terminal:
        with CONSOLE.status(title) as status:
            yield lambda done, total, _: status.update(f"{title}: {done} of {total}")
        return

    def keep_saying() -> None:
        while not ended.wait(QUIET_SECONDS):
            CONSOLE.print(f"  ... {title}{so_far[0]}, {time.perf_counter() - start:.0f} s", style="dim", soft_wrap=True)

    def tell(done: int, total: int, _: str) -> None:
        so_far[0] = f": {done} of {total}"

    CONSOLE.print(f"{title} ...", style="dim", soft_wrap=True)
    speaker = threading.Thread(target=keep_saying, daemon=True)
    speaker.start()
    try:
        yield tell
    finally:
        ended.set()
        speaker.join()
