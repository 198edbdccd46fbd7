"""Recorded launches replayed with new pointers, with a kernel that computes on the CPU."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch
from fake_triton import SIZE, Kernel, TensorDescriptor, add

import qcore
from qcore.contracts import CONTRACTS
from qcore.weights.schemes import Scheme
from qcore_cuda.linear import kernel as kernel_for
from qcore_cuda.runtime import device, replay
from qcore_cuda.runtime import launch as launching
from qcore_cuda.runtime.launch import launch
from qcore_cuda.runtime.replay import empty, replays, tracked


def numbers():
    return torch.randint(-99, 99, (SIZE,)).float()


def result_of(x):
    return empty(x.shape, x.dtype, x.device)


def plus(kernel, m=5):
    """A call of one launch."""

    def call(x):
        y = result_of(x)
        launch(kernel, (4,), x, y, m, WIDE=True)
        return y

    return call


def repeated(call, x, key=None):
    return replays(call).call(key, (x,), call, x)


def test_the_second_call_of_a_form_needs_addresses_only(kernel):
    call = plus(kernel)
    for turn in range(3):
        x = numbers()
        assert torch.equal(repeated(call, x), x + 5)
        assert len(kernel.direct) == turn
    flags = ("function", False, True, None, None, "metadata", None, None, None)
    assert kernel.direct[-1][:13] == (4, 1, 1, 77, *flags)
    assert kernel.direct[-1][13] == x.data_ptr()
    assert kernel.direct[-1][15:] == (5, True)


def test_what_is_tracked_is_asked_for_at_each_call(kernel):
    given = [torch.arange(8.0) + i for i in range(3)]
    source = iter(given)

    def next_one(step):
        assert step == 2
        return next(source)

    def call(x):
        y = result_of(x)
        launch(kernel, (4,), x, y, 5, WIDE=True)
        launch(kernel, (4,), tracked(next_one, 2), y, 1, WIDE=True)
        return y

    for expected in given:
        assert torch.equal(repeated(call, numbers()), expected + 1)
    assert len(kernel.direct) == 4


def test_several_launches_and_the_memory_between_them(kernel):
    def call(x):
        first, second = result_of(x), result_of(x)
        launch(kernel, (4,), x, first, 1, WIDE=True)
        launch(kernel, (4,), first, second, 2, WIDE=False)
        y = result_of(x)
        launch(kernel, (4,), second, y, 4, WIDE=True)
        return y

    for _ in range(3):
        x = numbers()
        assert torch.equal(repeated(call, x), x + 7)
    assert len(kernel.direct) == 6
    first, second = (next(args for args in reversed(kernel.direct) if args[15] == m)[13] for m in (2, 4))
    assert second - first == 256, "one allocation"


def test_tensor_descriptors_are_made_of_addresses(kernel):
    described = []

    def through(x, y, m, *_):
        described.append((tuple(x.shape), tuple(x.strides), x.padding))
        add(x.base.data_ptr(), y, m)

    kernel.compute, block = through, [2, 2]

    def call(x):
        y = result_of(x)
        launch(kernel, (4,), TensorDescriptor(x, [2, 4], [4, 1], block), y, 5, WIDE=True)
        return y

    for _ in range(3):
        x = numbers()
        assert torch.equal(repeated(call, x), x + 5)
    assert len(kernel.direct) == 2
    assert described == [((2, 4), (4, 1), "zero")] * 3
    call(x)
    assert (len(kernel.made), len(kernel.direct)) == (1, 2), "the long way finds the kernel as well"
    block = [4, 2]
    call(x)
    assert len(kernel.made) == 2, "the size of blocks is compiled in"


def test_other_keys_and_other_kinds_are_other_calls(kernel):
    five, six, x = plus(kernel, 5), plus(kernel, 6), numbers()
    for _ in range(2):
        assert torch.equal(repeated(five, x, "a"), x + 5)
        assert torch.equal(repeated(six, x, "a"), x + 6)
        assert torch.equal(repeated(lambda x: five(x) * 2, x, "a"), (x + 5) * 2)


def test_the_result_may_have_another_shape(kernel):
    call = plus(kernel)
    for _ in range(2):
        x = numbers().view(2, 2, 2)
        y = replays(call).call(None, (x,), lambda x=x: call(x.reshape(-1, 2)).reshape(2, 4))
        assert torch.equal(y, (x + 5).view(2, 4))
    assert len(kernel.direct) == 1


def computed_input(kernel, x):
    return plus(kernel)(x * 2)


def computed_result(kernel, x):
    return plus(kernel)(x) * 2


def transposed_result(kernel, x):
    return plus(kernel)(x).view(2, 4).t()


def ordinary_memory(kernel, x):
    y = torch.empty_like(x)
    launch(kernel, (4,), x, y, 5, WIDE=True)
    return y


def nothing_launched(_kernel, x):
    return result_of(x).copy_(x)


@pytest.mark.parametrize(
    "what", [computed_input, computed_result, transposed_result, ordinary_memory, nothing_launched]
)
def test_what_torch_has_a_part_in_goes_the_long_way(kernel, what):
    def call(x):
        return what(kernel, x)

    for _ in range(3):
        x = numbers()
        assert torch.equal(repeated(call, x), what(kernel, x))
    assert not kernel.direct


def test_a_kernel_that_wants_scratch_memory_is_left_to_triton(kernel, monkeypatch):
    monkeypatch.setattr("fake_triton.Run.global_scratch_size", 64)
    call, x = plus(kernel), numbers()
    for _ in range(3):
        repeated(call, x)
    assert not kernel.direct


def test_other_versions_of_triton_are_never_replayed(kernel, monkeypatch):
    monkeypatch.setattr(launching, "_quick", lambda: False)
    call, x = plus(kernel), numbers()
    for _ in range(3):
        assert torch.equal(repeated(call, x), x + 5)
    assert len(kernel.made) == 3


def test_inputs_that_are_one_tensor_may_differ_the_next_time(kernel):
    def call(x, z):
        return plus(kernel)(z)

    x, z = numbers(), numbers()
    for pair in ((x, x), (x, z), (z, x)):
        assert torch.equal(replays(call).call(None, pair, call, *pair), pair[1] + 5)


def test_odd_addresses_go_the_long_way(kernel):
    call, storage = plus(kernel), torch.randint(-99, 99, (SIZE + 1,)).float()
    for x in (storage[1:], storage[:-1], storage[:-1], storage[1:], storage[:-1]):
        assert torch.equal(repeated(call, x), x + 5)
    assert len(kernel.direct) == 2


def test_another_current_device_goes_the_long_way(kernel):
    call, x = plus(kernel), numbers()
    repeated(call, x)
    kernel.device = 1
    assert torch.equal(repeated(call, x), x + 5)
    assert not kernel.direct


def test_the_current_stream_is_asked_for_at_each_call(kernel):
    call, x = plus(kernel), numbers()
    repeated(call, x)
    for kernel.stream in (1, 2, 1):
        repeated(call, x)
    assert [args[3] for args in kernel.direct] == [1, 2, 1]


def test_forgotten_calls_are_recorded_anew(kernel):
    call, x = plus(kernel), numbers()
    for _ in range(2):
        repeated(call, x)
    replay.forget()
    repeated(call, x)
    assert len(kernel.direct) == 1
    repeated(call, x)
    assert len(kernel.direct) == 2


def test_an_error_ends_the_recording(kernel):
    def call(x):
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        repeated(call, numbers())
    assert replay.recording() is None


def test_a_call_within_a_call_is_part_of_it(kernel):
    inner = plus(kernel, 1)

    def call(x):
        return repeated(inner, repeated(inner, x))

    for _ in range(3):
        x = numbers()
        assert torch.equal(repeated(call, x), x + 2)
    assert len(kernel.direct) == 4


def test_a_call_that_replays_another_is_none_itself(kernel):
    inner, x = plus(kernel, 1), numbers()
    repeated(inner, x)

    def call(x):
        return repeated(inner, repeated(inner, x))

    for _ in range(3):
        x = numbers()
        assert torch.equal(repeated(call, x), x + 2)
    assert replays(call)[None] is None


def test_calls_of_other_threads_are_not_recorded(kernel):
    def call(x):
        other = threading.Thread(target=plus(kernel, 1), args=(numbers(),))
        other.start()
        other.join()
        return plus(kernel)(x)

    for _ in range(2):
        x = numbers()
        assert torch.equal(repeated(call, x), x + 5)
    assert len(kernel.direct) == 1


def test_no_tensor_is_kept(kernel):
    call, x = plus(kernel), numbers()
    seen = [weakref.ref(x), weakref.ref(repeated(call, x)), weakref.ref(repeated(call, x))]
    del x
    kernel.made.clear()
    gc.collect()
    assert len(kernel.direct) == 1
    assert not any(ref() is not None for ref in seen)


def test_few_are_kept(kernel, monkeypatch):
    monkeypatch.setattr(replay, "_FORMS", 4)
    call, x = plus(kernel), numbers()
    for i in range(20):
        for _ in range(3):
            assert torch.equal(repeated(call, x, i), x + 5)
    assert len(replays(call)) <= 4


SCHEMES = ("w4a16-g64", "w4a16-asym", "w8a16", "w8a16-g32-fzp", "w4a8-g64", "w8a8", "w8a8-aasym", "w8a8-static(0.1,3)")
N, K = 32, 128


def layer(scheme):
    """A kernel of the plugin, and a weight packed for it."""
    scheme = Scheme.parse(scheme)
    made = kernel_for(CONTRACTS["linear"].request_for(scheme, torch.device("cpu"), torch.bfloat16, N, K))
    return made, made.pack(qcore.quantize(torch.randn(N, K, dtype=torch.bfloat16), scheme.weight))


@pytest.fixture
def launches(kernel, interpreter, monkeypatch):
    """Everything that linear layers launch on a GPU, computing nothing."""
    import qcore_cuda.int8
    import qcore_cuda.weight_only  # noqa: F401 - both bring the kernels they launch

    monkeypatch.setattr(device, "_device", lambda _kind, _index: device.Device(90, False, 132))
    direct = []
    for module in [module for name, module in sys.modules.items() if name.startswith(("qcore_cuda.", "qcore_triton."))]:
        for name, jitted in vars(module).copy().items():
            if type(jitted).__module__.startswith("triton.") and hasattr(jitted, "arg_names"):
                monkeypatch.setattr(module, name, Kernel(jitted.arg_names, lambda *_args: None, direct))
    return direct


def pointers(found):
    """All that looks like an address."""
    return {arg for args in found for arg in args[13:] if isinstance(arg, int) and arg > 1 << 32}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(1, K), (4, K), (2, 3, K), (K,)], ids=str)
def test_layers_are_replayed_with_the_tensors_of_each_call(launches, scheme, shape):
    made, one = layer(scheme)
    two, other = {name: tensor.clone() for name, tensor in one.items()}, torch.randn(N, dtype=torch.bfloat16)
    seen = 0
    for packed, bias in ((one, None), (two, None), (one, other), (two, other.clone()), (one, None)):
        x = torch.randn(shape).to(torch.bfloat16)
        launches.clear()
        y = made(x, packed, bias)
        assert (y.shape, y.dtype) == ((*shape[:-1], N), torch.bfloat16)
        seen += 1
        if seen in {1, 3}:
            assert not launches, "the first call with and without a bias goes the long way"
            continue
        found = pointers(launches)
        assert {x.data_ptr(), packed["data"].data_ptr(), packed["scale"].data_ptr(), y.data_ptr()} <= found
        assert bias is None or bias.data_ptr() in found
        rest = two if packed is one else one
        assert not found & {tensor.data_ptr() for tensor in rest.values()}


def test_other_forms_of_x_and_bias_are_other_calls(launches):
    made, packed = layer("w4a16-g64")
    wide = torch.randn(8, 2 * K).to(torch.bfloat16)
    bias = torch.randn(2 * N).to(torch.bfloat16)
    forms = (
        (wide[:1, :K].clone(), None), (wide[:2, :K].clone(), None), (wide[:2, :K], None), (wide[:2, :K].half(), None),
        (wide[:1, :K].clone(), bias[:N]), (wide[:1, :K].clone(), bias[::2]), (wide[:1, :K].clone(), bias[:N].float()),
    )  # fmt: skip
    for x, own in forms:
        made(x, packed, own)
        assert not launches


def test_kernels_for_weights_of_other_forms_share_nothing():
    forms = ("w4a16", "w4a16-g64", "w4a16-g64-asym", "w4a16-g64-fzp", "w4a8-g64", "w4a8-g64-aasym", "w8a16")
    assert len({id(layer(scheme)[0]._replays) for scheme in forms}) == len(forms)
    assert layer("w4a16")[0]._replays is layer("w4a16")[0]._replays
