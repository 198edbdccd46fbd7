"""Whether there is a GPU that torch and Triton can use: by files, NVML and package metadata, without a CUDA context."""

from __future__ import annotations

import os
import platform
from collections import Counter
from functools import lru_cache
from pathlib import Path

import torch
from packaging.version import InvalidVersion, Version

from qcore import Available, Unavailable
from qcore.plugin_api import first_line, installed_version

from . import nvml

TRITON = "3.5"
"""The oldest Triton that compiles the kernels."""
_TRITON_NAMES = ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm", "triton-windows")
"""The distributions that provide the package ``triton``: torch for ROCm and nightly builds of torch have their own."""
_FILES = {"NVIDIA": ("proc/driver/nvidia/version", "dev/nvidia0"), "AMD": ("dev/kfd",)}
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def probe(root: Path = Path("/")) -> Available | Unavailable:
    """The result of `qcore_probe`; ``root``: the directory whose device files are examined."""
    return _torch_fault(root) or _device_fault(root) or _triton_unavailable() or _found()


def _torch_fault(root: Path) -> Unavailable | None:
    """Why this build of torch cannot use a GPU."""
    if torch.version.cuda or torch.version.hip:
        return None
    seen = _seen(root)
    if not seen:
        return Unavailable(
            f"no GPU was found, and torch {torch.__version__} is built for the CPU only. "
            f"On a machine with an NVIDIA GPU, install the CUDA build of torch: see pytorch.org."
        )
    vendor, file = seen
    release = torch.__version__.partition("+")[0]
    return Unavailable(
        f"an {vendor} GPU was found ({file}), but torch {torch.__version__} is built for the CPU only. "
        + (
            f"On Linux the default wheel is a CUDA build: pip install --force-reinstall torch=={release}"
            if vendor == "NVIDIA"
            else "Install the ROCm build of torch: see pytorch.org."
        ),
        broken=True,
    )


def _device_fault(root: Path) -> Unavailable | None:
    """Why torch finds no GPU."""
    try:
        if torch.cuda.device_count():
            return None
        why = ""
    except (RuntimeError, Warning) as error:
        why = f" ({first_line(error)})"
    for name in _VISIBLE:
        if os.environ.get(name) in ("", "-1"):
            return Unavailable(f"{name}={os.environ[name]} hides every GPU; unset it to use them.")
    seen = _seen(root)
    if not seen:
        return Unavailable("no NVIDIA or AMD GPU was found.")
    vendor, file = seen
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return Unavailable(
        f"an {vendor} GPU was found ({file}), but torch {torch.__version__} cannot use it{why}. "
        f"Its driver must support {runtime}: upgrade the driver, or install a torch for an older one.",
        broken=True,
    )


def _seen(root: Path) -> tuple[str, str] | None:
    """The vendor of a GPU that has a device file, and that file."""
    for vendor, files in _FILES.items():
        for file in files:
            if (root / file).exists():
                return vendor, f"/{file}"
    return None


def _triton_unavailable() -> Unavailable | None:
    fault = triton_fault()
    return Unavailable(fault, broken=True) if fault else None


@lru_cache(maxsize=1)
def triton_fault() -> str:
    """The fault of the installed Triton, with the remedy; empty if there is none."""
    found, needs = triton_version(), f"qcore-cuda needs triton>={TRITON}"
    remedy = f"pip install 'triton>={TRITON}'"
    if platform.system() != "Linux":
        remedy += f" (published for Linux; this is {platform.system()})"
    if not found:
        return f"triton is not installed, and {needs}: {remedy}"
    return f"triton {found} is too old: {needs}: {remedy}" if _older(found, TRITON) else ""


def _older(version: str, bound: str) -> bool:
    try:
        return Version(version).release < Version(bound).release
    except InvalidVersion:
        return False  # a custom build, whose version says nothing


def triton_version() -> str:
    """The version of Triton, from package metadata, without importing it; empty if it is not installed."""
    return next(filter(None, map(installed_version, _TRITON_NAMES)), "")


def _found() -> Available:
    count = torch.cuda.device_count()
    known = nvml.driver() if torch.version.cuda else nvml.Driver()
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    versions = (known.version and f"driver {known.version}", runtime, f"triton {triton_version()}")
    # cuda:0, not cuda: the device of tensors always has an index.
    details = {"device": "cuda:0", "gpus": count}
    return Available(_described(known.names, count), ", ".join(filter(None, versions)), details)


def _described(names: tuple[str, ...], count: int) -> str:
    if len(names) != count:  # some are hidden from CUDA, and NVML does not tell which
        kinds = " or ".join(dict.fromkeys(names)) or ("AMD GPU" if torch.version.hip else "NVIDIA GPU")
        return f"{count} x {kinds}"
    return ", ".join(f"{number} x {name}" for name, number in Counter(names).items())
