"""The compile harness sees what it is there to see."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

from compiling import Job, compile_all, report

SAMPLES = str(Path(__file__).with_name("sample_kernels.py"))
SUM = {"x": "*fp32:16", "y": "*fp32:16", "K": "i32:16"}
PRODUCT = {"x": "*bf16:16", "w": "*i8:16", "y": "*fp32:16", "K": "i32:16", "TYPE": "tl.bfloat16", "BLOCK": 64}

JOBS = {
    "slim": Job(f"{SAMPLES}:total", {**SUM, "ROWS": 8, "BLOCK": 128}),
    "wide": Job(f"{SAMPLES}:total", {**SUM, "ROWS": 128, "BLOCK": 256}, options={"maxnreg": 64}),
    "amd": Job(f"{SAMPLES}:total", {**SUM, "ROWS": 8, "BLOCK": 128}, "gfx942"),
    "product": Job(f"{SAMPLES}:product", PRODUCT),
    "product on ampere": Job(f"{SAMPLES}:product", PRODUCT, "sm_80"),
    "unknown argument": Job(f"{SAMPLES}:product", {**PRODUCT, "Z": 1}),
    "no such target": Job(f"{SAMPLES}:product", PRODUCT, "sm_3"),
    "wide on amd": Job(f"{SAMPLES}:total", {**SUM, "ROWS": 512, "BLOCK": 256}, "gfx90a"),
}


@pytest.fixture(scope="module")
def made():
    return dict(zip(JOBS, compile_all(JOBS.values()), strict=True))


def test_a_kernel_that_fits_has_no_spills(made):
    for name in ("slim", "amd", "product", "product on ampere"):
        assert not made[name].error
        assert made[name].registers > 8
        assert made[name].spills == made[name].stack == 0, name
        assert made[name].fits


@pytest.mark.parametrize("name", ["wide", "wide on amd"])
def test_spills_are_seen(made, name):
    assert made[name].spills > 0
    assert made[name].stack > 0


def test_the_inner_loop_is_the_one_with_the_tensor_cores(made):
    loop = made["product"].inner_loop
    assert loop.count("HGMMA") == loop.mma > 0
    assert made["product on ampere"].inner_loop.count("HMMA") == made["product on ampere"].inner_loop.mma > 0
    assert 0 < made["slim"].loop_instructions() < len(made["slim"].instructions)


def test_instructions_are_counted_per_weight(made):
    product = made["product"]
    assert product.per_weight(64 * 64) == pytest.approx(product.loop_instructions() * 4 * 32 / 4096)
    assert "per weight" in report(product, 4096)


def test_what_fails_says_why_and_stops_nobody_else(made):
    assert "not of this kernel: ['Z']" in made["unknown argument"].error
    assert made["no such target"].error
    assert "failed" in report(made["no such target"])


def test_nothing_is_compiled_where_the_interpreter_rules(monkeypatch):
    from compiling import compile_job

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_job(JOBS["slim"])
    (one,) = compile_all([JOBS["slim"]])  # in a process without it
    assert not one.error
