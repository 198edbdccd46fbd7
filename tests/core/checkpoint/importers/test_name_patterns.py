"""Regular expressions of untrusted files: the same answers as Python's matcher, in bounded time."""

import contextlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcore.checkpoint.importers.name_patterns import NamePattern, NamePatterns, TooManyStepsError

NAMES = ["", "a", "model.layers.0.mlp.down_proj", "model.layers.11.self_attn.q_proj", "lm_head", "x\ny", "été_1"]
PATTERNS = [
    ".*down_proj$",
    r"model\.layers\.[0-9]+\.self_attn\.(q|k|v)_proj",
    r"^(?!.*attn).*$",
    r".*layers\.(?:[02468]|\d\d)\..*",
    "a*b?.+",
    "(a|b|)*m",
    "[^a-l]+[.]",
    r"\w+\b\.",
    r"(?<=x)a|(?<!x)l",
    r"model\.layers\.(\d{2,3})\.",
    ".*?proj",
    "(?=lm)lm_head\\Z",
    r"\D+\d{0,1}\W",
    ".{5}",
    "x$",
    r"\S*\s\S*",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_python_does(pattern):
    for name in NAMES:
        assert NamePattern(pattern).matches(name) is (re.match(pattern, name) is not None), name


ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "\\w", "\\d", "$", "^", "\\b", "(?=a)", "(?!b)"])


def _extended(inner):
    suffix = st.sampled_from(["", "*", "+", "?", "{2}", "{1,3}", "*?"])
    joined = st.lists(inner, min_size=1, max_size=3)
    return st.builds(lambda parts, s: f"(?:{'|'.join(parts)}){s}", joined, suffix) | joined.map("".join)


@settings(max_examples=200, deadline=None)
@given(st.recursive(ATOMS, _extended, max_leaves=6), st.text("ab0.\n", max_size=8))
def test_any_pattern_matches_as_python_does(pattern, name):
    assert NamePattern(pattern).matches(name) is (re.match(pattern, name) is not None)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", ".*.*.*.*.*.*.*.*.*.*b", "(a*)*" * 50 + "b", "(((a*)*)*)*$"])
def test_hostile_patterns_end_soon(pattern):
    start = time.monotonic()
    with contextlib.suppress(ValueError):  # refused is as good
        assert not NamePattern(pattern).matches("a" * 900 + "!")
    assert time.monotonic() - start < 5


def test_the_first_of_several_patterns_decides():
    patterns = NamePatterns()
    for text, value in ((".*q_proj", 0), (".*proj", 1), (".*q_proj", 2), ("lm", 2)):
        patterns.add(text, value)
    assert [patterns.first(name, 3) for name in ("a.q_proj", "a.k_proj", "lm_head", "other")] == [0, 1, 2, None]
    assert patterns.first("lm_head", 2) is None


def compare(text, patterns, names):
    known = NamePatterns()
    for i in range(patterns):
        known.add(text.format(i), i)
    for i in range(names):
        known.first("a" * 100 + str(i), patterns)


@pytest.mark.parametrize("kind", ["harmless", "hostile", "many"])
def test_patterns_of_a_file_end_soon(kind):
    """Each is harmless, or nearly; thousands of them and as many names would take hours."""
    text = {"harmless": ".*x{}y", "hostile": "(a|a)*(a|b)*(a|c)*{}!", "many": "a{}"}[kind]
    start = time.monotonic()
    with pytest.raises(TooManyStepsError, match=r"too long|more than 200,000 characters"):
        compare(text, 1_000_000 if kind == "many" else 3000, 3000)
    assert time.monotonic() - start < 30


def test_as_many_patterns_and_names_as_a_large_model_has():
    patterns = NamePatterns()
    for i in range(40):
        patterns.add(rf"model\.layers\.{i}\.mlp\.experts\.\d+\.down_proj$", i)
    names = [f"model.layers.{i}.mlp.experts.{j}.down_proj" for i in range(40) for j in range(64)]
    assert [patterns.first(name, 40) for name in names] == [i for i in range(40) for _ in range(64)]
