"""Every module that Python can name is in the package, and everything in the package is said in variants.txt."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from vulkan_problems import vulkan  # noqa: F401

from qcore import Format
from qcore_vulkan import layout, native, variants
from qcore_vulkan.description import Description, Matrix
from qcore_vulkan.steps import product, selection

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
        needed = "integer_dot" if "dot" in name else "int64" if "long" in name else "timeline"
        if vulkan.description.features[needed]:
            assert vulkan.pipeline(name, (8,)) >= 0


def matrices() -> tuple[Matrix, ...]:
    """Every cooperative matrix that a kernel asks for."""
    shapes = [(m, n, k) for m in (16,) for n in (8, 16) for k in (16, 32)]
    types = (("f16", "f32"), ("s8", "s32"))
    return tuple(Matrix(*shape, a, a, c, c, False, "subgroup") for shape in shapes for a, c in types)


def problems() -> Iterator[product.GemmProblem]:
    """Rows, formats and dtypes between which kernels are chosen."""
    formats = [
        Format.parse(text) for text in ("int8", "int8-asym", "int8-g32-fzp", "int4", "int4-g128-asym", "int4-fzp")
    ]
    for op, m, fmt, dtype, n in itertools.product(
        ("gemm_float", "gemm_int"), (1, 2, 4, 8, 16, 64, 4096), formats, (torch.float32, torch.bfloat16), (20, 4096)
    ):
        yield product.GemmProblem(op, m, layout.Geometry.of(fmt, n, 1024), dtype, dtype, False)


@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.parametrize("matrix", [False, True])
def test_each_kernel_for_gpus_is_declared(vulkan, dot, matrix):  # noqa: F811
    description = replace(
        vulkan.description,
        features={**vulkan.description.features, "integer_dot": dot},
        cooperative_matrix=matrices() if matrix else (),
        subgroup=replace(vulkan.description.subgroup, size=32, min=32, max=32, control=True),
    )
    named = {kernel.variant for problem in problems() for kernel in selection.candidates(description, problem)}
    assert named <= set(declared())
    assert any("dot" in name for name in named) == dot
    assert any("coop" in name for name in named) == matrix


def test_modules_that_are_named_outright_are_declared():
    calls = [
        node
        for path in (Path(variants.__file__).parent / "steps").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "dispatch"
    ]
    named = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    assert {"prepare", "quantize", "finish"} <= named <= set(declared())


@dataclass
class Stand:
    """A device whose compiler knows some variants."""

    description: Description
    profile: str
    known: tuple[str, ...]

    def pipeline(self, variant):
        if variant not in self.known:
            raise native.Unsupported(variant)


@pytest.mark.parametrize(
    ("profile", "features", "known", "expected"),
    [
        ("gpu", ("integer_dot", "int64"), ("gemm_int_dot", "gemm_int_long"), "gemm_int_dot"),
        ("gpu", ("integer_dot",), (), "gemm_int_plain"),
        ("gpu", (), ("gemm_int_dot",), "gemm_int_plain"),
        ("cpu", ("integer_dot", "int64"), ("gemm_int_dot", "gemm_int_long"), "gemm_int_long"),
        ("cpu", ("integer_dot", "int64"), ("gemm_int_dot",), "gemm_int_dot"),
        ("cpu", ("integer_dot",), ("gemm_int_dot", "gemm_int_long"), "gemm_int_dot"),
    ],
)
def test_tiles_use_what_the_device_has(vulkan, profile, features, known, expected):  # noqa: F811
    description = replace(vulkan.description, features=dict.fromkeys(features, True))
    assert variants.int_variant(Stand(description, profile, known)) == expected


def test_long_words_are_for_cpus(vulkan):  # noqa: F811
    description = replace(vulkan.description, features={"int64": True})
    assert variants.float_variant(Stand(description, "cpu", ("gemm_float_long",))) == "gemm_float_long"
    assert variants.float_variant(Stand(description, "gpu", ("gemm_float_long",))) == "gemm_float"
