"""Links between pages lead somewhere, and the pages say nothing about the machine they were written on."""

from __future__ import annotations

import re

import pages
import pytest


def problem(page, link):
    """What is wrong with a link; empty where nothing is."""
    if re.match(r"https?://", link):
        return ""
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return f"{link}: there is no {target.relative_to(pages.ROOT)}"
    if anchor and anchor not in pages.anchors(target):
        return f"{link}: {target.name} has no such heading"
    return ""


@pytest.mark.parametrize("page", pages.LINKED, ids=pages.name)
def test_links_resolve(page):
    problems = [text for link in pages.links(page) if (text := problem(page, link))]
    assert not problems


def test_every_page_is_reached_from_the_index():
    index = pages.DOCS / "index.md"
    names = {page.relative_to(pages.DOCS).as_posix() for page in pages.GUIDES}
    assert names - {"index.md"} <= set(pages.links(index))


def test_every_page_is_reached_from_the_readme():
    assert "docs/index.md" in pages.links(pages.ROOT / "README.md")


@pytest.mark.parametrize("page", pages.LINKED, ids=pages.name)
def test_no_machine_shows_through(page):
    assert not re.search(r"(?<!\w)/(?:home|root|work|tmp|opt)/|localhost", page.read_text("utf-8"))


def test_a_broken_link_would_be_seen():
    page = pages.ROOT / "README.md"
    assert problem(page, "docs/no-such-page.md")
    assert problem(page, "docs/concepts/formats.md#no-such-heading")
