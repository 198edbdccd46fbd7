"""The pure functions: both ways through slices, by every kind of activation, and what XLA makes of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from grids import sampled

from qcore import Conv2dRequest, Scheme
from qcore.contracts import LINEAR
from qcore.resolving.verification import difference
from qcore_xla import calls, packing
from qcore_xla.bodies import linear as bodies
from qcore_xla.bodies.form import Form
from qcore_xla.engines import base
from qcore_xla.engines.crossing import array_of
from qcore_xla.kernels.linear import XlaLinear
from qcore_xla.packing import wants_rows

jax = pytest.importorskip("jax")


class Recorder:
    """An engine that keeps what the jax engine is asked to run."""

    def __init__(self, engine):
        self.engine, self.asked = engine, []

    def run(self, function, form, tensors, *rest):
        self.asked.append((function, form, [None if t is None else torch.as_tensor(t).clone() for t in tensors]))
        return self.engine.run(function, form, tensors, *rest)


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder(base.find("cpu"))
    monkeypatch.setattr(calls.base, "find", lambda kind: made)
    return made


@pytest.mark.parametrize(
    "scheme",
    [
        "w8a16-asym", "w4a16-g32-fzp", "w8a8-aasym", "w4a8-g32-asym", "w4a8-g32-asym-token", "wfp8a16", "nvfp4",
        "wfp8afp8", "wfp8afp8-g16", "wfp8afp8-g256", "w4afp8-g32-fzp",
    ],
)  # fmt: skip
def test_slices_at_once_and_in_turn_agree(problem, recorder, scheme):
    here = problem(scheme, rows=3, k=290)
    kernel = XlaLinear(here.request)
    packed = kernel.pack(here.weight)
    y = kernel(here.x, packed, here.bias, **here.given)
    assert LINEAR.judge(here, y).ok
    ((function, form, tensors),) = recorder.asked
    assert form.scan
    arrays = [None if t is None else array_of(t) for t in tensors]
    other = function(*arrays, form=replace(form, scan=False))
    np.testing.assert_allclose(np.asarray(other)[:3, :20], y.float().numpy(), rtol=1e-4, atol=1e-4)


@pytest.fixture
def gpu_layout(monkeypatch):
    """Weights as CUDA tensors have them, on the CPU."""

    def wanted(device, *of):
        return wants_rows(torch.device("cuda"), *of)

    monkeypatch.setattr(calls, "wants_rows", wanted)
    calls.call_of.cache_clear()
    yield
    calls.call_of.cache_clear()


LAID_OUT = ("w8a16-asym", "w4a16", "w4a16-g32-asym", "w8a8-aasym", "w8a8-g64-asym-aasym", "mxfp8", "nvfp4")
LAID_OUT += ("wfp4_bnba16-g16-fzp", "wnf4a16", "wfp8afp8", "wfp8afp8-g64", "wnf4afp8-g64-token")


@pytest.mark.parametrize(("scheme", "rows", "k"), sampled(itertools.product(LAID_OUT, (1, 3, 5), (36, 70, 256)), 18))
def test_the_layout_of_gpus(problem, monkeypatch, gpu_layout, scheme, rows, k):
    """Of 36 columns, a group of 64 is one of them all."""
    here = problem(scheme, rows=rows, k=k)
    kernel = XlaLinear(here.request)
    packed = kernel.pack(here.weight)
    assert kernel.plan.by_rows == (kernel.plan.groups == 1 or here.request.activation is None)
    assert packed["data"].ndim == (2 if kernel.plan.groups == 1 and kernel.plan.by_rows else 3)
    assert not difference(kernel.unpack(packed), here.weight)
    monkeypatch.setattr(bodies, "_MANY_ROWS", 5)
    verdict = LINEAR.judge(here, kernel(here.x, packed, here.bias))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("bias", ["none", "yes"])
def test_products_of_many_rows_are_rounded_once(problem, bias):
    here = problem("w4a16-g32", rows=33, k=64)
    packed = packing.pack(here.weight, packing.plan(20, 64, 4, 32, by_rows=True))
    x, data, scale = (jax.numpy.asarray(t.numpy()) for t in (here.x, packed["data"], packed["scale"]))
    added = None if bias == "none" else jax.numpy.ones((64,))
    form = Form(out_dtype="bfloat16", rows=True)

    def body(x):
        return bodies.linear(x, data, scale, None, added, form=form)

    y = body(x.astype("bfloat16"))
    expected = LINEAR.reference(here).numpy() + (0 if added is None else 1)
    assert y.dtype == "bfloat16"
    np.testing.assert_allclose(np.asarray(y[:, :20], "float32"), expected, rtol=2e-2, atol=4e-2)
    # Sums that are added to are float32 until then.
    product = next(e for e in jax.make_jaxpr(body)(x.astype("bfloat16")).eqns if e.primitive.name == "dot_general")
    assert product.outvars[0].aval.dtype == ("bfloat16" if added is None else "float32")


def test_weights_by_rows_and_of_jax_int4(problem):
    here = problem("w4a16", k=64)
    codes = here.weight.codes().numpy()
    expected = LINEAR.reference(here).numpy()
    x, scale = jax.numpy.asarray(here.x.numpy()), jax.numpy.asarray(here.weight.scale.numpy())
    from qcore_xla.packing import words_of

    for data in (
        jax.numpy.asarray(codes),
        jax.numpy.asarray(codes).astype(jax.numpy.int4),
        jax.numpy.asarray(words_of(here.weight.codes()).numpy()),
        jax.numpy.asarray(codes.T.reshape(2, 32, 20)),
        jax.numpy.asarray(codes.T.reshape(2, 32, 20)).astype(jax.numpy.int4),
    ):
        y = bodies.linear(x, data, scale, None, None, form=Form())
        np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5, atol=1e-5)


def test_a_token_that_holds_nan_gives_nan(problem):
    here = problem("w8a8")
    x = here.x.clone()
    x[1, 3] = float("nan")
    kernel = XlaLinear(here.request)
    y = kernel(x, kernel.pack(here.weight), None)
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-asym-aasym", "w4a8-g32", "wfp8afp8"])
def test_nan_in_many_tokens_of_which_each_is_long(problem, scheme):
    here = problem(scheme, k=256)
    kernel = XlaLinear(here.request)
    x = torch.randn(64, 256).to(here.x.dtype)  # XLA:CPU's own maximum drops NaN from 4096 numbers on
    x[40, 85] = float("nan")
    y = kernel(x, kernel.pack(here.weight), None)
    assert y[40].isnan().all()
    assert not y[[*range(40), *range(41, 64)]].isnan().any()


NARROW = ("float16", "bfloat16")
GPU_FORMS = ("wfp8a16", "wfp8_e5m2a16-g64", "mxfp4", "nvfp4", "wnf4a16-g64", "wfp8afp8", "w4afp8", "wnf4afp8")


@pytest.mark.parametrize(("scheme", "dtype", "rows"), sampled(itertools.product(GPU_FORMS, NARROW, (1, 5)), 10))
def test_activations_of_16_bits(problem, monkeypatch, scheme, dtype, rows):
    """As accelerators multiply them: a CPU gets float32."""
    here = problem(scheme, rows=rows, k=256, dtype=getattr(torch, dtype))
    kernel = XlaLinear(here.request)
    of = wants_rows(torch.device("cuda"), 256, here.weight.format.group_size, 1, kernel._call.activation)
    packed = packing.pack(
        here.weight, packing.plan(20, 256, here.weight.format.bits, here.weight.format.group_size, 1, of)
    )
    form = replace(kernel._call.form_on_cpu, out_dtype=dtype, rows=of)
    parts = {name: array_of(part) for name, part in packed.items()}
    monkeypatch.setattr(bodies, "_MANY_ROWS", 5)
    x = jax.numpy.asarray(here.x.float().numpy()).astype(dtype)
    y = bodies.linear(x, parts["data"], parts["scale"], None, None, factor=parts.get("factor"), form=form)
    assert y.dtype == dtype
    y = torch.from_numpy(np.array(y.astype("float32"))).to(getattr(torch, dtype))
    verdict = LINEAR.judge(here, y[:, :20])
    assert verdict.ok, verdict.message


def temporary_bytes(scheme, rows, n, k):
    """What XLA allocates beside arguments and result, and the bytes of the weight."""
    parsed = Scheme.parse(scheme)
    kernel = XlaLinear(LINEAR.request_for(parsed, torch.device("cpu"), torch.float32, n, k))
    of = kernel.plan
    spec = jax.ShapeDtypeStruct
    words = of.length // 8 if of.bits == 4 else of.length
    data = spec((of.slices, words, of.rows), "int32" if of.bits == 4 else "int8")
    call = calls.call_of(torch.device("cpu"), n, k, scheme, 1, torch.float32)
    form = calls.form_of(call, "cpu")
    arrays = (spec((rows, of.columns), "float32"), data, spec((of.filled, of.rows), "float32"), None, None)
    compiled = jax.jit(lambda *a: bodies.linear(*a, form=form)).lower(*arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("scheme", ["w4a16-g128", "w8a16", "mxfp4", "wfp8a16", "wnf4a16-g64", "wfp8afp8-g128"])
def test_a_dequantized_weight_is_never_whole_in_memory(scheme):
    n = k = 4096
    assert temporary_bytes(scheme, 16, n, k) < n * k * 4 / 8  # 8 MiB of the 64 that it would be in float32


def test_columns_are_those_of_the_contract():
    from qcore.contracts.conv2d import im2col
    from qcore_xla.columns import Geometry, columns

    request = Conv2dRequest(
        torch.device("cpu"), torch.float32, torch.float32, 6, 4, (3, 2), (2, 1), (1, 2), (1, 2), 2,
        Scheme.parse("w8a16").weight, None, None, False, False,
    )  # fmt: skip
    x = torch.randn(2, 6, 7, 9)
    found = columns(x, Geometry((3, 2), (2, 1), (1, 2), (1, 2), 2), 0)
    assert torch.equal(found.movedim(0, 1), im2col(x, request))
    assert torch.equal(
        columns(x.contiguous(memory_format=torch.channels_last), Geometry(*_geometry(request)), 0), found
    )


def _geometry(r):
    return r.kernel_size, r.stride, r.padding, r.dilation, r.groups


def test_kinds_of_activation():
    kinds = {"w8a16": "float", "w8a8": "symmetric", "w8a8-aasym": "asymmetric", "w8a8-static(0.5,3)": "given"}
    kinds |= {"wfp8afp8": "fp8", "wfp8afp8-g128": "fp8-groups", "wfp8afp8-g128-token": "fp8"}
    for scheme, kind in (kinds | {"wfp8afp8-static(0.5)": "fp8-given"}).items():
        assert calls.kind_of(Scheme.parse(scheme).activation) == kind
