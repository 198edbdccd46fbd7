"""What qcore-vllm uses of vLLM, in the same names and shapes, so that its side of the interface is tested without it.

Layers cut and copy weights by slicing, as vLLM's loaders do. Ranks are models in one process, made one after the other
with `PLACE` set; what a collective would do is done by whoever calls them. `nox -s vllm` compares `NAMES` with vLLM.
"""

from __future__ import annotations

import importlib
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Place:
    """The rank that layers are made for."""

    rank: int = 0
    size: int = 1


PLACE = Place()
PADDING = 64
"""A vocabulary is padded to multiples of this."""
current: list[Any] = []
"""The configuration of the model that is being loaded."""


class QuantizeMethodBase(ABC):
    @abstractmethod
    def create_weights(self, layer, *weight_args, **extra_weight_attrs): ...

    @abstractmethod
    def apply(self, layer, *args, **kwargs): ...

    def embedding(self, layer, *args, **kwargs):
        raise NotImplementedError

    def tie_weights(self, layer, embed_tokens):
        layer.weight = embed_tokens.weight
        return layer

    def process_weights_after_loading(self, layer): ...  # noqa: B027 - as vLLM declares it


class QuantizationConfig(ABC):
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self): ...

    @abstractmethod
    def get_supported_act_dtypes(self): ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls): ...

    @staticmethod
    @abstractmethod
    def get_config_filenames(): ...

    @classmethod
    @abstractmethod
    def from_config(cls, config): ...

    @abstractmethod
    def get_quant_method(self, layer, prefix): ...


def set_weight_attrs(weight, weight_attrs):
    for name, value in (weight_attrs or {}).items():
        setattr(weight, name, value)


class LinearMethodBase(QuantizeMethodBase):
    @abstractmethod
    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs,
    ): ...  # fmt: skip

    @abstractmethod
    def apply(self, layer, x, bias=None): ...


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs,
    ):  # fmt: skip
        raise AssertionError("qcore gives a layer back after loading")

    def apply(self, layer, x, bias=None):
        return nn.functional.linear(x, layer.weight, bias)


class LinearBase(nn.Module):
    """``sizes``: rows of each part of the layer on this rank, ``k``: its columns here."""

    def __init__(self, sizes, k, bias, quant_config, prefix, dtype) -> None:
        super().__init__()
        self.sizes, self.tp_rank, self.tp_size, self.skip_bias_add = sizes, PLACE.rank, PLACE.size, False
        self.quant_method = quant_config.get_quant_method(self, prefix)
        self.quant_method.create_weights(
            layer=self, input_size_per_partition=k, output_partition_sizes=sizes, input_size=k, output_size=sum(sizes),
            params_dtype=dtype, weight_loader=self.weight_loader,
        )  # fmt: skip
        made = nn.Parameter(torch.zeros(sum(sizes), dtype=dtype), requires_grad=False) if bias else None
        self.register_parameter("bias", made)
        if made is not None:
            set_weight_attrs(made, {"output_dim": 0, "weight_loader": self.weight_loader})

    def weight_loader(self, param, loaded_weight, *shard):
        raise NotImplementedError

    def forward(self, x):
        return self.quant_method.apply(self, x, self.bias)


