import json
import math
import re
from dataclasses import replace

import pytest

from qcore import testing
from qcore.discovery.registry import State
from qcore.testing import Certificate, Outcome, Result, html_report

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
ABSENT = Result("devices[linear-w8a16]", "devices", "linear", "w8a16", Outcome.INAPPLICABLE, "there is only one")
SKIPPED = Result("compile[linear-w8a16]", "compile", "linear", "w8a16", Outcome.SKIPPED, "no compiler")


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
        "2026-11-20T00:00:00+00:00",
    )
    return Certificate(*head, cases=(FAILED, PASSED, REFUSED), laws=(ABSENT,))


def test_ok_needs_a_plugin_that_came_up_and_no_failure(certificate):
    assert not certificate.ok
    assert replace(certificate, cases=(PASSED, REFUSED)).ok
    assert not replace(certificate, cases=(), laws=(), state="unavailable", reason="no chip").ok


def law(name, *outcomes):
    return tuple(Result(f"{name}[linear-w8a16]", name, "linear", "w8a16", o, f"because {o}") for o in outcomes)


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        ([Outcome.PASSED, Outcome.REFUSED, Outcome.SKIPPED], None),
        ([Outcome.GAP, Outcome.REFUSED], None),
        ([Outcome.INAPPLICABLE], None),
        ([Outcome.REFUSED, Outcome.INAPPLICABLE], None),
        ([Outcome.REFUSED], "because refused"),
        ([Outcome.SKIPPED], "because skipped"),
        ([Outcome.INAPPLICABLE, Outcome.SKIPPED], "because skipped"),
    ],
)
def test_ok_needs_every_law_that_applies_to_have_run(certificate, outcomes, reason):
    found = replace(certificate, cases=(PASSED,), laws=(ABSENT, *law("compile", *outcomes)))
    assert found.unshown == ({} if reason is None else {"compile": reason})
    assert found.ok == (reason is None)
    assert ("NOT SHOWN law compile" in str(found)) == (reason is not None)


def faults(schema, value, root, where="$"):
    """Where a value breaks a JSON Schema: all of the words that ours uses, and no others."""
    words = {"type", "enum", "const", "minimum", "minLength", "pattern", "required", "properties", "items", "$ref"}
    told = {"description", "title", "$schema", "$defs", "additionalProperties"}
    assert schema.keys() <= words | told, schema.keys() - words - told
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
    allowed = schema.get("type", [])
    allowed = [allowed] if isinstance(allowed, str) else allowed
    if allowed and not any(value is None if a == "null" else isinstance(value, kinds[a]) for a in allowed):
        return [f"{where} is no {allowed}"]
    found = [f"{where} is not {schema['const']}"] if value != schema.get("const", value) else []
    found += [f"{where} is none of enum"] if value not in schema.get("enum", [value]) else []
    found += [f"{where} < minimum"] if "minimum" in schema and value is not None and value < schema["minimum"] else []
    if isinstance(value, str):
        found += [f"{where} too short"] * (len(value) < schema.get("minLength", 0))
        found += [f"{where} does not match"] * (not re.search(schema.get("pattern", ""), value))
    if isinstance(value, list):
        found += [f for i, part in enumerate(value) for f in faults(schema["items"], part, root, f"{where}[{i}]")]
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{where} lacks {name}" for name in schema.get("required", ()) if name not in value]
        for name, part in value.items():
            inner = known.get(name, others)
            found += [f"{where}.{name} is unknown"] if inner is False else faults(inner, part, root, f"{where}.{name}")
    return found


def test_certificate_fits_its_schema(certificate, tmp_path):
    own = testing.run("torch", select=["embedding[w8a16-float32-one", "devices[embedding-w8a16]"], seed=1)
    gone = replace(certificate, cases=(), laws=(), state="unavailable", reason="no chip")
    for each in (certificate, own, gone, replace(certificate, laws=(SKIPPED,))):
        each.write_json(tmp_path / "c.json")
        found = json.loads((tmp_path / "c.json").read_text())
        assert faults(testing.schema(), found, testing.schema()) == []
        assert set(found) == set(testing.schema()["properties"])
        for broken in ({**found, "ok": "yes"}, {**found, "new": 1}, {k: v for k, v in found.items() if k != "seed"}):
            assert faults(testing.schema(), broken, testing.schema())


def test_schema_knows_every_outcome_and_state():
    outcomes, states = [o.value for o in Outcome], [s.value for s in State]
    properties = testing.schema()["properties"]
    assert sorted(properties["counts"]["properties"]) == sorted(outcomes)
    assert sorted(testing.schema()["$defs"]["result"]["properties"]["outcome"]["enum"]) == sorted(outcomes)
    assert sorted(properties["state"]["enum"]) == sorted(states)


def test_page_of_a_plugin_with_halves_of_characters_in_its_name(certificate, tmp_path):
    html_report.write([replace(certificate, hardware="chip \udcff")], tmp_path / "c.html")
    assert "chip \\udcff" in (tmp_path / "c.html").read_text(encoding="utf-8")


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
    assert "and 10 more failures" in str(replace(certificate, cases=(FAILED,) * 30))


def test_json_holds_every_result_and_no_infinity(certificate, tmp_path):
    certificate.write_json(tmp_path / "c.json")
    found = json.loads((tmp_path / "c.json").read_text(), parse_constant=pytest.fail)
    assert found["ok"] is False
    assert found["counts"] == {"passed": 1, "failed": 1, "refused": 1, "gap": 0, "inapplicable": 1, "skipped": 0}
    assert [case["outcome"] for case in found["cases"]] == ["failed", "passed", "refused"]
    assert found["cases"][0]["worst"] is None
    assert found["seed"] == 5


def test_page_stands_alone_and_escapes_reasons(certificate, tmp_path):
    html_report.write([certificate], tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    assert "http" not in page
    assert "off by </script>" not in page
    assert "prefers-color-scheme: dark" in page
    for word in ("Conformance of x", "qcore-x 1.0", "w8a16", "int8 weights only", "✗", "⊘", "a chip"):
        assert word in page


def test_page_shows_many_backends_side_by_side(certificate):
    from qcore.testing.html_report import render

    gone = replace(certificate, backend="gone", cases=(), laws=(), state="unavailable", reason="no chip")
    broken = replace(gone, backend="broken_one", state="import failed", broken=True)
    gaps = replace(certificate, backend="gappy", cases=(replace(FAILED, outcome=Outcome.GAP),), laws=())
    page = render([certificate, gone, broken, gaps])
    for words in ("qcore conformance matrix", "not available", "import failed", "known gaps", 'class="frame wide"'):
        assert words in page
