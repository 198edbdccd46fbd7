import json
import math
from dataclasses import replace

import pytest

from qcore.testing import Certificate, Outcome, Result

FAILED = Result(
    "linear[w8a16-float32-rows-1]",
    "results",
    "linear",
    "w8a16",
    Outcome.FAILED,
    "off by </script> 3",
    ("x.y",),
    math.inf,
)
PASSED = Result("linear[w8a16-float32-rows-2]", "", "linear", "w8a16", Outcome.PASSED, kernels=("x.y",), worst=0.25)
REFUSED = Result("linear[w4a16-float32-rows-2]", "", "linear", "w4a16", Outcome.REFUSED, "int8 weights only")
SKIPPED = Result("devices[linear-w8a16]", "devices", "linear", "w8a16", Outcome.SKIPPED, "there is only one")


@pytest.fixture
def certificate():
    head = (
        "x",
        "qcore-x",
        "1.0",
        "available",
        "",
        "cpu",
        "a chip",
        "driver 2",
        "26.11",
        "2.13",
        5,
        "2026-11-20T00:00:00",
    )
    return Certificate(*head, cases=(FAILED, PASSED, REFUSED), laws=(SKIPPED,))


def test_ok_needs_a_plugin_that_came_up_and_no_failure(certificate):
    assert not certificate.ok
    assert replace(certificate, cases=(PASSED, REFUSED)).ok
    assert not replace(certificate, cases=(), laws=(), state="unavailable", reason="no chip").ok


def test_text_says_what_was_tested_and_what_failed(certificate):
    text = str(certificate)
    assert "x (qcore-x 1.0) on cpu (a chip)" in text
    assert "seed 5" in text
    assert "FAILED linear[w8a16-float32-rows-1]: off by" in text
    assert text.splitlines()[-1] == "1 passed, 1 failed, 2 skipped"


def test_text_of_a_plugin_that_is_not_here(certificate):
    gone = replace(certificate, cases=(), laws=(), state="unavailable", reason="no chip: install one")
    assert "unavailable: no chip: install one" in str(gone)


def test_long_lists_of_failures_are_cut(certificate):
    assert "and 10 failures more" in str(replace(certificate, cases=(FAILED,) * 30))


def test_json_holds_every_result_and_no_infinity(certificate, tmp_path):
    certificate.write_json(tmp_path / "c.json")
    found = json.loads((tmp_path / "c.json").read_text(), parse_constant=pytest.fail)
    assert found["ok"] is False
    assert found["counts"] == {"passed": 1, "failed": 1, "refused": 1, "gap": 0, "skipped": 1}
    assert [case["outcome"] for case in found["cases"]] == ["failed", "passed", "refused"]
    assert found["cases"][0]["worst"] is None
    assert found["seed"] == 5


def test_page_stands_alone_and_escapes_reasons(certificate, tmp_path):
    certificate.write_html(tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    assert "http" not in page
    assert "off by </script>" not in page
    assert "prefers-color-scheme: dark" in page
    for word in ("Conformance of x", "qcore-x 1.0", "w8a16", "int8 weights only", "✗", "⊘", "a chip"):
        assert word in page


def test_page_shows_many_backends_side_by_side(certificate):
    from qcore.testing.page import render

    gone = replace(certificate, backend="gone", cases=(), laws=(), state="unavailable", reason="no chip")
    broken = replace(gone, backend="broken_one", state="import failed", broken=True)
    gaps = replace(certificate, backend="gappy", cases=(replace(FAILED, outcome=Outcome.GAP),), laws=())
    page = render([certificate, gone, broken, gaps])
    for words in ("qcore conformance matrix", "not here", "import failed", "known gaps", 'class="frame wide"'):
        assert words in page
