"""The plugin guide's own examples: an author starts from them, so they have to pass the kit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from processes import printed, unmeasured

GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "write-a-plugin"

KIT = """
from qcore import testing
certificate = testing.run("fastchip", seed=0)
print(certificate)
assert certificate.ok, certificate.unshown
assert certificate.complete
assert sum(r.outcome == "passed" for r in certificate.cases) > 30
"""

DEVICE = """
import json
import qcore
from qcore.discovery.registry import registry

autoload()
library = torch.library.Library("qcore_fastchip_test", "DEF")
op = qcore.discovery.kernels.define_op(library, "f(Tensor x) -> Tensor", lambda x: x, lambda x: x, ("PrivateUse1",))
asked = []

class Fastchip:
    @qcore.hookimpl
    def qcore_linear(self, request):
        asked.append(request.device.type)
        return qcore.Refusal("not yet")

registry.add("fastchip", Fastchip())
decision = qcore.explain("w8a16", n=64, k=64, device="fastchip:0", dtype=torch.float32)
print(json.dumps([torch.device("fastchip", 0).type, torch.fastchip.is_available(), asked, decision.plugin]))
"""


def blocks(page, heading):
    """The Python blocks of a section."""
    _, _, rest = (GUIDE / page).read_text("utf-8").partition(f"\n{heading}\n")
    assert rest, f"{page} has no {heading!r}"
    section = re.split(r"\n##+ ", rest)[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def first_example():
    """As it stands, up to where it takes the plugin away again."""
    source = blocks("index.md", "## Start")[0]
    assert 'registry.add("fastchip"' in source
    return source.replace('registry.remove("fastchip")', "")


@pytest.mark.grid  # `tests` runs the whole kit on what `new-plugin` writes
@pytest.mark.slow
def test_first_example_passes_the_whole_kit():
    printed("-c", first_example() + KIT, env=unmeasured())


def test_device_of_ones_own_is_asked_for_by_its_name():
    (source,) = blocks("native.md", "## A device of your own in torch")
    found = json.loads(printed("-c", source + DEVICE).splitlines()[-1])
    assert found == ["fastchip", True, ["fastchip"] * len(found[2]), "torch"]
    assert found[2]
