from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from contract_problems import CPU, DTYPES, dense_weight, linear_cases, shape_name

from qcore.contracts import (
    CONTRACTS,
    CONV2D,
    EMBEDDING,
    GIVEN_NAMES,
    GROUPED_LINEAR,
    LINEAR,
    EmbeddingRequest,
    Problem,
    contract_of,
)
from qcore.contracts.inputs import small_k, small_n
from qcore.formats import Format
from qcore.weights.activations import StaticInt8
from qcore.weights.qtensor import QTensor
from qcore.weights.quantizers import quantize
from qcore.weights.schemes import SCHEMES, Scheme


class TestEmbedding:
    @pytest.mark.parametrize("scheme", [s for s in SCHEMES if "a16" in s])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_reference_and_tolerance(self, scheme, dtype):
        for case in EMBEDDING.cases([Scheme.parse(scheme)], [dtype]):
            problem = case.build(0)
            table = torch.tensor(dense_weight(problem.weight), dtype=torch.float64)
            expected = table[problem.x.long()]
            found = EMBEDDING.reference(problem)
            assert found.shape == (*problem.x.shape, problem.request.embedding_dim)
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12), case.id
            right = problem.weight.dequantize(torch.float32)[problem.x.long()].to(dtype)
            assert EMBEDDING.judge(problem, right).worst <= 0.75, case.id

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("scheme", ["w8a16-asym", "w4a16-g32-fzp", "w4a16-g128-asym"])
    def test_wrong_kernels_are_caught(self, scheme, dtype):
        for case in EMBEDDING.cases([Scheme.parse(scheme)], [dtype]):
            problem = case.build(0)
            if shape_name(case) not in {"batched", "many", "odd-d", "ragged"}:
                continue
            weight, index = problem.weight, problem.x.long()
            zero = torch.zeros_like(weight.zero)
            unshifted = QTensor(weight.data, weight.scale, zero, weight.shape, weight.format)
            rolled = weight.dequantize(dtype).roll(1, 0)[index]
            shortened = weight.dequantize(dtype)[index]
            shortened[..., -1] = 0
            for wrong in (unshifted.dequantize(dtype)[index], rolled, shortened):
                assert not EMBEDDING.judge(problem, wrong).ok, case.id

    def test_rounding_twice_is_caught(self):
        (case,) = (c for c in EMBEDDING.cases([Scheme.parse("w8a16")], [torch.float32]) if shape_name(c) == "many")
        problem = case.build(0)
        assert not EMBEDDING.judge(problem, problem.weight.dequantize(torch.bfloat16).float()[problem.x]).ok

    def test_probe_and_request(self):
        request = EmbeddingRequest(CPU, torch.bfloat16, 30522, 384, Format("int4", 32))
        assert (request.n, request.k, contract_of(request)) == (30522, 384, EMBEDDING)
        small = request.small()
        assert small.n <= 128
        (problem,) = EMBEDDING.probe(small)
        assert EMBEDDING.judge(problem, EMBEDDING.reference(problem).bfloat16()).ok
        assert small.signature() == request.signature()


def test_a_convolution_may_begin_its_sums_with_the_bias():
    """As torch's do: of a depthwise convolution with small weights the bias is most of the sum."""
    scheme = Scheme.parse("w4a16-g32")
    request = replace(CONV2D.request_for(scheme, CPU, torch.float32, 4, 49), bias=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 49, 20, 20, generator=generator)
    weight = quantize(torch.randn(4, 49, generator=generator) * 0.01, scheme.weight)
    problem = Problem(request, x, weight, torch.tensor([3.3, -3.7, 2.9, 3.1]))
    y = problem.bias.view(1, -1, 1, 1).expand(1, 4, 20, 20).clone()
    for k, column in enumerate(weight.dequantize(torch.float32).t()):
        y += column.view(1, -1, 1, 1) * x[:, k : k + 1]
    assert CONV2D.judge(problem, y).ok
    assert not CONV2D.judge(problem, y + 1e-4).ok


