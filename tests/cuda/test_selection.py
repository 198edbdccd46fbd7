"""What kernels for many rows on Hopper, which no interpreter runs, rest on: choices, orders, who does which step."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from qcore_cuda.kernels.parts import segment, steps_of
from qcore_cuda.runtime.device import Device

HOPPER = Device(90, False, 132)


@triton.jit
def walk(seen, tiles, waves, share, KB):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    steps = steps_of(program, programs, tiles, waves, share, KB)
    step = steps * 0
    while step < steps:
        tile, begin, end = segment(step, steps, program, programs, waves, share, KB)
        for k in range(begin, end):
            tl.atomic_add(seen + tile * KB + k, 1)
        step += end - begin


@pytest.fixture
def gluon(monkeypatch):
    """A Triton with a Gluon that was tried."""
    from qcore_cuda.runtime import hopper
    from qcore_cuda.selection import choose

    monkeypatch.setattr(hopper, "usable", lambda: True)
    choose.cache_clear()
    yield
    choose.cache_clear()


def float_form(bits=4, group=128, zero=0, rows=64, **more):
    from qcore_cuda.problem import GemmProblem

    block = (min(group, 128) or 128) if bits == 4 else 64
    return GemmProblem(bits, 4096, 4096, rows, block, not group, group or 4096, zero, **more)


def int8_form(bits=8, group=0, rows=64, **more):
    step = (min(group, 128) or 128) if bits == 4 else (group or 128)
    return float_form(bits, group, rows=rows, codes=True, step=step, grouped=bool(group), **more)


FORMS = {
    "w4": float_form(group=0),
    "w4-g128": float_form(),
    "w4-g128-int": float_form(zero=1),
    "w4-g64": float_form(group=64),
    "w4-g32": float_form(group=32),
    "w4-g32-int": float_form(group=32, zero=1),
    "w8": float_form(8, 0),
    "w8-g128": float_form(8),
    "a8 w8": int8_form(),
    "a8 w8-xz": int8_form(x_zero=True),
    "a8 w4": int8_form(4),
    "a8 w4-g128": int8_form(4, 128),
    "a8 w4-g32": int8_form(4, 32),
    "a8 w4-g32-xz": int8_form(4, 32, x_zero=True),
    "a8 w8-g64": int8_form(8, 64),
    "a8 w8-g64-int": int8_form(8, 64, zero=1),
    "a8 w8-g128": int8_form(8, 128),
    "a8 w8-g128-int": int8_form(8, 128, zero=1),
}
UNMEASURED = {
    "a8 w8-g32-int": int8_form(8, 32, zero=1),
    "a8 w8-g384-xz": replace(int8_form(8, 128, x_zero=True), group=384),
    "a8 w4-g64": int8_form(4, 64),
    "a8 w4-g64-xz": int8_form(4, 64, x_zero=True),
    "a8 w4-g96": int8_form(4, 32, x_zero=True),
    "w4-g32-fzp": float_form(group=32, zero=2),
    "w8-g64": float_form(8, 64),
    "w8-g32": replace(float_form(8, 32), block=32),
    "w8-asym": float_form(8, 0, 1),
    "mxfp4": float_form(group=32, element="e2m1", scale=torch.uint8),
    "nvfp4": replace(float_form(group=32, element="e2m1", scale=torch.int8), group=16),
    "nf4": float_form(group=64, element="t" + "3f800000" * 16),
    "wfp8a16": float_form(8, 0, element="e4m3"),
    "mxfp8": replace(float_form(8, 32, element="e4m3", scale=torch.uint8), block=32),
    "w4-g128 of float16": float_form(x_dtype=torch.float16, out_dtype=torch.float16),
}
SIDES = (1024, 1088, 1536, 2048, 2560, 3584, 4096, 5120, 6144, 7168, 9728, 11008, 14336, 18944, 28672, 32768)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@pytest.mark.parametrize("name", FORMS)
def test_tables_have_an_estimate_for_every_form_and_rows(name):
    from qcore_cuda import measured
    from qcore_cuda.costs import forms

    assert next(forms(FORMS[name])) == name.removeprefix("a8 ")
    for rows in ROWS:
        assert len(next(measured.shipped(HOPPER, replace(FORMS[name], rows=rows)))) >= 2


@pytest.mark.parametrize("name", UNMEASURED)
def test_forms_that_nobody_measured_use_the_nearest(gluon, name):
    from qcore_cuda.selection import choose, estimated

    for n, rows in itertools.product((1024, 4096, 4100, 28672), ROWS):
        problem = replace(UNMEASURED[name], n=n, rows=rows)
        choice = choose(HOPPER, problem)
        assert choice.product.serves(HOPPER, problem)
        assert choice.product.adapted(problem, choice.config) == choice
        if "float16" not in name or rows <= 16:
            assert estimated(HOPPER, problem)
        if name.startswith("a8 w4-g64") and rows >= 256 and n in (4096, 28672):
            assert choice.product.name == "w4a8_groups_hopper"


def test_kernels_for_small_weights_are_not_chosen_alone(gluon):
    """Exact products have no other estimate: what `gemv_chunks` takes for a large weight says nothing of its rivals."""
    from qcore_cuda.selection import choose, estimated

    half = {"x_dtype": torch.float16, "out_dtype": torch.float16}
    for exact in (half, {"out_dtype": torch.float32}):
        for rows, size in itertools.product((32, 64, 128), (1024, 8192, 32768)):
            problem = replace(float_form(rows=rows, **exact), n=size, k=size)
            assert choose(HOPPER, problem).product.name == "gemm"
            assert not estimated(HOPPER, problem)
    names = {choice.product.name for _, choice in estimated(HOPPER, float_form(rows=32, half=True, **half))}
    assert names >= {"gemm_hopper", "gemv_chunks"}


@pytest.mark.parametrize(
    ("device", "tile"),
    [
        (Device(80, False, 108), (128, 128, 3)), (Device(89, False, 128), (128, 128, 2)),
        (Device(120, False, 170), (128, 128, 2)), (Device(0, True, 304), (64, 64, 3)),
    ],
)  # fmt: skip
def test_tiles_for_many_rows_fit_shared_memory(device, tile):
    from qcore_cuda.selection import choose

    half = {"x_dtype": torch.float16, "out_dtype": torch.float16}
    for problem in (float_form(rows=512, zero=1), float_form(8, 0, 1, 512, **half), float_form(4, 0, 2, 512)):
        product, config = choose(device, problem)
        assert product.name == "gemm"
        assert (config.bn, config.bm, config.stages) == tile


def test_a_small_k_in_one_group_is_not_for_blocks_of_128(gluon):
    """Of a single group of 64 or 32 columns, int4 is packed in blocks of that size."""
    from qcore_cuda.products.gemm_hopper import GEMM_HOPPER

    for block in (32, 64):
        for group in (block, 3 * block):
            problem = replace(float_form(rows=512), k=group, block=block, group=group, one_group=True)
            assert not GEMM_HOPPER.serves(HOPPER, problem)
    assert GEMM_HOPPER.serves(HOPPER, replace(float_form(rows=512), one_group=True, k=128))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("scale", "zero"), [*itertools.product((2, 4), (0, 1, 4))])
def test_stages_fit_shared_memory_whatever_the_parameters(bits, group, scale, zero):
    from types import SimpleNamespace

    from qcore_cuda.products.gemm_hopper import stages_of
    from qcore_cuda.runtime.hopper import ROOM
    from qcore_triton.weights import Weight

    sized = [None if size == 0 else SimpleNamespace(element_size=lambda size=size: size) for size in (scale, zero)]
    for bm, rows in ((32, 128), (64, 128), (128, 128), (256, 128), (32, 64), (64, 64), (128, 64)):
        pieces, each = 2 if bm > 128 else 1, 128 // group
        stages = stages_of(Weight(None, *sized, 0, 0, bits, group), bm, pieces, each, True, rows)
        slot = (64 * rows if bits == 4 else 0) + 128 * each * (scale + zero)
        stage, result = bm * 128 + (64 * rows if bits == 8 else 0), 2 * bm * 128 // pieces
        # Of two warpgroups that take blocks in turn, each waits for its next block before it releases the last stage of
        # the one before: with three stages neither would go on. Each stage is always of the same one.
        assert stages >= 3 if rows == 128 else stages >= 4 and stages % 4 == 0
        assert stages * stage + -(-stages // 2) * slot + (result if rows == 128 else bm * (128 + 256)) <= ROOM


def floor(name, n, k, rows):
    """Microseconds that an H200 needs to read the weight once, or to multiply at its peak."""
    codes, bits = name.startswith("a8 "), 4 if "w4" in name else 8
    return max(n * k * bits / 8 / 4.8e6, 2 * rows * n * k / (2e9 if codes else 1e9))


@pytest.mark.parametrize("name", FORMS)
def test_estimates_choose_without_jumps_between_sizes(gluon, name):
    """On a dense grid: estimates grow with the size, and a neighbour's choice is never taken to be much slower."""
    from qcore_cuda.selection import estimated

    for rows in ROWS:
        times = {
            (n, k): estimated(HOPPER, replace(FORMS[name], n=n, k=k, rows=rows))
            for n, k in itertools.product(SIDES, SIDES)
        }
        for (n, k), found in times.items():
            assert found, (rows, n, k)
            assert 0.7 * floor(name, n, k, rows) < found[0][0], (rows, n, k)
            if name != "a8 w8-g64":  # whose kernels do not split K: a few long programs, if N is small
                assert found[0][0] < 6 * floor(name, n, k, rows) + 60, (rows, n, k)
            for larger in ((2 * n, k), (n, 2 * k)):
                if larger in times:
                    growth = times[larger][0][0] / found[0][0]
                    assert 0.94 < growth < 2.5, (rows, n, k, larger, growth)


