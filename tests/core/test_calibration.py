from __future__ import annotations

import pytest
import torch
from torch import nn

from qcore.errors import FormatError
from qcore.model.calibration import Calibrated, calibrate
from qcore.nn.conv2d import im2col
from qcore.weights.activations import StaticFP8, StaticInt8
from qcore.weights.schemes import Scheme

STATIC = Scheme.parse("w8a8-static")
STATIC_FP8 = Scheme.parse("wfp8afp8-static")
GPTQ = Scheme.parse("w4a8-g2@gptq")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.table = nn.Embedding(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return self.norm(self.fc(input=x * scale))


X = torch.tensor([[-1.0, 0.0, 1.0, 3.0], [0.0, 0.5, 0.25, 0.0]])


@pytest.mark.parametrize(
    "batches",
    [
        [X],
        [(X,)],
        [[X]],
        [{"x": X}],
        [X, X / 2],
        iter([X]),
        lambda model: model(X),
        [(X / 2, 2.0)],
        [{"x": X / 2, "scale": 2.0}],
    ],
    ids=["tensor", "tuple", "list", "mapping", "two", "iterator", "function", "positional", "keyword"],
)
def test_the_range_of_the_inputs_gives_the_numbers(batches):
    found = calibrate(Model(), {"fc": STATIC}, batches).schemes["fc"].activation
    assert found == StaticInt8(4 / 255, round(-128 + 255 / 4))


@pytest.mark.parametrize(("x", "scale"), [(X, 3 / 448), (X - 4, 5 / 448), (X.abs() + 1, 4 / 448), (X * 0, 1.0)])
def test_the_largest_magnitude_gives_the_scale_of_fp8(x, scale):
    found = calibrate(Model(), {"fc": STATIC_FP8}, [x]).schemes["fc"]
    assert found.activation == StaticFP8(scale)
    assert str(found) == f"wfp8afp8-static({scale!r})"


def test_fp8_without_calibration_is_an_error():
    with pytest.raises(FormatError, match="whose scale must be known"):
        calibrate(Model(), {"fc": STATIC_FP8}, None)


def test_the_range_always_holds_zero():
    found = calibrate(Model(), {"fc": STATIC}, [X.abs() + 1]).schemes["fc"].activation
    assert (found.scale, found.zero_point) == (pytest.approx(4 / 255), -128)


def test_an_input_of_zeros_gets_a_scale():
    assert calibrate(Model(), {"fc": STATIC}, [X * 0]).schemes["fc"].activation == StaticInt8(1.0, -128)


def test_the_model_comes_out_as_it_went_in():
    model = Model().train()
    model.unused.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    mean = model.norm.running_mean.clone()
    calibrate(model, {"fc": STATIC}, [X])
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not model.fc._forward_pre_hooks
    assert torch.equal(model.norm.running_mean, mean)


def test_a_run_that_raises_takes_its_hooks_away():
    model = Model()
    with pytest.raises(RuntimeError, match="shapes"):
        calibrate(model, {"fc": STATIC}, [torch.randn(2, 5)])
    assert not model.fc._forward_pre_hooks
    assert model.training


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_name_the_layer(value):
    bad = X.clone()
    bad[0, 0] = value
    for batches in ([bad], [X, bad], [bad, X]):
        with pytest.raises(FormatError, match="layer 'fc' saw NaN or Inf"):
            calibrate(Model(), {"fc": STATIC}, batches)


def test_a_layer_that_saw_nothing_is_named():
    with pytest.raises(FormatError, match="layer 'unused' saw no input"):
        calibrate(Model(), {"unused": STATIC}, [X])


def test_a_generator_that_is_used_up_is_named():
    batches = iter([X])
    calibrate(Model(), {"fc": STATIC}, batches)
    with pytest.raises(FormatError, match=r"holds no batches.\nA generator runs only once"):
        calibrate(Model(), {"fc": STATIC}, batches)


def test_a_single_batch_is_no_list_of_batches():
    with pytest.raises(FormatError, match=r"a single batch, with 'x'.\nPut a single batch into a list"):
        calibrate(Model(), {"fc": STATIC}, {"x": X})


def test_an_embedding_needs_no_calibration():
    assert calibrate(Model(), {"table": STATIC}, None).schemes == {"table": Scheme.parse("w8a16")}
    assert calibrate(Model(), {}, None) == Calibrated({})


def test_without_batches_the_error_says_what_to_pass():
    with pytest.raises(FormatError, match=r"'w8a8-static' has static activations.*\nPass calibration=batches"):
        calibrate(Model(), {"fc": STATIC, "table": STATIC}, None)


class TestMoments:
    @pytest.mark.parametrize("batches", [[X], [{"x": X}], [X[:1], X[1:]], [X, X[:0]]])
    def test_are_the_sum_of_the_outer_products_of_the_inputs(self, batches):
        found = calibrate(Model().double(), {"fc": GPTQ}, [_doubled(batch) for batch in batches])
        assert found.schemes == {"fc": GPTQ}
        assert found.moments["fc"].dtype == torch.float32
        torch.testing.assert_close(found.moments["fc"], X.t() @ X)

    def test_come_with_the_range_where_both_are_wanted(self):
        found = calibrate(Model(), {"fc": Scheme.parse("w4a8-g2-static@gptq"), "table": GPTQ}, [X])
        assert found.schemes["fc"].activation == StaticInt8(4 / 255, round(-128 + 255 / 4))
        assert found.schemes["fc"].quantizer == "gptq"
        assert found.schemes["table"].activation is None
        assert found.moments.keys() == {"fc"}

    def test_are_not_gathered_where_only_the_range_is_wanted(self):
        assert calibrate(Model(), {"fc": STATIC}, [X]).moments == {}

    def test_of_layers_with_one_weight_are_summed(self):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        found = calibrate(model, {"0": GPTQ, "1": GPTQ}, [X], {"0": "0", "1": "0"})
        after = model[0](X).detach()
        assert found.moments.keys() == {"0"}
        torch.testing.assert_close(found.moments["0"], X.t() @ X + after.t() @ after)

    def test_stay_float32_under_autocast(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def run(model):
            with torch.autocast("cpu", torch.bfloat16):
                model(X * 0.123)

        found = calibrate(model, {"0": GPTQ, "1": GPTQ}, run)
        torch.testing.assert_close(found.moments["0"], X.t() @ X * 0.123**2)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"padding": 1, "stride": 2},
            {"groups": 2, "dilation": (1, 2)},
            {"kernel_size": 3, "padding": "same", "groups": 4},
            {"padding": 1, "padding_mode": "circular"},
            {"padding": (2, 1), "padding_mode": "reflect", "stride": (1, 2)},
        ],
        ids=str,
    )
    def test_of_a_convolution_are_those_of_its_columns(self, options):
        conv = nn.Conv2d(4, 8, **{"kernel_size": (3, 2), "bias": False, **options})
        x = torch.randn(2, 4, 7, 6)
        columns = im2col(conv, x)
        flat = conv.weight.permute(0, 2, 3, 1).flatten(1).unflatten(0, (conv.groups, -1))
        y = conv(x)
        torch.testing.assert_close((flat @ columns.transpose(1, 2)).flatten(0, 1), y.transpose(0, 1).flatten(1))
        found = calibrate(nn.Sequential(conv), {"0": GPTQ}, [x[:1], x[1]]).moments["0"]
        torch.testing.assert_close(found, columns.transpose(1, 2) @ columns)

    def test_need_finite_inputs_and_batches(self):
        with pytest.raises(FormatError, match="layer 'fc' saw NaN or Inf"):
            calibrate(Model(), {"fc": GPTQ}, [X / 0])
        with pytest.raises(FormatError, match="layer 'unused' saw no input"):
            calibrate(Model(), {"unused": GPTQ}, [X])
        with pytest.raises(
            FormatError, match=r"'w4a8-g2@gptq' rounds weights based on the inputs.*\nPass calibration=batches"
        ):
            calibrate(Model(), {"fc": GPTQ}, None)


def _doubled(batch):
    return {"x": batch["x"].double()} if isinstance(batch, dict) else batch.double()
