"""Tools that move or replace the buffers of a layer in its tables, as accelerate and transformers do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import qcore
from qcore.nn.offloading import moved_to

SCHEMES = ["w4a16-g32", "w8a8", "nf4", "nvfp4"]


def linear(scheme: str) -> qcore.nn.QuantizedLinear:
    torch.manual_seed(0)
    return qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(64, 32), scheme)


def replace_by_garbage(layer: torch.nn.Module) -> int:
    """What transformers does to every non-persistent buffer after it has loaded a model."""
    count = 0
    for name in sorted(layer._non_persistent_buffers_set):
        old = layer._buffers[name]
        if old is not None:
            fill = float("nan") if old.dtype.is_floating_point else 77
            layer._buffers[name] = torch.full(old.shape, fill).to(old.dtype)
            count += 1
    return count


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("compiled", [False, True])
def test_computes_with_its_own_tensors(scheme, compiled):
    layer, x = linear(scheme), torch.randn(3, 64)
    with torch.no_grad():
        wanted = layer(x)
        assert replace_by_garbage(layer)
        run = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
        assert torch.equal(run(x), wanted)


def passed(call, layer, other, x):
    """The result of ``layer`` with the tensors of ``other``, or the error."""
    tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    try:
        return call(layer, tensors, (x,))
    except (qcore.FormatError, torch._dynamo.exc.Unsupported) as error:  # the second holds the text of the first
        return str(error)


def is_refused(result):
    return isinstance(result, str) and "weight of a quantized layer was replaced by that of another" in result


def hides_tensors(layer):
    return any(tensor.layout is not torch.strided for tensor in layer._primary.packed.values())


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [False, True])
def test_functional_call_with_tensors_of_another(scheme, dtype, first):
    """They are computed with or refused, never ignored; copies of the layer's own are as good as its own.

    In a trace, copies are refused for a kernel with a tensor without strides (oneDNN's): no buffer can show it.
    """
    layer, other = linear(scheme).to(dtype), linear(scheme).to(dtype)
    other.weight, other.bias = qcore.quantize(torch.randn(32, 64), layer.weight.format), torch.nn.Parameter(-layer.bias)
    x = torch.randn(3, 64, dtype=dtype)
    wanted, theirs = layer(x), other(x)
    if not first:
        layer = copy.deepcopy(layer)  # its kernel has not run yet
    call = torch.func.functional_call

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(*given):
        return call(*given)

    for run in (call, compiled):
        assert torch.equal(passed(run, layer, layer, x), wanted)
        found = passed(run, layer, copy.deepcopy(layer), x)
        assert (run is compiled and hides_tensors(layer) and is_refused(found)) or torch.equal(found, wanted)
        found = passed(run, layer, other, x)
        assert is_refused(found) or torch.equal(found, theirs)
        assert torch.equal(layer(x), wanted)
    copied = {name: tensor.clone() for name, tensor in layer.named_buffers()}
    assert torch.equal(call(layer, copied, (x,)), wanted)
    for name, tensor in copied.items():
        flat = tensor.flatten().view(torch.uint8)
        if flat.numel():
            with pytest.raises(qcore.FormatError, match="was replaced by that of another"):
                call(layer, {name: (flat ^ 1).view(tensor.dtype).view(tensor.shape)}, (x,))


@torch.no_grad()
def test_functional_call_of_tables_and_convolutions():
    for make, x in (
        (lambda: qcore.nn.QuantizedEmbedding.from_float(torch.nn.Embedding(20, 64), "w4a16-g32"), torch.arange(5)),
        (lambda: qcore.nn.QuantizedConv2d.from_float(torch.nn.Conv2d(4, 8, 3), "w8a16"), torch.randn(1, 4, 6, 6)),
    ):
        layer, other = make(), make()
        wanted = layer(x)
        assert torch.equal(layer(x), wanted)
        assert torch.equal(passed(torch.func.functional_call, layer, layer, x), wanted)
        assert is_refused(passed(torch.func.functional_call, layer, other, x))
        assert torch.equal(layer(x), wanted)


def test_graph_made_before_is_not_reused_with_garbage():
    layer, x = linear("w4a16-g32"), torch.randn(3, 64)
    torch._dynamo.reset()
    run = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        wanted = run(x)
        replace_by_garbage(layer)
        assert torch.equal(run(x), wanted)


def test_table_and_convolution_compute_with_their_own_tensors():
    table = qcore.nn.QuantizedEmbedding.from_float(torch.nn.Embedding(20, 64), "w4a16-g32")
    conv = qcore.nn.QuantizedConv2d.from_float(torch.nn.Conv2d(4, 8, 3), "w8a16")
    for layer, x in ((table, torch.arange(5)), (conv, torch.randn(1, 4, 6, 6))):
        with torch.no_grad():
            wanted = layer(x)
            assert replace_by_garbage(layer)
            assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), wanted)
            assert torch.equal(layer(x), wanted)


def test_shows_its_own_tensors_again():
    layer = linear("w4a16-g32")
    shown = dict(layer._buffers)
    replace_by_garbage(layer)
    layer.weight  # noqa: B018 - looks at the layer
    assert all(layer._buffers[name] is tensor for name, tensor in shown.items())


@pytest.mark.parametrize("change", [copy.deepcopy, lambda layer: layer.double(), lambda layer: layer.to("cpu")])
def test_garbage_reaches_no_copy_and_no_state_dict(change):
    layer = linear("w4a16-g32")
    wanted = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    replace_by_garbage(layer)
    found = change(layer).state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name].double(), found[name].double()) for name in wanted)


def test_shows_no_tensor_without_strides():
    """oneDNN's tensors have no address: `empty_like`, `data_ptr` and numpy fail on them."""
    layer = linear("w8a8")
    assert all(tensor.layout is torch.strided for tensor in layer.buffers())
    assert all(torch.empty_like(tensor).data_ptr() >= 0 for tensor in layer.buffers())
    assert list(layer.buffers())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_goes_where_its_buffers_were_moved(scheme, monkeypatch):
    layer, seen = linear(scheme), []

    def applied(self, fn, recurse=True):
        with FakeTensorMode():
            seen.append(fn(torch.empty(0)).device)
        return self

    name = next(name for name in layer._buffers if layer._buffers[name] is not None)
    with FakeTensorMode():
        layer._buffers[name] = torch.empty(layer._buffers[name].shape, device="cuda:1")
    monkeypatch.setattr(qcore.nn.QuantizedLinear, "_apply", applied)
    layer._follow()
    assert seen == [torch.device("cuda:1")]
    layer._follow()
    assert len(seen) == 1


def test_does_not_follow_to_meta():
    layer, x = linear("w4a16-g32"), torch.randn(3, 64)
    wanted = layer(x)
    for name, tensor in list(layer._buffers.items()):
        layer._buffers[name] = None if tensor is None else tensor.to("meta")
    assert layer.weight.device.type == "cpu"
    assert torch.equal(layer(x), wanted)


def test_moved_to_ignores_what_is_no_tensor():
    cpu, meta = torch.device("cpu"), torch.device("meta")
    shown = {"a": torch.empty(1), "b": torch.empty(1)}
    assert moved_to(shown, {}, cpu) is None
    assert moved_to(shown, {"a": None, "b": "text"}, cpu) is None
    assert moved_to(shown, {"a": torch.empty(1, device="meta")}, cpu) is None
    assert moved_to(shown, {"b": torch.empty(1)}, meta) == cpu
