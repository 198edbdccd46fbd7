"""Explicit padding of images that oneDNN's convolutions read out of bounds.

If all taps of an output fall into the padding, oneDNN (as of torch 2.13) reads outside of the image and crashes or
returns garbage. This needs a stride or dilation that steps over a narrow image, or padding larger than the kernel;
torch.nn.Conv2d crashes, too. In int8 and bfloat16, oneDNN also misplaces the taps of groups of one input channel if a
stride above 1 leaves a single output. ``tests/core/fallback/test_fuzz_conv2d.py`` sweeps geometries for other defects.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor
from torch.nn import functional as F

from ..contracts import Conv2dRequest


@lru_cache(maxsize=4096)
def has_output_in_padding(size: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether some output along an axis has all of its taps in the padding."""
    if not padding:
        return False
    reach = dilation * (kernel - 1) + 1
    starts = range(-padding, size + padding - reach + 1, stride)
    return any(all(not 0 <= tap < size for tap in range(start, start + reach, dilation)) for start in starts)


@lru_cache(maxsize=4096)
def has_one_strided_output(size: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether an axis has a single output although its stride is above 1."""
    return stride > 1 and size + 2 * padding - dilation * (kernel - 1) - 1 < stride


def needs_explicit_padding(
    image: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> bool:
    """Whether an image ``(H, W)`` needs `pad_image` for a kernel ``(OC, IC/groups, KH, KW)``."""
    axes = (image, kernel[2:], stride, padding, dilation)
    return any(map(has_output_in_padding, *axes)) or (kernel[1] == 1 and any(map(has_one_strided_output, *axes)))


def may_need_explicit_padding(request: Conv2dRequest) -> bool:
    """Whether `needs_explicit_padding` holds for images of any size."""
    if request.in_channels == request.groups and max(request.stride) > 1:
        return True
    axes = zip(request.kernel_size, request.stride, request.padding, request.dilation, strict=True)
    # No kernel steps over an image of ``dilation`` pixels or more.
    return any(has_output_in_padding(size, *axis) for axis in axes for size in range(1, axis[3] + 1))


def pad_image(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], value: int
) -> tuple[Tensor, list[int]]:
    """Pad x with ``value``; returns the padded image and the strides to convolve it with.

    An axis with a single output is cropped to the kernel's window and gets stride 1.
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
    """`torch.nn.functional.conv2d`, correct for images of every size on a CPU."""
    if needs_explicit_padding(x.shape[2:], kernel.shape, stride, padding, dilation):
        x, stride = pad_image(x, kernel.shape[2:], stride, padding, dilation, 0)
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
    """`float_conv2d` for graphs, in which sizes are unknown: the result is always contiguous."""
    return float_conv2d(x, kernel, bias, stride, padding, dilation, groups).contiguous()
