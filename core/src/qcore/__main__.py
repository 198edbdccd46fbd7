"""``python -m qcore``: the same as the ``qcore`` command."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    code = main()
    # Where Ctrl-C once left a text that was being executed, such as a dataclass's methods, CPython ends `python -m` by
    # SIGINT instead of with our exit code, although the exception was caught. The next text that ends well clears that.
    exec("")  # noqa: S102
    sys.exit(code)
