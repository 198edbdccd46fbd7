"""Calibration: run batches through a model and record ranges and moments of each layer's inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FormatError, quoted
from ..nn.conv2d import im2col
from ..weights.activations import StaticFP8, StaticInt8, fp8_static_from_range, static_from_range
from ..weights.schemes import Scheme

Calibration = Iterable[Any] | Callable[[nn.Module], Any]
"""Batches (each a tensor, a tuple of positional arguments, or a mapping of keyword arguments), or a function that takes
the model and runs it."""


@dataclass(frozen=True)
class Calibrated:
    """The result of a calibration.

    **Fields:** ``schemes``: by layer name, with the parameters of static activations filled in; ``moments``: the
    sum of ``x x^T`` over a layer's inputs, float32 ``(K, K)``, for a convolution ``(groups, K, K)``, by the name of the
    first layer that holds the weight.
    """

    schemes: dict[str, Scheme]
    moments: dict[str, Tensor] = field(default_factory=dict)


class _Moments:
    """Accumulates ``x x^T`` over the inputs of all layers that share a weight."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None

    def add(self, module: nn.Module, x: Tensor) -> None:
        with torch.autocast(x.device.type, enabled=False):
            rows = _rows(module, x.detach().float())
            if self.sum is None:
                self.sum = rows.new_zeros(len(rows), rows.shape[2], rows.shape[2])
            self.sum.baddbmm_(rows.transpose(1, 2), rows)

    def result(self, module: nn.Module) -> Tensor:
        assert self.sum is not None
        return self.sum if isinstance(module, nn.Conv2d) else self.sum[0]


def _rows(module: nn.Module, x: Tensor) -> Tensor:
    """Return the vectors that a layer multiplies by its weight, ``(groups, rows, K)``."""
    if isinstance(module, nn.Conv2d):
        return im2col(module, x.reshape(-1, *x.shape[-3:]))
    return x.reshape(1, -1, x.shape[-1])


class _InputObserver:
    """Records the range of a layer's inputs and, if the scheme needs them, their moments."""

    def __init__(self, moments: _Moments | None) -> None:
        self.low, self.high, self.seen, self.finite = 0.0, 0.0, False, True
        self.moments = moments

    def observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(iter((*args, *kwargs.values())), None)
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            low, high = (float(v) for v in x.detach().aminmax())
            # min() and max() would ignore NaN.
            self.finite = self.finite and math.isfinite(low) and math.isfinite(high)
            self.low, self.high, self.seen = min(self.low, low), max(self.high, high), True
            if self.moments is not None:
                self.moments.add(module, x)


def calibrate(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    calibration: Calibration | None,
    ties: Mapping[str, str] | None = None,
) -> Calibrated:
    """Run the batches once and determine the static activations and moments that ``schemes`` need, by layer name.

    Scale and zero point of static int8 activations cover ``[min(x, 0), max(x, 0)]``, the scale of static fp8 ones maps
    ``max|x|`` to the largest value of e4m3fn. ``ties``: layer name to the name of the first layer with the same weight;
    the moments of tied layers are summed. Raises `FormatError` if ``calibration`` is None although it is needed, or if
    a layer's input is missing or not finite.
    """
    # An embedding has no activations: a static scheme needs no scale for it, and there are no moments.
    wanted = {name: s for name, s in schemes.items() if not isinstance(model.get_submodule(name), nn.Embedding)}
    blank = {name: _without_activation(scheme) for name, scheme in schemes.items() if name not in wanted}
    if not wanted:
        return Calibrated(blank)
    if calibration is None:
        raise _calibration_error(next(iter(wanted.values())))
    owners = {name: (ties or {}).get(name, name) for name, scheme in wanted.items() if scheme.needs_moments}
    moments = {owner: _Moments() for owner in owners.values()}
    inputs = {name: _InputObserver(moments[owners[name]] if name in owners else None) for name in wanted}
    _observe(model, inputs, calibration)
    filled = {name: _with_parameters(name, scheme, inputs[name]) for name, scheme in wanted.items()}
    sums = {owner: moments[owner].result(model.get_submodule(name)) for name, owner in owners.items()}
    return Calibrated({name: filled.get(name) or blank[name] for name in schemes}, sums)


def _calibration_error(scheme: Scheme) -> FormatError:
    why = "has static activations, whose scale must be known"
    if not scheme.needs_numbers:
        why = f"rounds weights based on the inputs of each layer ({scheme.quantizer})"
    return FormatError(
        f"scheme {str(scheme)!r} {why}.\nPass calibration=batches, or a function that runs the model on typical inputs."
    )


def _observe(model: nn.Module, inputs: Mapping[str, _InputObserver], calibration: Calibration) -> None:
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(i.observe, with_kwargs=True) for name, i in inputs.items()
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            _run(model, calibration)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training


def _run(model: nn.Module, calibration: Calibration) -> None:
    if callable(calibration):
        calibration(model)
        return
    count = 0
    for count, batch in enumerate(_batches(calibration), 1):  # noqa: B007 - read after the loop
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, (tuple, list)):
            model(*batch)
        else:
            model(batch)
    if not count:
        how = "A generator runs only once: make it again, or pass a list."
        raise FormatError(f"calibration holds no batches.\n{how}")


def _batches(calibration: Any) -> Iterator[Any]:
    what = f"calibration is {quoted(calibration)}; it must be batches or a function of the model."
    if isinstance(calibration, Mapping):
        what = f"calibration is a single batch, with {', '.join(map(quoted, calibration))}."
    else:
        with contextlib.suppress(TypeError):
            return iter(calibration)
    raise FormatError(f"{what}\nPut a single batch into a list: calibration=[batch].")


def _with_parameters(name: str, scheme: Scheme, found: _InputObserver) -> Scheme:
    if not found.seen:
        raise FormatError(
            f"layer {name!r} saw no input during calibration.\nExclude it, or calibrate with batches that reach it."
        )
    if not found.finite:
        raise FormatError(f"layer {name!r} saw NaN or Inf during calibration.")
    if not scheme.needs_numbers:
        return scheme
    if isinstance(scheme.activation, StaticFP8):
        return replace(scheme, activation=StaticFP8(fp8_static_from_range(found.low, found.high)))
    return replace(scheme, activation=StaticInt8(*static_from_range(found.low, found.high)))


def _without_activation(scheme: Scheme) -> Scheme:
    return replace(scheme, activation=None, output=None)
