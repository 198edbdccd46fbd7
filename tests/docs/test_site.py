"""The documentation site builds without a warning, loads nothing from elsewhere, and its links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pages
import pytest

_LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}
"""Tags that make a browser fetch something, and the attribute that says what."""


class Html(HTMLParser):
    """The ids, links and loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.add(values.get("id"))
        self.links += [values["href"]] if tag == "a" and values.get("href") else []
        self.loaded += [values[_LOADED[tag]]] if values.get(_LOADED.get(tag, "")) else []


def build(folder):
    # Not --quiet: that hides warnings from --strict as well.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=pages.ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def html(site):
    return {path: Html(path) for path in site.rglob("*.html") if path.name not in {"404.html", "conformance.html"}}


def problem(html, path, link):
    """What is wrong with a link of a page; empty if nothing is."""
    target, anchor = urldefrag(link)
    if re.match(r"[a-z]+:", target):
        return ""
    found = (path.parent / unquote(target)).resolve() if target else path
    found = found / "index.html" if found.is_dir() else found
    if not found.exists():
        return f"{path}: {link}: no such file"
    if anchor and found in html and anchor not in html[found].ids:
        return f"{path}: {link}: no such heading"
    return ""


def test_every_page_is_on_the_site(site, html):
    assert len(html) > len(pages.GUIDES)
    indexed = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    titles = {entry["title"] for entry in indexed}
    assert {"Quickstart", "Contracts", "Plugin API", "Contributing", "Measurements"} <= titles


def test_every_link_leads_somewhere(html):
    problems = [text for path, page in html.items() for link in page.links if (text := problem(html, path, link))]
    assert not problems


def test_nothing_is_loaded_from_elsewhere(html):
    loaded = {name for page in html.values() for name in page.loaded}
    assert loaded
    assert not [name for name in loaded if re.match(r"(https?:)?//", name)]


def test_a_broken_link_would_be_seen(html):
    path = next(iter(html))
    assert problem(html, path, "no-such-page/")
    assert problem(html, path, "#no-such-heading")
