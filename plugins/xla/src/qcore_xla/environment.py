"""JAX's behaviour in this process, inferred from the environment and package metadata. Changes and imports nothing."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from qcore.plugin_api import word

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
PLATFORMS = "JAX_PLATFORMS"
JAX = "0.6"
"""The oldest JAX that the plugin supports."""
_GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")
_GPU_FILES = ("dev/nvidia0", "dev/kfd")
_GPU_NAMES = {"cuda", "gpu", "rocm"}
forked = False
"""Whether this process was forked from one that had initialized JAX, here or elsewhere."""
TPUS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}
"""Generations of TPUs by PCI device; Google's vendor is 0x1ae0."""


def _after_fork() -> None:
    global forked  # noqa: PLW0603 - a process is forked or not
    forked = forked or initialised()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)


def why_not(kind: str, root: Path = Path("/")) -> str:
    """Why JAX cannot be used for tensors of a type of torch device in this process; empty if it can."""
    return why_not_jax() or why_not_platform(kind) or _why_not_accelerator(kind, root)


@lru_cache(maxsize=1)
def why_not_jax() -> str:
    """Why JAX is not installed completely; empty if it is."""
    missing = [name for name in ("jax", "jaxlib") if find_spec(name) is None]
    return f"{' and '.join(missing)} must be installed: pip install 'jax>={JAX}'" if missing else ""


def platforms() -> list[str]:
    """The platforms that ``JAX_PLATFORMS`` or ``jax.config`` restricts JAX to; empty if neither does."""
    chosen = os.environ.get(PLATFORMS, "")
    config = getattr(sys.modules.get("jax"), "config", None)  # not there as long as another thread imports JAX
    if config is not None:
        chosen = getattr(config, "jax_platforms", None) or ""
    return [name.strip() for name in chosen.split(",") if name.strip()]


def why_not_platform(kind: str) -> str:
    """Why JAX's choice of platforms leaves out a type of torch device; empty if it does not."""
    chosen, wanted = set(platforms()), {"cpu"} if kind == "cpu" else _GPU_NAMES
    if kind == "cuda" and not gpu_plugin():
        return "JAX has no GPU backend here: pip install 'jax[cuda13]' (or jax[cuda12]), to match torch's CUDA version."
    if chosen and not chosen & wanted:
        return (
            f"{PLATFORMS}={','.join(sorted(chosen))} leaves JAX without a backend for {kind} tensors; "
            f"add {'cpu' if kind == 'cpu' else 'cuda'} to it before the process starts."
        )
    return ""


def _why_not_accelerator(kind: str, root: Path) -> str:
    """Why JAX must not start: it would take a GPU's memory, or the TPU of torch_tpu; empty if it may."""
    if initialised():
        return ""
    chosen = set(platforms())
    takes_gpu = gpu_plugin() and gpu_file(root) and (not chosen or chosen & _GPU_NAMES)
    if takes_gpu and _preallocates():
        only = f", or {PLATFORMS}=cpu" if kind == "cpu" else ""
        return (
            f"JAX would allocate most of the GPU's memory at its first use; "
            f"set {PREALLOCATE}=false{only} before the process starts."
        )
    if kind == "cpu" and find_spec("torch_tpu") and tpu(root) and (not chosen or "tpu" in chosen):
        return f"JAX would take the TPU away from torch_tpu; set {PLATFORMS}=cpu before the process starts."
    return ""


def _preallocates() -> bool:
    limited = any(os.environ.get(name) for name in FRACTIONS)
    return not limited and os.environ.get(PREALLOCATE, "true").lower() not in {"false", "0"}


def initialised() -> bool:
    """Whether JAX is already initialized: then its backends are fixed."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    ask = getattr(bridge, "backends_are_initialized", None)
    return bool(ask and ask())


@lru_cache(maxsize=1)
def gpu_plugin() -> str:
    """The distribution that gives JAX a GPU backend; empty if there is none."""
    return next((name for name in _GPU_PLUGINS if find_spec(name)), "")


def gpu_file(root: Path = Path("/")) -> str:
    """The device file of a GPU; empty if there is none."""
    return next((f"/{name}" for name in _GPU_FILES if (root / name).exists()), "")


def tpu(root: Path = Path("/")) -> str:
    """The generation of a TPU on the PCI bus, "unknown" if there is only a device file; empty if there is none."""
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if word(device / "vendor") == "0x1ae0" and (generation := TPUS.get(word(device / "device"))):
            return generation
    return "unknown" if (root / "dev/accel0").exists() else ""
