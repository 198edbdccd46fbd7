"""`conv2d` as steps on a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from vulkan_problems import assert_right, run_conv2d, vulkan  # noqa: F401

from qcore import PluginError, StaticInt8
from qcore.contracts import CONV2D, Conv2dRequest, Problem
from qcore.contracts.inputs import Draw
from qcore.weights.schemes import SCHEMES, Scheme
from qcore_vulkan import layout
from qcore_vulkan.steps import Geometry2d, convolution, rows
from qcore_vulkan.steps.direct import is_direct

CPU = torch.device("cpu")


def drawn(request: Conv2dRequest, size: tuple[int, int, int]) -> Problem:
    draw = Draw(torch.Generator().manual_seed(5))
    x = draw.activations((size[0], request.in_channels, *size[1:]), request.x_dtype, "normal", "dense")
    return Problem(request, x, draw.weight(request.n, request.k, request.weight))


def request_of(scheme: str, channels: int, out: int, **geometry) -> Conv2dRequest:
    draw = Draw(torch.Generator().manual_seed(6))
    s = draw.fill(Scheme.parse(scheme))
    sizes = {"kernel_size": (3, 3), "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, **geometry}
    result = torch.int8 if s.output else torch.float32
    return Conv2dRequest(
        CPU, torch.float32, result, channels, out, **sizes, weight=s.weight, activation=s.activation, output=s.output,
        bias=False, training=False,
    )  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cases_of_the_contract(vulkan, scheme):  # noqa: F811
    for case in CONV2D.cases([Scheme.parse(scheme)], [torch.float32]):
        problem = case.build(1)
        if problem.x.numel():
            assert_right(vulkan, problem)
    assert vulkan.stats().messages == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["w8a16", "w8a8-static"])
def test_narrow_floats(vulkan, scheme, dtype):  # noqa: F811
    for case in CONV2D.cases([Scheme.parse(scheme)], [dtype]):
        problem = case.build(2)
        if problem.x.numel():
            assert_right(vulkan, problem)


@pytest.mark.parametrize("scheme", ["w8a8-static", "w8a16", "w4a8-g32-o8"])
def test_positions_are_cut_where_columns_would_grow_large(vulkan, scheme, monkeypatch):  # noqa: F811
    """Parts of 64 positions begin anywhere in an image, or in the next one."""
    monkeypatch.setattr(rows, "_LARGEST", 1)
    request = request_of(scheme, 6, 10, stride=(2, 1), padding=(1, 2), groups=2)
    assert_right(vulkan, drawn(request, (3, 13, 11)))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16-g32"])
def test_images_are_copied_to_a_device_behind_a_bus(vulkan, scheme, monkeypatch):  # noqa: F811
    monkeypatch.setattr(vulkan, "description", replace(vulkan.description, local_input=False))
    assert_right(vulkan, drawn(request_of(scheme, 6, 10, padding=(1, 1)), (2, 5, 7)))


@pytest.mark.parametrize("channels", [3, 8])
def test_images_of_codes_are_padded_with_their_zero_point(vulkan, channels):  # noqa: F811
    request = request_of("w8a8-static", channels, 5, padding=(1, 1))
    request = replace(request, x_dtype=torch.int8, activation=StaticInt8(0.1, 17))
    assert_right(vulkan, drawn(request, (2, 5, 6)))


GROUPED = ("w8a16-g5-asym", "w4a16-g8-fzp", "w8a8-aasym", "w4a8-g32-fzp-aasym", "w8a8-static-o8", "w4a8-asym")


@pytest.mark.parametrize("scheme", GROUPED)
@pytest.mark.parametrize(("channels", "out", "groups"), [(40, 80, 40), (6, 20, 2), (8, 14, 2)])
def test_channel_groups(vulkan, scheme, channels, out, groups):  # noqa: F811
    """Those with few output channels are computed one result at a time, others in tiles."""
    assert is_direct(weight_of(vulkan, scheme, out), groups) == (out // groups < 8)
    assert_right(vulkan, drawn(request_of(scheme, channels, out, padding=(1, 1), groups=groups), (2, 6, 5)))


def weight_of(device, scheme: str, n: int) -> layout.DeviceWeight:
    return layout.upload(device, Draw(torch.Generator()).weight(n, 16, Scheme.parse(scheme).weight))


def test_channel_groups_of_a_weight_in_parts_are_refused(vulkan, monkeypatch):  # noqa: F811
    monkeypatch.setattr(layout, "rows_per_part", lambda *_: 8)
    with pytest.raises(PluginError, match="one buffer"):
        run_conv2d(vulkan, drawn(request_of("w8a8", 4, 20, groups=2), (1, 4, 4)))


def test_columns_too_long_to_find_the_way_in_are_refused(vulkan, monkeypatch):  # noqa: F811
    monkeypatch.setattr(convolution, "_MOST_COLUMNS", 35)
    with pytest.raises(PluginError, match="columns of 36 values"):
        run_conv2d(vulkan, drawn(request_of("w8a8", 4, 20), (1, 4, 4)))


def test_sizes_of_results():
    g = Geometry2d((3, 5), (2, 1), (1, 0), (1, 2), 1)
    image = torch.nn.functional.conv2d(torch.zeros(1, 1, 9, 20), torch.zeros(1, 1, 3, 5), None, (2, 1), (1, 0), (1, 2))
    assert g.output(9, 20) == tuple(image.shape[2:])
    assert not g.is_pointwise
    assert Geometry2d((1, 1), (1, 1), (0, 0), (3, 3), 1).is_pointwise
