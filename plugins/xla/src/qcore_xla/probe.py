"""The devices of XLA on this machine. Reads metadata, the environment and device files; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from qcore import FALLBACK, NATIVE, Available, Unavailable
from qcore.plugin_api import installed_version

from . import environment
from .environment import tpu, why_not_jax

_VERSIONS = ("jax", "jaxlib", "torch_tpu", "torch_xla", "torchax", "libtpu")


def probe(root: Path = Path("/")) -> Available | Unavailable:
    """The result of `qcore_probe`; ``root``: the folder in which to look for device files."""
    if fault := why_not_jax():
        return Unavailable(fault, broken=True)
    if fault := _why_not_any_tensor(root):
        return Unavailable(fault)
    devices = [*([f"TPU {tpu(root)}"] if tpu(root) else []), *(["GPU"] if _has_gpu(root) else []), "CPU"]
    versions = [f"{name} {found}" for name in _VERSIONS if (found := installed_version(name))]
    return Available(f"XLA: {', '.join(devices)}", ", ".join(versions), _details(root))


_TENSORS = ("torch_tpu", "torch_xla")
"""Packages with tensors that JAX only compiles for, independent of its own backends."""


def _why_not_any_tensor(root: Path) -> str:
    """Why no tensors at all are supported, if JAX may use no backend; empty if some are."""
    if any(map(installed_version, _TENSORS)):
        return ""
    faults = [environment.why_not_platform(kind) for kind in ("cpu", *(["cuda"] if _has_gpu(root) else []))]
    return " ".join(faults) if all(faults) else ""


def _has_gpu(root: Path) -> bool:
    return bool(environment.gpu_plugin() and environment.gpu_file(root))


def _details(root: Path) -> dict[str, str]:
    """Further lines of `qcore doctor`: the supported devices of tensors, and the settings that are missing."""
    kinds = ["cpu", *(["cuda"] if _has_gpu(root) else [])]
    needs = {kind: why for kind in kinds if (why := environment.why_not(kind, root))}
    found = {"device": "cpu", "supports": ", ".join(kind for kind in kinds if kind not in needs) or "nothing yet"}
    if needs:
        found["needs"] = " ".join(dict.fromkeys(needs.values()))
    return found


def rank(kind: str) -> int:
    """The rank of an offer for tensors on a type of torch device.

    XLA's CPU backend is slower than torch's own kernels in nearly every case, so there it ranks below them; in the same
    tier, so that `qcore tune` may find it faster. On accelerators it ranks below kernels written for them.
    """
    return FALLBACK - 100 if kind == "cpu" else NATIVE - 100
