"""`QcoreConfig`: which layers qcore serves in vLLM, and with which settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

import qcore
from qcore import FormatError, Scheme, UnsupportedError
from qcore.plugin_api import Selection

from .experts import QcoreExpertsMethod
from .layer_weight import LayerWeight
from .methods import QcoreLinearMethod
from .stored import Notes
from .vocabulary import QcoreVocabularyMethod

METHOD = "qcore"
_SETTINGS = {"quant_method", "version", "scheme", "include", "exclude", "layers", "strict"}
_T = TypeVar("_T", bound=nn.Module)


class QcoreConfig(QuantizationConfig):  # type: ignore[misc, unused-ignore]
    """The ``quantization_config`` of a model that qcore serves.

    **Arguments:**

    - ``scheme``: float weights are quantized with it at load: a scheme, or a mapping from patterns of layer names to
      schemes. None for a checkpoint that is quantized.
    - ``include``, ``exclude``: patterns of layer names in the checkpoint, as for `qcore.quantize_`.
    - ``strict``: refuse a model of which a layer would run on the fallback, or unquantized although it is stored
      quantized.

    Raises `FormatError` for a scheme that does not exist, or that needs calibration.
    """

    def __init__(
        self,
        scheme: str | Mapping[str, str] | None = None,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        strict: bool = False,
    ) -> None:
        super().__init__()
        self.strict = strict
        self.selection = None if scheme is None else Selection.of(scheme, include, exclude)
        for _, chosen in self.selection.rules if self.selection else ():
            _check_at_load(chosen)
        self.notes = Notes()
        self.shared: dict[int, Any] = {}
        """Tables of the vocabulary while a model is loaded."""

    # vLLM's interface.

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # a kernel's own conditions decide, and there is always a fallback

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # without a quantization_config the weights are float, or in a format that their files describe

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QcoreConfig:
        if str(config.get("quant_method", METHOD)).lower() != METHOD:
            return cls()  # of another tool: its weights are read by qcore's importers
        unknown = sorted(config.keys() - _SETTINGS)
        if unknown:
            raise FormatError(
                f"quantization_config has no setting {unknown[0]!r} for qcore.\n"
                f"It has scheme, include, exclude and strict."
            )
        stored = bool(config.get("layers"))
        scheme = None if stored else config.get("scheme")
        return cls(scheme, config.get("include"), config.get("exclude") or (), bool(config.get("strict", False)))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """``quantization="qcore"`` also serves checkpoints whose settings name another tool."""
        return METHOD if user_quant == METHOD else None

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        return WeightsMapper()  # the loader yields whole weights; nothing is dropped

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """What loads a layer. Layers whose weights turn out to be float go back to vLLM's own methods."""
        if isinstance(layer, LinearBase):
            return QcoreLinearMethod(self, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return QcoreVocabularyMethod(self, prefix)
        if isinstance(layer, RoutedExperts):
            return QcoreExpertsMethod(self, prefix, layer.moe_config)
        return None

    # For the layers.

    def layer_weight(self, prefix: str, shape: tuple[int, ...], dtype: torch.dtype) -> LayerWeight:
        """The weight of a layer, on the device that vLLM makes parameters on."""
        device = torch.empty(0).device
        # Some models make their embedding without a name.
        return LayerWeight(
            prefix or "embed_tokens", shape, dtype, device, None if self.selection is None else self.choose
        )

    def choose(self, names: Iterable[str]) -> Scheme | None:
        """The scheme for a float weight with these names in the checkpoint; None to keep it float."""
        assert self.selection is not None
        return self.selection.choose([alias for name in names for alias in _aliases(name)]).scheme

    def bound(self, make: Callable[[], _T], weight: LayerWeight) -> _T:
        """Make a layer with kernels for its device. Raises `UnsupportedError` if none may serve it."""
        with self._resolving():
            try:
                return make()
            except UnsupportedError as error:
                raise UnsupportedError(f"vLLM's layer {weight.names[0]!r}:\n{error}") from error

    @contextmanager
    def _resolving(self) -> Iterator[None]:
        if not self.strict:
            yield
            return
        with qcore.using(strict=True):
            yield


def _check_at_load(scheme: Scheme) -> None:
    if scheme.needs_moments or scheme.needs_numbers:
        raise FormatError(
            f"scheme {str(scheme)!r} needs calibration data, which there is none of at load.\n"
            f"Quantize the model with qcore.quantize_(model, ..., calibration=...), save it, and serve the directory."
        )
    if scheme.output is not None:
        raise FormatError(f"scheme {str(scheme)!r} returns int8 codes, which vLLM's layers cannot pass on.")


_EXPERT = re.compile(r"(\.experts)\.[^.]+(\.|$).*")


def _aliases(name: str) -> Iterator[str]:
    """A layer's name, and that of the experts it is one of: `qcore.quantize_` knows these as one layer."""
    yield name
    experts = _EXPERT.sub(r"\1", name)
    if experts != name:
        yield experts
