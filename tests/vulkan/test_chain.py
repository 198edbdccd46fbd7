"""`qcore_vulkan.sequential`: the same numbers as one module after the other, in fewer submissions."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn

import qcore
import qcore_vulkan
from qcore.errors import FormatError, PluginError
from qcore_vulkan import builder, calls, chain, device, native


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def made(*modules, scheme="w8a16", backend="vulkan"):
    """A quantized `torch.nn.Sequential` in evaluation, served by the plugin."""
    model = nn.Sequential(*modules).eval()
    with qcore.using(backend):
        qcore.quantize_(model, scheme)
    return model


def mlp(scheme="w8a16", activation=None, **more):
    return made(nn.Linear(64, 96), activation or nn.ReLU(), nn.Linear(96, 20), scheme=scheme, **more)


def submissions(call):
    before = device.get().stats().submissions
    with torch.no_grad():
        call()
    return device.get().stats().submissions - before


def same(model, x, atol=1e-5, rtol=1e-5, pieces=1):
    """The chain's result is that of the modules one by one, in ``pieces`` submissions."""
    chained = qcore_vulkan.sequential(model)
    with torch.no_grad():
        expected, result = model(x), chained(x)
        torch.testing.assert_close(result, expected, atol=atol, rtol=rtol)
        assert result.stride() == expected.stride()
        assert torch.equal(chained(x), result)
    assert submissions(lambda: chained(x)) == pieces
    assert chained.explain().submissions == pieces
    return chained


ACTIVATIONS = [nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Sigmoid(), nn.Tanh()]
SCHEMES = ["w8a16", "w4a16-g32-asym", "w8a8", "w8a8-aasym", "w4a8-g32"]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activations_stay_on_the_device(activation, dtype):
    model = mlp(activation=activation)
    with qcore.using("vulkan"):
        model.to(dtype)
    near = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.005}[dtype]
    same(model, torch.randn(5, 64, dtype=dtype), atol=near, rtol=near)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(1, 64), (17, 64), (2, 3, 64), (64,)], ids=str)
def test_linear_layers(scheme, shape):
    same(mlp(scheme), torch.randn(shape), atol=0.02 if "a8" in scheme else 1e-4)


def test_codes_flow_from_layer_to_layer():
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 20)).eval()
    with qcore.using("vulkan"):
        qcore.quantize_(
            model, {"0": "w8a8-static-o8", "1": "w8a8-static"}, calibration=[torch.randn(32, 64) for _ in range(3)]
        )
    same(model, torch.randn(7, 64), atol=0.05)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8", "w4a16-g32"])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions(scheme, memory):
    model = made(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.SiLU(), nn.Conv2d(12, 5, 1)),
        scheme=scheme,
    )
    x = torch.randn(2, 3, 9, 8).contiguous(memory_format=memory)
    same(model, x, atol=0.02 if scheme == "w8a8" else 1e-4)


def test_a_one_pixel_convolution_is_flattened_for_a_linear_layer():
    model = made(nn.Conv2d(3, 8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5))
    same(model, torch.randn(2, 3, 4, 4), atol=1e-4)


def test_flattening_that_moves_numbers_splits_the_chain():
    model = made(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    chained = same(model, torch.randn(2, 3, 4, 4), atol=1e-4, pieces=2)
    assert "moves data" in str(chained.explain())


def test_flattening_of_leading_dimensions():
    model = made(nn.Linear(64, 32), nn.Flatten(0, 1), nn.Linear(32, 8))
    same(model, torch.randn(2, 3, 64), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lookups_start_a_chain(dtype):
    model = made(nn.Embedding(20, 64), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))
    same(model, torch.randint(0, 20, (3, 5), dtype=dtype), atol=1e-4)


def test_an_index_out_of_range_is_an_error():
    chained = qcore_vulkan.sequential(made(nn.Embedding(20, 64), nn.Linear(64, 32)))
    with torch.no_grad(), pytest.raises(IndexError, match="20 rows"):
        chained(torch.tensor([0, 20]))


def test_what_only_the_host_can_do_splits_the_chain():
    model = made(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 8))
    chained = same(model, torch.randn(5, 64), atol=1e-4, pieces=2)
    assert [(step.kind, step.submission) for step in chained.explain()] == [
        ("QuantizedLinear", 1), ("LayerNorm", 0), ("QuantizedLinear", 2), ("ReLU", 2), ("QuantizedLinear", 2),
    ]  # fmt: skip
    assert "no kernel for it" in str(chained.explain())


