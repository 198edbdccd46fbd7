"""What ``torch.ops.qcore.*`` refuse: tensors of other devices, layouts and kinds of number, for each argument."""

from __future__ import annotations

import pytest
import torch

from qcore import FormatError

OPS = torch.ops.qcore
pytestmark = pytest.mark.filterwarnings("ignore:.*Sparse CSR tensor support is in beta state")


def codes(*shape):
    return torch.randint(-100, 100, shape).to(torch.int8)


def nibbles(*shape):
    return torch.randint(0, 256, shape).to(torch.uint8)


GEOMETRY = ([3, 3], [1, 1], [0, 0], [1, 1], 1)
CALLS = {
    "quantized_matmul": lambda: [torch.randn(3, 64), codes(16, 64), torch.rand(16), torch.rand(16)],
    "bf16i4bf16_rowwise": lambda: [torch.randn(3, 64), nibbles(16, 32), torch.rand(2, 16), torch.rand(2, 16)],
    "linear_q8csw": lambda: [torch.randn(3, 64), codes(16, 64), torch.rand(16), torch.randn(16)],
    "linear_q8ta_q8csw": lambda: [torch.randn(3, 64), 0.1, 3, codes(16, 64), None, torch.rand(16), torch.randn(16)],
    "conv2d_q8csw": lambda: [torch.randn(1, 2, 5, 5), codes(4, 18), torch.rand(4), torch.randn(4), *GEOMETRY],
    "conv2d_q8ta_q8csw": lambda: [
        torch.randn(1, 2, 5, 5), 0.1, 3, codes(4, 18), None, torch.rand(4), torch.randn(4), *GEOMETRY
    ],
    "linear_qta8a_qga4w": lambda: [
        codes(3, 64), torch.rand(3) + 0.1, torch.zeros(3).int(), nibbles(16, 32), 32, torch.rand(2, 16),
        torch.zeros(2, 16).int(),
    ],
    "embedding_q4gsw": lambda: [nibbles(20, 32), torch.rand(20, 2), 32, torch.tensor([1, 2])],
}  # fmt: skip
WRONG = {
    "meta": lambda t: t.to("meta"),
    "complex": lambda t: torch.complex(t.float(), t.float()),
    "bool": lambda t: t > 0,
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.flatten()[None].to_sparse_csr(),
    "mkldnn": lambda t: t.float().to_mkldnn(),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", CALLS)
def test_each_tensor_is_looked_at(name, kind):
    torch.manual_seed(0)
    op, good = getattr(OPS, name), CALLS[name]()
    expected = op(*good)
    for at, value in enumerate(good):
        if isinstance(value, torch.Tensor):
            with pytest.raises(FormatError, match=f"qcore::{name}|x_"):
                op(*good[:at], WRONG[kind](value), *good[at + 1 :])
    assert torch.equal(op(*good), expected)


@pytest.mark.parametrize("name", ["linear_q8csw", "linear_q8ta_q8csw", "conv2d_q8csw", "conv2d_q8ta_q8csw"])
@pytest.mark.parametrize(
    "make", [lambda b: b[:1], lambda b: b[:-1], lambda b: b.expand(3, -1), lambda b: b[0], lambda b: b.long()]
)
def test_a_bias_that_does_not_fit_is_refused(name, make):
    good = CALLS[name]()
    at = 3 if name == "conv2d_q8csw" else len(good) - 1 if name.startswith("linear") else 6
    with pytest.raises(FormatError, match="bias has"):
        getattr(OPS, name)(*good[:at], make(good[at]), *good[at + 1 :])


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, ([0, 3]), "kernel_size"),
        (1, [0, 1], "stride"),
        (2, [-1], "padding"),
        (3, [0], "dilation"),
        (3, [9], "smaller"),
        (4, 0, "groups=0"),
        (4, 3, "groups=3"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_geometry_that_means_nothing_is_refused(device, at, value, words):
    geometry = [*GEOMETRY]
    geometry[at] = value
    tensors = [t.to(device) for t in CALLS["conv2d_q8csw"]()[:4]]
    with pytest.raises(FormatError, match=words):
        OPS.conv2d_q8csw(*tensors, *geometry)


@pytest.mark.parametrize(
    ("at", "make", "words"),
    [
        (1, lambda t: -t, "x_scale spans"),
        (1, lambda t: t * 0, "x_scale spans"),
        (1, lambda t: t * torch.nan, "x_scale spans"),
        (1, lambda t: t[:2], "has 2 values; x has 3 tokens"),
        (2, lambda t: t + 128, "x_zero_point spans"),
        (2, lambda t: t + 0.5, "x_zero_point holds fractions"),
        (6, lambda t: t + 256, "weight_zeros hold values outside -8..7"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(at, make, words):
    good = CALLS["linear_qta8a_qga4w"]()
    with pytest.raises(FormatError, match=words):
        OPS.linear_qta8a_qga4w(*good[:at], make(good[at]), *good[at + 1 :])


def test_a_zero_point_is_not_rounded_to_the_dtype_of_the_scale():
    x, weight = torch.randn(3, 64), nibbles(16, 32)
    scale, zero = torch.rand(2, 16).bfloat16(), torch.full((2, 16), 1.001)
    torch.testing.assert_close(
        OPS.bf16i4bf16_rowwise(x, weight, scale, zero),
        OPS.bf16i4bf16_rowwise(x, weight, scale.float(), zero),
        atol=1e-5, rtol=1e-5,
    )  # fmt: skip
