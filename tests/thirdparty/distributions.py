"""The distributions of these tests: built as wheels from source trees, and installed into directories of their own.

`dists/loopback` is a tree as an author would write it. The bad ones differ from each other in a few lines, so their
trees are rendered from one template: a plugin module, or a kernel that does one thing wrong on top of loopback's.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

HERE = Path(__file__).parent
LOOPBACK = HERE / "dists" / "loopback"

_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{dist}"
version = "0.1"
dependencies = ["qcore>=26.11"]

[project.entry-points."{group}"]
{name} = "{module}.plugin"

[tool.hatch.build.targets.wheel]
packages = [{packages}]
"""

# What every module of a bad plugin starts with; the rest of it follows.
_PLUGIN = """
import os
import sys
import time

import qcore

{body}
"""

# A plugin that works but for what `body` overrides in its kernel, and offers that above all others.
_KERNEL = """
import qcore

@qcore.hookimpl
def qcore_linear(request):
    from .kernel import Bad
    if request.device.type != "cpu" or not request.x_dtype.is_floating_point:
        return qcore.Refusal("{name} takes floating-point tensors on the CPU.")
    return qcore.Offer(Bad(request, "{name}"), qcore.NATIVE)
"""
_BAD = """
import qcore
import torch
from qcore_loopback.kernels import Linear

class Bad(Linear):
{body}
"""


@dataclass(frozen=True)
class Bad:
    """A bad distribution: the text of its plugin module, or of its kernel's methods.

    ``api``: of its entry point; ``ships``: an empty package beside its own, standing in for a device's stack.
    """

    name: str
    plugin: str = ""
    kernel: str = ""
    api: str = "v1"
    ships: str = ""

    @property
    def module(self) -> str:
        return f"qcore_{self.name}"

    def render(self, where: Path) -> Path:
        """Write the source tree; returns its root."""
        root = where / self.name
        package = root / "src" / self.module
        group, dist = f"qcore.plugins.{self.api}", f"qcore-{self.name.replace('_', '-')}"
        shipped = [name for name in (self.module, self.ships) if name]
        for name in shipped:
            (root / "src" / name).mkdir(parents=True)
            (root / "src" / name / "__init__.py").write_text("")
        packages = ", ".join(f'"src/{name}"' for name in shipped)
        words = {"name": self.name, "module": self.module, "dist": dist, "group": group, "packages": packages}
        (root / "pyproject.toml").write_text(_PROJECT.format(**words))
        body = textwrap.dedent(self.plugin).strip()
        text = _PLUGIN.format(body=body) if self.plugin else _KERNEL.format(**words)
        (package / "plugin.py").write_text(text)
        methods = textwrap.indent(textwrap.dedent(self.kernel).strip(), "    ")
        (package / "kernel.py").write_text(_BAD.format(body=methods or "    pass"))
        return root


LIFECYCLE = (
    Bad("import_raises", "raise OSError('libfancy.so.3: cannot open shared object file')"),
    Bad("import_exits", "sys.exit(3)"),
    Bad(
        "misspelt",
        """
        @qcore.hookimpl
        def qcore_linaer(request):
            return qcore.Refusal("never asked")
        """,
    ),
    Bad("wrong_api", "raise RuntimeError('must not be imported')", api="v0"),
    Bad(
        "hangs",
        """
        @qcore.hookimpl
        def qcore_probe():
            time.sleep(3600)
        """,
    ),
    Bad(
        "aborts",
        """
        @qcore.hookimpl
        def qcore_probe():
            os.abort()
        """,
    ),
)