@pytest.mark.parametrize("name", FORMS)
def test_more_rows_have_no_faster_choice(gluon, name):
    """On a dense grid from the smallest weights on that were measured: what is known for more rows is not forgotten."""
    from qcore_cuda.selection import estimated

    for n, k in ((n, k) for n, k in itertools.product(SIDES, SIDES) if n * k >= 1 << 22):
        problems = [replace(FORMS[name], n=n, k=k, rows=rows) for rows in ROWS if rows >= 16]
        best = [estimated(HOPPER, problem)[0] for problem in problems]
        for problem, (us, _), (more, choice) in zip(problems, best, best[1:], strict=False):
            assert us <= 1.1 * more or not choice.product.serves(HOPPER, problem), (problem.rows, n, k, us, more)


@pytest.mark.parametrize("name", [name for name in (*FORMS, *UNMEASURED) if "float16" not in name])  # by rules
def test_sizes_that_fill_no_line_cost_little_more(gluon, name):
    """They have the same kernels, and at most two launches that copy x and the result, which are counted."""
    from qcore_cuda.costs import copying
    from qcore_cuda.selection import estimated

    for n, k, rows in itertools.product((2048, 4096, 14336), (2048, 4096), ROWS):
        form = replace(FORMS.get(name) or UNMEASURED[name], rows=rows)
        even = estimated(HOPPER, replace(form, n=n, k=k))[0][0]
        for less, along in ((8, 0), (4, 0), (1, 0), (0, 8), (3, 7)):
            us, (product, _) = estimated(HOPPER, replace(form, n=n - less, k=k - along))[0]
            limit = 1.05 * even + copying((rows * n, rows * k))
            assert us <= limit, (n - less, k - along, rows, product.name, us, even)


