"""A load that is refused, or interrupted anywhere, leaves the model as it was, whatever the model is made of."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import qcore
from qcore import CheckpointError
from qcore.checkpoint import load_, loading, placing, save
from qcore.nn.base import QuantizedModule

X = torch.ones(2, 8)


def fresh() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.fixture
def trained(tmp_path) -> nn.Module:
    """The model whose checkpoint is ``m.safetensors``."""
    torch.manual_seed(0)
    model = fresh().eval()
    with torch.no_grad():
        for tensor in (*model[1].parameters(), model[3].running_mean):
            tensor.normal_()
    qcore.quantize_(model, "w8a16")
    save(model, tmp_path / "m.safetensors")
    return model


def all_of(model: nn.Module) -> dict[str, object]:
    """Everything that a load could change: values, identities, attributes, modes, the random state."""
    found: dict[str, object] = {"random": torch.get_rng_state().tolist()}
    for name, module in model.named_modules():
        attributes = {
            key: value for key, value in vars(module).items() if isinstance(value, (bool, int, str, type(None)))
        }
        found[name] = id(module), module.training, attributes, list(module._modules)
        tensors = {**dict(module._parameters.items()), **dict(module._buffers.items())}
        found |= {
            f"{name}.{key}": None if t is None else (id(t), t.tolist())
            for key, t in tensors.items()
            if key[:6] != "packed"
        }
    return found


def refused(model: nn.Module, path: Any, match: str, error: type[BaseException] = CheckpointError) -> None:
    before = all_of(model)
    with pytest.raises(error, match=match):
        load_(model, path)
    assert all_of(model) == before


@torch.no_grad()
def test_a_model_made_under_inference_mode(tmp_path, trained):
    with torch.inference_mode():
        model = fresh().eval()
    load_(model, tmp_path / "m.safetensors")
    assert torch.equal(model(X), trained(X))


def test_loading_under_inference_mode_gives_trainable_tensors(tmp_path, trained):
    with torch.device("meta"):
        model = fresh()
    with torch.inference_mode():
        load_(model, tmp_path / "m.safetensors")
    assert not [name for name, p in (*model.named_parameters(), *model.named_buffers()) if p.is_inference()]
    model.train()(X).sum().backward()
    assert model[1].weight.grad is not None


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("place", [1, 2, "all"])
def test_scripted_modules(tmp_path, trained, place):
    model: Any = fresh().eval()
    if place == "all":
        model = torch.jit.script(model)
    else:
        model[place] = torch.jit.script(model[place])
    report = load_(model, tmp_path / "m.safetensors")
    assert torch.allclose(model(X), trained(X), atol=1e-6)
    assert place == 1 or "dequantized to float" in str(report)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_scripted_modules_stay_if_the_file_ties_theirs(tmp_path):
    first, second = nn.LayerNorm(4), nn.LayerNorm(4)
    nn.init.normal_(first.weight)
    second.weight = first.weight
    save(nn.Sequential(first, second), tmp_path / "m.safetensors")
    model = nn.Sequential(nn.LayerNorm(4), torch.jit.script(nn.LayerNorm(4)))
    load_(model, tmp_path / "m.safetensors")
    assert torch.equal(model[1].weight, first.weight)
    x = torch.randn(2, 4)
    assert torch.allclose(model(x), second(first(x)))


def test_a_bias_that_is_no_parameter(tmp_path, trained):
    model = fresh().eval()
    bias = model[0].bias.detach()
    del model[0].bias
    model[0].register_buffer("bias", bias)
    report = load_(model, tmp_path / "m.safetensors")
    assert "its bias is not a parameter" in report["0"].reason
    assert torch.allclose(model(X), trained(X), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_scripted_modules_on_meta_are_refused(tmp_path, trained):
    with torch.device("meta"):
        norm = torch.jit.script(nn.LayerNorm(4))
    model = fresh()
    model[1] = norm
    before = model[3].running_mean.clone()
    with pytest.raises(CheckpointError, match="scripted LayerNorm, whose tensors cannot be replaced"):
        load_(model, tmp_path / "m.safetensors")
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[3].running_mean, before)


class Frozen(nn.Sequential):
    """Refuses to change once ``frozen``; by then it may have noted what it was asked."""

    frozen = False

    def __setattr__(self, name: str, value: object) -> None:
        if self.frozen and name == "2":
            raise RuntimeError("frozen")
        super().__setattr__(name, value)
        if self.frozen:
            self.__dict__[f"changed_{name}"] = 1


def test_a_module_that_refuses_to_change(tmp_path, trained):
    model = Frozen(*fresh())
    model.frozen = True
    refused(model, tmp_path / "m.safetensors", r"replacing '2' of Frozen raised RuntimeError: frozen\n.*unchanged")
    model.frozen = False
    load_(model, tmp_path / "m.safetensors")
    assert torch.equal(model.eval()(X), trained(X))


def places(model: nn.Module) -> object:
    modules = {name: id(module) for name, module in model.named_modules()}
    return modules, [id(tensor) for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("meta", [False, True])
def test_whatever_raises_at_any_step_of_the_change(tmp_path, trained, monkeypatch, error, meta):
    """Each write, each replaced layer and tensor, and the report, in turn."""
    steps = []

    def counted(original: Any, *args: object) -> object:
        steps.append(original)
        if len(steps) == fails_at:
            raise error("now")
        result = original(*args)
        if len(steps) == fails_at + 0.5:
            raise error("just done")
        return result

    for name in ("fill", "put_module", "put_tensor"):
        original = getattr(placing.Transaction, name)
        monkeypatch.setattr(placing.Transaction, name, lambda *args, original=original: counted(original, *args))
    monkeypatch.setattr(placing, "_copy", partial(counted, placing._copy))
    monkeypatch.setattr(loading, "report", partial(counted, loading.report))
    fails_at: float = 10_000
    load_(fresh(), tmp_path / "m.safetensors")
    total = len(steps)
    assert total > 8
    expected = error if error is KeyboardInterrupt else CheckpointError
    raised = 0
    for half in range(2, 2 * total + 1):
        fails_at = half / 2
        with torch.device("meta" if meta else "cpu"):
            model = fresh()
        before = places(model), None if meta else all_of(model)
        steps.clear()
        try:
            load_(model, tmp_path / "m.safetensors")
        except expected:
            raised += 1
            assert (places(model), None if meta else all_of(model)) == before
    assert raised > total


def test_a_quantized_root(tmp_path, monkeypatch):
    save(qcore.nn.QuantizedLinear.from_float(nn.Linear(8, 6), "w8a8"), tmp_path / "m.safetensors")
    root = qcore.nn.QuantizedLinear.from_float(nn.Linear(8, 6), "w4a16")
    expected, store = root(X), root._store

    def fail(_: object) -> None:
        raise KeyboardInterrupt("stop")

    with monkeypatch.context() as patch:
        patch.setattr(loading, "report", fail)
        refused(root, tmp_path / "m.safetensors", "stop", KeyboardInterrupt)
    assert torch.equal(root(X), expected)
    assert root._store is store
    assert root in store.users
    load_(root, tmp_path / "m.safetensors")
    assert str(root.scheme) == "w8a8"
    assert root in root._store.users
    assert root not in store.users


# Tensors that are no plain memory.


def test_an_expanded_parameter_gets_memory_of_its_own(tmp_path):
    model, source = nn.Linear(8, 4), nn.Linear(8, 4)
    one = torch.randn(1)
    model.bias = nn.Parameter(one.expand(4))
    save(source, tmp_path / "m.safetensors")
    load_(model, tmp_path / "m.safetensors")
    assert torch.equal(model.bias, source.bias)
    assert isinstance(model.bias, nn.Parameter)


def test_views_are_written_where_they_are(tmp_path):
    rows, table = torch.zeros(2, 4), torch.zeros(4, 8)
    model = nn.Module()
    model.register_buffer("row", rows.unbind()[1])
    model.register_buffer("columns", table[:, ::2])
    model.register_buffer("negated", torch._neg_view(rows[0]))
    state = {"row": torch.randn(4), "columns": torch.randn(4, 4), "negated": torch.randn(4)}
    save(state, tmp_path / "m.safetensors")
    load_(model, tmp_path / "m.safetensors")
    assert torch.equal(rows, torch.stack((-state["negated"], state["row"])))
    assert torch.equal(table[:, ::2], state["columns"])
    assert not table[:, 1::2].any()


class Sharing(nn.Module):
    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self.register_buffer("first", memory[:4])
        self.register_buffer("second", memory[2:])


def test_tensors_that_overlap_hold_what_they_can(tmp_path):
    memory = torch.zeros(6)
    save({"first": torch.arange(4.0), "second": torch.arange(2.0, 6.0)}, tmp_path / "m.safetensors")
    load_(Sharing(memory), tmp_path / "m.safetensors")
    assert torch.equal(memory, torch.arange(6.0))
    save({"first": torch.zeros(4), "second": torch.ones(4)}, tmp_path / "m.safetensors")
    refused(Sharing(memory), tmp_path / "m.safetensors", "ties it to a tensor that has different values")


def test_two_parameters_on_one_memory(tmp_path):
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = nn.Parameter(first.weight.data)
    save({"0.weight": torch.ones(4, 4), "1.weight": torch.zeros(4, 4)}, tmp_path / "m.safetensors")
    refused(nn.Sequential(first, second), tmp_path / "m.safetensors", "ties it to a tensor that has different values")


def test_a_module_that_lists_its_weights_elsewhere(tmp_path):
    source = nn.LSTM(4, 5)
    save(source, tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = nn.LSTM(4, 5)
    load_(model, tmp_path / "m.safetensors")
    x = torch.randn(3, 4)
    assert torch.equal(model(x)[0], source(x)[0])


def test_a_lazy_module_is_refused(tmp_path):
    save(nn.Linear(8, 4), tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="not initialized in the model"):
        load_(nn.LazyLinear(4), tmp_path / "m.safetensors")


# What must not run.


def test_a_refused_load_runs_no_parametrization(tmp_path, trained):
    model = fresh()
    model[0] = spectral_norm(model[0])
    model[2] = nn.utils.parametrizations.weight_norm(model[2])
    refused(model, tmp_path / "m.safetensors", "do not match those of the model")


def test_a_refused_load_reads_no_property(tmp_path, trained):
    class Counting(nn.Module):
        reads = 0

        @property
        def weight(self) -> Tensor:
            type(self).reads += 1
            return torch.ones(4, 8)

    model = fresh()
    model[0] = Counting()
    refused(model, tmp_path / "m.safetensors", "do not match those of the model")
    assert not Counting.reads


def test_a_refused_load_of_a_quantized_model_keeps_its_layers(tmp_path, trained):
    model = fresh()
    qcore.quantize_(model, "w4a16")
    layers = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    kept = [(id(layer._store), len(layer._store.users), layer.decision) for layer in layers]
    model.append(nn.Linear(3, 3))
    refused(model, tmp_path / "m.safetensors", "Missing in the checkpoint: 4.weight")
    assert [(id(layer._store), len(layer._store.users), layer.decision) for layer in layers] == kept
