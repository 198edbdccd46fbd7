"""What plugins answer with, and the hook specifications."""

from __future__ import annotations

import inspect

import pluggy
import pytest
import torch

from qcore import hookspecs
from qcore.discovery.kernels import (
    EMULATED,
    FALLBACK,
    NATIVE,
    OFFLOAD,
    Available,
    Kernel,
    Offer,
    Rank,
    Refusal,
    RowsKernel,
    Unavailable,
    check_weight,
    define_op,
)
from qcore.errors import FormatError
from qcore.formats import PLAIN_INT32, Format
from qcore.weights.quantizers import quantize


class Dense(RowsKernel):
    """Dequantizes while packing."""

    name = "test.dense"
    n, k, out_dtype = 3, 5, torch.float32

    def pack(self, weight):
        return {"w": weight.dequantize(), **weight.tensors()}

    def unpack(self, packed):
        raise NotImplementedError

    def run(self, x, packed, bias, **given):
        assert x.dim() == 2
        self.seen = given
        return torch.nn.functional.linear(x, packed["w"], bias)


class TestRank:
    def test_order(self):
        assert NATIVE > OFFLOAD > FALLBACK > EMULATED
        assert (EMULATED, FALLBACK, OFFLOAD, NATIVE) == (Rank.EMULATED, Rank.FALLBACK, Rank.OFFLOAD, Rank.NATIVE)

    def test_fine_tuning_stays_within_a_rank(self):
        assert OFFLOAD < NATIVE - 100 < NATIVE < NATIVE + 100


class TestKernel:
    def test_is_abstract(self):
        with pytest.raises(TypeError, match="abstract"):
            Kernel()

    def test_packing_is_its_own_unless_said(self):
        assert Dense().packing == "test.dense"

    def test_a_packed_tensor_counts_its_own_bytes(self):
        assert Dense().nbytes(torch.zeros(3, 5)) == 60

    def test_repr(self):
        assert repr(Dense()) == "<Dense test.dense>"
        nameless = type("Nameless", (Dense,), {})
        del Dense.name
        try:
            assert repr(nameless()) == "<Nameless ?>"
        finally:
            Dense.name = "test.dense"


class TestDefineOp:
    @pytest.fixture
    def library(self):
        library = torch.library.Library("qcore_test_kernels", "FRAGMENT")
        yield library
        library._destroy()

    @pytest.fixture
    def doubled(self, library):
        def doubled(x, n):
            return 2 * x[:, :1].expand(-1, n)

        def fake(x, n):
            return x.new_empty((x.shape[0], n))

        return define_op(library, "doubled(Tensor x, int n) -> Tensor", doubled, fake, ["CPU"])

    def test_the_overload_comes_back_and_runs(self, doubled):
        assert doubled is torch.ops.qcore_test_kernels.doubled.default
        assert torch.equal(doubled(torch.ones(2, 5), 3), torch.full((2, 3), 2.0))
        assert torch.Tag.pt2_compliant_tag in doubled.tags

    def test_the_fake_serves_traces(self, doubled):
        assert doubled(torch.empty(4, 5, device="meta"), 3).shape == (4, 3)
        graphs = []

        def backend(graph, inputs):
            graphs.append(str(graph.graph))
            return graph.forward

        compiled = torch.compile(lambda x: doubled(x, 3) + 1, fullgraph=True, dynamic=True, backend=backend)
        assert [compiled(torch.ones(rows, 5)).shape for rows in (2, 7)] == [(2, 3), (7, 3)]
        (graph,) = graphs
        assert "qcore_test_kernels.doubled.default" in graph

    def test_it_passes_opcheck(self, doubled):
        torch.library.opcheck(doubled, (torch.ones(2, 5), 3))

    def test_every_key_gets_the_implementation_and_no_other(self, library):
        op = define_op(library, "same(Tensor x) -> Tensor", torch.clone, torch.empty_like, ("CPU", "CUDA", "XPU"))
        keys = ("CPU", "CUDA", "XPU", "XLA", "PrivateUse1")
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        assert [key for key in keys if has(op.name(), key)] == ["CPU", "CUDA", "XPU"]