def test_weights_that_16_bits_round_alike_are_not_dequantized(gluon):
    from qcore_cuda.products.dense import DENSE
    from qcore_cuda.selection import choose

    table = "t" + "3f800000" * 16
    for group, more in ((0, {"zero": 2}), (1024, {"zero": 2}), (0, {"element": table}), (1024, {"element": table})):
        for rows in (16, 512, 2048):
            problem = replace(float_form(group=group, **more), rows=rows, block=128)
            assert problem.alike
            assert not DENSE.serves(HOPPER, problem)
            assert choose(HOPPER, problem).product.serves(HOPPER, problem)
    for group, more in ((0, {}), (128, {"zero": 2}), (64, {"element": table})):
        assert DENSE.serves(HOPPER, float_form(group=group, **more))


def test_tiles_that_cannot_be_split_are_no_choice_of_their_own(gluon):
    from qcore_cuda.products.gemm_hopper import GEMM_HOPPER, Tokens
    from qcore_cuda.schedule import SPLITS

    problem = float_form(rows=256)  # 64 tiles of 128 tokens
    assert [split for split in SPLITS if GEMM_HOPPER.apart(HOPPER, problem, Tokens(128, split))] == [1, 2, 0]
    works = {split: GEMM_HOPPER.work(HOPPER, problem, Tokens(128, split)) for split in SPLITS}
    assert [works[split].parts for split in (1, 2, 4)] == [0, 2, 0]
    assert 1 < works[0].parts < 4  # programs with the end of a tile and the beginning of another
    assert works[1].steps == 2 * works[2].steps == 32


