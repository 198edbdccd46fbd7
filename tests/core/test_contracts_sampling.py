"""Judging a result by some of its rows and columns: it accepts what the contract accepts, and finds large faults."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

import qcore
from qcore.contracts import CONTRACTS, Conv2dRequest, EmbeddingRequest, LinearRequest, Problem, sampled
from qcore.contracts.inputs import Draw, Shape
from qcore.contracts.sampling import excerpt, positions, result_shape
from qcore.weights.schemes import Scheme

CPU = torch.device("cpu")
CASES = [
    case
    for contract in CONTRACTS.values()
    for case in contract.cases(map(Scheme.parse, ("w4a16-g32-asym", "w8a8", "w8a8-o8", "w8a8-static")), [torch.float16])
]


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def right(problem: Problem) -> torch.Tensor:
    return CONTRACTS[problem.request.contract].reference(problem).to(problem.request.out_dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_accepts_each_cases_reference_and_finds_another_result(case):
    problem = case.build(3)
    y = right(problem)
    assert tuple(y.shape) == result_shape(problem)
    assert sampled(problem, y, drawn()).ok
    if y.numel():
        verdict = sampled(problem, torch.zeros_like(y) + 77, drawn())
        assert not verdict.ok
        assert "elements are off" in verdict.message


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_names_the_place_in_the_whole_result(case):
    problem = case.build(3)
    y = right(problem).contiguous()
    if not y.numel():
        return
    places = excerpt(problem, drawn()).pick(torch.arange(y.numel()).view(y.shape)).flatten()
    flat = int(places[len(places) * 2 // 3])
    y.view(-1)[flat] += 77 if y.is_floating_point() else 99 - 2 * int(y.view(-1)[flat])
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), y.shape))
    assert sampled(problem, y, drawn()).message.startswith(f"at {where}: ")


def linear(dtype=torch.float32, n=4096, k=2048, rows=256, scheme="w4a16-g128") -> Problem:
    parsed = Scheme.parse(scheme)
    request = LinearRequest(CPU, dtype, dtype, n, k, None, parsed.weight, parsed.activation, None, True, False)
    return Draw(drawn()).linear(request, Shape("real", (rows,), n, k, "same", weights="codes"), dtype=dtype)


def float_result(problem: Problem) -> torch.Tensor:
    y = problem.x.double() @ problem.weight.dequantize(torch.float64).t() + problem.bias.double()
    return y.to(problem.request.out_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_real_size_is_judged_quickly(dtype):
    problem = linear(dtype)
    y = float_result(problem)
    start = time.process_time()
    assert sampled(problem, y, drawn()).ok
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param((slice(None), slice(-40, None)), id="last columns"),
        pytest.param((slice(None), slice(1024, 1152)), id="a tile of columns"),
        pytest.param((slice(240, None), slice(None)), id="last rows"),
        pytest.param((slice(64, 80), slice(None)), id="a tile of rows"),
    ],
)
def test_a_tile_that_is_wrong_is_found_wherever_it_lies(wrong, seed):
    problem = linear(k=256)
    y = float_result(problem)
    y[wrong] *= 1.5
    assert not sampled(problem, y, drawn(seed)).ok


def test_form_is_checked_as_a_whole():
    problem = linear(n=64, k=32, rows=3)
    y = float_result(problem)
    assert "shape" in sampled(problem, y[:2], drawn()).message
    assert "dtype" in sampled(problem, y.double(), drawn()).message
    assert "NoneType" in sampled(problem, None, drawn()).message


def test_given_parameters_and_bias_follow_their_rows():
    scheme = Scheme.parse("w4a8-g32-asym-token-o8t")
    request = replace(CONTRACTS["linear"].request_for(scheme, CPU, torch.float32, 700, 96), bias=True)
    problem = Draw(drawn()).linear(request, Shape("given", (3, 50), 700, 96, "same"))
    y = right(problem)
    assert sampled(problem, y, drawn()).ok
    part = excerpt(problem, drawn()).problem
    assert part.x.shape[0] < 150
    assert {name: len(value) for name, value in part.given.items()} == dict.fromkeys(problem.given, part.x.shape[0])
    assert not sampled(replace(problem, bias=problem.bias.flip(0)), y, drawn()).ok


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 32])
def test_patches_agree_with_the_contract_of_the_whole_image(groups, static):
    dtype, activation = torch.float32, None
    if static:
        dtype, activation = torch.int8, qcore.StaticInt8(0.02, 7)
    request = Conv2dRequest(
        CPU, dtype, torch.float32, 32, 64, (3, 2), (2, 1), (2, 3), (1, 2), groups,
        qcore.Format("int8"), activation, None, True, False,
    )  # fmt: skip
    draw = Draw(drawn(groups))
    x = draw.activations((3, 32, 41, 29), dtype, "normal", "dense")
    problem = Problem(request, x, draw.weight(64, request.k, request.weight), draw.normal(64))
    y = right(problem)
    part = excerpt(problem, drawn())
    assert part.problem.request.n < 64
    torch.testing.assert_close(part.pick(y), right(part.problem), rtol=0, atol=1e-12)
    assert sampled(problem, y, drawn()).ok
    y[:, :, -8:, -8:] += 1
    assert not sampled(problem, y, drawn()).ok


def test_an_embedding_gathers_only_the_rows_it_judges():
    draw = Draw(drawn())
    weight = draw.weight(3000, 64, qcore.Format("int4", 32), "codes")
    request = EmbeddingRequest(CPU, torch.float32, 3000, 64, weight.format)
    problem = Problem(request, draw.whole(0, 2999, 40, 50).int(), weight)
    y = right(problem)
    assert excerpt(problem, drawn()).problem.weight.shape[0] <= 24
    assert sampled(problem, y, drawn()).ok
    assert not sampled(problem, y.flip(0), drawn()).ok


@pytest.mark.parametrize(("size", "most"), [(5, 8), (8, 8), (9, 8), (4096, 96), (1, 3)])
def test_positions_are_one_from_each_stretch(size, most):
    found = positions(size, most, drawn())
    assert len(found) == min(size, most)
    assert len(set(found.tolist())) == len(found)
    assert (found[0], found[-1]) == (0, size - 1)
    assert found.diff().max() <= 2 * -(-size // most) if len(found) > 1 else True
