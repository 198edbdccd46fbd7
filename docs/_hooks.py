# ruff: noqa: INP001 - mkdocs loads it by path
"""Hooks of mkdocs (see mkdocs.yml): pages from outside of docs/, and the matrix of the conformance kit.

Links in the Markdown are paths in the repository, so that they work on a code host and in a clone. On the site the
files of `EXTRA` are pages too, and links between them and docs/ are rewritten to the places they have there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
EXTRA = [
    "CONTRIBUTING.md",
    "changelog.d/README.md",
    *(
        path.relative_to(ROOT).as_posix()
        for kind in ("integrations", "plugins")
        for path in ROOT.glob(f"{kind}/*/README.md")
    ),
]
MATRIX = ROOT / "conformance.html"
"""Written by ``nox -s matrix -- --html conformance.html``. The site is complete without it."""

_LINK = re.compile(r"(\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_MATRIX_URI = "reference/conformance.html"
_BUILT = "[The matrix of the machine that built this site](conformance.html)."
_NOT_BUILT = "*This site was built without a matrix.*"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/, an index of the measurements and, if there is one, the matrix."""
    results = sorted((ROOT / RESULTS).glob("*.md"), reverse=True)
    for name in [*EXTRA, *(f"{RESULTS}/{path.name}" for path in results)]:
        files.append(File.generated(config, name, content=(ROOT / name).read_text("utf-8")))
    files.append(File.generated(config, f"{RESULTS}/index.md", content=_index(results)))
    if MATRIX.exists():
        files.append(File.generated(config, _MATRIX_URI, content=MATRIX.read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Point links to where their targets stand on the site; name the matrix if it is there."""
    source = page.file.src_uri
    markdown = markdown.replace("<!-- matrix -->", _BUILT if files.get_file_from_path(_MATRIX_URI) else _NOT_BUILT)
    here = source if _is_outside(source) else f"docs/{source}"
    parts = zip([*_FENCE.split(markdown)], [*_FENCE.findall(markdown), ""], strict=True)
    return "".join(_LINK.sub(lambda link: _moved(link, here, source), prose) + code for prose, code in parts)


def _is_outside(uri: str) -> bool:
    return uri in EXTRA or uri.startswith(f"{RESULTS}/")


def _moved(link: re.Match[str], here: str, source: str) -> str:
    text, target, anchor = link[1], link[2], link[3] or ""
    if ":" in target:
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    place = f"{RESULTS}/index.md" if path == RESULTS else path.removeprefix("docs/")
    if not place.endswith(".md"):
        return link[0]
    return f"{text}({posixpath.relpath(place, posixpath.dirname(source) or '.')}{anchor})"


def _index(results: list[Path]) -> str:
    heads = {path.name: path.read_text("utf-8").partition("\n")[0].removeprefix("# ") for path in results}
    lines = [f"* [{head}]({name}) (`{name.removesuffix('.md')}`)" for name, head in heads.items()]
    return "\n".join(
        ["# Measurements", "", "Ratios against a peer in the same run, each with date and machine.", "", *lines, ""]
    )
