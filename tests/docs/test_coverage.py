"""Whatever a user or an author of plugins can touch is named in the documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pages
import pytest
import torch

import qcore
from qcore import contracts, hookspecs
from qcore.cli import app
from qcore.discovery import kernels
from qcore.testing.laws import LAWS
from qcore.testing.laws.base import EVERYWHERE
from qcore.weights.quantizers import QUANTIZERS
from qcore.weights.schemes import SCHEMES

SOURCE = pages.ROOT / "core" / "src" / "qcore"
AUTHORS = "how-to/write-a-plugin"
HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("qcore_"))
REQUESTS = [contracts.LinearRequest, contracts.Conv2dRequest, contracts.EmbeddingRequest]
ANSWERS = [kernels.Offer, kernels.Refusal, kernels.Available, kernels.Unavailable]


def text_of(name):
    return (pages.DOCS / name).read_text("utf-8")


def section(name, heading):
    found = pages.sections(pages.DOCS / name)
    assert heading in found, f"{name} has no section {heading!r}"
    return found[heading]


def missing(names, text):
    """The names that do not stand in backticks, alone or at the start of what does."""
    return [name for name in names if not re.search(rf"`{re.escape(name)}(?![\w-])", text)]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_section_that_names_its_arguments(hook):
    arguments = inspect.signature(getattr(hookspecs, hook)).parameters
    assert not missing(arguments, section(f"{AUTHORS}/hooks.md", f"`{hook}`"))


@pytest.mark.parametrize("kind", [*REQUESTS, *ANSWERS], ids=lambda kind: kind.__name__)
def test_every_field_of_requests_and_answers_is_explained(kind):
    fields = [field.name for field in dataclasses.fields(kind)]
    assert not missing(fields, section(f"{AUTHORS}/hooks.md", f"`{kind.__name__}`"))


def test_every_member_of_a_kernel_is_explained():
    members = [name for name in vars(qcore.Kernel) if not name.startswith("_")]
    assert not missing([*members, "name", "__call__"], section(f"{AUTHORS}/kernels.md", "`Kernel`"))


def test_every_parameter_given_with_a_call_is_explained():
    assert not missing(contracts.GIVEN_NAMES, section(f"{AUTHORS}/kernels.md", "`Kernel`"))


def test_every_rank_is_explained():
    assert not missing([rank.name for rank in qcore.Rank], text_of(f"{AUTHORS}/hooks.md"))


def test_every_law_of_the_kit_is_listed():
    assert not missing([*EVERYWHERE, *(law.name for law in LAWS)], section(f"{AUTHORS}/conformance.md", "The laws"))


def test_every_environment_variable_is_listed():
    source = "".join(path.read_text("utf-8") for path in SOURCE.rglob("*.py"))
    names = set(re.findall(r"\bQCORE_[A-Z]+(?:_[A-Z]+)*\b", source))
    assert len(names) >= 5
    assert not missing(names, text_of("reference/settings.md"))


def test_every_public_name_is_listed():
    assert not missing([f"qcore.{name}" for name in qcore.__all__], text_of("reference/api.md"))


def test_every_name_listed_is_public():
    listed = re.findall(r"^\| `qcore\.(\w+)", text_of("reference/api.md"), re.MULTILINE)
    assert sorted(listed) == sorted(qcore.__all__)


def test_plugin_api_page_lists_every_name():
    plugin_api = pytest.importorskip("qcore.plugin_api")
    shared = {*qcore.__all__, *vars(qcore)}
    assert not missing([name for name in plugin_api.__all__ if name not in shared], text_of("reference/plugin-api.md"))


def test_every_name_of_the_plugin_api_page_exists():
    plugin_api = pytest.importorskip("qcore.plugin_api")
    listed = set().union(
        *(pages.named(row[0]) for row in pages.rows(pages.DOCS / "reference" / "plugin-api.md", "Names"))
    )
    assert listed
    assert not {name for name in listed if not hasattr(plugin_api, name)}


def test_every_command_is_shown():
    names = [f"qcore {command.NAME}" for command in app._COMMANDS]
    assert len(names) >= 8
    assert not missing(names, text_of("reference/command-line.md"))


def test_every_option_of_a_command_is_named():
    parser = app.build_parser()
    (commands,) = [action for action in parser._actions if hasattr(action, "choices") and action.choices]
    for name, command in commands.choices.items():
        options = [option for action in command._actions for option in action.option_strings if option.startswith("--")]
        text = "".join(
            section("reference/command-line.md", head) for head in (f"`qcore {name}`", "Common to all commands")
        )
        assert not missing(options, text), name


def ops():
    return {s.name.removeprefix("qcore::"): s for s in torch._C._jit_get_all_schemas() if s.name.startswith("qcore::")}


def test_every_op_has_a_section_with_its_arguments():
    assert len(ops()) >= 9
    for name, schema in ops().items():
        arguments = [argument.name for argument in schema.arguments]
        assert not missing(arguments, section("reference/ops.md", f"`{name}`")), name


def test_every_scheme_and_quantizer_is_listed():
    assert not missing(SCHEMES, section("reference/schemes.md", "Tested schemes"))
    assert not missing(QUANTIZERS, section("reference/schemes.md", "Quantizers"))


@pytest.mark.parametrize("contract", contracts.CONTRACTS.values(), ids=lambda contract: contract.name)
def test_every_case_of_a_contract_is_listed(contract):
    scheme = qcore.Scheme.parse("w8a16")
    ids = [case.id for case in contract.cases([scheme], [torch.float32])]
    shapes = [name.partition("-float32-")[2].rstrip("]") for name in ids]
    text = section("concepts/contracts.md", f"Cases of `{contract.name}`")
    assert not missing(shapes, text)


def test_readme_names_every_row_of_the_scheme_table():
    text = (pages.ROOT / "README.md").read_text("utf-8")
    assert not missing(["w8a16", "w4a16", "w8a8", "w4a8", "w8a8-static"], text)