def kind_of(choice):
    """The name of a kernel, whatever the rows of its tiles."""
    return choice.product.name.removesuffix("_64").removesuffix("_192")


OWN = {
    "a8 w8": "int8_hopper", "a8 w8-xz": "int8_hopper", "a8 w4": "w4a8_hopper", "a8 w4-g128": "w4a8_hopper",
    "a8 w4-g32": "w4a8_groups_hopper", "a8 w4-g32-xz": "w4a8_groups_hopper",
    "a8 w8-g64": "int8_groups_hopper", "a8 w8-g128": "int8_groups_hopper",
    "a8 w8-g64-int": "w8a8_groups_hopper", "a8 w8-g128-int": "w8a8_groups_hopper",
}  # fmt: skip
"""Forms of int8 activations: the kernel for many rows on Hopper; all others have `gemm_hopper`."""


@pytest.mark.parametrize("name", FORMS)
def test_kernels_for_hopper_take_many_rows(gluon, name):
    from qcore_cuda.selection import choose

    own = OWN.get(name, "gemm_hopper")
    found = []
    for n, k, rows in itertools.product(SIDES, SIDES, (512, 2048)):
        if n >= 2048 and n * k >= 1 << 24:
            chosen = kind_of(choose(HOPPER, replace(FORMS[name], n=n, k=k, rows=rows)))
            assert chosen in (own, "dense", "int8_persistent", "int8_tiles"), (n, k, rows)
            found.append(chosen)
    assert found.count(own) >= 0.7 * len(found)
    assert choose(HOPPER._replace(arch=100), replace(FORMS[name], rows=2048)).product.name.find("hopper") < 0


