from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from linear_layers import SCHEMES, _counting, _gradients, dense, made

import qcore


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_whole_and_apart(add_kernel, copied):
    add_kernel("mine")
    layer, x = made("w4a16-g32-asym"), torch.randn(3, 64)
    expected = layer(x)
    other = copied(layer)
    assert torch.equal(other(x), expected)
    assert other.decision.plugin == "mine"
    other.load_state_dict({name: torch.zeros_like(t) for name, t in other.state_dict().items()})
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    "move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.float()]
)
def test_casting_never_touches_codes_or_scales(add_kernel, move):
    add_kernel("mine")
    layer = made("w4a16-g32-asym")
    before = {name: tensor.clone() for name, tensor in layer.weight.tensors().items()}
    move(layer)
    after = layer.weight.tensors()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )


def test_casting_changes_what_is_computed_in():
    layer = made().to(torch.bfloat16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert layer.decision.request.x_dtype == torch.bfloat16
    assert layer(torch.randn(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_dtype_that_is_left_leaves_no_packed_weight(add_plugin, stub):
    def offer(request):
        return qcore.Offer(stub(f"mine.{request.x_dtype}".replace("torch.", ""), request))

    add_plugin("mine", linear=offer)
    layer = made()
    layer.to(torch.bfloat16)
    assert list(layer._store._packs) == ["mine.bfloat16"]
    assert all("bfloat16" in name for name, _ in layer.named_buffers())


def test_meta_and_back(add_kernel):
    add_kernel("mine")
    layer, x = made("w4a16-g32-asym"), torch.randn(2, 64)
    expected, state = layer(x), layer.state_dict()
    layer.to("meta")
    assert layer.decision is None
    assert layer.weight.device.type == "meta"
    with torch.device("meta"):
        fresh = made("w4a16-g32-asym")
    assert fresh.weight.device.type == "meta"
    fresh.to_empty(device="cpu")
    for target in (fresh, layer.to_empty(device="cpu")):
        target.load_state_dict(state)
        assert torch.equal(target(x), expected)
        assert target.decision.plugin == "mine"


def test_meta_and_assign():
    source, x = made(), torch.randn(2, 64)
    with torch.device("meta"):
        layer = made()
    layer.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(layer(x), source(x))


def test_fresh_memory_need_not_be_a_valid_weight(monkeypatch):
    with torch.device("meta"):
        layer = made("w4a16-g32-asym", bias=False)

    def garbage(tensor):
        made = torch.empty_like(tensor, device="cpu")
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(99)

    layer._apply(garbage)
    assert layer.weight.device.type == "cpu"


def test_a_copy_into_a_layer_on_meta_says_that_it_does_nothing():
    with torch.device("meta"):
        layer = made(bias=False)
    with pytest.warns(UserWarning, match="is a no-op"):
        layer.load_state_dict(made(bias=False).state_dict())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (0, 64)])
def test_gradients_are_those_of_the_dense_weight(scheme, shape):
    layer, x = made(scheme), torch.randn(shape)
    weights = torch.randn(*shape[:-1], 16)
    dx, dbias = _gradients(layer, x, weights)
    torch.testing.assert_close(dx, weights @ layer.weight.dequantize(torch.float32), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dbias, weights.reshape(-1, 16).sum(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision(dtype):
    layer, x = made(dtype=dtype), torch.randn(5, 64, dtype=dtype)
    dx, dbias = _gradients(layer, x, torch.ones(5, 16, dtype=dtype))
    assert dx.dtype == dbias.dtype == dtype
    torch.testing.assert_close(
        dx.float(), layer.weight.dequantize(torch.float32).sum(0).expand(5, 64), atol=3e-2, rtol=3e-2
    )


def test_gradients_through_a_kernel_that_torch_cannot_see_into(add_plugin, stub):
    class Opaque(stub):
        def __call__(self, x, packed, bias, **given):
            with torch.no_grad():
                return super().__call__(x.detach(), packed, bias, **given).detach()

    add_plugin("mine", linear=lambda request: qcore.Offer(Opaque("mine.k", request)))
    layer, x = made(bias=False), torch.randn(5, 64)
    dx, _ = _gradients(layer, x, torch.ones(5, 16))
    torch.testing.assert_close(dx, layer.weight.dequantize().sum(0).expand(5, 64), atol=1e-5, rtol=1e-5)


def test_large_weights_are_differentiated_in_pieces(monkeypatch):
    import importlib

    layer, x = made(), torch.randn(5, 64)
    whole, _ = _gradients(layer, x, torch.ones(5, 16))
    monkeypatch.setattr(importlib.import_module("qcore.functional.autograd"), "_CHUNK_ELEMENTS", 64 * 3)
    parts, _ = _gradients(layer, x, torch.ones(5, 16))
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


def test_bound_under_inference_mode_and_trained_afterwards(add_kernel):
    add_kernel("mine")
    layer, x = made(), torch.randn(5, 64)
    with torch.inference_mode():
        layer(x.to(torch.bfloat16))
    assert not any(buffer.is_inference() for buffer in layer.buffers())
    _gradients(layer, x.to(torch.bfloat16), torch.ones(5, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_decides_the_dtype(grad):
    layer, x = made("w4a16-g32"), torch.randn(5, 64, requires_grad=grad)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert layer(x.detach()).dtype == torch.bfloat16
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), dense(layer, x), atol=5e-2, rtol=5e-2)
    if grad:
        y.sum().backward()
        assert x.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32


def test_a_pack_that_raises_makes_way_with_one_warning(add_kernel):
    add_kernel("mine", fault="pack")
    with qcore.using(verify="off"):
        with pytest.warns(
            qcore.QcoreWarning, match="'mine.stub' .* is disabled for int4-g32/plain: pack raised Runtime"
        ):
            layer = made()
        assert layer.decision.plugin == "torch"
        assert made().decision.plugin == "torch"  # and no second warning


def test_a_first_call_that_raises_makes_way_with_one_warning(add_kernel):
    made_kernels = add_kernel("mine", fault="call")
    with qcore.using(verify="off"):
        layer, x = made(), torch.randn(3, 64)
        assert layer.decision.plugin == "mine"
        with (
            torch.no_grad(),
            pytest.warns(qcore.QcoreWarning, match="its first call raised RuntimeError: no such instruction"),
        ):
            y = layer(x)
        torch.testing.assert_close(y.double(), dense(layer, x), atol=1e-5, rtol=1e-5)
        assert layer.decision.plugin == "torch"
        with torch.no_grad():
            layer(x)
    assert sum(kernel.calls for kernel in made_kernels.values()) == 1


@pytest.mark.parametrize("fault", ["pack", "call"])
def test_a_named_plugin_whose_kernel_fails_fails_loudly(add_kernel, fault):
    add_kernel("mine", fault=fault)
    with (
        qcore.using("mine", verify="off"),
        pytest.raises(qcore.PluginError, match="which you asked for, failed") as caught,
    ):
        made()(torch.randn(2, 64))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_strict_is_obeyed_when_a_layer_is_bound():
    with qcore.using(strict=True), pytest.raises(qcore.UnsupportedError, match="strict"):
        made()


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8"])
def test_one_graph_for_every_row_count(scheme):
    torch._dynamo.reset()
    layer = made(scheme).eval()
    graphs, backend = _counting()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for rows in (2, 3, 17, 300):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-5)
    assert len(graphs) == 1


def test_gradients_through_the_compiler():
    torch._dynamo.reset()
    layer, x, weights = made(), torch.randn(5, 64), torch.randn(5, 16)
    expected = _gradients(layer, x, weights)
    with warnings.catch_warnings():
        # Dynamo itself instantiates every torch.autograd.Function that it traces.
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        compiled(x.clone().requires_grad_())
        x = x.clone().requires_grad_()
        layer.zero_grad()
        (compiled(x) * weights).sum().backward()
    torch.testing.assert_close(x.grad, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.bias.grad, expected[1], atol=1e-5, rtol=1e-5)


def test_export_with_a_dynamic_batch():
    layer = made().eval()
    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.export.export(layer, (torch.randn(3, 64),), dynamic_shapes=({0: batch},))
    for rows in (1, 3, 50):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(program.module()(x), layer(x), atol=1e-5, rtol=1e-5)


def test_a_layer_on_meta_cannot_be_compiled_and_says_so():
    torch._dynamo.reset()
    with torch.device("meta"):
        layer = made()
    with pytest.raises(Exception, match="load its weights first"):
        torch.compile(layer, backend="eager", fullgraph=True)(torch.randn(2, 64, device="meta"))


@pytest.fixture
def made_for_mine(add_kernel):
    """A layer on a plugin that ranks below torch, so that it serves only where it is asked for."""
    add_kernel("mine", qcore.EMULATED)
    with qcore.using("mine", strict=True):
        return made()


def test_late_binding_uses_the_settings_the_layer_was_made_under(made_for_mine):
    x = torch.randn(2, 64)
    made_for_mine(x).sum().backward()
    made_for_mine(x.bfloat16())
    assert {bound.decision.plugin for bound in made_for_mine._bounds.values()} == {"mine"}
    assert len(made_for_mine._bounds) == 3
    with qcore.using("torch"):
        assert made_for_mine(x.half()).dtype == torch.float16
    assert {bound.decision.plugin for bound in made_for_mine._bounds.values()} == {"mine"}


@pytest.mark.parametrize(
    "move", [copy.deepcopy, copy.copy, lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.share_memory()]
)
def test_copies_and_moves_to_where_it_is_keep_the_kernel(made_for_mine, move):
    x = torch.randn(2, 64)
    with torch.no_grad():
        expected = made_for_mine(x)
        other = move(made_for_mine)
        assert other.decision.plugin == "mine"
        assert torch.equal(other(x), expected)
    assert [name for name, _ in other.named_buffers()]
    other(x.bfloat16())
    assert {bound.decision.plugin for bound in other._bounds.values()} == {"mine"}


def test_moves_and_pickles_bind_under_the_current_settings(made_for_mine):
    assert pickle.loads(pickle.dumps(made_for_mine)).decision.plugin == "torch"
    assert made_for_mine.to(torch.bfloat16).decision.plugin == "torch"


def test_the_report_names_what_else_serves(add_plugin, stub):
    def offer(request):
        taken = request.x_dtype == torch.float32 and not request.training
        return qcore.Offer(stub("mine.k", request), qcore.NATIVE) if taken else qcore.Refusal("not mine")

    add_plugin("mine", linear=offer)
    model = torch.nn.Sequential(made(), made())
    model[0](torch.randn(2, 64).double())
    rows = qcore.report(model)
    assert rows["0"].kernel == "mine.k"
    assert rows["0"].reason.endswith("; torch.plain.linear for gradients, x=float64")
    assert ";" not in rows["1"].reason


_SENT = """if True:
    import torch, qcore

    def work(index, sent):
        with torch.no_grad():
            for layer, x, expected in sent:
                assert torch.equal(layer(x), expected), (layer(x), expected)

    if __name__ == "__main__":
        sent = []
        for scheme in ("w8a8", "w4a16-g32", "w8a16"):
            layer, x = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(64, 16), scheme), torch.randn(2, 64)
            with torch.no_grad():
                sent.append((layer, x, layer(x)))
        torch.multiprocessing.spawn(work, args=(sent,), nprocs=2)
        print("done")
"""


@pytest.mark.slow
def test_modules_are_sent_to_processes_that_are_spawned(tmp_path):
    file = tmp_path / "sends.py"
    file.write_text(_SENT)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "done\n", done.stderr
