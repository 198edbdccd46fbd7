"""Compiled programs on disk: JAX's persistent compilation cache, in qcore's cache directory, for our programs only.

If the user has chosen a directory for JAX's cache, that one is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qcore.plugin_api import files_dir

_lock = threading.Lock()
_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
_DIGEST = hashlib.sha256().digest_size


class ProgramFiles:
    """What JAX asks for programs by key (its `CacheInterface`), with files that are whole or ignored.

    JAX's own cache writes in place, so that a second process can read half a file, and never replaces a file that it
    could not read: every start would compile the program again, with a warning.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder  # JAX logs it

    def get(self, key: str) -> bytes | None:
        """The bytes of a program; None if there are none that JAX could read."""
        from jax._src.compilation_cache import decompress_executable

        try:
            stored = self._file(key).read_bytes()
            digest, program = stored[:_DIGEST], stored[_DIGEST:]
            if hashlib.sha256(program).digest() != digest:
                return None
            decompress_executable(program)  # fails after zstandard was installed or removed
        except Exception:  # noqa: BLE001 - each way to compress has its own errors
            return None
        return program

    def put(self, key: str, value: bytes) -> None:
        """Keep a program if the disk lets us: it runs in any case."""
        with contextlib.suppress(OSError):
            self._write(self._file(key), hashlib.sha256(value).digest() + value)

    def _file(self, key: str) -> Path:
        return self._path / f"{key}-cache"

    def _write(self, path: Path, stored: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._path, suffix=".tmp", delete=False) as file:
            written = Path(file.name)
            try:
                file.write(stored)
                file.close()
                written.replace(path)
            except OSError:
                written.unlink(missing_ok=True)
                raise


@contextlib.contextmanager
def kept_on_disk() -> Iterator[None]:
    """Look up in the cache, and add to it, what is compiled meanwhile."""
    import jax
    from jax._src import compilation_cache as of_jax
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
        # JAX 0.6 to 0.10 have no public way to set it.
        of_jax._cache = ProgramFiles(folder)  # type: ignore[assignment]  # noqa: SLF001
        try:
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
