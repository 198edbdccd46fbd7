from __future__ import annotations

import pytest
import torch
from torch import nn

from qcore.activations import StaticInt8
from qcore.calibration import calibrate
from qcore.errors import FormatError
from qcore.schemes import Scheme

STATIC = Scheme.parse("w8a8-static")


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
    found = calibrate(Model(), {"fc": STATIC}, batches)["fc"].activation
    assert found == StaticInt8(4 / 255, round(-128 + 255 / 4))


def test_the_range_always_holds_zero():
    found = calibrate(Model(), {"fc": STATIC}, [X.abs() + 1])["fc"].activation
    assert (found.scale, found.zero_point) == (pytest.approx(4 / 255), -128)


def test_an_input_of_zeros_gets_a_scale():
    assert calibrate(Model(), {"fc": STATIC}, [X * 0])["fc"].activation == StaticInt8(1.0, -128)


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
    with pytest.raises(FormatError, match="layer 'fc' saw no input"):
        calibrate(Model(), {"fc": STATIC}, [])


def test_an_embedding_needs_no_calibration():
    assert calibrate(Model(), {"table": STATIC}, None) == {"table": Scheme.parse("w8a16")}
    assert calibrate(Model(), {}, None) == {}


def test_without_batches_the_error_says_what_to_pass():
    with pytest.raises(FormatError, match=r"'w8a8-static' has static activations.*\nPass calibration=batches"):
        calibrate(Model(), {"fc": STATIC, "table": STATIC}, None)
