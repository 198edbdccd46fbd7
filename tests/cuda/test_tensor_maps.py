"""Replays hand tensor maps, kept by address, to the launcher that Triton's own wraps; the real wrapper, no device."""

from __future__ import annotations

import pytest
import torch
from fake_triton import SIZE, TensorDescriptor, add

from qcore_cuda.runtime import replay
from qcore_cuda.runtime.launch import _TESTED, launch
from qcore_cuda.runtime.replay import empty, replays

triton_driver = pytest.importorskip("triton.backends.nvidia.driver")
if not triton_driver.triton.__version__.startswith(_TESTED):
    pytest.skip("kernels are launched through Triton's own interface with this version", allow_module_level=True)
SIGNATURE = {"x": "tensordesc<fp32[2,2]>", "y": "*fp32", "m": "i32", "WIDE": "constexpr"}
META = {"swizzle": 0, "elem_size": 4, "elem_type": 7, "block_size": [2, 2], "fp4_padded": False}


@pytest.fixture
def wrapped(kernel, monkeypatch):
    """Wraps the kernel's launcher as Triton does; what was encoded, and the arguments behind each map."""

    class Encoded(list):
        launched: list[tuple[object, ...]]

    encoded = Encoded()
    encoded.launched = []

    class Utils:
        @staticmethod
        def fill_tma_descriptor(address, swizzle, size, kind, block, shape, strides, padding):
            encoded.append((address, tuple(shape), tuple(strides), padding))
            return ("map", address)

    class Driver:
        class active:  # noqa: N801 - named as Triton names it
            utils = Utils

    def inner(*args):
        encoded.launched.append(args[13:])
        (kind, x), *sizes, y, m, _wide = args[13:]
        assert (kind, sizes) == ("map", [2, 4, 4, 1])
        add(x, y, m)

    monkeypatch.setattr(triton_driver.triton.runtime, "driver", Driver)
    kernel.compute = lambda x, y, m, *_: add(x.base.data_ptr(), y, m)
    start = kernel.__class__.__getitem__

    def getitem(self, grid):
        run = start(self, grid)

        def first(*args, **meta):
            made = run(*args, **meta)
            made.run.launch = triton_driver.wrap_handle_tensordesc(inner, SIGNATURE, encoded.metas)
            return made

        return first

    encoded.metas = [META]
    monkeypatch.setattr(kernel.__class__, "__getitem__", getitem)
    return encoded


def call_of(kernel):
    def call(x):
        y = empty(x.shape, x.dtype, x.device)
        launch(kernel, (4,), TensorDescriptor(x, [2, 4], [4, 1], [2, 2]), y, 5, WIDE=True)
        return y

    return lambda x: replays(call).call(None, (x,), call, x)


def numbers():
    return torch.randint(-99, 99, (SIZE,)).float()


def test_a_map_is_made_once_for_each_address(kernel, wrapped):
    call, (a, b) = call_of(kernel), (numbers(), numbers())
    for x in (a, a, b, a, b):
        assert torch.equal(call(x), x + 5)
    assert [address for address, *_ in wrapped] == [a.data_ptr(), b.data_ptr()]
    assert wrapped[0][1:] == ((2, 4), (4, 1), 0)
    assert len(wrapped.launched) == 4, "the first call is launched by Triton"


def test_maps_of_old_addresses_are_dropped(kernel, wrapped, monkeypatch):
    monkeypatch.setattr(replay, "_MAPS", 2)
    call, many = call_of(kernel), [numbers() for _ in range(4)]
    for x in (many[0], *many, many[3], many[0]):
        assert torch.equal(call(x), x + 5)
    addresses = [address for address, *_ in wrapped]
    assert addresses == [x.data_ptr() for x in (*many, many[0])]


@pytest.mark.parametrize("metas", [[None], [{**META, "fp4_padded": True}]])
def test_what_triton_encodes_otherwise_is_left_to_it(kernel, wrapped, monkeypatch, metas):
    wrapped.metas = metas
    asked = []
    monkeypatch.setattr(
        triton_driver, "make_tensordesc_arg", lambda arg, _meta: asked.append(arg) or [("map", arg.address), 2, 4, 4, 1]
    )
    call, x = call_of(kernel), numbers()
    for _ in range(3):
        assert torch.equal(call(x), x + 5)
    assert len(asked) == 2
