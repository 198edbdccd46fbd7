"""The wiring of the kernels: what they pack, what they pass on, and that tracing sees one op for any number of rows.

Products are stand-ins in torch ops; those in Triton have tests of their own.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import cuda_stand_ins as stand_ins
import pytest
import torch
from torch._subclasses import FakeTensorMode

import qcore
from qcore import FormatError
from qcore.contracts import CONTRACTS, EMBEDDING, LINEAR
from qcore.resolving.verification import difference
from qcore.testing.case_selection import PreparedCase
from qcore.testing.laws import inputs as input_laws
from qcore.testing.laws import kernel as kernel_laws
from qcore.testing.laws.base import Sample
from qcore.weights.schemes import SCHEMES, TABLE_SCHEMES, Scheme
from qcore_cuda import conv_ops, ops
from qcore_cuda.embedding import CudaEmbedding
from qcore_cuda.linear import FloatLinear, kernel

CPU = torch.device("cpu")
TOKENS = ("w4a8-g32-asym-token", "w4a8-g32-asym-token-o8t")
MORE = ("w4a16-g64-fzp/plain_int32", "w4a8-g32-fzp-aasym", "w8a8-g96-asym-static-o8", "w4a8-asym-aasym")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = (
    "rows-0",
    "rows-1",
    "k-odd",
    "k-ragged",
    "n-129",
    "vector",
    "batched-4d",
    "bias-float32",
    "strided-odd",
    "codes",
)


@pytest.fixture(scope="module")
def on_cpu():
    """The ops also for the CPU, which the plugin does not register them for."""
    library = torch.library.Library(ops.NAMESPACE, "IMPL")
    for name, function in (
        ("linear_a16", ops._linear_a16),
        ("linear_a8", ops._linear_a8),
        ("linear_afp8", ops._linear_afp8),
        ("embedding", ops.embedding),
    ):
        library.impl(name, function, "CPU")
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """Stand-ins for what runs in Triton."""
    monkeypatch.setattr(ops, "_weight_only", lambda: stand_ins.float_linear)
    monkeypatch.setattr(ops, "_int8", lambda: stand_ins.int8_product)
    monkeypatch.setattr(ops, "_fp8", lambda: stand_ins.fp8_product)
    monkeypatch.setattr(ops, "_gather", lambda: stand_ins.gather)


def made_for(request):
    return CudaEmbedding(request) if request.contract == "embedding" else kernel(request)


def cases():
    every = LINEAR.cases(map(Scheme.parse, (*SCHEMES, *MORE, *TABLE_SCHEMES)), DTYPES)
    found = [case for case in every if case.id.rstrip("]").endswith(tuple(f"-{name}" for name in SHAPES))]
    # Every scheme meets every shape, in one of the dtypes.
    return [case for i, case in enumerate(found) if i % 3 == i // (3 * len(SHAPES)) % 3]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_contract(case):
    problem = case.build(seed=5)
    mine = kernel(problem.request)
    packed = mine.pack(problem.weight)
    assert difference(mine.unpack(packed), problem.weight) == ""
    verdict = LINEAR.judge(problem, mine(problem.x, packed, problem.bias, **problem.given))
    assert verdict.ok, verdict.message


def sample(contract, scheme, dtype=torch.bfloat16):
    parsed = Scheme.parse(scheme)
    name = "rows-17" if contract == "linear" else "batched"
    (case,) = [
        c for c in CONTRACTS[contract].cases([parsed], [dtype]) if c.id.endswith(f"{scheme}-{str(dtype)[6:]}-{name}]")
    ]
    question = PreparedCase(case, seed=1)
    here = question.on(CPU).to(CPU)
    mine = made_for(here.request)
    return Sample(question, here, [mine], [mine.pack(here.weight)])


FAMILIES = [
    ("linear", scheme) for scheme in ("w4a16-g32", "w8a16", "w8a8", "w4a8-g32-asym-aasym", "w8a8-static-o8", *TOKENS)
]
FAMILIES += [("linear", scheme) for scheme in ("wfp4a16-g16-e4m3", "wfp8afp8-g128", "wnf4a16-g64")]
FAMILIES += [("embedding", "w4a16-g128-asym"), ("embedding", "w8a16"), ("embedding", "wfp4a16-g16-e4m3d")]
LAWS = {"fake": kernel_laws.fakes, "opcheck": kernel_laws.opcheck, "compile": kernel_laws.compiles}
LAWS |= {"threads": kernel_laws.threads, "empty": input_laws.empty, "determinism": kernel_laws.deterministic}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("family", FAMILIES, ids="-".join)
def test_laws_of_the_kit(on_cpu, law, family):
    mine = sample(*family)
    LAWS[law](SimpleNamespace(device=CPU), mine, mine.kernels[0], mine.packs[0])


def test_a_result_wider_than_x():
    plain = LINEAR.request_for(Scheme.parse("w4a16-g32"), CPU, torch.bfloat16, 24, 96)
    for scheme in ("w4a16-g32", "w8a8"):
        parsed = Scheme.parse(scheme)
        request = replace(plain, weight=parsed.weight, activation=parsed.activation, out_dtype=torch.float32)
        for problem in LINEAR.probe(request):
            mine = kernel(request)
            verdict = LINEAR.judge(problem, mine(problem.x, mine.pack(problem.weight), problem.bias))
            assert verdict.ok, verdict.message


def test_codes_as_input():
    plain = LINEAR.request_for(Scheme.parse("w8a8-static(0.02,-3)"), CPU, torch.bfloat16, 24, 96)
    request = replace(plain, x_dtype=torch.int8)
    for problem in LINEAR.probe(request):
        mine = kernel(request)
        verdict = LINEAR.judge(problem, mine(problem.x, mine.pack(problem.weight), problem.bias))
        assert verdict.ok, verdict.message


def test_sums_only_where_activations_have_a_zero_point():
    for scheme, sums in (("w8a8", False), ("w8a8-aasym", True), ("w8a8-static", True), (TOKENS[0], True)):
        mine = kernel(LINEAR.request_for(Scheme.parse(scheme), CPU, torch.bfloat16, 16, 64))
        assert mine.packing.endswith("+sums") == sums
        weight = LINEAR.probe(LINEAR.request_for(Scheme.parse(scheme), CPU, torch.bfloat16, 16, 64))[0].weight
        assert ("sums" in mine.pack(weight)) == sums


def test_wrong_k():
    mine = kernel(LINEAR.request_for(Scheme.parse("w8a16"), CPU, torch.float32, 16, 64))
    weight = qcore.quantize(torch.randn(16, 64), qcore.Format("int8"))
    with pytest.raises(qcore.FormatError, match="must be K=64"):
        mine(torch.randn(2, 63), mine.pack(weight), None)


class Counting:
    """Counts direct calls and calls of the op."""

    def __init__(self, monkeypatch):
        self.direct = self.op = 0
        inner = ops.linear_a16

        def direct(*args):
            self.direct += 1
            return inner(*args)

        def op(*args):
            self.op += 1
            return ops._linear_a16_fake(*args)

        monkeypatch.setattr(ops, "linear_a16", direct)
        monkeypatch.setattr(ops, "op_linear_a16", op)


@pytest.fixture
def counting(monkeypatch):
    return Counting(monkeypatch)


@pytest.fixture
def layer():
    request = LINEAR.request_for(Scheme.parse("w8a16"), CPU, torch.float32, 16, 64)
    mine = FloatLinear(request)
    packed = mine.pack(qcore.quantize(torch.randn(16, 64), qcore.Format("int8")))
    return lambda x: mine(x, packed, None)


def test_plain_calls_pass_by_the_dispatcher(counting, layer):
    layer(torch.randn(3, 64))
    layer(torch.randn(2, 3, 64).transpose(0, 1))
    assert (counting.direct, counting.op) == (2, 0)


def test_whoever_looks_at_ops_sees_one(counting, layer):
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, 64)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        layer(mode.from_tensor(x))
    with Looking():
        layer(x)
    make_fx(layer)(x)
    layer(torch.nn.Parameter(x))
    torch.func.vmap(layer)(x[None])
    assert counting.direct == 0
    assert counting.op == 5


def test_graphs_show_the_op(on_cpu, layer):
    graph = torch.export.export(Wrapped(layer), (torch.randn(3, 64),)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [ops.op_linear_a16]


class Wrapped(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("contract", ["linear", "linear-int8", "embedding"])
def test_autocast_changes_nothing(monkeypatch, contract):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    scheme = Scheme.parse("w8a8" if contract == "linear-int8" else "w8a16")
    which = EMBEDDING if contract == "embedding" else LINEAR
    problem = which.probe(which.request_for(scheme, CPU, torch.float32, 16, 64))[0]
    mine = made_for(problem.request)
    packed = mine.pack(problem.weight)
    expected = mine(problem.x, packed, None)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert ops.needs_guard(problem.x)
        found = mine(problem.x, packed, None)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert torch.equal(found, expected)


def test_the_device_of_x_becomes_the_current_one(monkeypatch):
    entered = []
    x = SimpleNamespace(get_device=lambda: 1, is_cuda=True, device=torch.device("cuda:1"))
    monkeypatch.setattr(ops, "_current_device", lambda: 0)
    assert ops.needs_guard(x)
    monkeypatch.setattr(ops, "_current_device", lambda: 1)
    assert not ops.needs_guard(x)

    class Device:
        def __init__(self, device):
            entered.append(device)

        def __enter__(self):
            entered.append("in")

        def __exit__(self, *_):
            entered.append("out")

    monkeypatch.setattr(torch.cuda, "device", Device)
    with ops.device_guard(x):
        entered.append("body")
    assert entered == [torch.device("cuda:1"), "in", "body", "out"]


def test_strided_biases_and_parameters_are_read_in_order(monkeypatch):
    from qcore_cuda import ops
    from qcore_triton.codes import flat

    seen = {}
    monkeypatch.setattr(ops, "_weight_only", lambda: lambda x, weight, bias, dtype: seen.update(bias=bias))
    ops.linear_a16(
        torch.zeros(1, 4), torch.zeros(1), torch.zeros(1, 4), None, torch.arange(8.0)[::2], None, 4, 4, 8, 4, "int",
        torch.float32,
    )  # fmt: skip
    assert seen["bias"].is_contiguous()
    assert seen["bias"].tolist() == [0.0, 2.0, 4.0, 6.0]
    pairs = torch.arange(8.0).view(4, 2)
    assert flat(pairs[:, 0]).is_contiguous()


class On:
    """What is asked of a tensor that lies on a GPU."""

    def __init__(self, device):
        self.device = torch.device(device)

    def get_device(self):
        return -1 if self.device.index is None else self.device.index


@pytest.mark.parametrize(("x", "bias", "said"), [
    ("cuda:1", "cuda:0", "x is on cuda:1, the weight on cuda:0"),
    ("cpu", "cuda:0", "x is on cpu, the weight on cuda:0"),
    ("cuda:0", "cuda:1", "bias is on cuda:1, the weight on cuda:0"),
    ("cuda:0", "cpu", "bias is on cpu, the weight on cuda:0"),
])  # fmt: skip
def test_tensors_on_another_device_are_named(x, bias, said):
    weight, rest = On("cuda:0"), (16, 64, 8, 64)
    with pytest.raises(FormatError, match=said):
        ops.linear_a16(On(x), weight, weight, None, On(bias), None, *rest, "int", torch.float32)
    with pytest.raises(FormatError, match=said):
        ops.linear_afp8(On(x), weight, weight, None, On(bias), None, None, *rest, "int", 0, None, torch.float32)
    with pytest.raises(FormatError, match=said):
        ops.linear_a8(
            On(x), weight, weight, None, None, None, On(bias), None, None, None, None,
            *rest, True, None, 0, None, 0, None,
        )  # fmt: skip
    window = ([1, 1], [1, 1], [0, 0], [1, 1], 1)
    with pytest.raises(FormatError, match=said):
        conv_ops.conv2d_a16(On(x), weight, weight, None, On(bias), None, *rest, *window, "int", torch.float32)
    with pytest.raises(FormatError, match=said):
        conv_ops.conv2d_a8(
            On(x), weight, weight, None, None, On(bias), *rest, *window, True, None, 0, None, 0, torch.float32
        )
    if x != "cuda:0":
        with pytest.raises(FormatError, match=said):
            ops.embedding(On(x), weight, weight, None, None, *rest, "int", torch.float32)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_a_bias_of_another_shape_is_an_error(scheme):
    mine = kernel(replace(LINEAR.request_for(Scheme.parse(scheme), CPU, torch.float32, 16, 64), bias=True))
    packed = mine.pack(qcore.quantize(torch.randn(16, 64), qcore.Format("int8")))
    for bias in (torch.zeros(5), torch.zeros(1), torch.tensor(0.0), torch.zeros(1, 16)):
        with pytest.raises(FormatError, match=r"bias has shape .*; this weight needs \(16,\)"):
            mine(torch.randn(2, 64), packed, bias)
