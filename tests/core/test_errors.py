"""The family of errors, and the hint they end with."""

from __future__ import annotations

import pytest

from qcore import errors
from qcore.errors import did_you_mean, first_line


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("FormatError", ValueError),
        ("UnsupportedError", RuntimeError),
        ("PluginError", RuntimeError),
        ("CheckpointError", ValueError),
        ("ConformanceError", AssertionError),
    ],
)
def test_each_error_is_a_qcore_error_and_the_builtin_that_fits(name, builtin):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.QcoreError)
    assert issubclass(kind, builtin)
    assert kind.__doc__


def test_all_lists_every_public_class():
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert set(errors.__all__) == classes


def test_the_warning_can_be_filtered():
    assert issubclass(errors.QcoreWarning, UserWarning)


@pytest.mark.parametrize(
    ("word", "hint"),
    [("vulcan", " Did you mean 'vulkan'?"), ("VULKAN", " Did you mean 'vulkan'?"), ("zzz", ""), ("", "")],
)
def test_did_you_mean(word, hint):
    assert did_you_mean(word, ["cuda", "vulkan"]) == hint


def test_did_you_mean_reads_an_iterator_once():
    assert did_you_mean("CUDA", iter(["cuda"])) == " Did you mean 'cuda'?"


@pytest.mark.parametrize(
    ("error", "line"),
    [(RuntimeError("one\ntwo"), "one"), (RuntimeError(), "RuntimeError"), (OSError("\ntwo"), "OSError")],
)
def test_first_line_of_an_error(error, line):
    assert first_line(error) == line