@pytest.mark.parametrize(
    ("name", "kernel", "refused"),
    [
        ("w4-g32", "gemm_hopper", [{"x_dtype": torch.float32}, {"group": 96}]),
        ("w4-g64", "gemm_hopper", [{"element": "e2m1", "scale": torch.uint8, "x_dtype": torch.float16}]),
        ("w8-g128", "gemm_hopper", [{"group": 192}, {"group": 96}, {"x_dtype": torch.float16}]),
        ("a8 w4-g128", "w4a8_hopper", [{"step": 32}, {"bits": 8}, {"zero": 2}, {"own_order": True}, {"rows": 8}]),
        ("a8 w4-g32", "w4a8_groups_hopper", [{"group": 96}, {"zero": 2}, {"own_order": True}, {"rows": 8}]),
        ("a8 w8", "int8_hopper", [{"rows": 64}, {"bits": 4}, {"grouped": True}, {"zero": 1}]),
        ("a8 w8-g64", "int8_groups_hopper", [{"rows": 8}, {"bits": 4}, {"group": 192}, {"zero": 1}, {"zero": 2}]),
        ("a8 w8-g128-int", "w8a8_groups_hopper", [{"rows": 8}, {"bits": 4}, {"zero": 0}, {"own_order": True}]),
    ],
)  # fmt: skip
def test_kernels_for_hopper_refuse_what_they_cannot_compute(gluon, name, kernel, refused):
    from qcore_cuda.products.catalog import FLOAT_PRODUCTS, INT8_PRODUCTS

    problem = replace(FORMS[name], rows=2048)
    product = next(p for p in (*FLOAT_PRODUCTS, *INT8_PRODUCTS) if p.name == kernel)
    assert product.serves(HOPPER, problem)
    assert all(product.serves(HOPPER, replace(problem, n=n)) for n in (17, 4100, 5001))
    assert not product.serves(HOPPER._replace(arch=100), problem)
    if problem.codes:
        refused = [*refused, {"out_dtype": torch.float32}, {"out_dtype": torch.int8, "out_by_token": True}]
    assert not any(product.serves(HOPPER, replace(problem, **change)) for change in refused)


@pytest.mark.parametrize(
    ("name", "like"), [("mxfp4", "w4-g32"), ("nvfp4", "w4-g32"), ("nf4", "w4-g64"), ("wfp8a16", "w8")]
)
def test_tables_are_estimated_like_integers_until_measured(gluon, name, like):
    from qcore_cuda.costs import forms
    from qcore_cuda.selection import estimated

    first = {"mxfp4": "we2m1-g32-e8m0", "nvfp4": "we2m1-g16-e4m3", "nf4": "wt4-g64", "wfp8a16": "we4m3"}[name]
    assert next(forms(UNMEASURED[name])) == first
    for n, k, rows in itertools.product((1024, 4096, 28672), (1024, 8192), ROWS):
        mine, known = (
            estimated(HOPPER, replace(form, n=n, k=k, rows=rows)) for form in (UNMEASURED[name], FORMS[like])
        )
        integers = [(us, choice) for us, choice in known if choice.product.name != "slices"]
        fits = [(us, choice) for us, choice in integers if choice.product.adapted(UNMEASURED[name], choice.config)]
        assert mine == fits


