"""Validate the arguments of a call before any kernel sees them; errors name the argument and the expected form.

Kernels receive valid arguments only, so an exception in a kernel's first call is the kernel's own fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..contracts import Conv2dRequest, Request
from ..contracts.conv2d import check_image
from ..contracts.embedding import check_indices
from ..contracts.grouped import check_offsets
from ..errors import FormatError, UnsupportedError
from ..formats.bits import has_values
from ..weights.activations import (
    INT8_MAX,
    INT8_MIN,
    Activation,
    DynamicFP8,
    DynamicInt8,
    OutputInt8,
    StaticFP8,
    StaticInt8,
)
from ..weights.qtensor import QTensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of x, bias and result; narrower floats are storage formats in which nothing is computed."""
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = "float32, bfloat16, float16 or float64"


def check_module(value: Any, call: str) -> None:
    """Raise `UnsupportedError` unless ``value`` is a module; ``call``: what it was passed to."""
    if not isinstance(value, nn.Module):
        raise UnsupportedError(f"{call} takes a torch.nn.Module, not a {type(value).__name__}; pass the module in it.")


def check_dense(name: str, value: Any, device: torch.device) -> None:
    """Raise `FormatError` unless ``value`` is a plain dense tensor on the weight's ``device``."""
    if not isinstance(value, Tensor):
        raise FormatError(f"{name} must be a torch.Tensor, not a {type(value).__name__}.")
    if value.is_nested or value.layout is not torch.strided or value.is_quantized:
        raise FormatError(f"{name} must be a dense tensor, not {_describe(value)}.")
    if value.device != device and not _same_device(value.device, device):
        verb = "are" if name == "indices" else "is"
        raise FormatError(f"{name} {verb} on {value.device}, the weight on {device}; bring both to one device.")


def _describe(value: Tensor) -> str:
    """Describe a tensor that no kernel accepts, and how to convert it."""
    if value.is_nested:
        return "a nested one; pad it, or call the op once per component"
    if value.is_quantized:
        return f"one of torch's own quantized dtype {value.dtype}; call its dequantize() first"
    return f"one of layout {value.layout}; call its to_dense() first"


def _same_device(a: torch.device, b: torch.device) -> bool:
    # Some backends omit the index of their only device.
    return a.type == b.type and None in (a.index, b.index)


def check_grouped(x: Tensor, offsets: Tensor, bias: Tensor | None, weight: QTensor) -> None:
    """Raise `FormatError` unless x is float ``(T, K)``, offsets are ends, and bias is ``(E, N)`` on one device."""
    e, n, k = weight.shape
    check_dense("x", x, weight.device)
    if x.dim() != 2 or x.shape[1] != k:
        raise FormatError(f"x has shape {tuple(x.shape)}; it must be (T, K) with K={k}, rows sorted by expert.")
    if x.dtype not in FLOAT_DTYPES:
        raise FormatError(f"x has dtype {x.dtype}; it must be {_FLOATS}.")
    check_dense("offsets", offsets, weight.device)
    check_offsets(offsets, e, x.shape[0])
    if bias is not None:
        check_dense("bias", bias, weight.device)
        if tuple(bias.shape) != (e, n) or bias.dtype not in FLOAT_DTYPES:
            raise FormatError(
                f"bias has dtype {bias.dtype} and shape {tuple(bias.shape)}; this weight needs floats {(e, n)}."
            )


def check_weight(weight: Any, dims: int = 2) -> None:
    """Raise `FormatError` unless ``weight`` is a `QTensor` of ``dims`` dimensions."""
    if not isinstance(weight, QTensor):
        raise FormatError(f"weight must be a QTensor, e.g. from qcore.quantize, not a {type(weight).__name__}.")
    if weight.dim() != dims:
        form = "(N, K); qcore.grouped_linear takes (E, N, K)" if dims == 2 else "(E, N, K)"
        raise FormatError(f"weight has shape {tuple(weight.shape)}; this op needs {form}.")


def check_x_dtype(x: Tensor, activation: Activation | None) -> None:
    """Raise `FormatError` unless x is floating-point, or holds int8 codes of a static activation."""
    if x.dtype in FLOAT_DTYPES:
        return
    if x.dtype != torch.int8 or x.is_quantized:
        raise FormatError(f"x has dtype {x.dtype}; it must be {_FLOATS},\nor int8 codes under a static activation.")
    if not isinstance(activation, StaticInt8):
        raise FormatError(
            f"x has dtype int8, but the activation is {activation}: the scale of its codes is unknown.\n"
            f"Pass activation=StaticInt8(scale, zero_point), or pass x as floats."
        )


def check_bias(bias: Any, n: int, device: torch.device) -> None:
    """Raise `FormatError` unless ``bias`` is None, or floats ``(n,)`` on the weight's ``device``."""
    if bias is None:
        return
    check_dense("bias", bias, device)
    if tuple(bias.shape) != (n,):
        raise FormatError(f"bias has shape {tuple(bias.shape)}; this weight needs ({n},).")
    if bias.dtype not in FLOAT_DTYPES:
        raise FormatError(f"bias has dtype {bias.dtype}; it must be {_FLOATS}.")


