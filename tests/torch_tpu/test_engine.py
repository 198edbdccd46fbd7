"""What is registered for the device of torch_tpu, by its shapes and dtypes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import qcore
from qcore.weights.schemes import SCHEMES, Scheme
from qcore_xla import calls, environment, plugin
from qcore_xla.bodies.form import Form
from qcore_xla.bodies.linear import linear
from qcore_xla.engines import base
from qcore_xla.engines import tpu as engine

N, K, M = 64, 256, 5


def request(scheme, device, dtype=torch.bfloat16):
    scheme = Scheme.parse(scheme)
    out = torch.int8 if scheme.output else dtype
    return qcore.LinearRequest(
        device, dtype, out, N, K, None, scheme.weight, scheme.activation, scheme.output, False, False
    )


def layer(scheme, device, mode):
    """x, a kernel and its packed weight, all on the device and fake."""
    offer = plugin.qcore_linear(request(scheme, device))
    assert isinstance(offer, qcore.Offer), offer
    weight = qcore.quantize(torch.randn(N, K), Scheme.parse(scheme).weight)
    packed = offer.kernel.pack(weight)
    with mode:
        moved = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for name, tensor in packed.items()}
        return torch.empty(M, K, dtype=torch.bfloat16, device=device), offer.kernel, moved


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_a_kernel_with_a_fake(scheme, device):
    mode = FakeTensorMode()
    x, kernel, packed = layer(scheme, device, mode)
    with mode:
        y = kernel(x, packed, None)
    assert (y.shape, y.device.type) == ((M, N), "tpu")
    assert y.dtype == (torch.int8 if scheme.endswith("o8") else torch.bfloat16)


def test_the_device_is_served(device):
    assert base.find("tpu") is engine.ENGINE
    assert engine.ENGINE.why_not(device) == ""


def test_jax_must_not_take_the_tpu(device, monkeypatch):
    monkeypatch.setattr(environment, "initialised", lambda: False)
    monkeypatch.setattr(environment, "platforms", list)
    assert "JAX_PLATFORMS=cpu" in engine.ENGINE.why_not(device)


def test_another_torch_tpu_is_not_taken_for_googles(device, monkeypatch):
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    assert "torch_tpu" in engine.ENGINE.why_not(device)


@pytest.mark.parametrize("generation", ["v4", "tpu7x"])
def test_int8_activations_are_refused_if_nothing_multiplies_them(generation, device, monkeypatch):
    monkeypatch.setattr(environment, "tpu", lambda *_: generation)
    refusal = plugin.qcore_linear(request("w8a8", device))
    assert isinstance(refusal, qcore.Refusal)
    assert generation in refusal.reason
    assert "w8a16" in refusal.reason
    assert isinstance(plugin.qcore_linear(request("w8a16", device)), qcore.Offer)


def prepared(scheme, device, rows, mode):
    """What the engine is asked to run for a layer; rows may be symbolic."""
    with mode:
        of = calls.plan(N, K, 4, 32)
        x = torch.empty(rows, K, dtype=torch.bfloat16, device=device)
        data = torch.empty(of.slices, of.length // 8, of.rows, dtype=torch.int32, device=device)
        scale = torch.empty(of.filled, of.rows, dtype=torch.bfloat16, device=device)
    return x, data, scale


@pytest.mark.parametrize("form", [Form(out_dtype="bfloat16"), Form("symmetric", out_dtype="float32")])
def test_an_op_of_a_body(form, device):
    mode = FakeTensorMode()
    tensors = prepared("w4a16-g32", device, 8, mode)
    with mode:
        y = engine.ENGINE.run(linear, form, [*tensors, None, None], (0,))
    assert (tuple(y.shape), y.dtype, y.device.type) == ((8, N), getattr(torch, form.out_dtype), "tpu")


def test_our_fake_agrees_with_torch_tpus(device):
    """torch_tpu's own fake exports the function and looks at the result: slow, and without symbolic shapes."""
    import jax

    form = Form("symmetric", out_dtype="bfloat16")
    x, data, scale = prepared("w4a8-g32", device, 8, FakeTensorMode())
    specs = [jax.ShapeDtypeStruct(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in (x, data, scale)]
    traced = jax.eval_shape(lambda *arrays: linear(*arrays, None, None, form=form), *specs)
    ours = engine.fake("linear", form, (x, data, scale))
    assert (tuple(ours.shape), str(ours.dtype)) == (traced.shape, f"torch.{traced.dtype}")


def test_symbolic_rows(device):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = mode.shape_env.create_unbacked_symint()
    torch._check(rows >= 2)
    tensors = prepared("w4a16-g32", device, rows, mode)
    with mode:
        y = engine.ENGINE.run(linear, Form(out_dtype="bfloat16"), [*tensors, None, None], (0,))
    assert isinstance(y.shape[0], torch.SymInt)
    assert y.shape[1] == N


def test_the_op_is_seen_in_a_graph(device):
    mode = FakeTensorMode()
    x, kernel, packed = layer("w4a16-g32", device, mode)
    with mode:
        graph = make_fx(lambda x: kernel(x, packed, None), tracing_mode="real")(x)
    assert any("qcore_xla.linear" in str(node.target) for node in graph.graph.nodes)
