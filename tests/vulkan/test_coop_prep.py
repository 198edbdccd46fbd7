"""Float32 rows as two float16 rows that hold 22 of their bits, on whatever device there is."""

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


def terms_of(device, x: torch.Tensor, fmt: str, terms: int = TERMS) -> tuple[torch.Tensor, ...]:
    """Terms ``(terms, M, K)``, scales ``(M, 1)`` in float64 (negative for a plain row), and plain rows ``(M, K)``."""
    (m, k), weight, size = x.shape, Format.parse(fmt), x.itemsize
    geometry = Geometry.of(weight, 8, k)
    assert geometry.columns == k
    b = Builder(device)
    given = b.input(rows_bytes(m, k, x.dtype))
    rows = Rows(given, m, k, rows_pitch(k, x.dtype), x.dtype)
    made = _halves(b, rows, geometry, k, m, terms=terms)
    halves, scales = b.output(made.codes.bytes), b.output(made.scales.bytes)
    b.copy(made.codes, halves)
    b.copy(made.scales, scales)
    head = -(-m // 4) * 4
    program = b.program(
        [Place(given, m, size * k, size * rows.pitch)],
        [Place(halves, terms * m, 2 * k, 2 * k), Place(scales, 1, made.scales.bytes, made.scales.bytes)],
    )
    stored, found = torch.empty(terms * m, k, dtype=torch.float16), torch.empty(1, head + m * k)
    program.run([x], [stored, found])
    order = ORDERS[weight.bits]
    runs = stored.double().view(-1, len(order))
    made_terms = torch.empty_like(runs)
    made_terms[:, list(order)] = runs
    scale = found[0, :m].double().view(m, 1)
    return made_terms.view(terms, m, k), scale, found[0, head:].view(m, k)


def total(terms: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the terms stand for: the second counts 2^-11."""
    return sum(term * 2.0 ** (-11 * at) for at, term in enumerate(terms)) * scale


@pytest.mark.parametrize("fmt", ["int4-g64", "int8"])
def test_the_sum_is_x(vulkan, fmt):  # noqa: F811
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(6, 256, generator=draw) * 10.0 ** torch.randint(-5, 6, (6, 256), generator=draw)
    x[0], x[1], x[2, 5] = 0.0, -3.4e38, 1e-30
    x[3] *= 1e-30
    terms, scales, _ = terms_of(vulkan, x, fmt)
    wide = x.double()
    allowed = 2.0**-22 * wide.abs() + 2.0**-50 * wide.abs().amax(1, keepdim=True) + 2.0**-149
    assert (total(terms, scales) - wide).abs().le(allowed).all()
    assert terms[1].abs().sum() > 0


def test_one_term_of_float32_has_eleven_bits(vulkan):  # noqa: F811
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(9))
    x[1, 5], x[2, 5], x[3] = 2.0 - 2.0**-23, 3.4e38, 0.0  # the first two round up
    terms, scales, _ = terms_of(vulkan, x, "int8", 1)
    assert terms.isfinite().all()
    assert ((total(terms, scales) - x.double()).abs()[[0, 1, 3]] <= 2.0**-11 * x.double().abs()[[0, 1, 3]]).all()


def test_what_is_not_finite_leaves_nothing_over(vulkan):  # noqa: F811
    x = torch.ones(4, 64)
    x[1, 3], x[2, 9], x[3, 63] = torch.inf, -torch.inf, torch.nan
    terms, scales, _ = terms_of(vulkan, x, "int8")
    found = total(terms, scales)
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found.isinf(), x.isinf())
    assert torch.equal(found[x.isinf()], x[x.isinf()].double())
    assert not terms[1][~x.isfinite()].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spike", [1e30, -3e38, 2.0**127])
def test_rows_too_wide_for_halves_stay_as_they_are(vulkan, dtype, spike):  # noqa: F811
    draw = torch.Generator().manual_seed(8)
    x = torch.randn(5, 256, generator=draw).to(dtype)
    x[1, 85], x[3, ::3], x[4, 7] = spike, spike, 1e5
    terms, scales, plain = terms_of(vulkan, x, "int8", TERMS if dtype == torch.float32 else 1)
    assert (scales[:, 0] < 0).tolist() == [False, True, False, True, False]
    assert not terms[:, [1, 3]].any()
    assert torch.equal(plain[[1, 3]], x[[1, 3]].float())
    others, wide = [0, 2, 4], x.double()
    error = (total(terms, scales) - wide).abs()[others]
    assert (error <= 2.0**-8 * wide.abs()[others]).all()
    assert terms[0, others].any(1).all()