class MergedColumnParallelLinear(LinearBase):
    """Several matrices of the same x, each cut by its rows; ``copies``: ranks that share a share of a part."""

    def __init__(self, rows, k, bias, quant_config, prefix, dtype, copies=None) -> None:
        self.copies = copies or [1] * len(rows)
        sizes = [n * c // PLACE.size for n, c in zip(rows, self.copies, strict=True)]
        super().__init__(sizes, k, bias, quant_config, prefix, dtype)

    def weight_loader(self, param, loaded_weight, *shard):
        (part,) = shard
        size, start = self.sizes[part], sum(self.sizes[:part])
        own = param.data.narrow(param.output_dim, start, size)
        first = self.tp_rank // self.copies[part] * size
        loaded_weight = loaded_weight.narrow(param.output_dim, first, size)
        assert own.shape == loaded_weight.shape
        own.copy_(loaded_weight)


class RowParallelLinear(LinearBase):
    def __init__(self, n, k, bias, quant_config, prefix, dtype) -> None:
        super().__init__([n], k // PLACE.size, bias, quant_config, prefix, dtype)

    def weight_loader(self, param, loaded_weight, *shard):
        own, dim = param.data, getattr(param, "input_dim", None)
        if dim is not None:
            loaded_weight = loaded_weight.narrow(dim, self.tp_rank * own.shape[dim], own.shape[dim])
        assert own.shape == loaded_weight.shape
        own.copy_(loaded_weight)

    def forward(self, x):
        """This rank's summand; the first rank adds the bias."""
        return self.quant_method.apply(self, x, None if self.tp_rank else self.bias)


class UnquantizedEmbeddingMethod(QuantizeMethodBase):
    def create_weights(self, layer, *weight_args, **extra_weight_attrs):
        raise AssertionError("qcore gives a layer back after loading")

    def apply(self, layer, x, bias=None):
        return nn.functional.linear(x, layer.weight, bias)

    def embedding(self, layer, input_):
        return nn.functional.embedding(input_, layer.weight)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, vocabulary, k, quant_config, prefix, dtype) -> None:
        super().__init__()
        self.per_rank = -(-vocabulary // PADDING) * PADDING // PLACE.size
        self.start = PLACE.rank * self.per_rank
        self.stop = min(self.start + self.per_rank, vocabulary)
        self.quant_method = quant_config.get_quant_method(self, prefix)
        self.quant_method.create_weights(
            self, k, [self.per_rank], k, self.per_rank, params_dtype=dtype, weight_loader=self.weight_loader
        )

    def weight_loader(self, param, loaded_weight):
        count = max(0, self.stop - self.start)
        loaded_weight = loaded_weight.narrow(param.output_dim, min(self.start, self.stop), count)
        param[:count].data.copy_(loaded_weight)
        param[count:].data.fill_(0)

    def forward(self, ids):
        own = (ids >= self.start) & (ids < self.stop)
        rows = self.quant_method.embedding(self, torch.where(own, ids - self.start, 0))
        return torch.where(own.unsqueeze(-1), rows, 0)


class ParallelLMHead(VocabParallelEmbedding):
    def tie_weights(self, embed_tokens):
        return self.quant_method.tie_weights(self, embed_tokens)

    def forward(self, x):
        return self.quant_method.apply(self, x)


@dataclass
class ApplyMoEActivationConfig:
    clamp_limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None


def apply_moe_activation(activation, output, input, *, activation_config=None):  # noqa: A002 - vLLM's name
    gate, up = input.chunk(2, -1)
    return output.copy_(nn.functional.silu(gate) * up)


class SwigluOAIAndMul(nn.Module):
    def forward_native(self, x):
        gate, up = x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe) -> None:
        super().__init__()
        self.moe = moe

    @abstractmethod
    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ): ...

    @abstractmethod
    def get_fused_moe_quant_config(self, layer): ...

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        raise NotImplementedError


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        raise AssertionError("qcore gives a layer back after loading")

    def get_fused_moe_quant_config(self, layer):
        return None

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        total = torch.zeros_like(x)
        for expert in range(layer.w13_weight.shape[0]):
            gate, up = nn.functional.linear(x, layer.w13_weight[expert]).chunk(2, -1)
            y = nn.functional.linear(nn.functional.silu(gate) * up, layer.w2_weight[expert])
            total += y * (topk_weights * (topk_ids == expert)).sum(-1, keepdim=True)
        return total


@dataclass
class MoeConfig:
    """The fields of vLLM's FusedMoEConfig that qcore reads."""

    is_act_and_mul: bool = True
    has_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None


class RoutedExperts(nn.Module):
    """Experts cut by tensor, or by expert if ``by_expert``."""

    ckpt_gate_proj_name, ckpt_up_proj_name, ckpt_down_proj_name = "w1", "w3", "w2"
    is_fused_checkpoint_transposed = apply_router_weight_on_input = False
    activation = "silu"

    def __init__(self, experts, hidden, width, quant_config, prefix, dtype, by_expert=False) -> None:
        super().__init__()
        self.moe_config, self.by_expert, self.rank = MoeConfig(), by_expert, PLACE.rank
        own = experts // PLACE.size if by_expert else experts
        self.first, self.count, self.width = PLACE.rank * own if by_expert else 0, own, width
        self.width = width if by_expert else width // PLACE.size
        local = torch.arange(experts) - self.first
        self.expert_map = torch.where((local >= 0) & (local < own), local, -1) if by_expert else None
        self.quant_method = quant_config.get_quant_method(self, prefix)
        self.quant_method.create_weights(self, own, hidden, self.width, dtype, weight_loader=self.weight_loader)

    def weight_loader(self, param, loaded_weight, name, expert):
        local = expert - self.first
        if not 0 <= local < self.count:
            return
        own, dim, at = param.data[local], 1 if name == "w2" else 0, 0 if self.by_expert else self.rank * self.width
        loaded_weight = loaded_weight.narrow(dim, at, self.width)
        if name != "w2":
            own = own.narrow(0, 0 if name == "w1" else self.width, self.width)
        own.copy_(loaded_weight)

    def _replace_quant_method(self, quant_method):
        self.quant_method = quant_method

    def forward(self, x, weights, ids):
        return self.quant_method.apply(self, x, weights, ids, None, None)


