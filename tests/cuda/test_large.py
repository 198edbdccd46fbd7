"""What kernels for many rows on Hopper, which no interpreter runs, rest on: choices, orders, who does which step."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from qcore_cuda.device import Device
from qcore_cuda.kernels.parts import segment, steps_of

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
    from qcore_cuda import dispatch, int8_config, large

    monkeypatch.setattr(large, "usable", lambda: True)
    for choose in (dispatch.choose, int8_config.choose):
        choose.cache_clear()
    yield
    for choose in (dispatch.choose, int8_config.choose):
        choose.cache_clear()


def test_int4_in_blocks_of_128_meets_many_codes_in_a_kernel_of_its_own(gluon):
    from dataclasses import replace

    from qcore_cuda.int8_config import Problem, choose

    plain = Problem(4, 4096, 4096, 2048, True, 128)
    for rows in (64, 256, 2048):
        assert choose(HOPPER, replace(plain, rows=rows)).kernel == "fours"
    others = (replace(plain, rows=32), replace(plain, inner=32), replace(plain, n=4100), replace(plain, bits=8))
    assert all(choose(HOPPER, other).kernel != "fours" for other in others)
    assert choose(HOPPER, plain, specialized=False).kernel != "fours"
    assert choose(HOPPER._replace(arch=100), plain).kernel != "fours"


def test_what_it_does_not_compute():
    from qcore_cuda.large import computes_fours
    from qcore_triton.weights import Weight

    scale = torch.ones(1, 16)
    weight = Weight(torch.zeros(1, 1, 16, 64, dtype=torch.uint8), scale, None, 16, 128, 4, 128)
    assert computes_fours(weight, torch.bfloat16, None)
    assert computes_fours(weight._replace(zero=torch.zeros(1, 16, dtype=torch.int8)), torch.int8, 0.1)
    assert not computes_fours(weight._replace(zero=scale), torch.bfloat16, None)
    assert not computes_fours(weight, torch.float32, None)
    assert not computes_fours(weight, torch.int8, torch.ones(3))


def test_codes_in_its_order_meet_the_weights_that_its_threads_hold(interpreter):
    from qcore_cuda.int8 import quantize_rows
    from qcore_cuda.large import FOURS_ORDER
    from qcore_triton.packing import _planar

    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (16, 256), dtype=torch.int8, generator=generator)
    x = torch.randn(3, 256, generator=generator)
    words = _planar(codes, 128).view(2, 16, 4, 4, 4)  # block, row, thread t, word j of its four, byte b
    nibbles = torch.stack((words & 15, words >> 4)).to(torch.int32) - 8
    # Operand A as `kernels.fours` makes it: column 64 * (high nibble) + 16 j + 4 t + b of a block.
    operand = nibbles.permute(2, 1, 0, 4, 3, 5).reshape(16, 256)
    found = quantize_rows(x, symmetric=True, order=FOURS_ORDER).q.int() @ operand.t()
    assert torch.equal(found, quantize_rows(x, symmetric=True).q.int() @ codes.int().t())


@pytest.mark.parametrize("tiles", [1, 5, 7, 16, 23, 38])
@pytest.mark.parametrize("blocks", [3, 9, 64])
def test_every_block_of_every_tile_is_multiplied_once(interpreter, tiles, blocks):
    from qcore_cuda.large import shares

    _, (waves, share, programs) = shares(tiles, blocks, 256, HOPPER._replace(sms=16))
    assert programs <= 16
    seen = torch.zeros(tiles, blocks, dtype=torch.int32)
    walk[(programs,)](seen, tiles, waves, share, blocks)
    assert (seen == 1).all()


def test_tiles_are_split_spread_or_left_whole():
    from qcore_cuda.large import shares

    found = {
        (tiles, blocks): shares(tiles, blocks, 256, HOPPER)[1] for tiles, blocks in ((32, 112), (224, 64), (128, 64))
    }
    assert found == {(32, 112): (0, 28, 128), (224, 64): (1, 45, 132), (128, 64): (1, 0, 128)}