KERNELS = (
    Bad(
        "unreasonable",
        """
        @qcore.hookimpl
        def qcore_linear(request):
            return qcore.Refusal("")
        """,
    ),
    Bad(
        "falsy",
        """
        @qcore.hookimpl
        def qcore_linear(request):
            return False
        """,
    ),
    Bad(
        "wrong_sign",
        kernel="""
        def weight(self, packed):
            codes, scale, minus, plus, group = super().weight(packed)
            return codes, scale, None if minus is None else -minus.short(), plus, group
        """,
    ),
    Bad(
        "drops_bias",
        kernel="""
        def __call__(self, x, packed, bias, **given):
            return super().__call__(x, packed, None, **given)
        """,
    ),
    Bad(
        "tall",
        kernel="""
        def __call__(self, x, packed, bias, **given):
            y = super().__call__(x, packed, bias, **given)
            return y * 2 if y.numel() // self.request.n > self.request.k else y
        """,
    ),
    Bad(
        "odd",
        kernel="""
        def activations(self, x, given):
            a = super().activations(x, given)
            if self.request.k % 2:
                a[..., -1] = 0
            return a
        """,
    ),
    Bad(
        "lossy",
        kernel="""
        def pack(self, weight):
            packed = super().pack(weight)
            return {**packed, "scale": packed["scale"].bfloat16().to(packed["scale"].dtype)}
        """,
    ),
    Bad(
        "secret",
        kernel="""
        def __call__(self, x, packed, bias, **given):
            with qcore.using("torch", disable=("secret",)):
                kinds = {"activation": self.request.activation, "output": self.request.output}
                return qcore.linear(x, self.unpack(packed), bias, out_dtype=self.out_dtype, **kinds)
        """,
    ),
    Bad(
        "secret_kernel",
        kernel="""
        def __call__(self, x, packed, bias, **given):
            from qcore.fallback.plugin import qcore_linear
            kernel = qcore_linear(self.request)[-1].kernel
            return kernel(x, kernel.pack(self.unpack(packed)), bias, **given)
        """,
    ),
    Bad(
        "wrong_dtype",
        kernel="""
        def __call__(self, x, packed, bias, **given):
            return super().__call__(x, packed, bias, **given).double()
        """,
    ),
    Bad(
        "raises",
        kernel="""
        def __call__(self, x, packed, bias, **given):
            raise RuntimeError("device lost")
        """,
    ),
    Bad(
        "heavy",
        """
        import dpctl

        @qcore.hookimpl
        def qcore_linear(request):
            return qcore.Refusal("heavy has no kernels yet.")
        """,
        ships="dpctl",
    ),
    Bad(
        "unmarked",
        """
        @qcore.hookimpl
        def qcore_probe():
            return qcore.Available("a device")

        def qcore_linear(request):
            return qcore.Refusal("never asked")
        """,
    ),
    Bad(
        "zeroes_x",
        kernel="""
        def __call__(self, x, packed, bias, **given):
            y = super().__call__(x, packed, bias, **given)
            x.zero_()
            return y
        """,
    ),
    Bad(
        "one_buffer",
        kernel="""
        kept = {}

        def __call__(self, x, packed, bias, **given):
            y = super().__call__(x, packed, bias, **given)
            return self.kept.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)
        """,
    ),
    Bad(
        "small_only",
        kernel="""
        def __call__(self, x, packed, bias, **given):
            y = super().__call__(x, packed, bias, **given)
            return y * 1.5 if self.request.n >= 1024 else y
        """,
    ),
    Bad(
        "lossy_layout",
        """
        class Nibbles(qcore.Layout):
            name = "lossy_nibbles"

            def encode(self, codes):
                return qcore.PLAIN.encode(codes * 0)

            def decode(self, data, k):
                return qcore.PLAIN.decode(data, k)

            def check(self, data, n, k):
                qcore.PLAIN.check(data, n, k)

        @qcore.hookimpl
        def qcore_formats():
            return [Nibbles()]

        @qcore.hookimpl
        def qcore_linear(request):
            return qcore.Refusal("lossy_layout has a layout and no kernels.")
        """,
    ),
    Bad(
        "mutates",
        kernel="""
        def __call__(self, x, packed, bias, **given):
            y = super().__call__(x, packed, bias, **given)
            packed["scale"].mul_(1.0001)
            return y
        """,
    ),
)


def build(root: Path, where: Path) -> Path:
    """Build a source tree as pip would, with its build backend; returns the wheel."""
    (wheel,) = WheelBuilder(str(root)).build(directory=str(where), versions=["standard"])
    return Path(wheel)


def install(wheel: Path, where: Path) -> Path:
    """Unpack a wheel into a directory for ``PYTHONPATH``: what ``pip install --target`` does, without its second."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(where)
    return where


def pip_install(wheels: list[Path], where: Path) -> Path:
    """The same by pip itself."""
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(where)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, wheels)], check=True, timeout=120)
    return where