class WeightsMapper:
    """Names of a checkpoint to those of a model; empty ones are all that qcore makes."""


METHODS: dict[str, type] = {}
LOADERS: dict[str, type] = {}


def register_quantization_config(quantization):
    return lambda cls: METHODS.setdefault(quantization, cls)


def register_model_loader(load_format):
    return lambda cls: LOADERS.setdefault(load_format, cls)


@dataclass
class LoadConfig:
    load_format: str = "auto"


@dataclass
class ModelConfig:
    """A checkpoint: its folder, the dtype to compute in, and the method that serves it."""

    model: str
    dtype: torch.dtype = torch.float32
    quantization: str | None = "qcore"
    revision: str | None = None


@dataclass
class VllmConfig:
    """``make``: builds the model of a rank for a quantization config."""

    quant_config: Any
    make: Any
    load_config: LoadConfig = field(default_factory=LoadConfig)


class DefaultModelLoader:
    def __init__(self, load_config) -> None:
        self.load_config = load_config

    def load_model(self, vllm_config, model_config, prefix=""):
        current[:] = [vllm_config]
        model = vllm_config.make(vllm_config.quant_config)
        for name, tensor in self.get_all_weights(model_config, model):
            model.load(name, tensor)
        for module in list(model.modules()):
            method = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)
        return model

    def get_all_weights(self, model_config, model) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("vLLM reads no checkpoint that qcore serves")


_LAYERS = "vllm.model_executor.layers"
NAMES: dict[str, tuple[Any, ...]] = {
    "vllm.model_executor.layers.fused_moe": (RoutedExperts,),
    f"{_LAYERS}.activation": (SwigluOAIAndMul,),
    f"{_LAYERS}.fused_moe.activation": (ApplyMoEActivationConfig, apply_moe_activation),
    f"{_LAYERS}.fused_moe.fused_moe_method_base": (FusedMoEMethodBase,),
    f"{_LAYERS}.fused_moe.unquantized_fused_moe_method": (UnquantizedFusedMoEMethod,),
    f"{_LAYERS}.linear": (LinearBase, LinearMethodBase, RowParallelLinear, UnquantizedLinearMethod),
    f"{_LAYERS}.quantization": (register_quantization_config,),
    f"{_LAYERS}.quantization.base_config": (QuantizationConfig, QuantizeMethodBase),
    f"{_LAYERS}.vocab_parallel_embedding": (VocabParallelEmbedding, ParallelLMHead, UnquantizedEmbeddingMethod),
    "vllm.model_executor.model_loader": (register_model_loader,),
    "vllm.model_executor.model_loader.default_loader": (DefaultModelLoader,),
    "vllm.model_executor.models.utils": (WeightsMapper,),
    "vllm.model_executor.utils": (set_weight_attrs,),
}
"""Modules of vLLM and what qcore-vllm takes from them, beside functions of the process."""

FUNCTIONS: dict[str, dict[str, Any]] = {
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.config": {"get_current_vllm_config_or_none": lambda: current[0] if current else None},
    "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: PLACE.rank},
}
GLUE = ("config", "experts", "loader", "methods", "reporting", "vocabulary")
"""The modules of qcore-vllm that import vLLM."""


@contextmanager
def installed() -> Iterator[dict[str, ModuleType]]:
    """Put the stand-in where vLLM would be; gives the modules of qcore-vllm that import it, by name."""
    made: dict[str, ModuleType] = {}
    given = {**{name: {one.__name__: one for one in ones} for name, ones in NAMES.items()}, **FUNCTIONS}
    for name, content in given.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            made.setdefault(path := ".".join(parts[:depth]), ModuleType(path))
        vars(made[name]).update(content)
    glue = {name: f"qcore_vllm.{name}" for name in GLUE}
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name in glue.values() or name in made}
    sys.modules.update(made)
    try:
        yield {name: importlib.import_module(path) for name, path in glue.items()}
    finally:
        for name in (*made, *glue.values()):
            sys.modules.pop(name, None)
        sys.modules.update(kept)
        METHODS.clear(), LOADERS.clear(), current.clear()
        PLACE.rank, PLACE.size = 0, 1


@contextmanager
def placed(rank: int, size: int) -> Iterator[None]:
    """Make layers for a rank."""
    PLACE.rank, PLACE.size = rank, size
    try:
        yield
    finally:
        PLACE.rank, PLACE.size = 0, 1
