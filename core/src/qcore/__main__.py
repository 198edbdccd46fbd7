"""``python -m qcore``: the same as the ``qcore`` command."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    code = main()
    # If Ctrl-C interrupted an exec() earlier, such as the one that creates a dataclass's methods, CPython ends
    # `python -m` by SIGINT instead of with our exit code, although the exception was caught. The next exec() that
    # succeeds resets this.
    exec("")  # noqa: S102
    sys.exit(code)