def test_layers_of_other_plugins_run_on_the_host():
    model = made(nn.Linear(64, 32), backend="torch")
    model.append(made(nn.Linear(32, 8))[0])
    chained = same(model, torch.randn(5, 64), atol=1e-4)
    assert "torch." in next(iter(chained.explain())).reason


def test_containers_are_flattened():
    model = made(nn.Sequential(nn.Linear(64, 32), nn.ReLU()), nn.Identity(), nn.Sequential(nn.Linear(32, 8)))
    chained = same(model, torch.randn(5, 64), atol=1e-4)
    assert [step.name for step in chained.explain()] == ["0.0", "0.1", "1", "2.0"]


def test_the_same_module_twice():
    layer, relu = made(nn.Linear(64, 64))[0], nn.ReLU()
    same(nn.Sequential(layer, relu, layer, relu), torch.randn(5, 64), atol=1e-4)


def test_dropout_runs_on_the_host_while_training():
    model = mlp(activation=nn.Dropout(0.5))
    chained = same(model, torch.randn(5, 64), atol=1e-4)
    chained.train()
    assert submissions(lambda: chained(torch.randn(5, 64))) == 2


def test_hooks_are_called():
    model, seen = mlp(), []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    same(model, torch.randn(5, 64), atol=1e-4, pieces=2)
    assert seen


def test_gradients_are_recorded_as_without_a_chain():
    model = mlp()
    chained, x = qcore_vulkan.sequential(model), torch.randn(5, 64)
    results = []
    for one in (model, chained):
        inner = x.clone().requires_grad_()
        one(inner).sum().backward()
        results.append(inner.grad)
    assert torch.equal(*results)
    assert not chained.explain().submissions
    assert "gradients" in str(chained.explain())


def test_before_the_first_call_explain_says_what_to_do():
    assert "explain(input)" in str(qcore_vulkan.sequential(mlp()).explain())


def test_explain_can_be_asked_for_an_input():
    explanation = qcore_vulkan.sequential(mlp()).explain(torch.randn(3, 64))
    assert explanation.submissions == 1
    assert "3 modules, 1 submission" in str(explanation)


def test_no_rows():
    chained = qcore_vulkan.sequential(mlp())
    with torch.no_grad():
        assert chained(torch.randn(0, 64)).shape == (0, 20)


def test_an_input_of_another_width_is_the_error_of_the_layer():
    with torch.no_grad(), pytest.raises(FormatError, match="in_features"):
        qcore_vulkan.sequential(mlp())(torch.randn(3, 63))


def test_it_is_a_sequential():
    model = mlp()
    chained = qcore_vulkan.sequential(model)
    assert list(chained.state_dict()) == list(model.state_dict())
    assert chained[0] is model[0]
    assert isinstance(chained[:2], chain.Sequential)
    assert not chained.training
    assert qcore_vulkan.sequential(*model)[2] is model[2]


def test_copies_and_pickles(tmp_path):
    chained, x = qcore_vulkan.sequential(mlp()), torch.randn(3, 64)
    with torch.no_grad(), qcore.using("vulkan"):
        expected = chained(x)
        for copied in (copy.deepcopy(chained), pickle.loads(pickle.dumps(chained))):
            assert torch.equal(copied(x), expected)
            assert copied.explain().submissions == 1


def test_new_weights_are_noticed():
    chained, other, x = qcore_vulkan.sequential(mlp()), mlp("w8a16"), torch.randn(3, 64)
    with torch.no_grad(), qcore.using("vulkan"):
        chained(x)
        chained.load_state_dict(other.state_dict())
        torch.testing.assert_close(chained(x), other(x))
        assert chained.explain().submissions == 1
        chained.to(torch.bfloat16)
        assert chained(x.bfloat16()).dtype == torch.bfloat16


def test_memory_is_free_when_the_weights_go():
    gc.collect()
    before = device.get().stats()
    chained, state = qcore_vulkan.sequential(mlp()), mlp().state_dict()
    with torch.no_grad():
        chained(torch.randn(3, 64))
        held = device.get().stats().buffers
        chained.load_state_dict(state)
        gc.collect()
        assert device.get().stats().buffers <= held
    del chained
    gc.collect()
    after = device.get().stats()
    assert (after.buffers, after.programs) == (before.buffers, before.programs)


def test_threads_share_a_chain():
    chained, x = qcore_vulkan.sequential(mlp()), torch.randn(3, 64)
    with torch.no_grad():
        expected, found = nn.Sequential(*chained)(x), []

    def work():
        with torch.no_grad():
            found.extend(chained(x) for _ in range(5))

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 40
    for result in found:
        torch.testing.assert_close(result, expected)


