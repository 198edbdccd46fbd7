"""`NeutralLinear`: a quantized linear layer whose weight stays in the neutral format, as frozen parameters.

Tools that shard, gather or load parameters (FSDP2, torch.distributed.checkpoint) see each tensor of the weight. Nothing
is packed, because such tools replace the memory of parameters between calls: the layer runs in plain torch ops that
read the neutral tensors.
"""

# ruff: noqa: SLF001 - reads the store and dtype of quantized layers, and torch's tables

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..contracts import LinearRequest
from ..discovery.kernels import Kernel
from ..errors import FormatError
from ..formats.tracing import without_base
from ..functional.autograd import call_differentiably, needs_derivatives
from ..functional.checks import check_bias, check_dense, check_last_dimension, check_x_dtype
from ..resolving.binding import WeightStore
from ..weights.qtensor import QTensor
from ..weights.quantizers import quantize
from ..weights.schemes import Scheme
from . import state_notes
from .base import FLOATS, adopt_hooks, static_parameters, with_static_parameters
from .linear import QuantizedLinear


class WeightParts(nn.Module):
    """The tensors of a quantized weight: ``data``, ``scale``, and the others if it has them.

    All are frozen parameters, except ``global_scale``, a buffer.
    """

    def __init__(self, weight: QTensor) -> None:
        super().__init__()
        self.shape, self.format, self.quantizer = weight.shape, weight.format, weight.quantizer
        self.dtypes = {name: tensor.dtype for name, tensor in weight.tensors().items()}
        for name, tensor in weight.tensors().items():
            # FSDP2 shards no scalars.
            value = tensor.detach().reshape(1) if not tensor.dim() else tensor.detach()
            if name == "global_scale":  # of four bytes, and not to be cast by a policy of mixed precision
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def qtensor(self) -> QTensor:
        """The weight in the memory that the parameters have now; dtypes and shapes are checked, values are not.

        Raises `FormatError` for parameters that are sharded, or that a tool has cast.
        """
        held: dict[str, Any] = {**self._parameters, **self._buffers}
        found = {name: _uncast(_local(tensor), self.dtypes[name]) for name, tensor in held.items()}
        cast = next((name for name, t in found.items() if t.dtype != self.dtypes[name]), "")
        if cast:
            raise FormatError(
                f"weight.{cast} was cast to {found[cast].dtype}; it is stored as {self.dtypes[cast]}.\n"
                f"Under FSDP2, pass no MixedPrecisionPolicy(param_dtype=...), or quantize with scales of that dtype."
            )
        if "global_scale" in found:
            found["global_scale"] = found["global_scale"].reshape(())
        made = object.__new__(QTensor)
        facts = {"shape": self.shape, "format": self.format, "quantizer": self.quantizer}
        for name in QTensor.__dataclass_fields__:
            object.__setattr__(made, name, found.get(name, facts.get(name)))
        made._check_form()
        return made

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WeightParts:
        def moved(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            return changed if changed.dtype == tensor.dtype else tensor.to(changed.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Describe the weight for ``print(model)``."""
        return f"{tuple(self.shape)}, {self.format}"


class NeutralLinear(nn.Module):
    """``y = A(x) @ W^T + bias`` with a weight that stays in the neutral format; see `QuantizedLinear` for x and y.

    Children: ``weight``, with the frozen parameters ``weight.data``, ``weight.scale`` and so on, as they are called in
    a state dict of a `QuantizedLinear`: state dicts of the two fit each other. ``fully_shard`` of FSDP2 shards them,
    and adapters beside the layer train. Slower than `QuantizedLinear`; `packed` makes one.
    """

    def __init__(self, weight: QTensor, bias: Tensor | None, scheme: Scheme, dtype: torch.dtype) -> None:
        super().__init__()
        if weight.dim() != 2:
            raise FormatError(f"weight has shape {tuple(weight.shape)}; a linear layer has (N, K).")
        if scheme.needs_numbers:
            raise FormatError(f"scheme {str(scheme)!r} lacks its scale and zero point; calibrate the layer first.")
        self.out_features, self.in_features = weight.shape
        self.scheme = replace(scheme, weight=weight.format)
        self.compute_dtype = dtype if dtype in FLOATS else torch.float32
        self.weight = WeightParts(weight)
        trained = bias is not None and bias.requires_grad
        own = bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias, requires_grad=trained)
        self.register_parameter("bias", own)
        self._kernels: dict[LinearRequest, Kernel] = {}

    @classmethod
    def from_qtensor(
        cls,
        weight: QTensor,
        bias: Tensor | None = None,
        scheme: Scheme | str | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> NeutralLinear:
        """Wrap a quantized weight ``(N, K)``; arguments as for `QuantizedLinear.from_qtensor`."""
        wanted = Scheme(weight.format) if scheme is None else Scheme.parse(scheme)
        return cls(weight, bias, wanted, dtype or weight.dtype)

    @classmethod
    def from_float(cls, module: nn.Linear, scheme: Scheme | str, *, name: str = "weight") -> NeutralLinear:
        """Quantize a `torch.nn.Linear`. Raises `FormatError` for NaN or Inf in the weight, naming ``name``."""
        wanted = Scheme.parse(scheme)
        weight = quantize(module.weight, wanted.weight, wanted.quantizer, name=name)
        return adopt_hooks(cls(weight, module.bias, wanted, module.weight.dtype), module)

    @classmethod
    def from_linear(cls, layer: QuantizedLinear) -> NeutralLinear:
        """Unpack a `QuantizedLinear`, which keeps its own tensors; the bias is shared."""
        weight = layer._store.neutral().map(lambda t: t.detach().clone())
        return adopt_hooks(cls(weight, layer.bias, layer.scheme, layer._dtype), layer)

    def packed(self) -> QuantizedLinear:
        """A `QuantizedLinear` with this weight, packed for the best kernel of its device. Shares the bias."""
        weight = self.weight.qtensor().map(lambda t: t.detach().clone())
        bias: Any = self.bias
        return adopt_hooks(QuantizedLinear(WeightStore(weight), self.scheme, bias, self.compute_dtype), self)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer. Raises `FormatError` if the last dimension of x is not ``in_features``."""
        bias: Any = self.bias
        weight = self.weight.qtensor()
        self._check(x, bias, weight.device)
        kind = x.device.type
        if x.is_floating_point() and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        trains = self.scheme.output is None and needs_derivatives(x, bias)
        request = self._request(x, weight, bias is not None, trains)
        kernel = self._kernel(request, weight)
        if request.training:
            return call_differentiably(x, bias, _Reading(kernel, self.weight), {}, request)  # type: ignore[arg-type]
        return without_base(kernel(x, kernel.pack(weight), bias))

    def _check(self, x: Tensor, bias: Tensor | None, device: torch.device) -> None:
        check_dense("x", x, device)
        check_x_dtype(x, self.scheme.activation)
        check_last_dimension(x, self.in_features, "in_features")
        check_bias(bias, self.out_features, device)

    def _request(self, x: Tensor, weight: QTensor, bias: bool, training: bool) -> LinearRequest:
        scheme = self.scheme
        out = torch.int8 if scheme.output else x.dtype if x.is_floating_point() else self.compute_dtype
        sizes = (self.out_features, self.in_features, None)
        return LinearRequest(
            weight.device, x.dtype, out, *sizes, scheme.weight, scheme.activation, scheme.output, bias, training
        )

    def _kernel(self, request: LinearRequest, weight: QTensor) -> Kernel:
        kernel = self._kernels.get(request)
        if kernel is None:
            from ..fallback.plain_linear import PlainLinear
            from ..resolving.ordering import OrderedKernel

            plain: Kernel = PlainLinear(request)
            kernel = plain if weight.order is None else OrderedKernel(plain, plain.name, plain.packing)
            self._kernels[request] = kernel
        return kernel

    # State: the same names as a QuantizedLinear.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self._static_parameters():
            destination[prefix + name] = value
        notes, weight = getattr(destination, "_metadata", {}).get(prefix[:-1]), self.weight
        has_order = "order" in weight.dtypes
        state_notes.describe(notes, weight.format, weight.shape, weight.quantizer, self.scheme, has_order=has_order)

    def _static_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, part in (("input", self.scheme.activation), ("output", self.scheme.output)):
            for name, dtype in static_parameters(part).items():
                yield f"{prefix}_{name}", torch.tensor(getattr(part, name), dtype=dtype)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        try:
            state_notes.check_format(local_metadata, self.weight.format, self.weight.shape[-1])
        except FormatError as error:
            args[-1].append(f"{prefix}weight: {error}")
            return
        own = {name: state_dict[prefix + name] for name, _ in self._static_parameters() if prefix + name in state_dict}
        rest = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in own}
        super()._load_from_state_dict(rest, prefix, local_metadata, *args)
        for field, name in (("activation", "input"), ("output", "output")):
            part: Any = getattr(self.scheme, field)
            given = {key: own[f"{name}_{key}"] for key in static_parameters(part) if f"{name}_{key}" in own}
            if given and given.keys() == static_parameters(part).keys():
                self.scheme = replace(self.scheme, **{field: with_static_parameters(part, given)})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernels": {}}

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme}"