@pytest.mark.parametrize("element", ["e2m1", "e4m3", "t" + "3f800000" * 16])
def test_some_kernel_computes_any_table(gluon, element):
    """On every kind of GPU, of every number of rows, of every dtype; none rounds what float32 must not lose."""
    from qcore_cuda.selection import choose

    bits = 8 if element == "e4m3" else 4
    for arch, rows, n in itertools.product((0, 80, 89, 90, 100), (1, 16, 64, 512, 2048), (64, 4100)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            split = 3 * rows if dtype == torch.float32 else 0
            problem = float_form(bits, 32, rows=rows, element=element, x_dtype=dtype, out_dtype=dtype, split_rows=split)
            problem = replace(problem, n=n, block=32)
            chosen = choose(Device(arch, not arch, 128), problem)
            assert chosen.product.serves(Device(arch, not arch, 128), problem)
            assert chosen.product.name != "slices"
            assert (chosen.product.name == "dense") >= (dtype == torch.float32 and element[0] == "t")


@pytest.mark.parametrize("arch", [0, 80, 89, 90, 100])
def test_a_choice_serves_its_problem(gluon, arch):
    from qcore_cuda.problem import GemmProblem
    from qcore_cuda.selection import candidates, choose

    device = Device(arch, not arch, 128)
    for codes, bits, rows, n in itertools.product((False, True), (4, 8), (1, 16, 32, 256, 2048), (64, 4096, 4100)):
        for zero, x_dtype in itertools.product((0, 1, 2), (torch.bfloat16, torch.float16, torch.float32)):
            problem = GemmProblem(
                bits, n, 4096, rows, zero=zero, x_dtype=x_dtype, codes=codes, grouped=True, x_zero=True
            )
            for choice in (choose(device, problem), *candidates(device, problem)):
                assert choice.product.serves(device, problem)
                assert choice.product.adapted(problem, choice.config) == choice


def test_codes_in_its_order_match_the_weights_of_its_threads(interpreter):
    from qcore_cuda.products.quantized import quantize_rows
    from qcore_cuda.products.w4a8_hopper import ORDER
    from qcore_triton.packing import _planar

    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (16, 256), dtype=torch.int8, generator=generator)
    x = torch.randn(3, 256, generator=generator)
    words = _planar(codes + 8, 128, 8).view(2, 16, 4, 4, 4)  # block, row, thread t, word j of its four, byte b
    nibbles = torch.stack((words & 15, words >> 4)).to(torch.int32) - 8
    # Operand A as `kernels.w4a8_hopper` makes it: column 64 * (high nibble) + 16 j + 4 t + b of a block.
    operand = nibbles.permute(2, 1, 0, 4, 3, 5).reshape(16, 256)
    found = quantize_rows(x, symmetric=True, order=ORDER).q.int() @ operand.t()
    assert torch.equal(found, quantize_rows(x, symmetric=True).q.int() @ codes.int().t())


@pytest.mark.parametrize("tiles", [1, 5, 7, 16, 23, 38])
@pytest.mark.parametrize("blocks", [3, 9, 64])
def test_every_block_of_every_tile_is_multiplied_once(interpreter, tiles, blocks):
    from qcore_cuda.schedule import SPLITS, tail_spread

    for waves, share, programs in {tail_spread(tiles, blocks, split, 16) for split in SPLITS}:
        assert programs <= 16
        seen = torch.zeros(tiles, blocks, dtype=torch.int32)
        walk[(programs,)](seen, tiles, waves, share, blocks)
        assert (seen == 1).all()
        # The copying warp and its readers rely on every program having something to do.
        assert not share or waves or (programs - 1) * share < tiles * blocks


def test_tiles_are_split_spread_or_left_whole():
    from qcore_cuda.schedule import best_split, tail_spread

    def best(tiles, blocks):
        return tail_spread(tiles, blocks, best_split(tiles, blocks, 256, HOPPER.sms)[1], HOPPER.sms)

    found = {size: best(*size) for size in ((32, 112), (224, 64), (128, 64))}
    assert found == {(32, 112): (0, 28, 128), (224, 64): (1, 45, 132), (128, 64): (1, 0, 128)}
    assert tail_spread(96, 32, 0, HOPPER.sms) == (0, 24, 128)
    assert tail_spread(96, 32, 4, HOPPER.sms) == tail_spread(96, 32, 1, HOPPER.sms) == (1, 0, 96)


@pytest.mark.parametrize("rows", [128, 256, 512, 1024, 2048])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1024, 8192), (28672, 4096)])
def test_weights_with_units_are_multiplied_in_float16(gluon, n, k, rows):
    from qcore_cuda.selection import choose

    form = replace(int8_form(4, 32, rows=rows), n=n, k=k, group=32)
    own = {"w4a8_units_hopper", "int8_gemv_chunks"} if rows == 128 and n == 1024 else {"w4a8_units_hopper"}
    assert kind_of(choose(HOPPER, replace(form, units=True))) in own
    for other in (form, replace(form, units=True, zero=1), replace(form, units=True, out_dtype=torch.float32)):
        assert kind_of(choose(HOPPER, other)) != "w4a8_units_hopper"
    if rows >= 256:
        assert choose(HOPPER, form).product.name == "w4a8_groups_hopper", "it keeps the kernel that it had"
