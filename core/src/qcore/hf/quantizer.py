"""The quantizer that transformers' ``from_pretrained`` and ``save_pretrained`` call.

Quantizing: transformers reads one float weight at a time, moves it to the device of its layer and passes it to
`_Quantize`, which keeps the quantized weight. Loading: transformers loads all tensors that are not quantized. In both
cases weights stay on meta until that is done; then layers are replaced by their quantized counterparts
(`_Loading.install`).
"""

# ruff: noqa: ARG002, SLF001 - the arguments are those of transformers' interface, and so are the private names

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from ..checkpoint.archive import Archive
from ..checkpoint.fusing import fuse_experts
from ..checkpoint.imported import ImportedArchive
from ..checkpoint.loading import load_weights
from ..checkpoint.matching import Swap
from ..checkpoint.model_config import layer_settings
from ..checkpoint.opening import open_checkpoint
from ..checkpoint.records import CALIBRATED, REMEDIES
from ..checkpoint.saving import described_state
from ..errors import CheckpointError, FormatError, UnsupportedError, did_you_mean
from ..model.streamed import StreamedPlan
from ..nn.base import QuantizedModule
from ..nn.experts import expert_weights
from ..nn.neutral import NeutralLinear
from ..weights.schemes import Scheme
from .config import METHOD, ForeignConfig, QcoreConfig
from .dequantizing import dequantize_
from .placing import keep_place
from .resizing import make_resizable
from .tensor_parallel import TensorParallel, check_whole

FOREIGN = {
    "gptq": ("gptq",),
    "awq": ("awq",),
    "auto-round": ("auto-round",),
    "compressed-tensors": ("compressed-tensors",),
    "fp8": ("fp8",),
    "fbgemm_fp8": ("fbgemm_fp8",),
    "mxfp4": ("mxfp4",),
    "modelopt": ("modelopt",),
    "bitsandbytes": ("bitsandbytes_4bit", "bitsandbytes_8bit"),
    "hqq": ("hqq",),
    "quanto": ("quanto",),
    "torchao": ("torchao",),
}
"""Methods that `adopt` accepts, and transformers' names for them."""
_WITH_PACKAGE = ("compressed-tensors",)
"""Methods whose settings transformers cannot read without the tool's own package, which qcore does not need."""


def adopt(*methods: str) -> None:
    """Make ``from_pretrained`` read the directories of other tools through qcore, in this process.

    ``methods``: names as in ``quantization_config.quant_method``, e.g. ``"gptq", "awq", "compressed-tensors"``; none
    for all. Raises `UnsupportedError` for another name.
    """
    for method in methods or FOREIGN:
        if method not in FOREIGN:
            raise UnsupportedError(
                f"qcore cannot adopt {method!r}; it adopts {', '.join(FOREIGN)}.{did_you_mean(method, FOREIGN)}"
            )
        for name in FOREIGN[method]:
            AUTO_QUANTIZER_MAPPING[name] = QcoreQuantizer
            if name in _WITH_PACKAGE or name not in AUTO_QUANTIZATION_CONFIG_MAPPING:
                AUTO_QUANTIZATION_CONFIG_MAPPING[name] = ForeignConfig


