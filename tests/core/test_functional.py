from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional as F

import qcore
from qcore.errors import FormatError
from qcore.functional import calls


def weight(text="int4-g32-asym", n=16, k=64):
    return qcore.quantize(torch.randn(n, k), text)


@pytest.mark.parametrize("text", ["int8", "int4-g32-asym", "int4-g32-fzp", "int4-g32/plain_int32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear(text, dtype):
    qt, x, bias = weight(text), torch.randn(2, 3, 64, dtype=dtype), torch.randn(16)
    y = qcore.linear(x, qt, bias)
    assert y.dtype == dtype
    expected = F.linear(x.double(), qt.dequantize(torch.float64), bias.double())
    torch.testing.assert_close(y.double(), expected, atol=5e-2, rtol=2e-2)
    assert qcore.linear(x, qt, out_dtype=torch.float32).dtype == torch.float32


def test_linear_with_dynamic_activations():
    qt, x = weight("int8"), torch.randn(5, 64)
    scale = x.abs().amax(1, keepdim=True) / 127
    expected = ((x / scale).round() * scale).double() @ qt.dequantize(torch.float64).t()
    torch.testing.assert_close(
        qcore.linear(x, qt, activation=qcore.DynamicInt8()).double(), expected, atol=1e-3, rtol=1e-4
    )


def test_linear_per_token_in_and_out():
    qt, codes = weight("int8"), torch.randint(-128, 128, (5, 64)).to(torch.int8)
    given = {"x_scale": torch.rand(5), "x_zero_point": torch.randint(-9, 9, (5,)).int()}
    static = qcore.StaticInt8(per_token=True)
    y = qcore.linear(codes, qt, activation=static, **given)
    expected = ((codes.double() - given["x_zero_point"][:, None]) * given["x_scale"][:, None].double()) @ qt.dequantize(
        torch.float64
    ).t()
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, atol=1e-2, rtol=1e-4)
    out = {"out_scale": torch.full((5,), 10.0), "out_zero_point": torch.zeros(5).int()}
    z = qcore.linear(codes, qt, activation=static, output=qcore.OutputInt8(per_token=True), **given, **out)
    assert z.dtype == torch.int8
    assert (z.double() - (expected / 10).round().clamp(-128, 127)).abs().max() <= 1


def test_gradients_reach_the_bias_beside_per_token_parameters():
    qt, codes = weight("int8"), torch.zeros(5, 64, dtype=torch.int8)
    bias = torch.randn(16, requires_grad=True)
    static = qcore.StaticInt8(per_token=True)
    y = qcore.linear(codes, qt, bias, activation=static, x_scale=torch.rand(5), x_zero_point=torch.zeros(5).int())
    y.sum().backward()
    assert torch.equal(bias.grad, torch.full((16,), 5.0))


def test_gradients():
    qt = weight()
    x, bias = torch.randn(5, 64, requires_grad=True), torch.randn(16, requires_grad=True)
    qcore.linear(x, qt, bias).sum().backward()
    torch.testing.assert_close(x.grad, qt.dequantize().sum(0).expand(5, 64))
    assert torch.equal(bias.grad, torch.full((16,), 5.0))


def test_conv2d_and_its_gradients():
    qt, x = weight("int8", 8, 36), torch.randn(2, 4, 6, 6, requires_grad=True)
    bias = torch.randn(8, requires_grad=True)
    kernel = qt.dequantize().view(8, 3, 3, 4).permute(0, 3, 1, 2)
    grads = []
    for call in (
        lambda: qcore.conv2d(x, qt, bias, kernel_size=(3, 3), padding=(1, 1)),
        lambda: F.conv2d(x, kernel, bias, padding=1),
    ):
        x.grad = bias.grad = None
        y = call()
        y.square().sum().backward()
        grads.append((y.detach(), x.grad, bias.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-3)
    x = x.detach()
    assert qcore.conv2d(x, qt, bias, kernel_size=(3, 3)).requires_grad


def test_embedding():
    qt, indices = weight("int4-g32", 20), torch.tensor([[1, 2], [3, 19]])
    assert torch.equal(qcore.embedding(indices, qt), qt.dequantize()[indices])
    assert qcore.embedding(indices, qt, out_dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(IndexError):
        qcore.embedding(torch.tensor([20]), qt)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: qcore.linear(torch.randn(3, 63), weight()), "its last dimension must be K = 64"),
        (lambda: qcore.linear(torch.tensor(1.0), weight()), "its last dimension must be K = 64"),
        (lambda: qcore.linear(torch.randn(3, 64), weight(), torch.randn(64)), r"this weight needs \(16,\)"),
        (lambda: qcore.linear(torch.randn(3, 64, device="meta"), weight()), "x is on meta, the weight on cpu"),
        (lambda: qcore.linear(torch.randn(3, 64), weight(), x_scale=torch.ones(3)), "passed: x_scale; required: none"),
        (
            lambda: qcore.linear(torch.randn(3, 64), weight(), activation=qcore.StaticInt8(per_token=True)),
            "passed: none; required: x_scale, x_zero_point",
        ),
        (lambda: qcore.conv2d(torch.randn(4, 6, 6), weight("int8", 8, 36), kernel_size=(3, 3)), r"\(B, IC, H, W\)"),
        (lambda: qcore.conv2d(torch.randn(1, 4, 6, 6), weight("int8"), kernel_size=(3, 3)), "needs .* = 36"),
    ],
)
def test_errors(call, words):
    with pytest.raises(FormatError, match=words):
        call()


