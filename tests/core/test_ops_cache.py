from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
from op_formulas import OPS, TAIL, B, Q, S, T, W, X, expected_matmul, per_channel, samples

import qcore
from qcore.errors import FormatError
from qcore.functional import torch_ops


@pytest.mark.parametrize("index", range(11))
def test_opcheck_and_fakes(index):
    name, arguments = list(samples())[index]
    op = getattr(OPS, name).default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    y = op(*arguments)
    meta = op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    assert (meta.shape, meta.dtype, meta.device.type) == (y.shape, y.dtype, "meta")


def test_every_op_has_a_sample_and_a_documented_implementation():
    names = {name for name, _ in samples()}
    defined = {
        line.split("(")[0].split("::")[1]
        for line in torch._C._dispatch_get_all_op_names()
        if line.startswith("qcore::")
    }
    assert names == defined
    assert all(inspect.getdoc(getattr(torch_ops, name)) for name in names)


def test_compile_packs_once_and_keeps_one_graph():
    torch._dynamo.reset()
    w, scale, _ = per_channel(torch.randn(8, 64))
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    compiled = torch.compile(
        lambda x: OPS.quantized_matmul(x, w, scale) * 2, fullgraph=True, dynamic=True, backend=backend
    )
    before = len(torch_ops._cache)
    for rows in (2, 3, 7):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(compiled(x), OPS.quantized_matmul(x, w, scale) * 2)
    assert len(graphs) == 1
    assert len(torch_ops._cache) == before + 1


def test_a_weight_is_packed_once_and_freed_with_it(add_kernel):
    made = add_kernel("mine")
    w, scale, _ = per_channel(torch.randn(8, 64))
    x = torch.randn(2, 64)
    OPS.quantized_matmul(x, w, scale)
    packs = sum(kernel.packs for kernel in made.values())
    for _ in range(3):
        OPS.quantized_matmul(x, w, scale)
    assert sum(kernel.packs for kernel in made.values()) == packs
    (entry,) = [
        e
        for entries in torch_ops._cache._entries.values()
        for e in entries.values()
        if e.is_built_from((w, scale, None))
    ]
    freed = weakref.ref(entry)
    del entry, w
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("index", range(11))
def test_no_op_keeps_its_weight_alive(index):
    gc.collect()
    before = len(torch_ops._cache)
    name, arguments = list(samples())[index]
    getattr(OPS, name)(*arguments)
    assert len(torch_ops._cache) == before + 1
    del arguments
    gc.collect()
    assert len(torch_ops._cache) == before


def test_a_weight_that_is_changed_in_place_is_packed_anew():
    w, scale, _ = per_channel(torch.randn(8, 64))
    x = torch.randn(2, 64)
    for change in (lambda: w.mul_(-1), lambda: scale.mul_(2), w[0].zero_):
        change()
        y = OPS.quantized_matmul(x, w, scale)
        torch.testing.assert_close(y.double(), expected_matmul(x, w, scale, None, -1, False), atol=1e-3, rtol=1e-3)


def test_scales_made_per_call_are_not_mistaken_for_one_another():
    # A tensor that is gone leaves its id to the next one.
    w, scale, _ = per_channel(torch.randn(8, 64))
    x = torch.randn(2, 64)
    for factor in (1.0, 2.0, 3.0, 4.0, 5.0):
        y = OPS.quantized_matmul(x, w, scale * factor)
        torch.testing.assert_close(
            y.double(), expected_matmul(x, w, scale * factor, None, -1, False), atol=1e-3, rtol=1e-3
        )
    assert sum(len(entries) for key, entries in torch_ops._cache._entries.items() if key is w) <= 2


def test_one_weight_read_in_two_ways():
    w = torch.randint(-8, 8, (8, 64)).to(torch.int8)
    scale, x = torch.rand(8), torch.randn(2, 64)
    first = OPS.quantized_matmul(x, w, scale, int4_weight=True)
    torch.testing.assert_close(first, OPS.linear_q8csw(x, w, scale), atol=1e-4, rtol=1e-4)


def test_inference_tensors_work():
    with torch.inference_mode():
        w, scale, _ = per_channel(torch.randn(8, 64))
        x = torch.randn(2, 64)
        y = OPS.quantized_matmul(x, w, scale)
    torch.testing.assert_close(y.double(), expected_matmul(x, w, scale, None, -1, False), atol=1e-3, rtol=1e-3)


