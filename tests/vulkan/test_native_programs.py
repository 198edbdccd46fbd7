"""Programs: recording, staging, copies of rows, and what is refused."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch
from vulkan_scale import LANES, chain, expected, pipeline

from qcore_vulkan import native
from qcore_vulkan.builder import Builder, Place, Ref, fold


@pytest.mark.parametrize(("rows", "columns", "pitch"), [(1, 1, 0), (1, 1000, 0), (7, 33, 0), (7, 33, 36), (3, 5, 64)])
def test_rows_go_in_and_out(device, rows, columns, pitch):
    program = chain(device, rows, columns, pitch)
    for _ in range(3):
        x, y = torch.randn(rows, columns), torch.empty(rows, columns)
        assert program.run([x], [y]) is None
        torch.testing.assert_close(y, expected(x))


@pytest.mark.parametrize("columns", [1000, 1001])
def test_large_tensors_are_copied_in_shares(device, columns):
    x, y = torch.randn(5000, columns), torch.empty(5000, columns)
    chain(device, 5000, columns, 1004).run([x], [y])
    torch.testing.assert_close(y, expected(x))
    buffer = device.upload(y)
    assert torch.equal(torch.from_numpy(buffer.read().view("f4")).view(y.shape), y)


def test_tensors_with_gaps_between_rows(device):
    wide, target = torch.randn(7, 50), torch.zeros(7, 40)
    program = chain(device, 7, 33, 36)
    program.run([wide[:, 5:38]], [target[:, :33]])
    torch.testing.assert_close(target[:, :33], expected(wide[:, 5:38]))
    assert not target[:, 33:].any()


def test_arrays_of_numpy(device):
    x, y = np.ones((2, 9), np.float32), np.empty((2, 9), np.float32)
    chain(device, 2, 9).run([x], [y])
    assert (y == 11).all()


def test_wrong_arrays_are_refused(device):
    program, x = chain(device, 7, 33), torch.zeros(7, 33)
    with pytest.raises(ValueError, match="got 792 bytes; expected 7 rows of 132 bytes"):
        program.run([torch.zeros(6, 33)], [x])
    with pytest.raises(ValueError, match="dense rows"):
        program.run([torch.zeros(33, 7).T], [x])
    with pytest.raises(ValueError, match="shorter"):
        program.run([x], [])


def test_time_of_each_step(device):
    b = Builder(device)
    target = b.output(1 << 20)
    b.fill(target, 7)
    b.copy(b.scratch(64), b.scratch(64))
    values = torch.empty(1, 1 << 18, dtype=torch.int32)
    program = b.program((), [Place(target, 1, 1 << 20, 1 << 20)], each=True)
    total = program.run([], [values])
    if total is None:
        pytest.skip("no queue of this device measures time")
    assert [step.name for step in program.steps] == ["fill", "copy"]
    times = program.times()
    assert len(times) == 2
    assert all(time >= 0 for time in times)
    assert 0 < sum(times) <= total * 1.001 + 1
    assert values.eq(7).all()
    with pytest.raises(native.VulkanError, match="timestamps"):
        chain(device, 7, 33, timed=True).times()


def test_time_on_the_device(device):
    elapsed = chain(device, 100, 100, timed=True).run([torch.zeros(100, 100)], [torch.zeros(100, 100)])
    assert 0 < elapsed < 10e6


def test_programs_share_memory_that_grows(own_device):
    small, x, y = chain(own_device, 3, 100), torch.randn(3, 100), torch.empty(3, 100)
    small.run([x], [y])
    large, big, out = chain(own_device, 1000, 1000), torch.randn(1000, 1000), torch.empty(1000, 1000)
    for _ in range(2):
        large.run([big], [out])
        torch.testing.assert_close(out, expected(big))
        y.zero_()
        small.run([x], [y])
        torch.testing.assert_close(y, expected(x))


def test_memory_of_a_large_program_goes_with_it(own_device):
    small, x, y = chain(own_device, 3, 100), torch.randn(3, 100), torch.empty(3, 100)
    b = Builder(own_device)
    b.fill(b.scratch(300 << 20).part(0, 4))
    large = b.program()
    large.run()
    assert own_device.stats().pooled >= 300 << 20
    del large
    assert own_device.stats().pooled < 300 << 20
    small.run([x], [y])
    torch.testing.assert_close(y, expected(x))


def test_shared_memory_shrinks_when_it_was_not_needed_for_long(own_device):
    small, x, y = chain(own_device, 3, 100), torch.randn(3, 100), torch.empty(3, 100)
    large, big, out = chain(own_device, 1000, 10000), torch.randn(1000, 10000), torch.empty(1000, 10000)
    before = own_device.stats().pooled
    assert before >= 3 * 40_000_000
    for program, inputs, outputs in ((large, big, out), (small, x, y), (large, big, out), (small, x, y)):
        program.run([inputs], [outputs])
    assert own_device.stats().pooled == before  # it may be needed again at once
    own_device.inject(native.INJECT_IDLE)
    large.run([big], [out])
    small.run([x], [y])
    assert own_device.stats().pooled == before
    own_device.inject(native.INJECT_IDLE)
    small.run([x], [y])
    assert own_device.stats().pooled < 20 << 20
    torch.testing.assert_close(y, expected(x))
    large.run([big], [out])
    torch.testing.assert_close(out, expected(big))


def test_shared_memory_goes_with_the_last_of_its_users(own_device):
    kept = own_device.upload(torch.zeros(10))
    program, x, y = chain(own_device, 1000, 4000), torch.randn(1000, 4000), torch.empty(1000, 4000)
    program.run([x], [y])
    assert own_device.stats().pooled >= 3 * 16_000_000
    del kept, program
    gc.collect()
    assert own_device.stats().pooled <= 4 << 20  # a spare block for buffers
    own_device.trim()
    assert own_device.stats().pooled == 0


def test_memory_is_given_back_on_request(own_device):
    program, x, y = chain(own_device, 1000, 4000), torch.randn(1000, 4000), torch.empty(1000, 4000)
    kept = own_device.upload(torch.ones(10))
    for _ in range(2):
        program.run([x], [y])
        torch.testing.assert_close(y, expected(x))
        own_device.trim()
        assert own_device.stats().pooled <= 4 << 20
        assert (kept.read().view("float32") == 1).all()


def test_no_room_for_a_program(own_device):
    before = own_device.stats()
    b = Builder(own_device)
    b.scratch(1 << 50)
    with pytest.raises(native.OutOfMemory, match="out of device memory"):
        b.program()
    gc.collect()
    assert own_device.stats() == before
    x, y = torch.randn(2, 3), torch.empty(2, 3)
    chain(own_device, 2, 3).run([x], [y])
    torch.testing.assert_close(y, expected(x))


def test_shared_memory_that_cannot_grow(own_device):
    small, x, y = chain(own_device, 3, 100), torch.randn(3, 100), torch.empty(3, 100)
    large = chain(own_device, 1, 30 << 20)
    before = own_device.stats()
    own_device.inject(native.INJECT_OUT_OF_MEMORY)
    b = Builder(own_device)
    b.scratch(400 << 20)
    with pytest.raises(native.OutOfMemory, match="out of device memory"):
        b.program()
    assert own_device.stats().programs == before.programs
    small.run([x], [y])
    torch.testing.assert_close(y, expected(x))
    del large
    small.run([y], [y])
    torch.testing.assert_close(y, expected(expected(x)))


def test_buffers_of_another_device_are_refused(device, own_device):
    b = Builder(device)
    with pytest.raises(ValueError, match=r"a buffer of <Vulkan device .*> cannot be used in a program of"):
        b.launch(0, (1, 1, 1), (), (own_device.alloc(4),))


def test_copies_and_fills(device):
    x, y = torch.randn(64), torch.empty(256)
    buffer = device.alloc(512)
    b = Builder(device)
    source, target, scratch = b.input(256), b.output(1024), b.scratch(256)
    b.copy(source, scratch)
    b.fill(buffer_whole := Ref(buffer, 0, 512), 0x3F800000)
    b.copy(scratch, buffer_whole.part(256, 256))
    b.fill(target, 0xBF800000)
    b.copy(buffer_whole, target.part(512, 512))
    program = b.program([Place(source, 1, 256, 256)], [Place(target, 1, 1024, 1024)])
    program.run([x], [y])
    assert (y[:128] == -1).all()
    assert (y[128:192] == 1).all()
    assert torch.equal(y[192:], x)


def test_a_program_keeps_its_buffers(own_device):
    x, y = torch.randn(100), torch.empty(100)
    weight = own_device.upload(x)
    b = Builder(own_device)
    target = b.output(400)
    b.launch(pipeline(own_device), (2, 1, 1), (100, 0.5), (weight, target))
    program = b.program([], [Place(target, 1, 400, 400)])
    number = weight.number
    del weight, b
    assert own_device.stats().buffers == 1
    own_device.check(own_device.library.qv_free(own_device.handle, number))  # even where another lets go of it
    others = [own_device.upload(np.zeros(400, np.uint8)) for _ in range(20)]
    program.run([], [y])
    torch.testing.assert_close(y, expected(x, 1))
    del others, program
    gc.collect()
    assert own_device.stats()[:2] == (0, 0)
    assert own_device.stats().programs == 0


def test_scratch_is_used_again(device):
    b = Builder(device)
    kept, mark = b.scratch(1000), b.mark()
    first = b.scratch(3000)
    b.rewind(mark)
    second = b.scratch(10)
    assert (kept.offset, first.offset, second.offset, second.bytes) == (0, 1024, 1024, 12)


@pytest.mark.parametrize("groups", [1, 65535, 65536, 1_000_003])
def test_many_workgroups_are_folded(groups):
    x, y, z = fold(groups)
    assert z == 1
    assert x <= 65535
    assert groups <= x * y < groups + y


def test_folded_workgroups_run(device):
    count = 66000 * LANES
    x, y = torch.randn(count), torch.empty(count)
    chain(device, 1, count).run([x], [y])
    torch.testing.assert_close(y, expected(x))


def test_steps_that_are_refused(device):
    scale = pipeline(device)
    most = device.description.limits.max_groups[0]

    def refused(words, step):
        b = Builder(device)
        target = b.output(1024)
        step(b, target)
        with pytest.raises(native.VulkanError, match=words):
            b.program()

    refused("no pipeline has the number", lambda b, out: b.launch(999_999, (1, 1, 1), (), ()))
    refused("workgroups along axis 0", lambda b, out: b.launch(scale, (most + 1, 1, 1), (1, 0.5), (out, out)))
    refused("ends outside", lambda b, out: b.launch(scale, (1, 1, 1), (1, 0.5), (Ref(native.OUTPUT, 256, 1024), out)))
    refused("does not start at a multiple", lambda b, out: b.launch(scale, (1, 1, 1), (), (Ref(native.OUTPUT, 4, 4),)))
    refused("no buffer has the number 9", lambda b, out: b.launch(scale, (1, 1, 1), (), (Ref(9, 0, 4),)))
    refused("no words", lambda b, out: b.launch(scale, (1, 1, 1), (), (Ref(native.OUTPUT, 0, 3),)))
    refused("ranges that differ", lambda b, out: b.copy(out.part(0, 256), out.part(256, 512)))


def test_ranges_are_held_against_the_device(device):
    longest = device.description.limits.max_storage_range
    if longest > 1 << 28:
        pytest.skip("the device takes longer ranges than this test should allocate")
    b = Builder(device)
    b.launch(pipeline(device), (1, 1, 1), (1, 0.5), (device.alloc(longest + 4), b.output(4)))
    with pytest.raises(native.VulkanError, match=f"longer than the device's storage ranges, {longest}"):
        b.program()


def test_words_of_push_constants(device):
    b = Builder(device)
    b.launch(0, (1, 2, 3), (1, -1, 0.5, 1 << 31, np.int64(-2), np.float32(1)), ())
    (step,) = b._steps
    assert list(step.push[:7]) == [1, 0xFFFFFFFF, 0x3F000000, 1 << 31, 0xFFFFFFFE, 0x3F800000, 0]
    assert step.push_bytes == 24
    assert list(step.groups) == [1, 2, 3]


def test_threads_take_turns(own_device):
    programs = [chain(own_device, 5, 100 + n) for n in range(3)]
    faults = []

    def work(seed):
        draw = torch.Generator().manual_seed(seed)
        for turn in range(40):
            program, columns = programs[(seed + turn) % 3], 100 + (seed + turn) % 3
            x, y = torch.randn(5, columns, generator=draw), torch.empty(5, columns)
            program.run([x], [y])
            buffer = own_device.upload(y)
            if not torch.equal(torch.from_numpy(buffer.read().view("f4")).view(5, -1), y):
                faults.append("buffer")
            if not torch.allclose(y, expected(x), atol=1e-6):  # some devices fuse 3 x + 0.5
                faults.append("program")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    gc.collect()
    assert own_device.stats().buffers == 0
