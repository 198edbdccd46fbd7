"""Import and probe a plugin in a separate process, before the kit does so in this one.

Shows which modules and libraries the entry point imports, and whether the process survives the probe.
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
"""Packages that an entry point must not import."""

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
    """The result of a preflight.

    **Fields:** ``skipped``: why it did not run; ``error``: the exception of the import; ``modules``: top-level packages
    that it imported, besides those of qcore; ``libraries``: shared libraries that it loaded; ``home``: the plugin's
    directory; ``died``: how the process ended prematurely.
    """

    skipped: str = ""
    error: str = ""
    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    home: str = ""
    died: str = ""


def preflight(name: str) -> Preflight:
    """Import and probe the plugin of an entry point in a new interpreter."""
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
