"""Calls whose activations are larger than the device takes at once, or than its memory: they go in parts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from contract_problems import one_thread  # noqa: F401

import qcore
from qcore.contracts import CONV2D, Problem
from qcore.nn import QuantizedConv2d
from qcore.weights.schemes import Scheme
from qcore_vulkan import calls
from qcore_vulkan.conv2d import VulkanConv2d
from qcore_vulkan.native import OutOfMemory
from qcore_vulkan.parts import Box, in_boxes
from qcore_vulkan.steps import Geometry2d

SCHEMES = ("w8a16", "w4a16-g32-asym", "w8a8-aasym", "w4a8-g32", "w8a8-static-o8")


def results(box: Box) -> list[tuple[int, int, int]]:
    return list(product(*(range(*span) for span in box)))


@pytest.mark.parametrize("most", [1, 2, 5, 7, 20, 35, 40, 1000])
@pytest.mark.parametrize("runs_out", [False, True], ids=["", "memory"])
def test_boxes_make_up_the_result_in_order(most, runs_out):
    """Whether too large boxes are known beforehand or tried in vain."""
    done = []

    def run(box):
        found = results(box)
        if len(found) > most:
            assert runs_out
            raise OutOfMemory("no memory")
        done.extend(found)

    in_boxes((3, 5, 7), lambda sizes: runs_out or sizes[0] * sizes[1] * sizes[2] <= most, run)
    assert done == list(product(range(3), range(5), range(7)))


def test_out_of_memory_for_a_single_result_is_passed_on():
    def run(box):
        raise OutOfMemory("no memory")

    with pytest.raises(OutOfMemory):
        in_boxes((1, 2, 2), lambda _: True, run)


def test_nothing_to_do():
    in_boxes((0, 5, 7), lambda _: True, lambda _: pytest.fail("there is no image"))


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry2d((3, 3), (1, 1), (1, 1), (1, 1), 1),
        Geometry2d((1, 5), (2, 3), (3, 0), (1, 2), 1),
        Geometry2d((2, 4), (5, 1), (0, 6), (3, 1), 1),
        Geometry2d((1, 1), (1, 1), (2, 1), (1, 1), 1),
    ],
    ids=["same", "strided", "skips", "padding-only"],
)
def test_parts_of_a_geometry(geometry):
    """Every rectangle of a result is the convolution of the pixels that are named, padded as is said."""
    x = torch.randn(1, 1, 8, 9, dtype=torch.float64)
    w = torch.randn(1, 1, *geometry.kernel, dtype=torch.float64)
    whole = torch.nn.functional.conv2d(x, w, None, geometry.stride, geometry.padding, geometry.dilation)
    height, width = geometry.output(8, 9)
    spans = [[(a, b) for b in range(n + 1) for a in range(b)] for n in (height, width)]
    for rows, columns in product(*spans):
        part, ys, xs = geometry.part((8, 9), rows, columns)
        assert part.output(ys[1] - ys[0], xs[1] - xs[0]) == (rows[1] - rows[0], columns[1] - columns[0])
        (above, left), (below, right) = part.padding, part.after or part.padding
        pixels = torch.nn.functional.pad(x[..., slice(*ys), slice(*xs)], (left, right, above, below))
        y = torch.nn.functional.conv2d(pixels, w, None, geometry.stride, 0, geometry.dilation)
        torch.testing.assert_close(y, whole[..., slice(*rows), slice(*columns)])


def test_the_whole_image_is_left_as_it_is():
    geometry = Geometry2d((3, 3), (2, 2), (1, 1), (1, 1), 1)
    assert geometry.part((8, 9), (0, 4), (0, 5)) == (geometry, (0, 8), (0, 9))
    assert geometry.part((8, 9), (0, 4), (0, 5))[0] is geometry


def convolved(problem: Problem) -> torch.Tensor:
    kernel = VulkanConv2d(problem.request)
    return kernel(problem.x, kernel.pack(problem.weight), problem.bias)


@pytest.mark.parametrize("most", [1, 3000, 12000], ids=["positions", "rows", "images"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_images_too_large_for_the_device(scheme, most, monkeypatch, device):
    """With one byte every result goes alone."""
    boxes, of = [], calls._conv2d
    monkeypatch.setattr(calls, "LARGEST", most)
    monkeypatch.setattr(calls, "_conv2d", lambda *arguments: boxes.append(arguments) or of(*arguments))
    problems = [case.build(3) for case in CONV2D.cases([Scheme.parse(scheme)], [torch.float32])]
    problems = [problem for problem in problems if problem.x.numel() and (most > 1 or problem.x.numel() < 300)]
    for problem in problems:
        verdict = CONV2D.judge(problem, convolved(problem))
        assert verdict.ok, verdict.message
    assert len(boxes) > len(problems)
    assert device.stats().messages == 0


def test_a_layer_convolves_an_image_that_no_single_buffer_holds(monkeypatch):
    """Through the layer. Rows at the top, inside and at the bottom of the image have a program each."""
    with qcore.using("vulkan", strict=True):
        layer = QuantizedConv2d.from_float(torch.nn.Conv2d(4, 6, 3, padding=1), "w8a16").requires_grad_(False)
    x = torch.randn(1, 4, 128, 16)
    expected = layer(x)
    made, of = [], calls._conv2d
    monkeypatch.setattr(calls, "_conv2d", lambda *arguments: made.append(arguments[-1]) or of(*arguments))
    monkeypatch.setattr(calls, "LARGEST", 32 * 16 * 32)
    torch.testing.assert_close(layer(x), expected)
    assert len(made) == 3
    torch.testing.assert_close(layer(x), expected)
    assert len(made) == 3