def test_a_new_bias_is_noticed():
    chained, x = qcore_vulkan.sequential(mlp()), torch.randn(3, 64)
    with torch.no_grad():
        before = chained(x)
        chained[2].bias.add_(1)
        torch.testing.assert_close(chained(x), before + 1)
        chained[2].bias = nn.Parameter(torch.zeros(20))
        torch.testing.assert_close(chained(x), nn.Sequential(*chained)(x))
        chained[2].bias.data += 3
        torch.testing.assert_close(chained(x), nn.Sequential(*chained)(x))
        chained[2].bias = None
        torch.testing.assert_close(chained(x), nn.Sequential(*chained)(x))


def test_a_bias_that_comes_later_is_noticed():
    chained, x = qcore_vulkan.sequential(made(nn.Linear(64, 32, bias=False), nn.ReLU())), torch.randn(3, 64)
    with torch.no_grad():
        chained(x)
        chained[0].bias = nn.Parameter(torch.ones(32))
        torch.testing.assert_close(chained(x), nn.Sequential(*chained)(x))
        assert chained.explain().submissions == 1


def test_a_module_put_in_place_of_another_is_noticed():
    chained, x = qcore_vulkan.sequential(mlp()), torch.randn(3, 64)
    with torch.no_grad():
        chained(x)
        chained[1] = nn.Tanh()
        torch.testing.assert_close(chained(x), nn.Sequential(*chained)(x))


def test_long_inputs_go_in_parts(monkeypatch):
    model = mlp()
    x = torch.randn(40, 64)
    with torch.no_grad():
        expected = model(x)
        monkeypatch.setattr(calls, "LARGEST", 10 * 96 * 4)
        chained = qcore_vulkan.sequential(model)
        torch.testing.assert_close(chained(x), expected)
    assert submissions(lambda: chained(x)) == 4
    assert chained.explain().submissions == 1


def test_a_batch_of_one_that_is_too_large_runs_module_by_module(monkeypatch):
    chained, x = qcore_vulkan.sequential(mlp()), torch.randn(1, 40, 64)
    with torch.no_grad():
        expected = chained(x)
        monkeypatch.setattr(calls, "LARGEST", 10 * 96 * 4)
        fresh = qcore_vulkan.sequential(chained)
        torch.testing.assert_close(fresh(x), expected)
    assert not fresh.explain().submissions
    assert "too large" in str(fresh.explain())


def test_a_long_chain_needs_no_more_memory_than_a_short_one(monkeypatch):
    recorded, sizes = builder.Builder.recorded, []

    def noted(made, *flags):
        sizes.append(made._used[native.ARENA])
        return recorded(made, *flags)

    monkeypatch.setattr(builder.Builder, "recorded", noted)
    for depth in (3, 30):
        layers = made(*(nn.Linear(64, 64) for _ in range(depth)), scheme="w8a8")
        sizes.clear()
        with torch.no_grad():
            qcore_vulkan.sequential(layers)(torch.randn(100, 64))
        if depth == 3:
            short = sizes[-1]
    assert sizes[-1] == short


def test_where_memory_runs_out_it_goes_in_parts(monkeypatch):
    chained, x = qcore_vulkan.sequential(mlp()), torch.randn(8, 64)
    run, most = calls.Program.run, 3

    def short(program, inputs, outputs):
        if outputs[0].shape[0] > most:
            raise native.OutOfMemory("no room")
        return run(program, inputs, outputs)

    with torch.no_grad():
        expected = chained(x)
        monkeypatch.setattr(calls.Program, "run", short)
        torch.testing.assert_close(chained(x), expected)


def test_a_lost_device_comes_back(monkeypatch):
    monkeypatch.setenv("QCORE_VULKAN_HOST_COPY", "1")
    chained, x = qcore_vulkan.sequential(mlp()), torch.randn(3, 64)
    with torch.no_grad():
        expected = chained(x)
        opened = device.get()
        opened.check(opened.library.qv_inject(opened.handle, native.INJECT_LOST))
        with pytest.raises(PluginError, match="lost"):
            chained(x)
        assert torch.equal(chained(x), expected)
        assert chained.explain().submissions == 1


def test_it_compiles_as_its_modules_do():
    chained, x = qcore_vulkan.sequential(mlp()), torch.randn(3, 64)
    with torch.no_grad():
        expected = chained(x)
        compiled = torch.compile(chained, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), expected)


def test_autocast_runs_the_modules_one_by_one():
    chained, x = qcore_vulkan.sequential(mlp()), torch.randn(3, 64)
    with torch.no_grad(), qcore.using("vulkan"), torch.autocast("cpu", torch.bfloat16):
        assert chained(x).dtype == torch.bfloat16
