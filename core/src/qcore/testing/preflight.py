"""Bringing a plugin up in a process of its own, before the kit does it in this one.

Shows what importing the entry point drags in, and that the probe leaves the process alive.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import importlib_metadata

from ..discovery.hookspecs import ENTRY_POINT_GROUP

_SECONDS = 120

HEAVY = (
    "cuda", "cupy", "dpctl", "dpnp", "intel_extension_for_pytorch", "jax", "jaxlib", "libtpu", "numba", "onnxruntime",
    "openvino", "pycuda", "pynvml", "pyopencl", "tensorflow", "torch_neuronx", "torch_npu", "torch_tpu", "torch_xla",
    "torchao", "torchvision", "transformers", "triton", "vulkan", "wgpu",
)  # fmt: skip
"""Packages that importing an entry point must not import."""

_SCRIPT = """
import json, os, sys
import qcore
from qcore.discovery.registry import registry

def libraries():
    try:
        with open("/proc/self/maps") as maps:
            return {line.split(None, 5)[5].strip() for line in maps if ".so" in line and "/" in line}
    except OSError:
        return set()

name = sys.argv[1]
entry = registry.entries()[name]
modules, loaded = set(sys.modules), libraries()
try:
    home = getattr(entry.load(), "__file__", None) or ""
except BaseException as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
    sys.exit(0)
new = sorted({m.partition(".")[0] for m in set(sys.modules) - modules})
native = sorted(libraries() - loaded)
print(json.dumps({"modules": new, "libraries": native, "home": os.path.dirname(home)}), flush=True)
import warnings
warnings.simplefilter("ignore")
registry.status(name)
print(json.dumps({"probed": True}), flush=True)
"""


@dataclass(frozen=True)
class Preflight:
    """What came of it.

    **Fields:** ``skipped``: why there was no flight; ``error``: what importing raised; ``modules``: top-level packages
    it imported beyond qcore's own; ``libraries``: shared libraries it loaded; ``home``: its folder; ``died``: how the
    process ended early.
    """

    skipped: str = ""
    error: str = ""
    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    home: str = ""
    died: str = ""


def preflight(name: str) -> Preflight:
    """Import and probe the plugin behind an entry point in a new interpreter."""
    if not importlib_metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        return Preflight(skipped="registered in this process; it has no entry point to import")
    try:
        run = subprocess.run(
            [sys.executable, "-c", _SCRIPT, name], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Preflight(died=f"importing and probing it took more than {_SECONDS} seconds")
    return _read(run)


def _read(run: subprocess.CompletedProcess[str]) -> Preflight:
    found: dict[str, Any] = {}
    for line in run.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    survived = found.pop("probed", False) or "error" in found
    died = "" if survived else f"the process ended with status {run.returncode} {run.stderr.strip()[-300:]}".strip()
    modules, libraries = tuple(found.get("modules", ())), tuple(found.get("libraries", ()))
    return Preflight("", found.get("error", ""), modules, libraries, found.get("home", ""), died)
