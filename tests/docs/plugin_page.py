"""What the page of every plugin is held to. The tests of a page inherit it and say what is the plugin's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import pages
import torch
from packaging.requirements import Requirement

import qcore
from qcore.contracts import CONTRACTS
from qcore.resolving.explaining import plain_request
from qcore.weights.schemes import SCHEMES


def request(contract: str = "linear", scheme: str = "w8a16", dtype: Any = torch.float32, **changes: Any) -> Any:
    """A request for a weight (64, 64), with changes."""
    return replace(plain_request(scheme, n=64, k=64, dtype=dtype, contract=contract), **changes)


class PluginPage:
    """Tests that ``docs/reference/<name>.md`` agrees with the plugin: what it serves, refuses and reads.

    ``hooks``: the plugin's module of hooks; ``device``: that of the tensors in its requests; ``dtype``: of those whose
    kernels are in the table; ``refused``: a request for each row of "Unsupported requests", except for those
    ``elsewhere``: refused before the request is looked at.
    """

    name: ClassVar[str]
    hooks: ClassVar[ModuleType]
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[torch.dtype] = torch.float32
    refused: ClassVar[Mapping[str, Any]]
    elsewhere: ClassVar[set[str]] = set()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each row of the table of refusals."""
        if "row" in metafunc.fixturenames:
            metafunc.parametrize("row", self.refused)

    @property
    def page(self):
        return pages.DOCS / "reference" / f"{self.name}.md"

    @property
    def folder(self):
        return pages.ROOT / "plugins" / self.name

    def rows(self, heading):
        return pages.rows(self.page, heading)

    def told(self, heading, columns=slice(None)):
        """What stands in backticks in a table."""
        return pages.named(" ".join(cell for row in self.rows(heading) for cell in row[columns]))

    def source(self, under=""):
        """The text of the plugin's modules."""
        return "".join(path.read_text("utf-8") for path in sorted((self.folder / "src" / under).rglob("*.py")))

    def dependencies(self):
        """What the distribution requires, qcore aside: ``name>=version`` by name."""
        text = (self.folder / "pyproject.toml").read_text("utf-8")
        (declared,) = re.findall(r"^dependencies = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
        found = map(Requirement, re.findall(r'"([^"]+)"', declared))
        return {one.name: f"{one.name}{one.specifier}" for one in found if one.name != "qcore"}

    def answer(self, asked):
        return getattr(self.hooks, f"qcore_{asked.contract}")(asked)

    def contracts(self):
        """The contracts that the plugin has a hook for."""
        return [contract for contract in CONTRACTS if hasattr(self.hooks, f"qcore_{contract}")]

    def served(self):
        """(contract, scheme) to kernel, for every scheme of the kit."""
        device, d = torch.device(self.device), self.dtype
        pairs = [(c, s) for c in self.contracts() for s in SCHEMES]
        answers = {(c, s): self.answer(request(c, s, d, device=device)) for c, s in pairs}
        return {key: answer.kernel.name for key, answer in answers.items() if isinstance(answer, qcore.Offer)}

    def test_every_scheme_that_is_served_stands_in_the_table_with_its_kernel(self):
        found = self.served()
        table = [
            (pages.named(contract), pages.named(schemes) or set(SCHEMES), pages.named(kernels))
            for contract, schemes, kernels in self.rows("Supported schemes")
        ]
        told = {(c, s): kernels for contracts, schemes, kernels in table for c in contracts for s in schemes}
        assert told.keys() == found.keys()
        assert not {key: name for key, name in found.items() if name not in told[key]}
        assert set().union(*told.values()) == set(found.values())
        assert set().union(*(contracts for contracts, _, _ in table)) == set(self.contracts())

    def test_what_is_refused_stands_on_the_page(self, row):
        answer = self.answer(self.refused[row])
        assert isinstance(answer, qcore.Refusal), answer
        assert answer.reason

    def test_the_table_of_refusals_is_what_is_tested(self):
        assert {row[0] for row in self.rows("Unsupported requests")} == {*self.refused, *self.elsewhere}

    def test_every_variable_that_the_plugin_reads_is_listed(self):
        read = set(re.findall(r"\bQCORE_[A-Z]+(?:_[A-Z]+)*\b", self.source()))
        assert read <= self.told("Environment and tuning", slice(1))
