"""The page for users of JAX, with its module of Flax NNX, which tests/docs leaves out where Flax is missing."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "use-from-jax.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("flax")
    monkeypatch.chdir(tmp_path)
    namespace, printed = {"__name__": "__main__"}, ""
    blocks = BLOCK.findall(PAGE.read_text("utf-8"))
    assert any("nnx.Module" in body for _, body in blocks)
    for kind, body in blocks:
        if kind == "text":
            assert printed == body
        else:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(body, namespace)
            printed = out.getvalue()
