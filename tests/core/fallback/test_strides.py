"""Bias, parameters, x and the tensors of a weight in any strides: kernels hand their addresses to libraries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import qcore
from qcore.contracts import CONTRACTS
from qcore.errors import FormatError
from qcore.formats import Format
from qcore.weights.activations import DynamicInt8
from qcore.weights.qtensor import QTensor, contiguous
from qcore.weights.quantizers import quantize
from qcore.weights.schemes import Scheme

SCHEMES = ["w8a16", "w8a8", "w4a8", "w8a8-static(0.05,3)", "w4a16-g32-asym", "w4a8-g32-asym", "w8a16-g32-fzp"]
SHAPES = ("strided-parts", "expanded-parts")


def strided(t):
    return torch.stack((t, t * float("nan")), -1)[..., 0]


def inside(t):
    return torch.cat((t.new_full((3,), float("nan")), t))[3:]


BIASES = {
    "strided": lambda n: strided(torch.randn(n)),
    "expanded": lambda n: torch.randn(1).expand(n),
    "reversed": lambda n: torch.complex(torch.zeros(n), torch.randn(n)).conj().imag,
    "inside": lambda n: inside(torch.randn(n)),
    "column": lambda n: torch.randn(n, 3)[:, 1],
}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_bias_of_any_strides(scheme, bias):
    drawn = BIASES[bias](48)
    linear, x = torch.nn.Linear(64, 48), torch.randn(5, 64)
    conv, image = torch.nn.Conv2d(4, 48, 3, padding=1), torch.randn(2, 4, 5, 6)
    with qcore.using("torch"), torch.no_grad():
        layers = (qcore.nn.QuantizedLinear, linear, x), (qcore.nn.QuantizedConv2d, conv, image)
        for kind, original, inputs in layers:
            layer = kind.from_float(original, scheme)
            layer.bias = torch.nn.Parameter(drawn)
            first, again = layer(inputs), layer(inputs[:1])
            layer.bias = torch.nn.Parameter(drawn.clone(memory_format=torch.contiguous_format).resolve_neg())
            torch.testing.assert_close(first, layer(inputs))
            torch.testing.assert_close(again, layer(inputs[:1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [*SCHEMES, "w4a8-g32-asym-token-o8t"])
def test_every_kernel_takes_parts_of_any_strides(tools, scheme, dtype):
    for contract in CONTRACTS.values():
        for case in contract.cases([Scheme.parse(scheme)], [dtype]):
            problem = case.build(7) if case.id.endswith(tuple(f"{shape}]" for shape in SHAPES)) else None
            for kernel in tools.offers(problem.request).values() if problem else ():
                tools.check(kernel, problem)


def test_a_problem_keeps_its_strides_on_its_way_to_a_device():
    for contract in CONTRACTS.values():
        for case in contract.cases([Scheme.parse("w4a8-g32-asym-token-o8t"), Scheme.parse("w8a16")], [torch.float32]):
            problem = case.build(1)
            moved = problem.to(torch.device("cpu"))
            pairs = [(problem.x, moved.x), (problem.bias, moved.bias)]
            pairs += [(value, moved.given[name]) for name, value in problem.given.items()]
            for mine, other in pairs:
                assert mine is None or (mine.stride() == other.stride() and torch.equal(mine, other)), case.id
                assert mine is None or mine.data_ptr() != other.data_ptr() or not mine.numel()


def test_cases_hold_every_kind_of_strides():
    cases = {
        name: case.build(1)
        for case in CONTRACTS["linear"].cases([Scheme.parse("w4a8-g32-asym-token-o8t")], [torch.float32])
        for name in SHAPES
        if name in case.id
    }
    for problem in cases.values():
        assert not any(value.is_contiguous() for value in (problem.bias, problem.x, *problem.given.values()))
    assert cases["expanded-parts"].bias.stride() == (0,)


@pytest.mark.parametrize("layout", ["plain", "plain_int32"])
def test_a_weight_is_contiguous_whatever_it_is_made_of(layout):
    whole = quantize(torch.randn(48, 64), Format.parse(f"int4-g32-asym/{layout}"))
    apart = {name: torch.stack((t.t(), t.t()), -1)[..., 0].t() for name, t in whole.tensors().items()}
    made = QTensor(apart["data"], apart["scale"], apart["zero"], whole.shape, whole.format)
    for name, tensor in made.tensors().items():
        assert not apart[name].is_contiguous()
        assert tensor.is_contiguous()
        assert torch.equal(tensor, whole.tensors()[name])
    x = torch.randn(3, 64)
    assert torch.equal(qcore.linear(x, made), qcore.linear(x, whole))
    same = QTensor(whole.data, whole.scale, whole.zero, whole.shape, whole.format)
    assert all(same.tensors()[name] is tensor for name, tensor in whole.tensors().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["w8a16", "w8a16-asym", "w4a16", "w8a8", "w4a8"])
def test_one_column_of_a_transposed_x(scheme, dtype):
    layer = qcore.nn.QuantizedLinear.from_float(nn.Linear(1, 5).to(dtype), scheme)
    x = torch.randn(1, 9, dtype=dtype).t()
    first = layer(x)  # a failure in the first call would count against the kernel
    assert torch.equal(first, layer(x.clone(memory_format=torch.contiguous_format)))


def test_scales_of_every_layer_may_be_transposed():
    for activation, fmt in ((None, "int8-g32"), (DynamicInt8(), "int8-g32"), (DynamicInt8(), "int4"), (None, "int8")):
        whole = quantize(torch.randn(48, 64), Format.parse(fmt))
        across = torch.stack((whole.scale.t().contiguous(),) * 2, -1)[..., 0].t()
        turned = QTensor(whole.data, across, None, whole.shape, whole.format)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(4, 64, dtype=dtype)
            results = [qcore.linear(x, weight, activation=activation) for weight in (whole, turned)]
            assert torch.equal(*results)


def test_contiguous_gives_the_strides_of_a_new_tensor():
    base = torch.randn(4, 5, 1, 1)
    for odd in (base.permute(0, 3, 1, 2), base[..., 0, 0][:, :1], torch.randn(6)[::5][:1], base[:0], torch.randn(())):
        found = contiguous(odd)
        assert found.stride() == torch.empty(odd.shape).stride() or found.dim() == 1
        assert torch.equal(found, odd)
    negative = torch.complex(torch.zeros(3), torch.randn(3)).conj().imag
    assert not contiguous(negative).is_neg()
    assert torch.equal(contiguous(negative), negative)


def test_a_sparse_part_is_refused():
    weight = quantize(torch.randn(4, 8), Format("int8"))
    with pytest.raises(FormatError, match=r"data has the layout torch.sparse_coo.*to_dense"):
        QTensor(weight.data.to_sparse(), weight.scale, None, weight.shape, weight.format)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8", "w4a16-g32"])
def test_x_of_any_strides(tools, scheme):
    made = tools.linear(scheme, torch.bfloat16)
    x = torch.randn(6, 256).bfloat16()
    views = x.t().contiguous().t(), strided(x), x[:1].expand(6, 256), torch.cat((x, x), 1)[:, :256]
    for kernel in made.kernels.values():
        packed = kernel.pack(made.weight)
        for view in views:
            tools.check(kernel, replace(made.problem(6), x=view), packed)
