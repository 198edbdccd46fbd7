"""Linears whose weights are in small groups, on a Vulkan device: bytes of the weight there, and CPU time of a call.

    python benchmarks/vulkan_groups.py [--schemes w4a16-g16,w4a16-g32] [--rows 1,64] [--size 1024x1024] [--seconds 2]

Prints Markdown. Meant for a software device such as lavapipe, whose threads belong to the process: CPU time counts what
they do, whatever else the machine runs. A call is a program of eight products, by the kernel that is selected; the
shortest of its runs within the seconds counts. Compare two checkouts by running this file in turn with each.
"""

from __future__ import annotations

import argparse
import time

import torch
from _table import header, markdown

from qcore import quantize
from qcore.weights.schemes import Scheme
from qcore_vulkan import device as devices
from qcore_vulkan import steps
from qcore_vulkan.builder import Builder, Place, Program
from qcore_vulkan.device import Device
from qcore_vulkan.layout import DeviceWeight, upload
from qcore_vulkan.steps import Rows

_PRODUCTS = 8
_SCHEMES = "w4a16-g16,w8a16-g16,w4a8-g16,w8a8-g16,wfp4a16-g16-e4m3d,w4a16-g32,w8a8-g32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default=_SCHEMES, help="separated by commas")
    parser.add_argument("--rows", default="1,64", help="numbers of rows of x")
    parser.add_argument("--size", default="1024x1024", help="N x K of the weight")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number of rows")
    options = parser.parse_args()
    device, counts = devices.get(), [int(m) for m in options.rows.split(",")]
    n, k = (int(part) for part in options.size.split("x"))
    rows = []
    for text in options.schemes.split(","):
        torch.manual_seed(0)
        scheme = Scheme.parse(text)
        weight = upload(device, quantize(torch.randn(n, k) * 0.02, scheme.weight))
        times = [f"{_cpu_us(device, weight, scheme, m, options.seconds):.1f}" for m in counts]
        rows.append([text, f"{n} x {k}", f"{weight.nbytes / 1024:.0f}", *times])
    d = device.description
    print(header("Vulkan: weights in small groups") + f"\n- Device: {d.name}, driver {d.driver_name} {d.driver_info}\n")
    print(markdown(("scheme", "N x K", "KiB", *(f"M={m}, CPU us" for m in counts)), rows))


def _cpu_us(device: Device, weight: DeviceWeight, scheme: Scheme, m: int, seconds: float) -> float:
    """CPU microseconds of a product of float32 rows ``(m, K)``."""
    geometry = weight.geometry
    x, y = torch.randn(m, geometry.k), torch.empty(m, geometry.n)
    program = _program(Builder(device), weight, scheme, m)
    program.run([x], [y])
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.process_time()
        program.run([x], [y])
        best = min(best, time.process_time() - start)
    return 1e6 * best / _PRODUCTS


def _program(b: Builder, weight: DeviceWeight, scheme: Scheme, m: int) -> Program:
    x, y = _rows(b, m, weight.geometry.k), _rows(b, m, weight.geometry.n)
    given, result = b.input(x.ref.bytes), b.output(y.ref.bytes)
    b.copy(given, x.ref)
    for _ in range(_PRODUCTS):
        mark = b.mark()
        steps.linear(b, x, weight, None, scheme.activation, None, torch.float32, out=y.ref)
        b.rewind(mark)
    b.copy(y.ref, result)
    places = (Place(ref, m, 4 * rows.columns, 4 * rows.pitch) for ref, rows in ((given, x), (result, y)))
    given_place, result_place = places
    return b.program([given_place], [result_place])


def _rows(b: Builder, m: int, columns: int) -> Rows:
    dtype = torch.float32
    return Rows(b.scratch(steps.rows_bytes(m, columns, dtype)), m, columns, steps.rows_pitch(columns, dtype), dtype)


if __name__ == "__main__":
    main()
