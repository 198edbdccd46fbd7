"""Every module that Python can name is in the package, and everything in the package is said in variants.txt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from vulkan_problems import vulkan  # noqa: F401

from qcore_vulkan import native, variants
from qcore_vulkan.description import Description

SHADERS = Path(__file__).parents[2] / "plugins" / "vulkan" / "shaders"


def declared() -> dict[str, list[str]]:
    lines = [line.split("#")[0].split() for line in (SHADERS / "variants.txt").read_text().splitlines()]
    return {words[0]: words[1:] for words in lines if words}


def test_each_tile_is_declared_and_built():
    assert set(variants.TILES) <= set(declared())
    for name in variants.TILES:
        assert native.spirv(name)[:4] == b"\x03\x02\x23\x07"


@pytest.mark.skipif(not SHADERS.exists(), reason="without the sources")
def test_sources_and_modules_belong_together():
    compiled = {words[0] for words in declared().values()}
    assert compiled == {path.name for path in SHADERS.glob("*.comp")}
    for name, words in declared().items():
        if not any(word.startswith("needs=") for word in words):
            assert native.spirv(name)


def test_the_device_compiles_every_tile(vulkan):  # noqa: F811
    for name in variants.TILES:
        if name != "gemm_int_dot" or vulkan.description.features["integer_dot"]:
            vulkan.pipeline(name, (8,))


@dataclass
class Stand:
    """A device whose compiler knows some variants."""

    description: Description
    known: tuple[str, ...]

    def pipeline(self, variant, _constants):
        if variant not in self.known:
            raise native.Unsupported(variant)


@pytest.mark.parametrize(
    ("features", "known", "expected"),
    [
        ({"integer_dot": True}, ("gemm_int_dot",), "gemm_int_dot"),
        ({"integer_dot": True}, (), "gemm_int_plain"),
        ({}, ("gemm_int_dot",), "gemm_int_plain"),
    ],
)
def test_integer_dot_products_are_used_where_the_device_has_them(vulkan, features, known, expected):  # noqa: F811
    device = Stand(replace(vulkan.description, features=features), known)
    assert variants.int_variant(device, (8, 1, 4, 8)) == expected