@register_quantizer(METHOD)
class QcoreQuantizer(HfQuantizer):  # type: ignore[misc, unused-ignore]
    """transformers' interface to qcore; users never create one."""

    requires_calibration = False

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.quantization_config: Any = quantization_config
        self._loading: _Loading | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raise `FormatError` if there is no scheme to quantize with."""
        if not self.pre_quantized and getattr(self.quantization_config, "scheme", None) is None:
            raise FormatError("QcoreConfig has no scheme: name one, e.g. QcoreConfig('w4a16-g128').")

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        if self.pre_quantized:
            self._loading = _Stored(model, _folder(checkpoint_files))
        else:
            self._loading = _OnTheFly(model, self.quantization_config)
        self._loading.intercept()
        return model

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Take the rules for quantized layers out of the tensor parallel plan: qcore applies those itself."""
        if self._loading is not None and plan is model.tp_plan:
            self._loading.take_rules(plan)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter is the weight of a layer that will be quantized."""
        return self._loading is not None and param_name in self._loading.targets

    def get_weight_conversions(self) -> list[WeightRenaming]:
        """Names of tensors in the files that differ from those of the float model."""
        renamed = {} if self._loading is None else self._loading.renamed
        return [WeightRenaming([f"^{re.escape(name)}$"], [new]) for name, new in renamed.items()]

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that quantizes a float weight."""
        assert isinstance(self._loading, _OnTheFly)
        return _Quantize(self._loading)

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """Bytes per weight, with which ``device_map="auto"`` plans."""
        own = None if self._loading is None else self._loading.bytes_per_weight(param_name, param)
        return super().param_element_size(model, param_name, param) if own is None else own

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        assert self._loading is not None
        if not self._loading.installed:
            raise CheckpointError("transformers never tied the weights of the model, so qcore could not load them.")
        self._loading = None
        # Saving would undo the renames of this load; qcore saves the model's own names.
        model._weight_conversions = []
        if not isinstance(self.quantization_config, QcoreConfig):  # that of another tool
            self.quantization_config = QcoreConfig()
        self.describe(model)
        model.quantization_method = METHOD
        make_resizable(model)
        keep_place(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """The content of ``save_pretrained``: the neutral tensors, and the records that `qcore.load_` reads.

        None and no records, which stand for the model's own state dict, if no quantized tensor will be written.
        ``config.json``, which transformers writes next, describes the layers as they are now.
        """
        check_whole(model)
        if getattr(model, "_hf_peft_config_loaded", False):  # only the adapter is saved
            return None, {}
        if not self.describe(model):
            return None, {}
        keep_place(model)
        model._weight_conversions = []  # as after loading
        return described_state(model, guarded=True)

    def describe(self, model: Any) -> bool:
        """Describe all quantized layers in the model's configuration, and only there; returns whether there are any."""
        layers = _described(model)
        for part in model.modules():
            if isinstance(part, PreTrainedModel):  # one that was saved by itself, or is no longer quantized
                vars(part.config).pop("quantization_config", None)
        if layers:
            self.quantization_config.layers = layers
            model.config.quantization_config = self.quantization_config
        return bool(layers)

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Make ``model`` a float model in place; ``dtype``: default the dtype that its layers compute in."""
        dequantize_(model, dtype)
        self.remove_quantization_config(model)
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                vars(part.config).pop("_is_quantized", None)
        return model

    def is_serializable(self) -> bool:
        """Always."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Trainable with adapters: gradients reach them through quantized layers."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Always."""
        return True


def _folder(files: list[str] | None) -> Path:
    folders = {os.path.dirname(file) for file in files or ()}  # noqa: PTH120 - links of a cache stay links
    if len(folders) != 1:
        raise CheckpointError(f"qcore loads models from one directory; these files are in {sorted(folders)}.")
    return Path(folders.pop())


def _described(model: nn.Module) -> dict[str, dict[str, str]]:
    """Format, scheme and dtype of scales of every quantized layer, for ``config.json``."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            weight = module.weight
            found[name] = layer_settings(weight.format, module.scheme, weight.scale.dtype)
        elif isinstance(module, NeutralLinear):
            found[name] = layer_settings(module.weight.format, module.scheme, module.weight.dtypes["scale"])
    return found


class _Loading:
    """One load. ``targets``: parameters that transformers must leave on meta; ``installed``: whether it is done."""

    def __init__(self, model: Any, targets: Iterable[str]) -> None:
        self.model, self.targets = model, frozenset(targets)
        self.installed = False
        self.renamed: dict[str, str] = {}
        self.parallel = TensorParallel.of(model)
        self.device_map: Mapping[str, Any] | None = None

    def intercept(self) -> None:
        """Run `install` between loading and tying, for which transformers has no quantizer hook.

        Two methods of the model are replaced until they are called: one would give weights on meta memory and random
        values, the other one ties layers that are quantized by then. Both originals are looked up again when called:
        during construction of a model, transformers replaces tying by a method that does nothing.
        """
        model = self.model
        blank = {name: model.get_parameter(name) for name in self.targets}
        for parameter in blank.values():
            parameter._is_hf_initialized = True

        def moved(missing_keys: set[str], device_map: Any, *args: Any) -> Any:
            del model._move_missing_keys_from_meta_to_device
            self.device_map = device_map
            for name, parameter in blank.items():
                module, _, attribute = name.rpartition(".")
                if name in self.covered:  # transformers has loaded at most an empty placeholder
                    model.get_submodule(module)._parameters[attribute] = parameter
                else:  # the checkpoint lacks it: transformers initializes it as usual
                    del parameter._is_hf_initialized
            return model._move_missing_keys_from_meta_to_device(missing_keys - self.covered, device_map, *args)

        def tied(missing_keys: set[str] | None = None, **kwargs: Any) -> Any:
            del model.tie_weights
            if missing_keys is not None:
                missing_keys.difference_update(self.covered)
            pairs = model.all_tied_weights_keys
            model.all_tied_weights_keys = {a: b for a, b in pairs.items() if not {a, b} & self.covered}
            try:
                self._check_places()
                self.install()
                self._check_filled()
                if self.parallel is not None:
                    self.parallel.finish()
                self.installed = True
                return model.tie_weights(missing_keys=missing_keys, **kwargs)
            finally:
                model.all_tied_weights_keys = pairs

        model._move_missing_keys_from_meta_to_device, model.tie_weights = moved, tied

    def _check_places(self) -> None:
        """Raise if biases of experts are on disk: the file that is read back has the float model's names for them."""
        for name, module in self.model.named_modules():
            biases = [bias for weight in expert_weights(module) if (bias := f"{weight}_bias") in module._parameters]
            if biases and f"{name}.{expert_weights(module)[0]}" in self.covered and self._place_of(name) == "disk":
                raise UnsupportedError(
                    f"{name!r} are experts with biases, which qcore cannot offload to disk.\n"
                    f"Put them on 'cpu' or another device: pass a device_map that names devices, or more max_memory."
                )

    def _check_filled(self) -> None:
        """Raise if a parameter is still on meta: torch may compute with one, and the results are arbitrary numbers."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        left = sorted(name for name in self.covered & parameters.keys() if parameters[name].is_meta)
        if left:
            raise CheckpointError(f"qcore found no values for {left[0]!r}, which transformers left to it to load.")

    def take_rules(self, plan: dict[str, str]) -> None:
        """Take the rules for ``targets`` out of a plan of transformers."""
        if self.parallel is not None:
            self.parallel.take_rules(plan, self.targets)

    @property
    def covered(self) -> frozenset[str]:
        """Those of ``targets`` that qcore has values for."""
        return self.targets

    def _place_of(self, layer: str) -> Any:
        """Where the device map puts a layer."""
        places = self.device_map or {}
        name = layer
        while name and name not in places:
            name = name.rpartition(".")[0]
        return places.get(name, torch.get_default_device())

    def device_of(self, layer: str) -> torch.device:
        """The device that a layer will be on; weights offloaded to disk pass through the CPU."""
        device = self._place_of(layer)
        return torch.device("cpu" if device in ("disk", "meta") else device)

    def bytes_per_weight(self, name: str, parameter: torch.Tensor) -> float | None:
        """Stored bytes per element of a parameter, None for one that is not quantized."""
        raise NotImplementedError

    def install(self) -> None:
        """Replace the layers."""
        raise NotImplementedError


class _Stored(_Loading):
    """A checkpoint that is already quantized, by qcore or another tool; its files stay open until `install`."""

    def __init__(self, model: Any, folder: Path) -> None:
        # Closed with the stack if the load fails earlier: planning reads zero points, and is not done twice.
        with ExitStack() as stack, torch.device("cpu"):  # transformers builds models with meta as the default device
            stored = stack.enter_context(open_checkpoint(folder, model))
            self.archive = archive = fuse_experts(stored, model)
            self.sizes = {
                name: sum(archive.entries[part].nbytes for part in record.tensor_names)
                for name, record in archive.records.items()
                if name not in archive.aliases
            }
            targets = set(_parameters_of(model, archive))
            _tie(model, lambda name: _stores(archive, name))
            _ignore(model, _unknown_to(model, stored) | _unknown_to(model, archive))
            self.files = stack.pop_all()
        super().__init__(model, targets)
        self.renamed = dict(_biases_of_experts(model, stored))

    def bytes_per_weight(self, name: str, parameter: torch.Tensor) -> float | None:
        size = self.sizes.get(name, self.sizes.get(f"{name}.weight"))
        return None if size is None or not parameter.numel() else size / parameter.numel()

    def install(self) -> None:
        with self.files, torch.device("cpu"):
            load_weights(self.model, self.archive, self.device_of, None if self.parallel is None else self._part)

    def _part(self, swap: Swap, scheme: Scheme) -> QuantizedModule | None:
        assert self.parallel is not None
        return self.parallel.make(self.archive, swap, scheme, self.device_of(swap.layer))


def _parameters_of(model: Any, archive: Archive) -> Iterable[str]:
    """Yield the model's parameters that are quantized in the records of an archive, and those tied to one."""
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = getattr(model, "all_tied_weights_keys", {})
    for record in archive.records:
        # Fused experts: the record of the parameter P is called P.weight.
        own = record if record in named else record.removesuffix(".weight")
        if own in named:
            yield own
            source = ties.get(own, own)
            yield from (name for name in (source, *ties) if ties.get(name, name) == source)


def _biases_of_experts(model: Any, archive: Archive) -> Iterator[tuple[str, str]]:
    """Yield the names that biases of quantized experts have in a file of qcore, and those of the float model."""
    stored = set(archive.plain_names())
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for which in expert_weights(module):
            bias = f"{name}.{which}.bias"
            if bias in stored and f"{which}_bias" in own:
                yield bias, f"{name}.{which}_bias"


def _stores(archive: Archive, name: str) -> bool:
    """Whether a checkpoint holds a parameter, quantized or not."""
    return any(name in held for held in (archive.records, archive.entries, archive.aliases))


def _tie(model: Any, is_stored: Callable[[str], bool]) -> None:
    """Tie weights that transformers ties after loading, for a plan that has to know which layers share one.

    ``is_stored``: whether the checkpoint holds a parameter; it unties two that it holds both.
    """
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        if not (is_stored(target) and is_stored(source)):
            layer, _, name = target.rpartition(".")
            setattr(model.get_submodule(layer), name, model.get_parameter(source))


def _unknown_to(model: Any, archive: Archive) -> set[str]:
    """The last parts of the names of stored tensors that transformers must not look for in the model."""
    stored = archive.plan.used if isinstance(archive, ImportedArchive) else set()
    own = {part for record in archive.records.values() for part in (record.name, *record.tensor_names)}
    own |= {*archive.guards, *REMEDIES} | {
        name for name in archive.plain_names() if name.rpartition(".")[2] in CALIBRATED
    }
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name for name in stored | own if name not in names or name in own}


