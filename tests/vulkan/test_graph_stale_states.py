"""States whose values are on a Vulkan device while torch reads, copies and writes them: right, or an error."""

import copy
import gc

import pytest
import torch
from tiny_models import Counter, Decoder
from torch import nn

from qcore import graphs
from qcore.plugin_api import PluginError
from qcore_vulkan import device as devices
from qcore_vulkan import native
from qcore_vulkan.graphs import sentinels, states
from qcore_vulkan.graphs.backend import qcore_vulkan
from qcore_vulkan.graphs.sentinels import StaleValuesError

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SHAPE = 3, 5, 601  # twice the period of the sentinels and a rest
FLOATS = torch.float32, torch.float16, torch.bfloat16
LOUD = sorted(sentinels.DTYPES, key=str)


def values(dtype, shape=SHAPE):
    """Whole numbers, whose sums are exact in every dtype."""
    return torch.randint(-9, 9, shape).to(dtype)


def counting(dtype, shape=SHAPE):
    """A model that counts, compiled, after one call; and the same in torch."""
    expected = Counter(values(dtype, shape))
    model = copy.deepcopy(expected)
    compiled, x = torch.compile(model, backend=qcore_vulkan), values(dtype, shape)
    assert torch.equal(compiled(x), expected(x))
    return model, compiled, expected


def check_step(compiled, expected):
    x = values(expected.count.dtype, expected.count.shape)
    assert torch.equal(compiled(x), expected(x))


def lacks_values(tensor):
    return tensor.isnan() if tensor.is_floating_point() else tensor.abs() > 1 << 31


@torch.no_grad()
@pytest.mark.parametrize("dtype", LOUD)
def test_a_stale_read_gives_no_numbers(dtype):
    model, compiled, expected = counting(dtype)
    for _ in range(2):
        assert lacks_values(model.count).all()
        before = model.count._version
        check_step(compiled, expected)
        assert model.count._version == before  # filled once
        graphs.synchronize(model)
        assert torch.equal(model.count, expected.count)
        check_step(compiled, expected)


PLACES = {
    "a row": 1, "the first": (0, 0, 0), "the last": (-1, -1, -1), "a column": (..., 3), "all": ...,
    "steps": (slice(None), slice(1, 4, 2)), "a list": (slice(None), [4, 0]),
    "a mask": torch.arange(3 * 5 * 601).view(SHAPE) % 7 == 0,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("dtype", LOUD)
@pytest.mark.parametrize("place", PLACES)
def test_writes_to_a_part(place, dtype):
    at = PLACES[place]
    model, compiled, expected = counting(dtype)
    for number, synchronizes in enumerate((False, True, False)):
        for one in (model, expected):
            one.count[at] = number
        if synchronizes:
            graphs.synchronize(model)
            assert torch.equal(model.count, expected.count)
        check_step(compiled, expected)
        check_step(compiled, expected)
    graphs.synchronize(model)
    assert torch.equal(model.count, expected.count)


@torch.no_grad()
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_torch_writes_may_be_nan(dtype):
    model, compiled, expected = counting(dtype)
    for one in (model, expected):
        one.count[1] = torch.nan
        one.count[2] = -torch.full(SHAPE[1:], torch.inf, dtype=dtype) * 0
    torch.testing.assert_close(compiled(expected.count), expected(expected.count), equal_nan=True)
    graphs.synchronize(model)
    torch.testing.assert_close(model.count, expected.count, equal_nan=True)
    check = torch.compile(lambda x: x * 2, backend=qcore_vulkan)
    torch.testing.assert_close(check(model.count), expected.count * 2, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.int8, torch.uint8, torch.int16])
def test_dtypes_without_sentinels_come_back(dtype):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(4, 300).to(dtype))

        def forward(self, x, at):
            self.cache.index_copy_(0, at, x)
            return self.cache[:2].float() * 2

    expected = Keeps()
    model = copy.deepcopy(expected)
    compiled = torch.compile(model, backend=qcore_vulkan)
    for number in range(4):
        x, at = torch.randint(0, 99, (1, 300)).to(dtype), torch.tensor([number])
        assert torch.equal(compiled(x, at), expected(x, at))
        assert torch.equal(model.cache, expected.cache)
        for one in (model, expected):
            one.cache[:, number] = 1