class TestCases:
    @pytest.mark.parametrize("contract", CONTRACTS.values(), ids=list(CONTRACTS))
    def test_ids_are_unique_and_every_scheme_is_covered(self, contract):
        schemes = [Scheme.parse(text) for text in SCHEMES]
        cases = list(contract.cases(schemes, DTYPES))
        assert max(Counter(case.id for case in cases).values()) == 1
        assert {case.contract for case in cases} == {contract.name}
        wanted = {s for s in SCHEMES if contract is not EMBEDDING or "a16" in s}
        if contract is GROUPED_LINEAR:
            wanted = {s for s in wanted if "o8" not in s}
        assert wanted <= {case.scheme for case in cases}
        assert contract.hook == f"qcore_{contract.name}"
        assert "Errors:" in type(contract).__doc__

    def test_schemes_that_were_not_asked_for_stay_out(self):
        for contract in CONTRACTS.values():
            assert {c.scheme for c in contract.cases([Scheme.parse("w8a16")], [torch.float32])} == {"w8a16"}

    def test_calibrated_schemes_keep_their_numbers(self):
        case = next(LINEAR.cases([Scheme.parse("w8a8-static(0.5,7)")], [torch.float32]))
        assert case.scheme == "w8a8-static"
        assert case.build(0).request.activation == StaticInt8(0.5, 7)

    def test_the_shapes_of_the_design(self):
        problems = [c.build(0) for c in linear_cases("w4a16-g128-asym", torch.float32)]
        rows = {p.x.shape[:-1].numel() for p in problems}
        assert {0, 1, 2, 8, 15, 16, 17, 31, 32, 33, 64, 128, 200, 256, 2100} <= rows
        assert any(p.x.shape[0] > p.request.k for p in problems if p.x.dim() == 2)
        assert {5, 77} <= {p.request.k for p in problems}
        assert any(p.request.k % 128 and p.request.k > 128 for p in problems)
        assert {1, 3, 12, 20, 129} <= {p.request.n for p in problems}
        assert any(p.x.dim() == 3 for p in problems)
        assert any(not p.x.is_contiguous() for p in problems)
        assert any((p.weight.dequantize().abs().amax(1) == 0).any() for p in problems)
        bf16 = [c.build(0) for c in linear_cases("w4a16-g128-asym", torch.bfloat16)]
        assert {p.bias.dtype for p in bf16 if p.bias is not None} == set(DTYPES)

    @pytest.mark.parametrize("contract", CONTRACTS.values(), ids=lambda contract: contract.name)
    def test_scales_in_halves_are_partly_subnormal(self, contract):
        (case,) = [
            c for c in contract.cases([Scheme.parse("w4a16-g32-fzp")], [torch.float32]) if c.id.endswith("half-scales]")
        ]
        weight = case.build(0).weight
        scale = weight.scale.abs().double()
        subnormal = (scale > 0) & (scale < torch.finfo(torch.float16).smallest_normal)
        assert (weight.scale.dtype, weight.zero.dtype) == (torch.float16, torch.float16)
        assert 0.4 < subnormal.double().mean() < 0.6

    @pytest.mark.parametrize("contract", ["linear", "conv2d"])
    def test_codes_come_with_a_static_scale_only(self, contract):
        schemes = [Scheme.parse(text) for text in ("w8a8", "w8a8-static", "w8a8-static-o8", "wfp8afp8-static")]
        found = [c for c in CONTRACTS[contract].cases(schemes, [torch.bfloat16]) if c.id.endswith("bfloat16-codes]")]
        assert [case.scheme for case in found] == ["w8a8-static", "w8a8-static-o8"]
        problem = found[0].build(0)
        assert (problem.x.dtype, problem.request.x_dtype) == (torch.int8, torch.int8)
        assert problem.bias.dtype == problem.request.out_dtype == torch.bfloat16

    def test_static_scales_differ_from_case_to_case(self):
        cases = LINEAR.cases([Scheme.parse("w8a8-static-o8")], [torch.float32])
        requests = [case.build(0).request for case in cases if case.scheme == "w8a8-static-o8"]
        assert len({request.activation.scale for request in requests}) == len(requests)
        assert len({request.output.scale for request in requests}) == len(requests)

    @pytest.mark.parametrize("text", ["w8a16", "w4a16-g128"])
    def test_zero_groups_leave_something(self, text):
        (case,) = linear_cases(text, torch.float32, "zero-groups")
        dense = case.build(0).weight.dequantize()
        assert (dense[::2] == 0).all()
        assert (dense[1::2] != 0).any()

    def test_the_same_seed_gives_the_same_numbers(self):
        for contract in CONTRACTS.values():
            case = next(
                c
                for c in contract.cases([Scheme.parse("w8a16")], [torch.float32])
                if "empty" not in c.id and "rows-0" not in c.id
            )
            a, b, other = case.build(3), case.build(3), case.build(4)
            assert torch.equal(a.x, b.x)
            assert torch.equal(a.weight.data, b.weight.data)
            assert not torch.equal(a.weight.data, other.weight.data)

    def test_given_parameters_only_for_per_token_schemes(self):
        for case in LINEAR.cases([Scheme.parse("w8a8")], [torch.float32]):
            problem = case.build(0)
            given = {"w4a8-g32-asym-token": GIVEN_NAMES[:2], "w4a8-g32-asym-token-o8t": GIVEN_NAMES}.get(
                case.scheme, ()
            )
            assert set(problem.given) == set(given)
            assert all(t.shape == (problem.x.shape[:-1].numel(),) for t in problem.given.values())

    def test_a_problem_moves_with_its_strides(self):
        (case,) = linear_cases("w4a16-g32-fzp", torch.float32, "strided-columns")
        problem = case.build(0)
        moved = problem.to(torch.device("meta"))
        assert (moved.x.stride(), moved.x.device.type, moved.weight.device.type) == (problem.x.stride(), "meta", "meta")
        again = problem.to(CPU)
        assert torch.equal(again.x, problem.x)
        assert not again.x.is_contiguous()


