"""Convolutions, pooling and norms of images in compiled graphs, against torch in float64."""

import dataclasses
import itertools

import pytest
import torch
from graph_backends import part_of_call
from torch.nn import functional as F

from qcore_vulkan.graphs import support
from qcore_vulkan.graphs.program import Program


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def check(function, *args, tolerance=1e-5):
    """The device computes what torch does in float64, from float32."""
    part, tensors, called, _ = part_of_call(function, args)
    assert not [why for node in called if (why := support.why_not(node))]
    found = Program(part)(tensors)
    expected = function(*(x.double() if x.is_floating_point() else x for x in args))
    for y, wanted in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert y.shape == wanted.shape
        torch.testing.assert_close(y.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("channels", "columns", "groups"), [
    (1, 1, 1), (3, 5, 1), (16, 9, 1), (6, 6, 6), (4, 8, 4), (6, 9, 3), (40, 12, 2),
])  # fmt: skip
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (2, 5), (7, 1)])
def test_convolutions(channels, columns, groups, kernel):
    x, w, bias = drawn(2, channels, 9, 7), drawn(columns, channels // groups, *kernel), drawn(columns)
    for stride, padding, dilation in itertools.product((1, (3, 2)), (0, (3, 2)), (1, (1, 2))):
        if kernel[1] == 5 and dilation != 1 and padding == 0:
            continue  # larger than the image
        check(lambda x, w, b, a=(stride, padding, dilation): F.conv2d(x, w, b, *a, groups), x, w, bias)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (3, 4)])
def test_transposed_convolutions(groups, kernel):
    x, w, bias = drawn(2, 6, 5, 4), drawn(6, 2, *kernel), drawn(2 * groups)
    for stride, padding, dilation in itertools.product((1, 2, (3, 2)), (0, (1, 0)), (1, (1, 2))):
        more = 0 if stride == 1 else (1, 0)
        args = (stride, padding, more, groups, dilation)
        if padding and kernel == (1, 1):
            continue
        check(lambda x, w, b, a=args: F.conv_transpose2d(x, w, b, *a), x, w, bias)
    check(lambda x, w: F.conv_transpose1d(x[:, :, 0], w[:, :, 0], None, 2, 0, 1, groups), x, w)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_of_sequences(bias, groups):
    x, w, b = drawn(2, 4, 11), drawn(6, 4 // groups, 3), drawn(6)
    check(lambda x, w, b: F.conv1d(x, w, b if bias else None, 2, 1, 2, groups), x, w, b)
    check(lambda x, w: F.conv1d(x[0], w, padding="same", groups=groups), x, w)


def test_convolutions_of_views():
    x, w = drawn(2, 9, 8, 6).permute(0, 3, 1, 2)[:, ::2, 1:], drawn(4, 3, 3, 3).transpose(0, 1)[:3].transpose(0, 1)
    check(lambda x, w: F.conv2d(x, w, w[:, 0, 0, 0], padding=1), x, w)
    check(lambda x, w: F.conv2d(x[:1].expand(3, -1, -1, -1), w.mT, padding=1), x, w)
    check(lambda x, w: F.conv2d(x[1], w), x, w)


def test_long_sums():
    x, w = drawn(1, 600, 3, 3) + 1, drawn(5, 600, 3, 3) + 1
    check(lambda x, w: F.conv2d(x, w, padding=1), x, w)


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
@pytest.mark.parametrize("cores", [1, 20, 1000])
def test_large_images_and_many_channels(device, monkeypatch, profile, cores):
    limits = dataclasses.replace(device.description.limits, cores=cores)
    monkeypatch.setattr(device, "description", dataclasses.replace(device.description, limits=limits))
    monkeypatch.setattr(device, "profile", profile)
    check(lambda x, w: F.conv2d(x, w, padding=1), drawn(2, 3, 40, 33), drawn(67, 3, 3, 3))


@pytest.mark.parametrize(("function", "reason"), [
    (lambda x: F.conv_transpose3d(x[None], x[:1, :1, :2, :2, None].repeat(2, 1, 1, 1, 1)), "3 dimensions"),
    (lambda x: F.conv3d(x[None], x[:1, :1, :2, :2, None].repeat(1, 2, 1, 1, 1)), "3 dimensions"),
    (lambda x: F.conv2d(x, x[:1, :, :2, :2], stride=70000), "70000"),
    (lambda x: F.avg_pool2d(x, 2, stride=70000), "70000"),
])  # fmt: skip
def test_refused(function, reason):
    x = drawn(2, 4, 5, 6)
    assert any(reason in support.why_not(node) for node in part_of_call(function, (x,))[2])


POOLED = drawn(2, 3, 11, 9)
WINDOWS = [((3, 3), 2, 1), ((2, 3), None, 0), ((3, 2), (1, 3), (1, 0)), ((5, 5), 3, 2)]


@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
@pytest.mark.parametrize("ceil", [False, True])
def test_largest_of_windows(kernel, stride, padding, ceil):
    for dilation in (1, (2, 1)):
        for indexed in (False, True):
            check(
                lambda x, d=dilation, i=indexed: F.max_pool2d(x, kernel, stride, padding, d, ceil, i),
                POOLED,
                tolerance=0,
            )
    x = POOLED.clone()
    x[0, 0, 3, 3], x[1] = float("nan"), -float("inf")
    check(lambda x: F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil), x, tolerance=0)


