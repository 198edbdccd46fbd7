"""Float32 rows as three float16 rows whose sum they are, on whatever device there is.

Their products need cooperative matrices, which lavapipe lacks.
"""

from __future__ import annotations

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from vulkan_problems import vulkan  # noqa: F401

from qcore import Format
from qcore_vulkan.builder import Builder, Place
from qcore_vulkan.layout import Geometry
from qcore_vulkan.steps import Rows, rows_bytes, rows_pitch
from qcore_vulkan.steps.gpu_kernels import TERMS, _halves

ORDERS = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""Of each run of columns, as unpacked weights leave them."""


def terms_of(device, x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms ``(3, M, K)`` and scales ``(3, M, 1)`` in float64."""
    (m, k), weight = x.shape, Format.parse(fmt)
    geometry = Geometry.of(weight, 8, k)
    assert geometry.columns == k
    b = Builder(device)
    given = b.input(rows_bytes(m, k, x.dtype))
    rows = Rows(given, m, k, rows_pitch(k, x.dtype), x.dtype)
    made = _halves(b, rows, geometry, k, TERMS * m, terms=TERMS)
    halves, scales = b.output(made.codes.bytes), b.output(made.scales.bytes)
    b.copy(made.codes, halves)
    b.copy(made.scales, scales)
    program = b.program(
        [Place(given, m, 4 * k, 4 * rows.pitch)],
        [Place(halves, TERMS * m, 2 * k, 2 * k), Place(scales, 1, 4 * TERMS * m, 4 * TERMS * m)],
    )
    stored, found = torch.empty(TERMS * m, k, dtype=torch.float16), torch.empty(1, TERMS * m)
    program.run([x], [stored, found])
    order = ORDERS[weight.bits]
    runs = stored.double().view(-1, len(order))
    terms = torch.empty_like(runs)
    terms[:, list(order)] = runs
    return terms.view(TERMS, m, k), found.double().view(TERMS, m, 1)


@pytest.mark.parametrize("fmt", ["int4-g64", "int8"])
def test_the_sum_is_x(vulkan, fmt):  # noqa: F811
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(6, 256, generator=draw) * 10.0 ** torch.randint(-6, 7, (6, 256), generator=draw)
    x[0], x[1, ::2], x[2, 5] = 0.0, -3.4e38, 1e-30
    x[3] *= 1e-30
    terms, scales = terms_of(vulkan, x, fmt)
    wide = x.double()
    allowed = 2.0**-23 * wide.abs() + 2.0**-58 * wide.abs().amax(1, keepdim=True) + 2.0**-149
    assert ((terms * scales).sum(0) - wide).abs().le(allowed).all()
    assert terms[1:].abs().sum() > 0
    assert torch.equal(scales[1], scales[0] / 2048)


def test_what_is_not_finite_leaves_nothing_over(vulkan):  # noqa: F811
    x = torch.ones(4, 64)
    x[1, 3], x[2, 9], x[3, 63] = torch.inf, -torch.inf, torch.nan
    terms, scales = terms_of(vulkan, x, "int8")
    total = (terms * scales).sum(0)
    assert torch.equal(total.isnan(), x.isnan())
    assert torch.equal(total.isinf(), x.isinf())
    assert torch.equal(total[x.isinf()], x[x.isinf()].double())