def test_settings_are_obeyed_by_weights_that_are_packed_already(add_kernel):
    made = add_kernel("mine", qcore.EMULATED)
    w, scale, _ = per_channel(torch.randn(8, 64))
    x = torch.randn(2, 64)
    OPS.quantized_matmul(x, w, scale)
    with qcore.using("mine"):
        OPS.quantized_matmul(x, w, scale)
    assert any(kernel.packs and kernel.inner.n == 8 for kernel in made.values())
    with qcore.using(strict=True), pytest.raises(qcore.UnsupportedError):
        OPS.quantized_matmul(x, w, scale)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("quantized_matmul", (X, W.float(), S), "w has dtype torch.float32; int4 values are stored in int8, too"),
        ("quantized_matmul", (X, W[0], S), r"per-channel w has shape \(6,\); it must be \(N, K\)"),
        ("quantized_matmul", (X, W, S[:5]), r"scale has shape \(5,\); it must be \(8,\)"),
        ("quantized_matmul", (X, W, S, S[:5]), r"zero_point has shape \(5,\)"),
        ("quantized_matmul", (X[:, :5], W, S), r"x has shape \(3, 5\); its last dimension must be 6"),
        ("quantized_matmul", (X, W, S, None, 2), r"blockwise w has shape \(8, 6\); it must be \(K/2, 2, N\)"),
        ("quantized_matmul", (X, W + 9, S, None, -1, True), r"int4_weight is set, but w spans 9\.\.9"),
        ("bf16i4bf16_rowwise", (X, W, S, S), r"both must be \(K/g, N\)"),
        ("bf16i4bf16_rowwise", (X, W.float(), S[None], S[None]), r"it must be int8 \(N, K/2\)"),
        ("bf16i4bf16_rowwise", (X, B.view(torch.int8), torch.ones(4, 4), torch.ones(4, 4)), "do not divide K = 6"),
        ("linear_q8csw", (X, W.float(), S), r"they must be int8 \(N, K\)"),
        ("linear_q8csw", (X, W, S[:5]), "weight_scales have shape"),
        ("linear_q8ta_q8csw", (X, 0.1, 0, W, S, S), "weight_sums have dtype torch.float32"),
        ("linear_q8ta_q8csw", (X, 0.0, 0, W, None, S), "scale is 0.0; it must be positive"),
        ("linear_q8ta_q8csw", (X, 0.1, 200, W, None, S), "zero_point is 200"),
        ("conv2d_q8csw", (X, W, S, None, *TAIL), r"it must be \(B, IC, H, W\)"),
        ("conv2d_q8csw", (torch.zeros(1, 4, 5, 5), W, S, None, *TAIL), r"weights have 6 columns; they need .* = 36"),
        ("conv2d_q8csw", (torch.zeros(1, 4, 5, 5), W, S, None, [3, 3, 3], *TAIL[1:]), "take one or two ints"),
        ("linear_qta8a_qga4w", (X, T, T, B, 2, torch.ones(3, 4), torch.ones(3, 4)), "it must hold int8 codes"),
        ("linear_qta8a_qga4w", (Q, T, T, B, 4, torch.ones(3, 4), torch.ones(3, 4)), "group_size 4 must divide K = 6"),
        (
            "linear_qta8a_qga4w",
            (Q, T, T, B, 2, torch.ones(4, 3), torch.ones(3, 4)),
            r"weight_scales have shape \(4, 3\)",
        ),
        (
            "linear_qta8a_qga4w",
            (Q, T, T, B, 2, torch.ones(3, 4), torch.ones(3, 4)),
            "weight_zeros have dtype torch.float32",
        ),
        (
            "linear_qta8a_qga4w",
            (Q, T[:2], T, B, 2, torch.ones(3, 4), torch.ones(3, 4).int()),
            "has 2 values; x has 3 tokens",
        ),
        ("embedding_q4gsw", (W, S, 2, torch.arange(3)), r"it must be uint8 \(V, D/2\)"),
        ("embedding_q4gsw", (B, S, 4, torch.arange(3)), "group_size 4 must divide D = 6"),
        ("embedding_q4gsw", (B, S, 2, torch.arange(3)), r"they must be \(V, D/g\) = \(4, 3\)"),
    ],
)
def test_errors_name_the_op_and_what_is_wrong(name, arguments, words):
    with pytest.raises(FormatError, match=words) as caught:
        getattr(OPS, name)(*arguments)
    assert f"qcore::{name}" in str(caught.value) or "StaticInt8" in str(caught.value)