@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_means_of_windows(kernel, stride, padding, ceil, padded):
    for divisor in (None, 5):
        check(lambda x, d=divisor: F.avg_pool2d(x, kernel, stride, padding, ceil, padded, d), POOLED)


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (4, 9), (13, 2)])
def test_windows_that_divide_the_image(size):
    check(lambda x: F.adaptive_avg_pool2d(x, size), POOLED)
    check(lambda x: F.adaptive_avg_pool2d(x[0].mT, size), POOLED)
    check(lambda x: F.adaptive_max_pool2d(x, size, True), POOLED, tolerance=0)


def test_pooling_of_sequences_and_views():
    x = drawn(3, 4, 13)
    check(lambda x: (F.max_pool1d(x, 3, 2, 1), F.avg_pool1d(x.mT, 2), F.adaptive_avg_pool1d(x[0], 5)), x)
    check(lambda x: F.max_pool2d(x[:, ::2].permute(0, 1, 3, 2), 2), POOLED)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 5), (3, 6, 4, 5)])
def test_batch_norms(affine, shape):
    x, p = drawn(*shape), drawn(4, 6)
    own = (lambda p: (p[2], p[3])) if affine else (lambda p: (None, None))
    check(lambda x, p: F.batch_norm(x, p[0] * 30, p[1].abs() + 0.1, *own(p), False), x, p)
    if len(shape) == 4:
        check(
            lambda x, p: F.batch_norm(F.conv2d(x, x[:, :, :2, :3].repeat(2, 1, 1, 1)), p[0], p[1].abs(), *own(p)), x, p
        )
        check(lambda x, p: F.batch_norm(F.conv2d(x, x[:, :, :1, :1], p[0, :3]), p[0, :3], p[1, :3].abs()).relu(), x, p)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norms(affine, groups):
    x, p = drawn(3, 6, 4, 5), drawn(2, 6)
    check(lambda x, p: F.group_norm(x, groups, *((p[0], p[1]) if affine else ())), x, p)


@pytest.mark.parametrize("affine", [False, True])
def test_norms_with_statistics_of_their_own(affine):
    x, p = drawn(3, 6, 4, 5), drawn(2, 6)
    own = (lambda p: (p[0], p[1])) if affine else (lambda p: (None, None))
    check(lambda x, p: F.instance_norm(x, None, None, *own(p)), x, p)
    check(lambda x, p: F.batch_norm(F.conv2d(x, x[:, :, :2, :2].repeat(2, 1, 1, 1)), None, None, *own(p), True), x, p)
    check(lambda x, p: torch.ops.aten._native_batch_norm_legit.no_stats(x, *own(p), True, 0.1, 1e-5)[0], x, p)
    kept = part_of_call(lambda x, p: F.batch_norm(x, p[0], p[1], None, None, True), (x, p))[2]
    assert any("keeps statistics" in support.why_not(node) for node in kept)
