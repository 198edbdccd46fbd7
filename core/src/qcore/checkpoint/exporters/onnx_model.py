"""Models of transformers in the form that torch's ONNX exporter needs: class, and inputs and outputs by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ..header import file_error
from ..model_config import CONFIG, folder_of

_PAST, _PRESENT = "past_key_values.{}.{}", "present.{}.{}"
_PARTS = ("key", "value")


@dataclass(frozen=True)
class Traced:
    """The module to export.

    **Fields:** ``module``: called with ``arguments``; ``axes``: in the form of `torch.export`'s ``dynamic_shapes``;
    ``inputs``, ``outputs``: their names in the graph.
    """

    module: nn.Module
    arguments: tuple[Any, ...]
    axes: tuple[Any, ...]
    inputs: Sequence[str]
    outputs: Sequence[str]


def empty_model(path: Path, *, is_gguf: bool) -> nn.Module:
    """The model that a checkpoint's configuration describes, on meta, in float32."""
    transformers = _transformers()
    folder = folder_of(path)
    if not is_gguf and not (folder / CONFIG).is_file():
        what = f"it has no {CONFIG}, which describes the model for the ONNX file."
        raise file_error(folder, what, "Copy the model's config.json to it.")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **({"gguf_file": path.name} if is_gguf else {}))
    except (ValueError, KeyError, OSError) as error:
        raise file_error(path, f"transformers cannot read its configuration: {error}.") from error
    for settings in (config, config.get_text_config()):
        if hasattr(settings, "quantization_config"):
            del settings.quantization_config
    if getattr(config, "is_encoder_decoder", False):
        raise file_error(
            path, f"{config.model_type} is an encoder-decoder model, which needs two graphs; qcore writes one."
        )
    config.dtype = torch.float32
    name = next(iter(config.architectures or ()), "")
    kind = getattr(transformers, name, None)
    with torch.device("meta"):
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            return kind(config).eval()
        try:
            made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            what = f"transformers has no class {name!r}, which its config.json names."
            hint = "Its 'architectures' must name one that is part of transformers."
            raise file_error(path, what, hint) from error
        return made.eval()


def _transformers() -> Any:
    try:
        import onnxscript  # type: ignore[import-not-found, unused-ignore]  # noqa: F401 - torch's exporter needs it, and raises later and at length
        import transformers
    except ImportError as error:
        raise CheckpointError(
            f"Writing ONNX needs the packages transformers and onnxscript: {error}.\nInstall them: "
            f"pip install 'qcore[onnx]'"
        ) from error
    return transformers


def traced(model: nn.Module, path: Path) -> Traced:
    """Prepare a model with weights for export. Raises `CheckpointError` for a model whose inputs are unknown."""
    accepted = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids" and "past_key_values" in accepted and getattr(model, "can_generate", bool)():
        return _generating(model, accepted)
    if main == "input_ids":
        names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in accepted]
        values = {"input_ids": torch.ones, "attention_mask": torch.ones, "token_type_ids": torch.zeros}
        arguments = [values[name](2, 3, dtype=torch.int64) for name in names]
        return _of_tensors(model, names, arguments, {0: "batch", 1: "sequence"})
    if main == "pixel_values":
        config: Any = model.config
        side = config.image_size if isinstance(getattr(config, "image_size", None), int) else 224
        pixels = torch.zeros(2, getattr(config, "num_channels", 3), side, side)
        return _of_tensors(model, ["pixel_values"], [pixels], {0: "batch"})
    raise file_error(path, f"{type(model).__name__} takes {main}; ONNX is supported for input_ids and pixel_values.")


class _Named(nn.Module):
    """Calls a model with tensors in order; its results are the tensors ``outputs``."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        found = self.model(**dict(zip(self.inputs, tensors, strict=True)), return_dict=True)
        return [found[name] for name in self.outputs]


def _of_tensors(model: nn.Module, names: list[str], arguments: list[Tensor], axes: Mapping[int, str]) -> Traced:
    with torch.no_grad():
        found = model(**dict(zip(names, arguments, strict=True)), return_dict=True)
    outputs = [name for name, value in found.items() if isinstance(value, Tensor)]
    shapes = (tuple(dict(axes) for _ in names),)  # of one argument with many parts
    return Traced(_Named(model, names, outputs), tuple(arguments), shapes, names, outputs)


class _Generating(nn.Module):
    """Calls a language model with the keys and values of earlier tokens; returns them with those of the new tokens."""

    def __init__(self, model: nn.Module, cache: type[Any], *, positions: bool) -> None:
        super().__init__()
        self.model, self.cache, self.positions = model, cache, positions

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past: list[Tensor], *positions: Tensor
    ) -> list[Tensor]:
        where = {"position_ids": positions[0]} if self.positions else {}
        cache = self.cache(list(zip(past[0::2], past[1::2], strict=True)))
        found = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **where
        )
        return [found.logits, *(part for layer in found.past_key_values.layers for part in (layer.keys, layer.values))]


def _generating(model: nn.Module, accepted: Mapping[str, Any]) -> Traced:
    """The names are those of optimum and onnxruntime-genai."""
    cache = _transformers().DynamicCache
    with torch.no_grad():
        layers = model(input_ids=torch.ones(1, 1, dtype=torch.int64), use_cache=True).past_key_values.layers
    batch, before, now = 2, 5, 3
    past = [
        torch.zeros(batch, part.shape[1], before, part.shape[3]) for one in layers for part in (one.keys, one.values)
    ]
    positions = "position_ids" in accepted
    arguments: list[Any] = [
        torch.ones(batch, now, dtype=torch.int64), torch.ones(batch, before + now, dtype=torch.int64), past,
    ]  # fmt: skip
    axes: list[Any] = [
        {0: "batch", 1: "sequence"}, {0: "batch", 1: "total"}, [{0: "batch", 2: "past"} for _ in past],
    ]  # fmt: skip
    inputs = ["input_ids", "attention_mask", *_cache_names(_PAST, len(layers))]
    if positions:
        arguments.append(torch.arange(before, before + now).expand(batch, now).contiguous())
        axes.append(({0: "batch", 1: "sequence"},))
        inputs.append("position_ids")
    module = _Generating(model, cache, positions=positions)
    return Traced(module, tuple(arguments), tuple(axes), inputs, ["logits", *_cache_names(_PRESENT, len(layers))])


def _cache_names(form: str, layers: int) -> list[str]:
    return [form.format(layer, part) for layer in range(layers) for part in _PARTS]
