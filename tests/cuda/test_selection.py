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


def test_int4_in_blocks_of_128_meets_many_codes_in_a_kernel_of_its_own(gluon):
    from qcore_cuda.problem import GemmProblem
    from qcore_cuda.products.w4a8_hopper import W4A8_HOPPER
    from qcore_cuda.selection import choose
    from qcore_triton.weights import FLOAT_ZERO, INT_ZERO

    def chosen(device=HOPPER, **change):
        return choose(device, replace(plain, **change)).product is W4A8_HOPPER

    plain = GemmProblem(4, 4096, 4096, 2048, codes=True, grouped=True)
    assert all(chosen(rows=rows) for rows in (64, 256, 2048))
    assert chosen(zero=INT_ZERO)
    assert chosen(out_dtype=torch.int8)
    others = ({"rows": 32}, {"step": 32}, {"n": 4100}, {"bits": 8}, {"zero": FLOAT_ZERO}, {"out_dtype": torch.float32})
    others = (*others, {"out_dtype": torch.int8, "out_by_token": True}, {"own_order": True})
    assert not any(chosen(**change) for change in others)
    assert not chosen(HOPPER._replace(arch=100))


def test_many_codes_of_int8_go_where_the_last_wave_wastes_least(gluon):
    from qcore_cuda.problem import GemmProblem
    from qcore_cuda.products.int8_hopper import INT8_HOPPER
    from qcore_cuda.selection import choose

    plain = GemmProblem(8, 4096, 4096, 2048, 64, one_group=True, codes=True)
    found = {
        (n, rows): choose(HOPPER, replace(plain, n=n, rows=rows)).config.bn
        for n, rows in ((4096, 2048), (14336, 1024), (4096, 256))
    }
    assert found == {(4096, 2048): 256, (14336, 1024): 128, (4096, 256): 64}
    assert choose(HOPPER, plain).product is INT8_HOPPER
    others = ({"rows": 64}, {"bits": 4}, {"grouped": True}, {"n": 4100}, {"zero": 1}, {"x_zero": True})
    others = (*others, {"out_dtype": torch.float32}, {"out_dtype": torch.int8, "out_by_token": True})
    assert all(choose(HOPPER, replace(plain, **change)).product is not INT8_HOPPER for change in others)
    assert choose(HOPPER._replace(arch=100), plain).product is not INT8_HOPPER


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


def test_codes_in_its_order_meet_the_weights_that_its_threads_hold(interpreter):
    from qcore_cuda.products.quantized import quantize_rows
    from qcore_cuda.products.w4a8_hopper import ORDER
    from qcore_triton.packing import _planar

    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (16, 256), dtype=torch.int8, generator=generator)
    x = torch.randn(3, 256, generator=generator)
    words = _planar(codes, 128).view(2, 16, 4, 4, 4)  # block, row, thread t, word j of its four, byte b
    nibbles = torch.stack((words & 15, words >> 4)).to(torch.int32) - 8
    # Operand A as `kernels.w4a8_hopper` makes it: column 64 * (high nibble) + 16 j + 4 t + b of a block.
    operand = nibbles.permute(2, 1, 0, 4, 3, 5).reshape(16, 256)
    found = quantize_rows(x, symmetric=True, order=ORDER).q.int() @ operand.t()
    assert torch.equal(found, quantize_rows(x, symmetric=True).q.int() @ codes.int().t())


@pytest.mark.parametrize("tiles", [1, 5, 7, 16, 23, 38])
@pytest.mark.parametrize("blocks", [3, 9, 64])
def test_every_block_of_every_tile_is_multiplied_once(interpreter, tiles, blocks):
    from qcore_cuda.schedule import shares

    _, (waves, share, programs) = shares(tiles, blocks, 256, 16)
    assert programs <= 16
    seen = torch.zeros(tiles, blocks, dtype=torch.int32)
    walk[(programs,)](seen, tiles, waves, share, blocks)
    assert (seen == 1).all()


def test_tiles_are_split_spread_or_left_whole():
    from qcore_cuda.schedule import shares

    found = {
        (tiles, blocks): shares(tiles, blocks, 256, HOPPER.sms)[1]
        for tiles, blocks in ((32, 112), (224, 64), (128, 64))
    }
    assert found == {(32, 112): (0, 28, 128), (224, 64): (1, 45, 132), (128, 64): (1, 0, 128)}
