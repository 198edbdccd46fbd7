"""Quantized layers under the transforms of torch.func and in forward mode: as a layer with the dense weight."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import qcore
from qcore import StaticInt8
from qcore.errors import FormatError

# torch scripts its own decompositions at the first derivative in forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
SCHEMES = ["w8a16", "w4a16-g32", "w8a8", "wfp8afp8", "nf4"]


def linear(scheme="w8a16", dtype=torch.float32, k=64, n=24):
    """A quantized layer, and the layer with its dense weight; both frozen."""
    layer = qcore.nn.QuantizedLinear.from_float(nn.Linear(k, n).to(dtype), scheme)
    dense = nn.Linear(k, n).to(dtype)
    dense.load_state_dict({"weight": layer.weight.dequantize(dtype), "bias": layer.bias.detach()})
    return layer.requires_grad_(False), dense.requires_grad_(False)


def convolution(mode="zeros"):
    layer = qcore.nn.QuantizedConv2d.from_float(nn.Conv2d(8, 12, 3, 2, 1, groups=2, padding_mode=mode), "w8a16")
    dense = nn.Conv2d(8, 12, 3, 2, 1, groups=2, padding_mode=mode)
    weight = layer.weight.dequantize().view(12, 3, 3, 4).permute(0, 3, 1, 2)
    dense.load_state_dict({"weight": weight, "bias": layer.bias.detach()})
    return layer.requires_grad_(False), dense.requires_grad_(False)


def experts():
    layer = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 8, 16), "w8a16", bias=torch.randn(3, 8))
    weight, bias = [layer.weight[e].dequantize() for e in range(3)], layer.bias.detach()

    def dense(x, offsets=(2, 2, 5)):
        parts = [x[:2] @ weight[0].t() + bias[0], x[2:5] @ weight[2].t() + bias[2], x.new_zeros(len(x) - 5, 8)]
        return torch.cat(parts)

    return layer.requires_grad_(False), dense


def square(call):
    return lambda x: call(x).square().sum()


def close(found, wanted, dtype=torch.float32):
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert found.shape == wanted.shape
    assert error < (0.02 if dtype is torch.bfloat16 else 1e-5), f"relative error {error:.4f}"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_derivatives_of_linear(scheme, dtype):
    layer, dense = linear(scheme, dtype)
    x, direction = torch.randn(2, 5, 7, 64, dtype=dtype)
    wanted = direction.double() @ dense.weight.double().t()
    close(torch.func.jvp(layer, (x,), (direction,))[1], wanted, dtype)
    close(torch.func.jacfwd(layer)(x[0, 0]), dense.weight, dtype)
    close(torch.func.jacrev(layer)(x[0, 0]), dense.weight, dtype)
    row = dense.weight.double().sum(0).expand_as(x)
    close(torch.func.grad(lambda x: layer(x).sum())(x), row, dtype)
    close(torch.vmap(torch.func.grad(lambda x: layer(x).sum()))(x), row, dtype)
    with forward_ad.dual_level():
        close(forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction))).tangent, wanted, dtype)


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8"])
def test_forward_mode_in_a_compiled_function(scheme):
    """The op of a kernel has no derivative, and takes tangents without an error."""
    layer, dense = linear(scheme, torch.bfloat16)
    x, direction = torch.randn(2, 5, 64).to(torch.bfloat16)
    y, tangent = torch.compile(lambda *given: torch.func.jvp(layer, given[:1], given[1:]), backend="aot_eager")(
        x, direction
    )
    assert torch.equal(y, layer(x))
    close(tangent, direction.double() @ dense.weight.double().t(), torch.bfloat16)


@pytest.mark.parametrize("make", [convolution, partial(convolution, "reflect"), experts])
def test_derivatives_of_convolutions_and_experts(make):
    layer, dense = make()
    call = layer if make is not experts else partial(layer, offsets=torch.tensor([2, 2, 5], dtype=torch.int32))
    x, direction = torch.randn(2, 3, 6, 16) if make is experts else torch.randn(2, 3, 2, 8, 7, 9)
    for transform in (torch.vmap, lambda f: torch.vmap(torch.func.grad(square(f)))):
        close(transform(call)(x), transform(dense)(x))
    for transform in (torch.func.jacfwd, torch.func.jacrev):
        close(transform(call)(x[0]), transform(dense)(x[0]))
    close(*(torch.func.jvp(f, (x[0],), (direction[0],))[1] for f in (call, dense)))


@pytest.mark.parametrize("make", [linear, convolution])
def test_derivatives_with_respect_to_the_bias(make):
    layer, dense = make()
    x, bias = torch.randn(3, 64) if make is linear else torch.randn(2, 8, 7, 9), layer.bias.detach()

    def of(module):
        return lambda b: torch.func.functional_call(module, {"bias": b}, (x,))

    close(torch.func.jacfwd(of(layer))(bias), torch.func.jacfwd(of(dense))(bias))
    close(torch.vmap(of(layer))(torch.stack([bias, 2 * bias])), torch.vmap(of(dense))(torch.stack([bias, 2 * bias])))


def test_experts_differentiate_their_bias_and_batch_their_ends():
    layer, dense = experts()
    x, ends = torch.randn(4, 6, 16), torch.tensor([2, 2, 5], dtype=torch.int32)
    slope = torch.func.jacfwd(lambda b: torch.func.functional_call(layer, {"bias": b}, (x[0], ends)))(layer.bias)
    each = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 0]]).float()
    assert torch.equal(slope, torch.einsum("te,no->tneo", each, torch.eye(8)))
    close(torch.vmap(layer)(x, ends.expand(4, 3)), torch.vmap(dense)(x))


@pytest.mark.parametrize("batched", [True, False])
def test_batches_of_rows_with_parameters_of_their_own(batched):
    weight, x, scale = qcore.quantize(torch.randn(8, 16), "int8/plain"), torch.randn(4, 6, 16), torch.rand(4, 6) + 0.1
    zero = torch.zeros(6, dtype=torch.int32)

    def call(x, scale):
        return qcore.linear(x, weight, activation=StaticInt8(per_token=True), x_scale=scale, x_zero_point=zero)

    scales = scale if batched else scale[:1].expand(4, 6)
    found = torch.vmap(call, in_dims=(0, 0 if batched else None))(x, scale if batched else scale[0])
    assert torch.equal(found, torch.stack([call(*each) for each in zip(x, scales, strict=True)]))


def test_first_lookup_of_a_batch():
    layer = qcore.nn.QuantizedEmbedding.from_float(nn.Embedding(20, 16), "w4a16-g8")
    indices, wanted = torch.randint(0, 20, (4, 5)), layer.weight.dequantize()
    assert torch.equal(torch.vmap(layer)(indices), wanted[indices])


def test_first_call_in_a_transform_disables_no_kernel(recwarn):
    layer, _ = linear("w4a16-g32", torch.bfloat16)
    fresh, _ = linear("w4a16-g32", torch.bfloat16)
    name = layer.decision.selected.kernel
    torch.func.grad(lambda x: layer(x).sum())(torch.randn(3, 64, dtype=torch.bfloat16))
    assert fresh.to(torch.float32).to(torch.bfloat16).decision.selected.kernel == name
    assert not [w for w in recwarn if "disabled" in str(w.message)]


def test_siblings_compute_for_themselves_in_a_transform():
    model = nn.ModuleDict({"q_proj": nn.Linear(32, 16), "k_proj": nn.Linear(32, 8), "v_proj": nn.Linear(32, 8)})
    qcore.quantize_(model, "w8a16")
    single = copy.deepcopy(model.requires_grad_(False))
    assert qcore.fuse_(model)
    x, direction = torch.randn(2, 3, 32)
    torch.func.grad(lambda s: (model["q_proj"](x) * s).sum())(torch.ones(()))  # a result of the transform's level
    for name in model:
        assert torch.equal(model[name](x), single[name](x))
        close(*(torch.func.jvp(m[name], (x,), (direction,))[1] for m in (model, single)))


def test_stacked_weights_of_several_models_are_refused():
    models = [nn.Sequential(nn.Linear(16, 16)) for _ in range(2)]
    for model in models:
        qcore.quantize_(model, "w8a16")
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0])

    def call(parameters, buffers, x):
        return torch.func.functional_call(base, (parameters, buffers), (x,))

    x = torch.randn(3, 16)
    with pytest.raises(FormatError, match=r"packed weight .* was replaced"):
        torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
    assert torch.equal(base(x), models[0](x))