class TestCheckWeight:
    weight = quantize(torch.ones(4, 64), "int4-g32")

    def test_what_the_kernel_was_made_for(self):
        check_weight("mine", self.weight, Format("int4", 32), 4, 64)

    @pytest.mark.parametrize(
        ("fmt", "n", "k"),
        [
            (Format("int4", 32), 5, 64),
            (Format("int4", 32), 4, 65),
            (Format("int8", 32), 4, 64),
            (Format("int4", 64), 4, 64),
            (Format("int4", 32, layout=PLAIN_INT32), 4, 64),
        ],
        ids=str,
    )
    def test_another(self, fmt, n, k):
        with pytest.raises(FormatError) as error:
            check_weight("mine", self.weight, fmt, n, k)
        assert str(error.value).splitlines() == [
            f"mine was made for {fmt} of shape {(n, k)};",
            "it cannot pack int4-g32/plain of shape (4, 64).",
        ]


class TestRowsKernel:
    @pytest.fixture
    def packed(self):
        return Dense().pack(quantize(torch.randn(3, 5), "int8"))

    @pytest.mark.parametrize("lead", [(), (1,), (4,), (2, 3), (2, 1, 3), (0,), (2, 0, 3)])
    def test_leading_dimensions(self, packed, lead):
        x, bias = torch.randn(*lead, 5), torch.randn(3)
        found = Dense()(x, packed, bias)
        assert found.shape == (*lead, 3)
        assert torch.allclose(found, torch.nn.functional.linear(x, packed["w"], bias), atol=1e-6)

    def test_any_strides(self, packed):
        x = torch.randn(5, 2, 4).permute(1, 2, 0)
        assert torch.allclose(Dense()(x, packed, None), x @ packed["w"].t(), atol=1e-6)

    def test_per_token_parameters_are_passed_on(self, packed):
        kernel, scale = Dense(), torch.ones(2)
        kernel(torch.randn(2, 5), packed, None, x_scale=scale)
        assert kernel.seen == {"x_scale": scale}

    @pytest.mark.parametrize("shape", [(4, 6), (5, 4), (), (0, 4)])
    def test_another_k_is_an_error(self, packed, shape):
        with pytest.raises(FormatError, match=r"last dimension must be K=5.\n.*\(3, 5\)"):
            Dense()(torch.zeros(shape), packed, None)


class TestAnswers:
    def test_offer_defaults(self):
        kernel = Dense()
        assert (Offer(kernel).rank, Offer(kernel).note) == (NATIVE, "")

    def test_frozen(self):
        for answer in (Offer(Dense()), Refusal("no"), Available("cpu"), Unavailable("no driver")):
            with pytest.raises(AttributeError):
                answer.reason = answer.note = ""

    def test_a_device_that_is_missing_is_not_broken(self):
        assert not Unavailable("no such device").broken
        assert Available().details is None


HOOKS = [
    "qcore_conv2d", "qcore_decided", "qcore_elements", "qcore_embedding", "qcore_formats", "qcore_grouped_linear",
    "qcore_importers", "qcore_linear", "qcore_probe", "qcore_quantizers",
]  # fmt: skip


class TestHookSpecifications:
    @pytest.fixture
    def manager(self):
        manager = pluggy.PluginManager("qcore")
        manager.add_hookspecs(hookspecs)
        return manager

    def test_exactly_these(self, manager):
        assert sorted(name for name in vars(manager.hook) if name.startswith("qcore_")) == HOOKS

    @pytest.mark.parametrize("name", HOOKS)
    def test_documented(self, name):
        assert inspect.getdoc(getattr(hookspecs, name))

    def test_an_implementation_may_take_fewer_arguments(self, manager):
        class Plugin:
            @hookspecs.hookimpl
            def qcore_linear(self):
                return Refusal("never")

        manager.register(Plugin())
        manager.check_pending()
        assert manager.hook.qcore_linear(request=None) == Refusal("never")

    def test_a_misspelt_hook_is_noticed(self, manager):
        class Plugin:
            @hookspecs.hookimpl
            def qcore_linaer(self, request):
                return Refusal("never")

        manager.register(Plugin())
        with pytest.raises(pluggy.PluginValidationError, match="qcore_linaer"):
            manager.check_pending()

    def test_the_group_is_the_version(self):
        assert (hookspecs.PROJECT, hookspecs.ENTRY_POINT_GROUP) == ("qcore", "qcore.plugins.v1")
