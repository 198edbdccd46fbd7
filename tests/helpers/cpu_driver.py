"""Problems for the library's kernels as a driver without torch reads them, and the results that it must write."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

import qcore

NATIVE = Path(__file__).parents[2] / "plugins" / "cpu" / "native"
DRIVER = Path(__file__).parents[1] / "cpu" / "driver.cpp"
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-w", f"-I{NATIVE}")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCHEMES = ("w4a16-g32-asym", "w8a16", "w4a16-g128-fzp", "mxfp4", "w8a8", "w4a8-g32-asym-aasym", "w8a8-static(0.05,3)")


CONVOLUTIONS = ("w8a8", "w4a8", "w8a8-g64-asym", "w4a8-asym", "w8a8-static(0.05,3)", "w8a8-asym-static(0.05,3)")
CONVOLUTIONS += ("w8a8-aasym", "w4a8-g32", "w4a8-g32-asym-aasym", "w8a8-g64-fzp-aasym", "w4a8-g32-static(0.05,3)")
PLANES = ("w8a8", "w4a8-asym", "w8a8-aasym", "w4a8-g32-fzp-aasym", "w8a8-asym-static(0.05,3)")


def build(folder: Path, compiler: str, files: dict[str, Sequence[str]], *more: str) -> Path:
    """Compile ``files`` of the library, each with its own flags, and the driver; returns the program."""
    objects, running = [], []
    for name, flags in files.items():
        objects.append(str(folder / f"{name}.o"))
        command = [compiler, *FLAGS, *more, *flags, "-c", str(NATIVE / f"{name}.cpp"), "-o", objects[-1]]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE))
    for process in running:
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors.decode()
    program = folder / "driver"
    subprocess.run(
        [compiler, *FLAGS, *more, str(DRIVER), *objects, "-static", "-o", str(program)], check=True, timeout=300
    )
    return program


def problems(shapes=((1, 77, 33), (5, 200, 40), (9, 576, 32))):
    """Each as the bytes of the driver's input, the result of this machine's own kernels, and whether x is in int8."""
    from qcore_cpu.kinds import Mode

    generator = torch.Generator().manual_seed(7)
    for scheme in SCHEMES:
        parsed = qcore.Scheme.parse(scheme)
        for rows, k, n in shapes:
            layout, packed, mode = _weight(parsed, n, k, generator)
            for dtype in DTYPES:
                x = (torch.randn(rows, k, generator=generator) + 0.3).to(dtype)
                yield _input(layout, packed, mode, x), _expected(layout, packed, mode, x), mode != Mode.DIGITS


def fp8(shapes=((1, 77, 33), (33, 200, 40), (70, 576, 96))):
    """The same for fp8 activations with a scale of their own for each row, or for 32 columns of it."""
    generator = torch.Generator().manual_seed(11)
    for text in ("wfp8afp8", "wfp8afp8-g32", "w4afp8-g32-asym"):
        parsed = qcore.Scheme.parse(text)
        for rows, k, n in shapes:
            layout, packed, mode = _weight(parsed, n, k, generator)
            for dtype in DTYPES:
                x = (torch.randn(rows, k, generator=generator) + 0.3).to(dtype)
                group = parsed.activation.group or 0
                yield (
                    _input(layout, packed, mode, x, given=(0.0, group)),
                    _expected(layout, packed, mode, x, (0.0, group)),
                    False,
                )


def convolutions(shapes=((3, 13, 12, 33), (2, 5, 16, 40), (1, 1, 4, 7), (3, 26, 8, 32), (4, 15, 3, 20), (2, 9, 9, 17))):
    """The same for 3 x 3 convolutions: lines, width and channels of an image, and output channels."""
    from qcore_cpu.kinds import Mode

    generator = torch.Generator().manual_seed(8)
    for scheme in CONVOLUTIONS:
        parsed = qcore.Scheme.parse(scheme)
        for height, width, channels, n in shapes:
            layout, packed, mode = _weight(parsed, n, 9 * channels, generator)
            for dtype in DTYPES:
                x = (torch.randn(height, width, channels, generator=generator) + 0.3).to(dtype)
                yield _input(layout, packed, mode, x), _expected_image(layout, packed, mode, x), mode != Mode.DIGITS


def planes(shapes=((3, 13, 12, 33, 1), (9, 17, 40, 80, 40), (1, 40, 6, 12, 3), (26, 8, 3, 5, 1))):
    """The same where channels lie in planes: lines, width and channels of an image, output channels, and groups."""
    generator = torch.Generator().manual_seed(9)
    for scheme in PLANES:
        parsed = qcore.Scheme.parse(scheme)
        for height, width, channels, n, groups in shapes:
            layout, packed, mode = _weight(parsed, n, 9 * channels // groups, generator)
            for dtype in DTYPES:
                x = (torch.randn(channels, height, width, generator=generator) + 0.3).to(dtype)
                yield _input(layout, packed, mode, x, groups), _expected_image(layout, packed, mode, x, groups), True


def depthwise(shapes=((3, 13, 33, 1), (9, 1, 80, 1), (1, 40, 16, 1), (5, 9, 36, 4))):
    """The same where channels beside each other are lanes: lines, width and channels of an image, and of a group."""
    from qcore_cpu.kinds import Mode

    generator = torch.Generator().manual_seed(10)
    for text in ("w8a8", "w4a8-asym", "w8a8-aasym", "w8a8-static(0.05,3)", "w4a16-g8-fzp"):
        parsed = qcore.Scheme.parse(text)
        for height, width, channels, size in shapes:
            if size > 1 and Mode.of(parsed.activation) is Mode.DIGITS:
                continue
            layout, packed, mode = _weight(parsed, channels, 9 * size, generator)
            for dtype in DTYPES:
                x = (torch.randn(height, width, channels, generator=generator) + 0.3).to(dtype)
                yield _input(layout, packed, mode, x, -size), _expected_image(layout, packed, mode, x, -size), True


def _weight(scheme, n, k, generator):
    from qcore_cpu.kinds import Mode, needs_sums
    from qcore_cpu.layout import WeightLayout

    dense = torch.randn(n, k, generator=generator) * 0.05 + 0.03
    quantizer = "absmax" if scheme.weight.zero is qcore.ZeroPoint.NONE else "minmax"
    weight = qcore.quantize(dense, scheme.weight, quantizer)
    layout = WeightLayout(weight.format, n, k, sums=needs_sums(scheme.activation))
    return layout, layout.pack(weight), Mode.of(scheme.activation)


def _input(layout, packed, mode, x, groups=0, given=(0.05, 3)):
    from qcore_cpu import ops
    from qcore_cpu.kinds import Kind

    offset = 12 if layout.kind is Kind.HALVES4 else layout.kind.offset
    scale_type = 4 if packed["scale"].dtype == torch.uint8 else ops.TYPES[packed["scale"].dtype]
    lines, width, channels = (x.shape[1], x.shape[2], x.shape[0]) if groups > 0 else (*x.shape, 0, 0)[:3]
    image = (channels, width) if x.dim() == 3 else (0, 0)
    numbers = (
        layout.n, layout.k, layout.at.group, int(layout.kind), int(mode), offset, scale_type, ops.TYPES[x.dtype],
        lines, given[1], *image, groups, round(1000 * given[0]),
    )  # fmt: skip
    _, scale, zero, added, sums, table, _ = layout.arguments(packed)
    parts = (x, packed["data"], scale, zero, added, sums, table)
    blobs = [b"" if t is None else bytes(t.contiguous().view(-1).view(torch.uint8).numpy()) for t in parts]
    return struct.pack("14q", *numbers) + b"".join(struct.pack("q", len(blob)) + blob for blob in blobs)


def _expected(layout, packed, mode, x, given=(0.05, 3)):
    from qcore_cpu import ops

    arguments = (*layout.numbers, int(mode), layout.divides, *given, 1.0, 0, ops.TYPES[x.dtype])
    return ops.linear(x, *layout.arguments(packed), None, None, None, None, None, *arguments)


def _expected_image(layout, packed, mode, x, groups=0):
    from qcore_cpu import ops

    constants = (*layout.numbers[2:], int(mode), layout.divides, 0.05, 3, 1.0, 0, ops.TYPES[x.dtype])
    sides = (3, 3, 1, 1, 1, 1, 1, 1)
    op, channels = (ops.conv2d_planes, x.shape[0]) if groups > 0 else (ops.conv2d, x.shape[2])
    if groups < 0:
        op, groups = ops.conv2d_channels, channels // -groups
    return op(x[None], *layout.arguments(packed), None, channels, layout.n, max(1, groups), *constants, *sides)


def check(
    command: Sequence[str],
    isa: str,
    folder: Path,
    made: list[tuple[bytes, torch.Tensor, bool]],
    *,
    summed: bool = False,
) -> None:
    """Run the driver (behind an emulator, say) for an instruction set: it must give the same bits.

    ``summed``: sums may have another order.
    """
    from qcore_cpu import native

    given, written = folder / "in", folder / "out"
    given.write_bytes(struct.pack("q", len(made)) + b"".join(data for data, _, _ in made))
    run = [*command, isa, str(given), str(written)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results, at = written.read_bytes(), 0
    for _, expected, exact in made:
        size = expected.numel() * expected.element_size()
        raw = torch.frombuffer(bytearray(results[at : at + size]), dtype=expected.dtype).view(expected.shape)
        at += size
        # Float x does not become digits everywhere: here it may meet codes as bfloat16, and with AVX2 alone as float32.
        rounded = not exact and (native.isa() == "avx2" or summed)
        tolerance = 0.02 if expected.dtype == torch.bfloat16 else 4e-3 if rounded else 0
        assert torch.allclose(raw.float(), expected.float(), rtol=tolerance, atol=tolerance)
    assert at == len(results)
