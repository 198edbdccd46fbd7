import pytest

from qcore import testing
from qcore.errors import ConformanceError
from qcore.testing.gaps import matches, read_gaps

CASES = {"schemes": ["w8a16"], "contracts": ["linear"], "select": ["linear[w8a16-float32-rows", "offers"], "seed": 3}


def wrong_for_16(self, x, packed, bias, **given):
    y = super(type(self), self).__call__(x, packed, bias, **given)
    return y + 1 if x.shape[0] == 16 else y


@pytest.fixture
def listed(tmp_path):
    def write(text):
        path = tmp_path / "qcore_gaps.toml"
        path.write_text(text)
        return path

    return write


def entry(cases, reason="because"):
    return f'[[gap]]\ncases = "{cases}"\nreason = "{reason}"\n'


def test_brackets_stand_for_themselves():
    assert matches("linear[w8a16-*-rows-1]", "linear[w8a16-float32-rows-1]")
    assert not matches("linear[w8a16-*-rows-1]", "linear[w8a16-float32-rows-17]")
    assert matches("linear[w8a16-float3?-rows-1]", "linear[w8a16-float32-rows-1]")


def test_known_gap_is_neither_passed_nor_failed(add, listed):
    name = add(__call__=wrong_for_16)
    assert not testing.run(name, **CASES).ok
    certificate = testing.run(name, gaps=listed(entry("linear[*-rows-16]", "overflows, until 2.0")), **CASES)
    assert certificate.ok, str(certificate)
    (gap,) = [r for r in certificate.cases if r.outcome == "gap"]
    assert gap.id == "linear[w8a16-float32-rows-16]"
    assert gap.reason.startswith("overflows, until 2.0 (toy.linear: wrong result")


def test_gap_that_passes_is_an_error(add, listed):
    certificate = testing.run(add(), gaps=listed(entry("linear[*-rows-16]")), **CASES)
    assert not certificate.ok
    assert any("but it passes" in result.reason for result in certificate.failures)


def test_gap_that_hides_more_than_what_fails_is_an_error(add, listed):
    certificate = testing.run(add(__call__=wrong_for_16), gaps=listed(entry("linear[*]")), **CASES)
    assert {result.law for result in certificate.failures} >= {"gaps"}


def test_gap_that_covers_nothing_is_an_error_if_everything_ran(add, listed):
    from qcore.testing.kit import Kit

    kit = Kit(add(), gaps=listed(entry("linear[w9a16*]")), seed=1)
    assert "covers nothing that fails" in kit.gaps_result().reason
    part = Kit("toy", gaps=listed(entry("linear[w9a16*]")), seed=1, select="rows-1")
    assert part.gaps_result().outcome == "passed"


@pytest.mark.parametrize("text", [entry("linear[*"), entry("", "why"), "[[gap]]\ncases = 'x'\n", "gap = 'x"])
def test_gap_without_a_reason_and_unreadable_files_are_errors(add, listed, text):
    path = listed(text.replace('"because"', '""'))
    with pytest.raises(ConformanceError, match=r"qcore_gaps\.toml"):
        read_gaps(path)


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConformanceError, match="cannot read the gaps"):
        read_gaps(tmp_path / "none.toml")