class _Reading:
    """A kernel that reads the parameters at each call: FSDP2 frees them between forward and backward."""

    def __init__(self, kernel: Kernel, parts: WeightParts) -> None:
        self._kernel, self._parts = kernel, parts

    def __call__(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:  # noqa: ARG002 - a kernel's arguments
        return self._kernel(x, self._kernel.pack(self._parts.qtensor()), bias)

    def unpack(self, packed: Any) -> QTensor:  # noqa: ARG002
        return self._parts.qtensor()


def _uncast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales of 8 bits that FSDP2 has cast to bfloat16 or float32, which is exact, as they were."""
    small = dtype.is_floating_point and dtype.itemsize == 1
    return tensor.to(dtype) if small and tensor.dtype in (torch.bfloat16, torch.float32) else tensor


def _local(parameter: Any) -> Tensor:
    """The memory behind a parameter; a DTensor that is replicated gives its own."""
    if not hasattr(parameter, "placements"):
        found: Tensor = parameter.detach()
        return found
    if any(not placement.is_replicate() for placement in parameter.placements):
        raise FormatError(
            "the weight is sharded over ranks, so this layer cannot run.\n"
            "Call the module that fully_shard was applied to, which gathers it."
        )
    return parameter.to_local().detach()  # type: ignore[no-any-return]
