"""Compiled programs on disk: JAX's persistent compilation cache, in qcore's cache directory, for our programs only.

If the user has chosen a directory for JAX's cache, that one is used.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from qcore.plugin_api import files_dir

_lock = threading.Lock()
_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@contextlib.contextmanager
def kept_on_disk() -> Iterator[None]:
    """Look up in the cache, and add to it, what is compiled meanwhile."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = files_dir("xla-programs")
    if folder is None or getattr(jax.config, _SETTINGS[0]):
        yield
        return
    with _lock:
        before: dict[str, Any] = {name: getattr(jax.config, name) for name in _SETTINGS}
        # JAX decides once per process whether and where it caches, unless it is reset.
        compilation_cache.reset_cache()
        jax.config.update(_SETTINGS[0], str(folder))
        jax.config.update(_SETTINGS[1], 0.0)
        try:
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
