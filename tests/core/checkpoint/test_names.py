"""The names of tools' formats are listed in several places, which must agree."""

import argparse
import ast
from pathlib import Path

import pytest

import qcore
from qcore.checkpoint.converting import target_names
from qcore.checkpoint.importers import BUILTIN
from qcore.checkpoint.importers.base import Source
from qcore.cli import convert


def _foreign() -> dict[str, tuple[str, ...]]:
    """FOREIGN of qcore.hf, read from its text: the module imports transformers."""
    tree = ast.parse((Path(qcore.__file__).parent / "hf/quantizer.py").read_text("utf-8"))
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["FOREIGN"]
    ]
    return ast.literal_eval(values[0])


FOREIGN = _foreign()


def test_convert_offers_every_target():
    parser = argparse.ArgumentParser()
    convert.add(parser)
    choices = next(action.choices for action in parser._actions if action.dest == "to")
    assert list(choices) == target_names()


def test_adopt_knows_every_importer():
    assert {importer.name for importer in BUILTIN} <= FOREIGN.keys()


@pytest.mark.parametrize("method", sorted({name for key, names in FOREIGN.items() for name in (key, *names)}))
def test_an_importer_reads_what_adopt_accepts(method, tmp_path):
    """bitsandbytes_4bit and _8bit are transformers' names of one method: both belong to one importer."""
    settings = {"quant_method": method, "packing_format": "auto_round:auto_gptq"}
    source = Source(tmp_path, {"quantization_config": settings}, settings, {}, {}, pytest.fail)
    assert len([importer.name for importer in BUILTIN if importer.recognizes(source)]) == 1
