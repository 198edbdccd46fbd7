"""A small shader, what it computes, and programs of it: tests of the runtime need no kernel of the package."""

from __future__ import annotations

import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from qcore_vulkan.builder import Builder, Place, Program, fold
from qcore_vulkan.device import Device

SCALE = """
#version 450
layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint factor = 2;
layout(push_constant) uniform Push { uint count; float added; };
layout(set = 0, binding = 0) readonly buffer From { float from[]; };
layout(set = 0, binding = 1) writeonly buffer To { float to[]; };
void main() {
  uint group = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
  uint i = group * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
  if (i < count) to[i] = from[i] * float(factor) + added;
}
"""
FLOAT64 = """
#version 450
layout(local_size_x = 1) in;
layout(set = 0, binding = 0) buffer To { double to[]; };
void main() { to[0] *= 2.0; }
"""
LANES = 64


@lru_cache
def module(name: str = "SCALE") -> bytes:
    """SPIR-V of a source of this file."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, f"{name}.comp"), Path(folder, f"{name}.spv")
        source.write_text(globals()[name])
        subprocess.run(["glslc", "-O", "--target-env=vulkan1.1", str(source), "-o", str(target)], check=True)
        return target.read_bytes()


def pipeline(device: Device, factor: int = 3) -> int:
    return device.compile(module(), (LANES, factor))


def chain(device: Device, rows: int, columns: int, pitch: int = 0, steps: int = 2, **options) -> Program:
    """x -> 3 x + 0.5, ``steps`` times through scratch; rows of ``pitch`` floats in INPUT and OUTPUT."""
    pitch = pitch or columns
    count, scale = rows * pitch, pipeline(device)
    b = Builder(device)
    first, target = b.input(4 * count), b.output(4 * count)
    source = first
    for number in range(steps):
        to = target if number == steps - 1 else b.scratch(4 * count)
        b.launch(scale, fold(-(-count // LANES)), (count, 0.5), (source, to))
        source = to
    place = (rows, 4 * columns, 4 * pitch)
    return b.program([Place(first, *place)], [Place(target, *place)], **options)


def expected(x: torch.Tensor, steps: int = 2) -> torch.Tensor:
    for _ in range(steps):
        x = 3 * x + 0.5
    return x
