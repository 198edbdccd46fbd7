"""Products of several experts: results in Triton's interpreter, against the contract's reference, and the wiring."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import cuda_stand_ins as stand_ins
import pytest
import torch
from grids import sampled

import qcore
from qcore.contracts import GROUPED_LINEAR
from qcore.contracts.grouped import expert_rows, is_for_experts
from qcore.testing.case_selection import PreparedCase
from qcore.testing.laws import inputs as input_laws
from qcore.testing.laws import kernel as kernel_laws
from qcore.testing.laws.base import Sample
from qcore.weights.schemes import SCHEMES, Scheme
from qcore_cuda import grouped_ops, ops
from qcore_cuda.grouped_linear import CudaGroupedLinear

CPU = torch.device("cpu")
MORE = (
    "w4a16-g64-fzp", "w4a16-fzp", "w8a16-g32-asym", "w8a16-fzp", "w4a8-g32-fzp-aasym", "w8a8-g64-asym-static", "w4a8",
    "mxfp4", "nvfp4", "nf4", "wfp8a16", "mxfp8",
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cases():
    from qcore_cuda.eligibility import _why_not_weight

    for dtype in DTYPES:
        for scheme in map(Scheme.parse, dict.fromkeys((*SCHEMES, *MORE))):
            request = GROUPED_LINEAR.request_for(scheme, CPU, dtype, 32, 128)
            if is_for_experts(scheme) and not _why_not_weight(request):
                yield from GROUPED_LINEAR.cases([scheme], [dtype])


CASES = list(cases())


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("case", sampled(CASES, 40), ids=lambda case: case.id)
def test_contract(case):
    from qcore.resolving.verification import difference

    problem = case.build(seed=3)
    mine = CudaGroupedLinear(problem.request)
    packed = mine.pack(problem.weight)
    assert difference(mine.unpack(packed), problem.weight) == ""
    verdict = GROUPED_LINEAR.judge(problem, mine(problem.x, packed, problem.bias, **problem.given))
    assert verdict.ok, verdict.message


def by_config(scheme, counts, n, k, config, dtype=torch.bfloat16, behind=0):
    """A problem with a bias, and its result by a given configuration."""
    from qcore.contracts.grouped import _problem, _Shape
    from qcore.contracts.inputs import Draw
    from qcore_cuda.grouped import product
    from qcore_cuda.grouped.problem import Experts

    draw = Draw(torch.Generator().manual_seed(n))
    asked = draw.fill(Scheme.parse(scheme))
    request = replace(GROUPED_LINEAR.request_for(asked, CPU, dtype, n, k), experts=len(counts), bias=True)
    problem = _problem(draw, request, _Shape("case", counts, n, k, bias=True, behind=behind))
    packed = CudaGroupedLinear(request).pack(problem.weight)
    experts = Experts(
        packed["data"], packed["scale"], packed.get("zero"), n, k, asked.weight.bits, asked.weight.group(k)
    )
    plan = product.plan(problem.x, experts, dtype, None)._replace(config=config)
    return problem, product.run(problem.x, experts, problem.bias, problem.given["offsets"], None, plan)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("even", [0, 1])
@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a16"])
def test_programs_compute_one_tile_or_several(scheme, even):
    from qcore_cuda.products.gemm import Tile

    config = Tile(64, 16, stages=2, unroll=2, scaled=True, even=even)  # 4 programs, of 10 tiles
    problem, result = by_config(scheme, (20, 0, 1, 33), 80, 96, config, behind=2)
    verdict = GROUPED_LINEAR.judge(problem, result)
    assert verdict.ok, verdict.message
    assert not result[-2:].any()


@pytest.mark.parametrize("experts", [1, 3, 8, 130])
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("bm", [8, 64])
def test_there_are_never_more_tiles_than_programs(experts, rows, bm):
    from qcore_cuda.grouped.problem import GroupedProblem

    room = GroupedProblem(None, experts, rows).tiles_at_most(bm)
    most = 0
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(0, 1 + seed * experts // 50, (rows,), generator=generator)
        counts = torch.bincount(chosen, minlength=experts)
        most = max(most, int(((counts + bm - 1) // bm).sum()))
    assert most <= room


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("rows", [(0, 70, 0, 3, 128, 1), (0, 0, 0), (5,), (64, 0, 64)])
def test_the_list_of_tiles(rows):
    """What programs of the kernel for Hopper, which no interpreter runs, walk through."""
    gluon = pytest.importorskip("triton.experimental.gluon")
    assert gluon
    from qcore_cuda.kernels.grouped_hopper import list_tiles

    ends = torch.tensor(rows).cumsum(0).to(torch.int32)
    y = torch.full((sum(rows) + 2, 16), 3.0)
    table = torch.full((4 + 4 * 8,), -1, dtype=torch.int32)
    list_tiles[(4,)](ends, table, y, len(rows), len(y), 16, SE=8, BM=64, B=2, PDL=False)
    expected, first, begin = [], 0, 0
    for expert, count in enumerate(rows):
        tiles = -(-count // 64)
        expected += [[expert, first, begin, begin + count]] * tiles
        first, begin = first + tiles, begin + count
    assert table[0] == len(expected)
    assert table[4 : 4 + 4 * len(expected)].view(-1, 4).tolist() == expected
    assert (table[4 + 4 * len(expected) :] == -1).all()
    assert not y[-2:].any()
    assert (y[:-2] == 3).all()


def problem_of(scheme, experts, rows, n=4096, k=4096, dtype=torch.bfloat16):
    """The problem of a layer with packed weights of a scheme, without memory."""
    from qcore_cuda.grouped.problem import grouped_problem
    from qcore_cuda.problem import form_of
    from qcore_triton import packing
    from qcore_triton.weights import Weight

    parsed = Scheme.parse(scheme)
    codes, groups = torch.empty(n, k, dtype=torch.int8, device="meta"), parsed.weight.groups(k)
    scale = torch.empty(groups, n, dtype=dtype, device="meta")
    zero = None
    if parsed.weight.zero is not qcore.ZeroPoint.NONE:
        zero = scale if parsed.weight.zero is qcore.ZeroPoint.FLOAT else scale.to(torch.int8)
    packed = packing.pack(qcore.QTensor.from_codes(codes, scale, zero, parsed.weight))
    weight = Weight(*(packed.get(name) for name in ("data", "scale", "zero")), *packing_sizes(parsed.weight, n, k))
    return grouped_problem(form_of(weight), experts, rows, dtype, dtype, codes=parsed.activation is not None)


def packing_sizes(form, n, k):
    return n, k, form.bits, form.group(k)


@pytest.fixture
def gluon(monkeypatch):
    """A Triton with a Gluon that was tried."""
    from qcore_cuda.grouped.choice import choose
    from qcore_cuda.runtime import hopper

    monkeypatch.setattr(hopper, "usable", lambda: True)
    choose.cache_clear()
    yield
    choose.cache_clear()


GPUS = {"sm_80": (80, False, 108), "sm_90": (90, False, 132), "sm_120": (120, False, 170), "gfx942": (0, True, 304)}
FORMS = ("w4a16-g128", "w4a16-g32-asym", "w4a16-fzp", "w8a16", "w8a16-g64", "w8a8", "w4a8-g32")


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("scheme", FORMS)
def test_every_size_has_a_kernel_that_serves_it(gluon, gpu, scheme):
    from qcore_cuda.grouped import choice, few, hopper
    from qcore_cuda.products.gemm import Tile
    from qcore_cuda.runtime.device import Device

    device = Device(*GPUS[gpu])
    for n, k, dtype in ((4096, 4096, torch.bfloat16), (72, 2880, torch.bfloat16), (256, 96, torch.float32)):
        for experts in (1, 8, 60, 256):
            for rows in (1, 2, 7, 33, 100, 511, 4096, 70000):
                problem = problem_of(scheme, experts, rows, n, k, dtype)
                config = choice.choose(device, problem)
                if isinstance(config, Tile):
                    assert not (config.scaled and problem.exact)
                else:
                    served = few if isinstance(config, few.Few) else hopper
                    assert served.serves(device, problem)
                    assert isinstance(config, hopper.Many) == (served is hopper)


CHOSEN = {  # what an H200 measured as fastest, or within 3 % of it: experts, rows, N, K
    ("w4a16-g128", 8, 8, 14336, 4096): (8, 4, 1, 4, 2),
    ("w4a16-g128", 8, 512, 14336, 4096): (64, 2),
    ("w4a16-g32-asym", 8, 512, 14336, 4096): (128, 2),
    ("w4a16-g128", 8, 4096, 14336, 4096): (256, 2),
    ("w4a16-g128", 128, 8, 1536, 2048): (8, 2, 2, 4, 2),
    ("w4a16-g32", 128, 512, 1536, 2048): (8, 4, 1, 4, 2),
    ("w8a16-g128", 128, 64, 1536, 2048): (8, 2, 2, 2, 3),
    ("w4a16-g32", 128, 4096, 1536, 2048): (64, 2),
    ("w4a16-g32", 32, 512, 5760, 2880): (32, 2),
    ("w4a16-g32", 32, 4096, 5760, 2880): (128, 2),
}


@pytest.mark.parametrize("cell", CHOSEN, ids=str)
def test_measured_cells_have_their_kernel(gluon, cell):
    from qcore_cuda.grouped import choice
    from qcore_cuda.runtime.device import Device

    scheme, experts, rows, n, k = cell
    assert tuple(choice.choose(Device(90, False, 132), problem_of(scheme, experts, rows, n, k))) == CHOSEN[cell]


# The wiring: a stand-in in torch ops multiplies.


def stand_in(x, experts, bias, offsets, out_dtype, mode):
    from qcore_triton.codes import SYMMETRIC
    from qcore_triton.weights import Weight

    data, scale, zero, *form, factor = experts
    assert factor is None
    y = torch.zeros(x.shape[0], experts.n, dtype=out_dtype)
    for e, rows in expert_rows(offsets.tolist()):
        weight = Weight(data[e], scale[e], None if zero is None else zero[e], *form)
        own = None if bias is None else bias[e]
        if mode is None:
            y[rows] = stand_ins.float_linear(x[rows], weight, own, out_dtype)
        else:
            assert mode.kind == SYMMETRIC
            y[rows] = stand_ins.int8_product(x[rows], weight, None, own, out_dtype)
    return y


@pytest.fixture
def on_cpu(monkeypatch):
    """The op also for the CPU, and the stand-in."""
    monkeypatch.setattr(grouped_ops, "_product", lambda: stand_in)
    library = torch.library.Library(ops.NAMESPACE, "IMPL")
    library.impl("grouped_linear", grouped_ops._grouped_linear, "CPU")
    yield
    library._destroy()


LAWS = {"fake": kernel_laws.fakes, "opcheck": kernel_laws.opcheck, "compile": kernel_laws.compiles}
LAWS |= {"threads": kernel_laws.threads, "empty": input_laws.empty, "determinism": kernel_laws.deterministic}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8"])
def test_laws_of_the_kit(on_cpu, law, scheme):
    (case,) = [
        case for case in GROUPED_LINEAR.cases([Scheme.parse(scheme)], [torch.bfloat16]) if case.id.endswith("-uneven]")
    ]
    question = PreparedCase(case, seed=1)
    here = question.on(CPU).to(CPU)
    mine = CudaGroupedLinear(here.request)
    sample = Sample(question, here, [mine], [mine.pack(here.weight)])
    LAWS[law](SimpleNamespace(device=CPU), sample, mine, sample.packs[0])


@pytest.fixture
def layer(on_cpu):
    request = replace(GROUPED_LINEAR.request_for(Scheme.parse("w8a16"), CPU, torch.float32, 16, 64), experts=3)
    mine = CudaGroupedLinear(request)
    made = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 16, 64), "w8a16")
    packed = mine.pack(made.weight)
    ends = torch.tensor([1, 1, 4], dtype=torch.int32)
    return lambda x, bias=None, offsets=ends: mine(x, packed, bias, offsets=offsets)


def test_wrong_arguments_are_named(layer):
    x = torch.randn(4, 64)
    with pytest.raises(qcore.FormatError, match=r"must be \(T, K\) with K=64"):
        layer(torch.randn(4, 63))
    for bias in (torch.zeros(16), torch.zeros(3, 1), torch.zeros(2, 16)):
        with pytest.raises(qcore.FormatError, match=r"this weight needs \(3, 16\)"):
            layer(x, bias)
    with pytest.raises(qcore.FormatError, match=r"must ascend within 0\.\.4"):
        layer(x, None, torch.tensor([2, 1, 4], dtype=torch.int32))
    with pytest.raises(qcore.FormatError, match="must be int32"):
        layer(x, None, torch.tensor([1, 1, 4]))


def test_strided_biases_and_offsets_are_read_in_order(layer):
    x, wide = torch.randn(4, 64), torch.randn(16, 3)
    ends = torch.tensor([1, 9, 1, 9, 4, 9], dtype=torch.int32)
    assert torch.equal(layer(x, wide.t(), ends[::2]), layer(x, wide.t().contiguous(), ends[::2].clone()))


def test_no_rows(layer):
    y = layer(torch.randn(0, 64), None, torch.zeros(3, dtype=torch.int32))
    assert (y.shape, y.dtype) == ((0, 16), torch.float32)