def _ignore(model: Any, names: set[str]) -> None:
    """Prevent transformers from reporting tensors as unexpected: qcore reads them."""
    endings = sorted({re.escape(name.rpartition(".")[2]) for name in names})
    if endings:
        patterns = {rf"(^|\.)({'|'.join(endings)})$"}
        model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | patterns


class _OnTheFly(_Loading):
    """A float checkpoint, quantized weight by weight."""

    def __init__(self, model: Any, config: QcoreConfig) -> None:
        _tie(model, lambda _: False)
        self.plan = StreamedPlan(model, config.scheme or {}, config.include, config.exclude)
        super().__init__(model, self.plan.parameters)

    @property
    def covered(self) -> frozenset[str]:
        return self.targets & self.plan.taken

    def bytes_per_weight(self, name: str, parameter: torch.Tensor) -> float | None:
        return self.plan.bytes_per_weight(name) if name in self.targets else None

    def install(self) -> None:
        self.plan.install()


class _Quantize(ConversionOps):  # type: ignore[misc, unused-ignore]
    """One float weight in, nothing out: the loader has nothing left to set."""

    def __init__(self, loading: _OnTheFly) -> None:
        self.loading = loading

    def __deepcopy__(self, memo: Any) -> _Quantize:
        return self  # the loader copies an operation for each weight

    def convert(
        self,
        input_dict: Mapping[str, Any],
        full_layer_name: str = "",
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Take the weights from ``input_dict``; other tensors that a conversion produced are passed on to the model."""
        plan, others = self.loading.plan, {}
        for key, value in input_dict.items():
            name = key if key in plan.parameters else full_layer_name
            if name not in plan.parameters:
                others[key] = value
                continue
            done = plan.take(name, value[0] if isinstance(value, list) else value)
            if missing_keys is not None:
                missing_keys.difference_update(done)
        return others