def check_last_dimension(x: Tensor, k: int, name: str = "K") -> None:
    """Raise `FormatError` unless x is ``(..., k)``."""
    if not x.dim() or x.shape[-1] != k:
        raise FormatError(f"x has shape {tuple(x.shape)}; its last dimension must be {name} = {k}.")


def check_quantization(activation: Any, output: Any, weight: QTensor) -> None:
    """Raise `FormatError` unless weight, activation and output are compatible, and their parameters known."""
    if not (activation is None or isinstance(activation, (DynamicInt8, StaticInt8, DynamicFP8, StaticFP8))):
        raise FormatError(
            f"activation is {activation!r}; it must be None, DynamicInt8(...), StaticInt8(...), DynamicFP8(...) "
            f"or StaticFP8(...)."
        )
    if not (output is None or isinstance(output, OutputInt8)):
        raise FormatError(f"output is {output!r}; it must be None or OutputInt8(scale, zero_point).")
    if output is not None and not isinstance(activation, (DynamicInt8, StaticInt8)):
        raise FormatError(
            "int8 results require int8 activations: pass activation=DynamicInt8() or StaticInt8(...) as well."
        )
    if isinstance(activation, (DynamicInt8, StaticInt8)) and not weight.format.element.is_integer:
        raise FormatError(
            f"int8 activations require integer weights; {weight.format.dtype} weights take float or fp8 activations."
        )
    for name, part in (("activation", activation), ("output", output)):
        if not getattr(part, "is_given", True):
            raise FormatError(f"{name} is {part}, without values; pass scale and zero_point, or per_token=True.")


def check_out_dtype(out_dtype: Any, output: OutputInt8 | None = None) -> None:
    """Raise `FormatError` unless ``out_dtype`` is None, a float dtype, or int8 together with ``output``."""
    if out_dtype is None or (out_dtype in FLOAT_DTYPES and output is None):
        return
    if output is None:
        hint = "\nFor int8 results pass output=OutputInt8(scale, zero_point)." if out_dtype == torch.int8 else ""
        raise FormatError(f"out_dtype is {out_dtype}; it must be {_FLOATS}.{hint}")
    if out_dtype != torch.int8:
        raise FormatError(f"out_dtype is {out_dtype}, but output={output} returns int8 codes; omit out_dtype.")


def check_runtime_params(runtime_params: Mapping[str, Tensor], tokens: int, device: torch.device) -> None:
    """Raise `FormatError` unless per-token parameters are ``(tokens,)`` on the weight's ``device`` with valid values.

    Scales are positive finite floats; zero points are integers in -128..127. Values are checked on a CPU only: on other
    devices the check would synchronize every call.
    """
    for name, value in runtime_params.items():
        check_dense(name, value, device)
        if tuple(value.shape) != (tokens,):
            raise FormatError(f"{name} has shape {tuple(value.shape)}; x has {tokens} tokens: it must be ({tokens},).")
        scale = name.endswith("scale")
        _check_param_dtype(name, value.dtype, FLOAT_DTYPES if scale else (*_INTEGERS, *FLOAT_DTYPES))
        if tokens and value.device.type == "cpu" and has_values(value):
            (_check_scale_values if scale else _check_zero_values)(name, value)


def _check_param_dtype(name: str, dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> None:
    if dtype not in allowed:
        kinds = _FLOATS if allowed is FLOAT_DTYPES else f"int8, int16, int32, int64, {_FLOATS}"
        raise FormatError(f"{name} has dtype {dtype}; it must be {kinds}.")


def _check_scale_values(name: str, scale: Tensor) -> None:
    low, high = (float(v) for v in scale.detach().aminmax())
    if not 0 < low <= high <= torch.finfo(torch.float32).max:  # aminmax propagates NaN, which fails here
        raise FormatError(f"{name} spans {low}..{high}; scales must be positive and finite in float32.")


def _check_zero_values(name: str, zero: Tensor) -> None:
    low, high = (float(v) for v in zero.detach().aminmax())
    if not INT8_MIN <= low <= high <= INT8_MAX:
        raise FormatError(f"{name} spans {low}..{high}; zero points must be in {INT8_MIN}..{INT8_MAX}.")
    if zero.is_floating_point() and not bool((zero == zero.round()).all()):
        raise FormatError(f"{name} holds fractions; zero points must be integers.")


def check_first_call(request: Request, x: Tensor) -> None:
    """Raise for an image smaller than the kernel, or for indices out of range; checked before a first call only.

    Kernels check this at every call themselves. But an exception in a kernel's first call counts as a failure of the
    kernel, so invalid arguments must be ruled out before it.
    """
    if isinstance(request, Conv2dRequest):
        check_image("conv2d", x, request)
    elif request.contract == "embedding" and x.device.type == "cpu" and has_values(x):
        check_indices(x, request.n)