class TestSmall:
    @pytest.mark.parametrize("group", [None, 1, 7, 32, 96, 100, 128, 1024])
    @pytest.mark.parametrize("k", [1, 5, 77, 255, 256, 300, 768, 960, 4096, 11008, 12345, 65536])
    def test_remainders_of_k_are_kept(self, k, group):
        fmt = Format("int4", group)
        small = small_k(k, fmt)
        assert small <= k
        assert small % 256 == k % 256
        if group is not None:
            assert small % group == k % group
            assert min(fmt.groups(small), 2) == min(fmt.groups(k), 2)
        assert small_k(small, fmt) == small or group is not None

    @pytest.mark.parametrize("n", [0, 1, 12, 63, 64, 65, 129, 4096, 30522])
    def test_remainders_of_n_are_kept(self, n):
        assert small_n(n) <= min(n, 127)
        assert small_n(n) % 64 == n % 64

    def test_signature_leaves_out_sizes_and_numbers(self):
        scheme = Scheme.parse("w8a8-static(0.5,3)")
        request = LINEAR.request_for(scheme, CPU, torch.float32, 4096, 4096)
        other = LINEAR.request_for(Scheme.parse("w8a8-static(0.25,1)"), CPU, torch.float32, 8192, 4096)
        assert request.signature() == other.signature() == request.small().signature()
        assert request.signature() != replace(request, bias=True).signature()
        assert request.signature() != replace(request, k=4097).signature()
        assert request.signature() != LINEAR.request_for(scheme, CPU, torch.float16, 4096, 4096).signature()
        assert (request.small().rows, request.small().training) == (None, False)

    def test_request_for(self):
        for contract in CONTRACTS.values():
            request = contract.request_for(Scheme.parse("w8a16"), CPU, torch.bfloat16, 24, 40)
            assert isinstance(request, contract.request)
            assert (request.n, request.k, request.out_dtype) == (24, 40, torch.bfloat16)
            assert contract_of(request) is contract
        token = LINEAR.request_for(Scheme.parse("w4a8-g32-token-o8t"), CPU, torch.float32, 8, 64)
        assert (token.x_dtype, token.out_dtype) == (torch.int8, torch.int8)
