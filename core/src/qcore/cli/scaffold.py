"""Renders a plugin package from ``templates/``."""

from __future__ import annotations

import keyword
import re
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from string import Template

from .. import __version__
from ..discovery.registry import registry
from ..errors import QcoreError

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_RESERVED = {"all", "cpu", "cuda", "qcore", "testing", "torch", "vulkan", "xla", "xpu"}
"""Names of qcore's own plugins and extras, whether or not they are installed."""

_FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
    ".github/workflows/conformance.yml": "conformance.yml.txt",
    "src/{module}/__init__.py": "src/init.py.txt",
    "src/{module}/plugin.py": "src/plugin.py.txt",
    "src/{module}/kernels.py": "src/kernels.py.txt",
    "src/{module}/qcore_gaps.toml": "src/gaps.toml.txt",
    "tests/test_{name}_plugin.py": "tests/test_plugin.py.txt",
}
"""File to template. Templates end in ``.txt``, so that tools do not treat them as code of this repository."""
_NATIVE_FILES = {
    "pyproject.toml": "native/pyproject.toml.txt",
    "CMakeLists.txt": "native/CMakeLists.txt.txt",
    "native/kernel.cpp": "native/kernel.cpp.txt",
    "src/{module}/kernels.py": "native/kernels.py.txt",
    "src/{module}/native.py": "native/native.py.txt",
}
"""Files that are added or replaced if the kernel is written in C++."""
_SUBSTITUTIONS = {
    False: {"kind": "plain torch ops", "files": "", "probe": ""},
    True: {
        "kind": "plain C++",
        "files": (
            "\n| `native/kernel.cpp` | the kernel in C++, with a C interface |"
            "\n| `src/$module/native.py` | the interface through ctypes, which converts strides and dtypes |"
        ),
        "probe": (
            "    from . import native\n\n"
            "    if native.path() is None:\n"
            '        return qcore.Unavailable("the native library is not built. Reinstall $dist.", broken=True)\n'
        ),
    },
}
"""Substitutions in the shared templates, by whether the kernel is written in C++."""


def check_name(name: str) -> None:
    """Raise `QcoreError` unless ``name`` is valid and free for a new plugin."""
    if not _NAME.fullmatch(name) or len(name) > 40:
        raise QcoreError(f"{name!r} is not a valid plugin name.{_suggestion(name)}\n{_RULE}")
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        raise QcoreError(f"{name!r} is a Python keyword or standard module.\nChoose another name, such as my_{name}.")
    if name in _RESERVED:
        raise QcoreError(f"{name!r} is reserved by qcore.\nChoose another name, such as my_{name}.")
    holder = registry.entries().get(name)
    if holder is not None:
        dist = f"{holder.dist} {holder.version}"
        raise QcoreError(
            f"a plugin named {name!r} is already installed: {dist}.\nChoose another name, or uninstall it."
        )


_RULE = "Use lower-case letters, digits and single underscores, a letter first, at most 40 characters."


def _suggestion(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower().removeprefix("qcore")).strip("_0123456789")[:40].rstrip("_")
    return f" Did you mean {plain!r}?" if _NAME.fullmatch(plain) else ""


def render(name: str, *, native: bool = False) -> dict[str, str]:
    """The text of every file of the package, by its path; ``native``: with a kernel in C++."""
    module = f"qcore_{name}"
    minimum = ".".join(__version__.split(".")[:2])
    words = {"name": name, "module": module, "dist": module.replace("_", "-"), "minimum": minimum}
    templates = files(__package__) / "templates"
    words |= {key: Template(text).substitute(words) for key, text in _SUBSTITUTIONS[native].items()}
    sources = {**_FILES, **(_NATIVE_FILES if native else {})}
    texts = {path: templates.joinpath(source).read_text(encoding="utf-8") for path, source in sources.items()}
    return {path.format(**words): Template(text).substitute(words) for path, text in texts.items()}


def write(texts: dict[str, str], directory: Path) -> None:
    """Write all files or none; raises `QcoreError` unless ``directory`` is missing or empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise QcoreError(f"{directory} exists and is not an empty directory.\nChoose another one with --directory.")
    try:
        _write(texts, directory)
    except OSError as error:
        what = f"{directory}: cannot be written: {error.strerror or error}."
        raise QcoreError(f"{what}\nChoose another directory with --directory.") from error


def _write(texts: dict[str, str], directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".qcore-new-", dir=directory.parent))
    try:
        for path, text in texts.items():
            (draft / path).parent.mkdir(parents=True, exist_ok=True)
            (draft / path).write_text(text, encoding="utf-8", newline="\n")
        _move_into_place(draft, directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _move_into_place(draft: Path, directory: Path) -> None:
    if not directory.exists():
        draft.chmod(0o755)  # mkdtemp makes it private
        draft.rename(directory)
        return
    # It may be the current directory of a shell, so fill it instead of replacing it.
    for child in draft.iterdir():
        child.rename(directory / child.name)
