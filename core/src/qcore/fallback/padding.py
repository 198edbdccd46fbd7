"""Images that oneDNN's convolutions cannot be given as they are, and the padding done beforehand for them.

If all taps of a result fall into the padding, oneDNN (as of torch 2.13) reads beside the image: a crash, or numbers
from there. That takes a stride or dilation that steps over a narrow image, or padding beyond the kernel;
torch.nn.Conv2d crashes alike. In int8 and bfloat16 it also misplaces the taps of groups of one input channel if a
stride above 1 leaves one result. ``tests/core/fallback/test_fuzz_conv2d.py`` sweeps over geometries for other faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor
from torch.nn import functional as F

from ..contracts import Conv2dRequest


@lru_cache(maxsize=4096)
def sees_padding_alone(size: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether some result along an axis has all of its taps in the padding."""
    if not padding:
        return False
    reach = dilation * (kernel - 1) + 1
    starts = range(-padding, size + padding - reach + 1, stride)
    return any(all(not 0 <= tap < size for tap in range(start, start + reach, dilation)) for start in starts)


@lru_cache(maxsize=4096)
def gives_one(size: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether an axis gives one result although the stride is above 1."""
    return stride > 1 and size + 2 * padding - dilation * (kernel - 1) - 1 < stride


def is_misread(
    image: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> bool:
    """Whether an image ``(H, W)`` needs `padded` for a kernel ``(OC, IC/groups, KH, KW)``."""
    axes = (image, kernel[2:], stride, padding, dilation)
    return any(map(sees_padding_alone, *axes)) or (kernel[1] == 1 and any(map(gives_one, *axes)))


def may_be_misread(request: Conv2dRequest) -> bool:
    """Whether `is_misread` holds for an image of some size."""
    if request.in_channels == request.groups and max(request.stride) > 1:
        return True
    axes = zip(request.kernel_size, request.stride, request.padding, request.dilation, strict=True)
    # No kernel steps over an image of ``dilation`` pixels or more.
    return any(sees_padding_alone(size, *axis) for axis in axes for size in range(1, axis[3] + 1))


def padded(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], value: int
) -> tuple[Tensor, list[int]]:
    """Pad x with ``value``; returns it with the strides to convolve it with.

    An axis that gives one result is cut to the kernel's window and has stride 1.
    """
    (ph, pw), strides = padding, list(stride)
    x = F.pad(x, (pw, pw, ph, ph), value=value)
    for axis in (0, 1):
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        if x.shape[axis + 2] < reach + stride[axis]:
            x, strides[axis] = x.narrow(axis + 2, 0, reach), 1
    return x, strides


def float_conv2d(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """`torch.nn.functional.conv2d` for images of every size on a CPU."""
    if is_misread(x.shape[2:], kernel.shape, stride, padding, dilation):
        x, stride = padded(x, kernel.shape[2:], stride, padding, dilation, 0)
        padding = (0, 0)
    return F.conv2d(x, kernel, bias, stride, padding, dilation, groups)


def traced_conv2d(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """`float_conv2d` for a graph, which knows no sizes: the result is contiguous."""
    return float_conv2d(x, kernel, bias, stride, padding, dilation, groups).contiguous()
