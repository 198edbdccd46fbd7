"""Pallas kernels lowered for GPUs where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


def lowered_for_gpus(function, *arrays):
    """``function`` of arrays, or of their shapes and dtypes, as JAX hands it to a GPU's compiler."""
    traced = jax.jit(function).trace(*arrays)
    try:
        return traced.lower(lowering_platforms=("cuda",))
    except RuntimeError as error:  # later versions of JAX compile it right away
        assert "does not have a Triton compilation handler" in str(error)  # noqa: PT017
        pytest.skip("this version of JAX lowers for GPUs only where it has its GPU backend")


def triton_kernels(function, *arrays) -> list[str]:
    """The kernels that ``function`` calls, as text of Triton's own language, without the names of source lines."""
    module = lowered_for_gpus(function, *arrays).compiler_ir()
    calls = [op for op in _operations(module.operation) if op.name == "stablehlo.custom_call"]
    return [_text_of(call.attributes["mhlo.backend_config"]) for call in calls]


def _operations(of) -> Iterator:
    for region in of.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _text_of(config) -> str:
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    context = ir.Context()
    dialect.register_dialect(context)
    with context:
        module = ir.Module.parse(ir.StringAttr(ir.DictAttr(config)["ir"]).value_bytes)
        return module.operation.get_asm(enable_debug_info=False)
