"""What stands in for vLLM in tests/engines has vLLM's names, bases, abstract methods and parameters."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest
import vllm_stand_in
from vllm_stand_in import FUNCTIONS, NAMES, MoeConfig

PAIRS = {one.__name__: (module, one) for module, ones in NAMES.items() for one in ones}
CLASSES = {name: one for name, (_, one) in PAIRS.items() if inspect.isclass(one)}
OWN = ("forward", "weight_loader")
"""Methods that qcore-vllm neither calls nor overrides."""


def real(name):
    return getattr(importlib.import_module(PAIRS[name][0]), name)


def parameters(function):
    """Names of parameters, without those that collect the rest."""
    rest = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind not in rest]


@pytest.mark.parametrize("module", FUNCTIONS)
def test_functions_are_there(module):
    assert all(callable(getattr(importlib.import_module(module), name)) for name in FUNCTIONS[module])


@pytest.mark.parametrize("name", CLASSES)
def test_bases_are_the_same(name):
    for other, one in CLASSES.items():
        if issubclass(CLASSES[name], one):
            assert issubclass(real(name), real(other)), other


@pytest.mark.parametrize("name", [name for name, one in CLASSES.items() if inspect.isabstract(one)])
def test_abstract_methods_are_the_same(name):
    assert real(name).__abstractmethods__ == CLASSES[name].__abstractmethods__


@pytest.mark.parametrize("name", CLASSES)
def test_methods_have_the_same_parameters(name):
    own = {key: value for key, value in vars(CLASSES[name]).items() if not key.startswith("__")}
    for key, value in own.items():
        if key in OWN or not callable(getattr(CLASSES[name], key)):
            continue
        theirs = parameters(getattr(real(name), key))
        ours = parameters(getattr(CLASSES[name], key))
        missing = [parameter for parameter in ours if parameter not in theirs]
        assert not missing, f"{name}.{key}: {value}: {missing}"


def test_functions_take_the_same_arguments():
    for name, (_, one) in PAIRS.items():
        if name not in CLASSES and not name.startswith("register"):
            assert set(parameters(one)) <= set(parameters(real(name))), name


def test_settings_of_experts_have_the_same_fields():
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    names = {field.name for field in dataclasses.fields(MoeConfig)}
    assert names <= set(dir(FusedMoEConfig)) | {f.name for f in dataclasses.fields(FusedMoEConfig)}
    ours = {field.name for field in dataclasses.fields(vllm_stand_in.ApplyMoEActivationConfig)}
    assert ours == {field.name for field in dataclasses.fields(real("ApplyMoEActivationConfig"))}


def test_experts_have_the_attributes_that_are_read():
    given = parameters(real("RoutedExperts").__init__)
    for name in ("ckpt_gate_proj_name", "ckpt_up_proj_name", "ckpt_down_proj_name", "is_fused_checkpoint_transposed"):
        assert name in given
        assert hasattr(vllm_stand_in.RoutedExperts, name)