MISUSES = {
    "rows are exchanged": lambda t: t.copy_(t[[2, 0, 1]]),
    "a row is copied": lambda t: t[0].copy_(t[1]),
    "an element is moved": lambda t: t[0, 0, :9].copy_(t[0, 0, 9:18]),
    "scaled": lambda t: t.mul_(0.5),
    "nothing is added": lambda t: t.add_(0),
    "negated": lambda t: t.neg_(),
    "absolute": lambda t: t.abs_(),
    "clamped": lambda t: t.clamp_(-1, 1),
    "partly scaled": lambda t: t[1].div_(2),
    "masked": lambda t: t.masked_fill_(t > 3, 0),
    "written, and a row is copied": lambda t: (t[0].zero_(), t[1].copy_(t[2])),
    "written and scaled": lambda t: t[0].zero_() + t.mul_(0.5),
    "written and negated": lambda t: t[0].zero_() + t.neg_(),
    "written and absolute": lambda t: t[0].zero_() + t.abs_(),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("misuse", MISUSES)
def test_writes_of_stale_values_are_errors(misuse, dtype):
    model, compiled, expected = counting(dtype)
    MISUSES[misuse](model.count)
    for _ in range(2):
        with pytest.raises(StaleValuesError, match=r"synchronize\(tensor or model\)"):
            compiled(values(dtype))
    with pytest.raises(StaleValuesError):
        graphs.synchronize(model)
    for one in (model, expected):
        one.count.fill_(3)
    check_step(compiled, expected)
    graphs.synchronize(model)
    for one in (model, expected):
        MISUSES[misuse](one.count)
    check_step(compiled, expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", LOUD)
def test_copies_between_states_and_times_are_errors(dtype):
    model, compiled, _ = counting(dtype)
    other, step, _ = counting(dtype)
    model.count[1] = 0
    model.count[0].copy_(other.count[0])  # at the same positions
    with pytest.raises(StaleValuesError):
        compiled(values(dtype))
    kept = other.count.clone()
    step(values(dtype))
    other.count.copy_(kept)  # a rollback
    with pytest.raises(StaleValuesError):
        step(values(dtype))
    other.count.zero_()
    step(values(dtype))
    other.count[1] = 0
    other.count[0].copy_(kept[0])  # filled anew since then
    with pytest.raises(StaleValuesError):
        step(values(dtype))


COPIES = {
    "a clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "reordered": lambda t: t.index_select(0, torch.tensor([1, 0, 2])),
    "joined": lambda t: torch.cat((torch.zeros(2, *t.shape[1:], dtype=t.dtype), t[:1])),
    "transposed": lambda t: t.mT.contiguous().mT,
    "scaled": lambda t: t.float() * 3,
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", COPIES)
def test_tensors_made_of_stale_ones_are_errors(kind, dtype):
    model, compiled, expected = counting(dtype)
    double = torch.compile(lambda x: x * 2, backend=qcore_vulkan)
    made = COPIES[kind](model.count)
    assert made.isnan().any()
    with pytest.raises(StaleValuesError, match="made by torch"):
        double(made)
    if made.dtype == dtype:
        model.count = made
        with pytest.raises(StaleValuesError, match="made by torch"):
            compiled(values(dtype))
        model.count = expected.count.clone()
        check_step(compiled, expected)
    graphs.synchronize(model)
    assert torch.equal(double(COPIES[kind](model.count)), COPIES[kind](expected.count) * 2)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "other"), [
    (torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float16),
])  # fmt: skip
def test_casts_of_stale_tensors_are_errors(dtype, other):
    model, _, expected = counting(dtype)
    double = torch.compile(lambda x: x * 2, backend=qcore_vulkan)
    with pytest.raises(StaleValuesError, match="made by torch"):
        double(model.count.to(other))
    graphs.synchronize(model)
    assert torch.equal(double(model.count.to(other)), expected.count.to(other) * 2)


@torch.no_grad()
@pytest.mark.parametrize("dtype", LOUD)
def test_the_first_call_with_a_stale_copy_is_an_error(dtype):
    model, _, expected = counting(dtype)
    other = copy.deepcopy(model)
    compiled = torch.compile(other.forward, backend=qcore_vulkan)
    for _ in range(2):
        with pytest.raises(StaleValuesError):
            compiled(values(dtype))
    other.count.copy_(expected.count)
    check_step(compiled, expected)


@torch.no_grad()
def test_weights_made_of_stale_values_are_errors():
    model, _, expected = counting(torch.bfloat16, (16, 32))
    layer, x = nn.Linear(32, 16, bias=False, dtype=torch.bfloat16), torch.randn(2, 32).bfloat16()
    compiled = torch.compile(layer, backend=qcore_vulkan)
    compiled(x)
    layer.weight.copy_(model.count)
    with pytest.raises(StaleValuesError, match="made by torch"):
        compiled(x)
    graphs.synchronize(model)
    layer.weight.copy_(model.count)
    torch.testing.assert_close(compiled(x), x @ expected.count.mT, rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_views_of_states_are_current():
    model, compiled, expected = counting(torch.float32)
    view, flat = model.count[1], model.count.detach().view(-1)
    double = torch.compile(lambda x: x * 2, backend=qcore_vulkan)
    assert torch.equal(double(view), expected.count[1] * 2)
    check_step(compiled, expected)
    assert flat.isnan().all()
    with pytest.raises(StaleValuesError):
        double(flat)
    graphs.synchronize(view)
    assert torch.equal(flat, expected.count.view(-1))
    check_step(compiled, expected)
    view[2], expected.count[1, 2] = 5, 5
    check_step(compiled, expected)

    def write(part):
        part.add_(1)
        return part * 2

    assert torch.equal(torch.compile(write, backend=qcore_vulkan)(view), write(expected.count[1]))
    check_step(compiled, expected)


@torch.no_grad()
@pytest.mark.parametrize("share", ["view", "alias"])
def test_buffers_that_share_the_memory_of_a_state(share):
    class Look(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.register_buffer("part", part)

        def forward(self, x):
            return self.part * x

    model, compiled, expected = counting(torch.float32)
    graphs.synchronize(model)
    look = torch.compile(Look(model.count[1:] if share == "view" else model.count.detach()), backend=qcore_vulkan)
    x, wanted = torch.tensor(3.0), expected.count[1:] if share == "view" else expected.count
    for _ in range(3):
        assert torch.equal(look(x), wanted * 3)
        check_step(compiled, expected)
        if share == "alias":
            with pytest.raises(StaleValuesError):
                look(x)
            graphs.synchronize(model)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:qcore_vulkan. what models write")  # Dynamo breaks the graph at an index by a mask
def test_parts_on_the_host_see_current_states():
    class Look(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("one", torch.ones(()))

        def forward(self, count):
            return count.to(torch.float64) * 3, count + self.one

    class Hosted(Counter):
        def forward(self, x):
            self.count.add_(x)
            return self.count * 2, self.count.flatten()[torch.isnan(x).flatten()], self.count.to(torch.float64)

    expected = Hosted(values(torch.float32))
    model, x = copy.deepcopy(expected), values(torch.float32)
    compiled = torch.compile(model, backend=qcore_vulkan)
    look = torch.compile(Look(), backend=qcore_vulkan)
    plain = Counter(model.count)
    counts = torch.compile(plain, backend=qcore_vulkan)
    for _ in range(3):
        for y, wanted in zip(compiled(x), expected(x), strict=True):
            assert torch.equal(y, wanted)
        counts(x)
        expected(x)
        for y, wanted in zip(look(model.count), Look()(expected.count), strict=True):
            assert torch.equal(y, wanted)
        counts(x)
        expected(x)
    assert graphs.explain(look).host
    assert graphs.explain(compiled).host


def test_graphs_that_run_in_torch_see_current_states():
    model, compiled, expected = counting(torch.float32)
    scale = nn.Parameter(torch.ones(()))
    scaled = torch.compile(lambda x: x * scale, backend=qcore_vulkan)
    with pytest.warns(match="gradients"):
        assert torch.equal(scaled(model.count), expected.count)
    with torch.no_grad():
        check_step(compiled, expected)
    assert torch.equal(scaled(model.count), expected.count)


@torch.no_grad()
def test_graphs_share_what_torch_wrote_to_a_part():
    model, compiled, expected = counting(torch.float32)

    def shift(count, x):
        count.sub_(x)
        return count + 1

    other, x = torch.compile(shift, backend=qcore_vulkan), values(torch.float32)
    for number in range(3):
        model.count[number, 1:3], expected.count[number, 1:3] = 7, 7
        assert torch.equal(other(model.count, x), shift(expected.count, x))
        model.count[..., number], expected.count[..., number] = 8, 8
        check_step(compiled, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_to_a_part_in_both_modes(mode):
    expected = Counter(values(torch.float32))
    model = copy.deepcopy(expected)
    compiled = torch.compile(model, backend=qcore_vulkan)
    with mode():
        check_step(compiled, expected)
        assert model.count.isnan().all()
        for number in range(3):
            model.count[number], expected.count[number] = 4, 4
            check_step(compiled, expected)
        graphs.synchronize(model)
        assert torch.equal(model.count, expected.count)


@torch.no_grad()
def test_memory_that_was_replaced():
    model, compiled, expected = counting(torch.float32)
    for one in (model, expected):
        one.count.data = torch.ones(SHAPE)
    check_step(compiled, expected)
    model.count.data = torch.full(SHAPE, 3.0)
    graphs.synchronize(model)
    assert torch.equal(model.count, torch.full(SHAPE, 3.0))
    expected.count.fill_(3)
    check_step(compiled, expected)
    model.count.data = model.count.data.flip(0)
    with pytest.raises(StaleValuesError):
        compiled(values(torch.float32))


@torch.no_grad()
def test_no_sentinels_stay_in_memory_that_is_freed():
    memory = bytearray(4 * 5000)
    model = Counter(torch.frombuffer(memory, dtype=torch.float32))
    assert not states.why_not(model.count)
    compiled = torch.compile(model, backend=qcore_vulkan)
    compiled(torch.ones(5000))
    assert any(memory)
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert not any(memory)
    model, compiled, _ = counting(torch.float32)
    view = model.count[1]
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert view.isnan().all()  # never old values


@torch.no_grad()
def test_a_lost_device_leaves_no_old_values():
    model, compiled, expected = counting(torch.float32)
    devices.get().inject(native.INJECT_LOST)
    with pytest.raises(PluginError, match="lost"):
        compiled(values(torch.float32))
    for _ in range(2):
        with pytest.raises(PluginError, match="Its host memory holds NaN"):
            compiled(values(torch.float32))
        with pytest.raises(PluginError, match="Its host memory holds NaN"):
            graphs.synchronize(model)
        model.count[0] = 0  # not enough
    for one in (model, expected):
        one.count.zero_()
    check_step(compiled, expected)
    check_step(compiled, expected)


@torch.no_grad()
def test_a_state_that_was_in_step_survives_a_loss():
    model, compiled, expected = counting(torch.float32)
    graphs.synchronize(model)
    devices.get().inject(native.INJECT_LOST)
    with pytest.raises(PluginError, match="lost"):
        compiled(values(torch.float32))
    check_step(compiled, expected)


@torch.no_grad()
def test_a_reordered_cache_of_a_decoder():
    torch.manual_seed(0)
    expected = Decoder(layers=1).eval()
    model = copy.deepcopy(expected)
    compiled = torch.compile(model, backend=qcore_vulkan)
    ids, positions = torch.tensor([[3, 1, 4, 1, 5]]), torch.arange(5)
    torch.testing.assert_close(compiled(ids, positions), expected(ids, positions), rtol=1e-4, atol=1e-4)

    def reorder(attention):
        attention.keys = attention.keys.index_select(0, torch.tensor([0]))

    reorder(model.layers[0].attention)
    with pytest.raises(StaleValuesError, match="Beam search"):
        compiled(ids[:, :1], positions[-1:] + 1)


@pytest.mark.parametrize("dtype", LOUD)
@pytest.mark.parametrize("count", [257, 4098, 4099, 4100, 8198, 12345])
def test_sentinels(count, dtype):
    tensor = torch.zeros(count, dtype=dtype)
    first = sentinels.Sentinels(tensor)
    assert tensor._version == 1
    assert lacks_values(tensor).all()
    kept = tensor.clone()
    tensor[count // 2] = 1
    left = first.left(tensor)
    assert left.sum() == count - 1
    assert not left[count // 2]
    with pytest.raises(StaleValuesError):
        sentinels.check(tensor)
    second = sentinels.Sentinels(tensor)
    with pytest.raises(StaleValuesError):
        second.left(kept)
    with pytest.raises(StaleValuesError):
        first.left(kept)
    second.clear()
    sentinels.check(tensor)
    assert not tensor.any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_of_torch_are_no_sentinels(dtype):
    sentinels.Sentinels(torch.zeros(300))
    nan = torch.full((300,), torch.nan)
    zeros = torch.zeros(300)
    for one in (nan, -nan, nan * 2, nan.double().float(), nan.maximum(zeros), zeros / 0, nan.bfloat16(), nan.half()):
        sentinels.check(one.to(dtype))
        sentinels.check(one.to(dtype) + 1)
    for bits in (-1, 0x7FFFFFFF, 0x7FC00000, -0x400000):
        sentinels.check(torch.full((300,), bits, dtype=torch.int32).view(torch.float32).to(dtype))