# The cache


def test_packed_once_and_freed(add_kernel):
    import gc

    made = add_kernel("mine")
    qt, x = weight(), torch.randn(3, 64)
    before = len(calls._cache)
    for _ in range(3):
        qcore.linear(x, qt)
    assert [k.packs for request, k in made.items() if request.n == 16 and request.x_dtype == torch.float32] == [4]
    assert len(calls._cache) == before + 1
    del qt
    gc.collect()
    assert len(calls._cache) == before


def test_the_same_tensors_in_another_qtensor_share_the_entry():
    qt = weight()
    twin = qcore.QTensor(qt.data, qt.scale, qt.zero, qt.shape, qt.format, qt.quantizer)
    assert calls.entry_for(twin) is calls.entry_for(qt)
    other = qcore.QTensor(qt.data, qt.scale * 2, qt.zero, qt.shape, qt.format, qt.quantizer)
    assert calls.entry_for(other) is not calls.entry_for(qt)


def test_a_change_in_place_is_seen():
    qt, x = weight(), torch.randn(3, 64)
    y = qcore.linear(x, qt)
    qt.scale.mul_(2)
    torch.testing.assert_close(qcore.linear(x, qt), 2 * y)


def test_settings_are_obeyed_after_the_weight_is_packed(add_kernel):
    made = add_kernel("mine", qcore.EMULATED)
    qt, x = weight(), torch.randn(3, 64)
    y = qcore.linear(x, qt)
    calls = sum(kernel.calls for kernel in made.values())
    with qcore.using("mine", verify="off"):
        torch.testing.assert_close(qcore.linear(x, qt), y)
    assert sum(kernel.calls for kernel in made.values()) == calls + 1
    with qcore.using(strict=True), pytest.raises(qcore.UnsupportedError):
        qcore.linear(x, qt)


def test_threads_share_the_entry():
    qt, x, results = weight(), torch.randn(3, 64), []
    expected = qcore.linear(x, weight())  # verified before the threads start
    threads = [threading.Thread(target=lambda: results.append(qcore.linear(x, qt))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0].shape == expected.shape


def test_int8_results_of_float_activations_are_refused():
    weight, output = qcore.quantize(torch.randn(8, 64), "int8"), qcore.OutputInt8(0.1, 3)
    with pytest.raises(FormatError, match="int8 results require int8 activations"):
        qcore.linear(torch.randn(2, 64), weight, output=output)
    with pytest.raises(FormatError, match="int8 results require int8 activations"):
        qcore.conv2d(torch.randn(2, 64, 3, 3), weight, kernel_size=(1, 1), output=output)
