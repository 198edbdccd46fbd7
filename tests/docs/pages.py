"""Reading Markdown: fenced blocks, sections, anchors and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = sorted(DOCS.rglob("*.md"))
PAGES = [ROOT / "README.md", *GUIDES]
"""Whose examples run."""
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md"]
"""Whose links and commands are checked."""

_FENCE = re.compile(r"^```(?P<kind>[a-z]*)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_VARY = "<!-- figures vary -->"
_NEEDS = re.compile(r"^<!-- needs: (?P<modules>[a-z_, ]+) -->$", re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^>]+) -->\s*$")


def name(page: Path) -> str:
    """A page's path in the repository: several pages are called `index.md`."""
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """One fenced block.

    ``follows``: only blank lines stand between it and the block before. ``not_run``: why it is not run.
    ``vary``: the numbers in its output differ from run to run.
    """

    kind: str
    body: str
    line: int
    follows: bool
    not_run: str
    vary: bool


def blocks(page: Path) -> list[Block]:
    text, found, end = page.read_text("utf-8"), [], 0
    for match in _FENCE.finditer(text):
        before = text[end : match.start()]
        reason = _NOT_RUN.search(before)
        line = text.count("\n", 0, match.start()) + 1
        why = reason["reason"] if reason else ""
        follows, vary = bool(end) and not before.strip(), before.rstrip().endswith(_VARY)
        found.append(Block(match["kind"], match["body"], line, follows, why, vary))
        end = match.end()
    return found


def needs(page: Path) -> list[str]:
    """The modules beside qcore that the page's examples import."""
    found = _NEEDS.search(page.read_text("utf-8"))
    return found["modules"].replace(",", " ").split() if found else []


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text("utf-8"))


def sections(page: Path) -> dict[str, str]:
    """The text under each heading, up to the next heading of any level."""
    text = page.read_text("utf-8")
    plain = _FENCE.sub(lambda block: "x" * len(block[0]), text)  # comments in code are no headings
    heads = list(_HEADING.finditer(plain))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {head[2]: text[head.end() : end] for head, end in zip(heads, ends, strict=True)}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", head.lower().replace("`", "")) for head in sections(page))
    return {head.replace(" ", "-") for head in plain}


def links(page: Path) -> list[str]:
    return _LINK.findall(prose(page))


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table in a section, without its head."""
    lines = [line for line in sections(page)[heading].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def named(cell: str) -> set[str]:
    """What stands in backticks."""
    return set(re.findall(r"`([^`]+)`", cell))
