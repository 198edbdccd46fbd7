"""`quantize_` releases each float weight as soon as its layer is quantized, and what raises early changes nothing."""

import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import qcore


def floats(model):
    """Weak references to the float weights of a model, by name."""
    return {name: weakref.ref(parameter) for name, parameter in model.named_parameters() if parameter.dim() >= 2}


def alive(references):
    return [name for name, reference in references.items() if reference() is not None]


def stack(count=4):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(count)])


def test_each_float_weight_is_released_before_the_next_layer():
    model = stack()
    references = floats(model)
    seen = []
    qcore.quantize_(
        model, "w8a16", progress=lambda done, total, name: seen.append((done, total, len(alive(references))))
    )
    assert seen == [(done, 4, 4 - done) for done in range(5)]


def test_tied_weights_are_released_with_the_last_layer():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 32)
            self.middle = nn.Linear(32, 32)
            self.head = nn.Linear(32, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.middle(self.embed(x)))

    model = Tied()
    references = floats(model)
    left = {}
    qcore.quantize_(model, "w8a16", progress=lambda _done, _total, name: left.update({name: alive(references)}))
    assert left == {"embed": ["embed.weight", "middle.weight"], "middle": ["middle.weight"], "": []}
    assert model.head._store is model.embed._store


def test_the_moments_of_gptq_are_released_layer_by_layer():
    model = stack(3)
    references = floats(model)
    counts = []
    qcore.quantize_(
        model,
        "w4a16-g16@gptq",
        calibration=[torch.randn(8, 32)],
        progress=lambda *_: counts.append(len(alive(references))),
    )
    assert counts == [3, 2, 1, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_with_nan_is_found_before_any_layer_changes(value, dtype):
    model = stack().to(dtype)
    with torch.no_grad():
        model[3].weight[1, 2] = value
    before = dict(model.named_modules())
    with pytest.raises(qcore.FormatError, match=r"3.* holds NaN or Inf"):
        qcore.quantize_(model, "w8a16")
    assert dict(model.named_modules()) == before


def test_after_an_error_midway_a_second_call_continues():
    model, x = stack(), torch.randn(2, 32)

    def stop(done, _total, _name):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.warns(qcore.QcoreWarning, match="after 2 of 4 layers"), pytest.raises(KeyboardInterrupt):
        qcore.quantize_(model, "w8a16", progress=stop)
    kinds = [type(layer) for layer in model]
    assert kinds == [qcore.nn.QuantizedLinear] * 2 + [nn.Linear] * 2
    assert torch.isfinite(model(x)).all()
    report = qcore.quantize_(model, "w8a16")
    assert [row.state for row in report] == ["refused", "refused", "quantized", "quantized"]
    expected = stack()
    qcore.quantize_(expected, "w8a16")
    assert torch.equal(model(x), expected(x))


PEAK = """
import resource, torch, qcore
qcore.quantize_(torch.nn.Sequential(torch.nn.Linear(512, 512)), "w4a16-g32")
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(16)])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
qcore.quantize_(model, "w8a16")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts KiB on Linux only")
def test_memory_peaks_at_the_float_model_and_one_layer():
    # 16 layers of 16 MiB, 4 MiB quantized: holding on to the float weights would add 64 MiB to the work on one.
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=120)
    one = subprocess.run(
        [sys.executable, "-c", PEAK.replace("range(16)", "range(1)")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(out.stdout) < int(one.stdout) + 24
