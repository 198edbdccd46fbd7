"""Devices, memory and pipelines of the native library."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest
import torch
from vulkan_scale import FLOAT64, LANES, chain, expected, module, pipeline

from qcore_vulkan import device as devices
from qcore_vulkan import native


def test_devices_are_described():
    first = devices.devices()[0]
    assert first.name
    assert first.type in {"cpu", "discrete", "integrated", "virtual", "other"}
    assert first.missing == ""
    assert first.limits.max_storage_range >= 1 << 27
    assert first.limits.push_constants >= 128
    assert first.subgroup.min <= first.subgroup.size <= first.subgroup.max
    assert first.features["timeline"]
    assert first.features["storage16"]
    assert sum(heap.device_local for heap in first.heaps) >= 1
    assert all(kind.heap < len(first.heaps) for kind in first.memory_types)
    assert bool(first.cooperative_matrix) <= first.features["cooperative_matrix"]


def test_a_device_is_opened_once(device):
    assert devices.get() is device
    assert devices.get(device.description.index) is device
    assert devices.get(device.description.name[:5].upper()) is device
    with devices.on_device(device.description.index) as description:
        assert description == device.description
        assert devices.get() is device
    with pytest.raises(native.NoDevice, match=r"no device: no Vulkan device here matches 'Voodoo'; choose one of 0: "):
        devices.get("Voodoo")


def test_the_environment_chooses(device, monkeypatch):
    monkeypatch.setenv("QCORE_VULKAN_DEVICE", "77")
    with pytest.raises(native.NoDevice, match="matches '77'"):
        devices.get()
    monkeypatch.setenv("QCORE_VULKAN_DEVICE", device.description.name)
    assert devices.get() is device


def test_what_is_uploaded_is_read(device):
    x = torch.randn(1000, 7)
    buffer = device.upload(x)
    assert buffer.nbytes == x.nbytes
    assert np.array_equal(buffer.read().view("f4").reshape(1000, 7), x.numpy())
    assert np.array_equal(buffer.read(28, 28).view("f4"), x[1].numpy())
    transposed = device.upload(x.T)
    assert np.array_equal(transposed.read().view("f4").reshape(7, 1000), x.numpy().T)
    halves = x.bfloat16()
    assert np.array_equal(device.upload(halves).read(), halves.view(torch.uint8).reshape(-1).numpy())
    odd = np.arange(5, dtype=np.uint8)
    assert np.array_equal(device.upload(odd).read(), odd)


def test_parts_of_a_buffer_are_written(device):
    buffer = device.alloc(100)
    buffer.write(np.full(10, 7, np.uint8), 90)
    assert buffer.read()[89:].tolist() == [0] + 10 * [7]
    with pytest.raises(native.VulkanError, match="bytes outside of buffer"):
        buffer.write(np.zeros(2, np.uint8), 99)
    with pytest.raises(native.VulkanError, match="bytes outside of buffer"):
        buffer.read(101, 0)
    with pytest.raises(ValueError, match="contiguous"):
        buffer.write(torch.zeros(10, 10)[:, :3])
    with pytest.raises(ValueError, match="contiguous"):
        buffer.write(np.zeros((10, 10))[:, :3])


def test_memory_used_again_is_zero(own_device):
    for _ in range(3):
        buffer = own_device.upload(np.full(5000, 255, np.uint8))
        place = buffer.number
        del buffer
        assert not own_device.alloc(5000).read().any()
    assert own_device.alloc(1).number > place


def test_buffers_die_with_their_objects(own_device):
    before = own_device.stats()
    buffers = [own_device.alloc(1000 + n) for n in range(10)]
    during = own_device.stats()
    assert (during.buffers, during.bytes) == (before.buffers + 10, before.bytes + 10045)
    del buffers
    gc.collect()
    assert own_device.stats()._replace(pooled=0, submissions=0) == before._replace(pooled=0, submissions=0)


def test_freed_ranges_grow_together(own_device):
    sizes = np.random.default_rng(1).integers(1, 100_000, 300)
    filled = [own_device.upload(np.full(size, n % 251, np.uint8)) for n, size in enumerate(sizes)]
    pooled = own_device.stats().pooled
    assert pooled >= sizes.sum()
    for n in np.random.default_rng(2).permutation(300)[:200]:
        filled[n] = None
    for n, buffer in enumerate(filled):
        assert buffer is None or (buffer.read() == n % 251).all()
    del buffer, filled
    assert own_device.stats().pooled < pooled
    own_device.alloc(4 << 20)  # the block that stays is whole again
    assert own_device.stats().pooled < pooled


def test_large_buffers_have_their_own_memory(own_device):
    before = own_device.stats().pooled
    large = own_device.alloc(80 << 20)
    assert own_device.stats().pooled == before + (80 << 20)
    large.write(np.full(3, 9, np.uint8), (80 << 20) - 3)
    assert large.read((80 << 20) - 4, 4).tolist() == [0, 9, 9, 9]
    del large
    assert own_device.stats().pooled == before


@pytest.mark.parametrize("nbytes", [100, 1 << 50, (1 << 64) - 1])
def test_out_of_memory_leaves_nothing_behind(own_device, nbytes):
    own_device.alloc(1)
    before = own_device.stats()
    if nbytes == 100:
        own_device.inject(native.INJECT_OUT_OF_MEMORY)
    with pytest.raises(native.OutOfMemory, match="out of device memory"):
        own_device.alloc(nbytes)
    gc.collect()
    assert own_device.stats() == before
    assert not own_device.lost
    assert own_device.upload(np.ones(3)).read().view("f8").tolist() == [1, 1, 1]


def test_an_empty_buffer_is_refused(device):
    with pytest.raises(native.VulkanError, match="no bytes"):
        device.alloc(0)


def test_a_closed_device_says_so(own_device):
    buffer, program, x = own_device.alloc(10), chain(own_device, 1, 100), torch.zeros(100)
    own_device.close()
    own_device.close()
    for call in (buffer.read, own_device.stats, lambda: own_device.alloc(10), partial(program.run, [x], [x])):
        with pytest.raises(native.VulkanError, match="the device is closed"):
            call()
    del call, buffer, program  # after the device


def test_two_devices_side_by_side(own_device):
    other = devices.Device(own_device.description)
    x, y, z = torch.randn(3, 100), torch.empty(3, 100), torch.empty(3, 100)
    first, second = chain(own_device, 3, 100), chain(other, 3, 100, steps=3)
    first.run([x], [y])
    second.run([x], [z])
    torch.testing.assert_close(y, expected(x))
    torch.testing.assert_close(z, expected(x, 3))
    other.close()
    first.run([z], [y])
    torch.testing.assert_close(y, expected(z))


def test_constants_make_different_pipelines(device):
    assert pipeline(device, 3) != pipeline(device, 4)


def test_variants_that_are_not_built(device):
    for _ in range(2):
        with pytest.raises(native.Unsupported, match=r"no_such: the shader 'no_such' is not in this build"):
            device.pipeline("no_such")


def test_shaders_that_the_device_cannot_run(device):
    with pytest.raises(native.Unsupported, match="SPIR-V capability 10, which this library does not enable"):
        device.compile(module("FLOAT64"))
    assert "double" in FLOAT64
    with pytest.raises(native.Unsupported, match="cannot be asked for subgroups of 3"):
        device.compile(module(), (LANES, 3), subgroup=3)


@pytest.mark.parametrize("damage", [b"", b"abcd" * 10, "cut"])
def test_what_is_no_spirv_module(device, damage):
    with pytest.raises(native.VulkanError, match="SPIR-V"):
        device.compile(module()[:-100] if damage == "cut" else damage)


def test_a_required_subgroup_size(device):
    subgroup = device.description.subgroup
    if subgroup.control:
        device.compile(module(), (LANES, 3), subgroup=subgroup.min)
