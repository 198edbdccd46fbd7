"""Whether there is an Intel GPU that torch can use. Checks device files and package metadata first.

Only if torch sees a GPU is it queried for the name and the driver, which are part of the key of stored verdicts on
kernels. That starts torch's XPU runtime (its list of devices and their context): no other way reveals the driver.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qcore import Available, Unavailable
from qcore.plugin_api import first_line, installed_version, on_pci, word

from . import aten
from .device import why_not_triton

_INTEL, _INTEGRATED = "0x8086", "0000:00:02.0"
_VISIBLE = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")
_TRITON_NAMES = ("triton-xpu", "pytorch-triton-xpu", "triton")
"""The distributions that provide the package ``triton`` for XPU: the last in newer releases, as a version ``+xpu``."""
_DRIVER = (
    "Install or upgrade Intel's compute runtime to the version that your torch needs: on Ubuntu the packages "
    "libze1, libze-intel-gpu1 and intel-opencl-icd. To see what fails to load, run "
    "SYCL_UR_TRACE=1 python -c 'import torch; print(torch.xpu.device_count())'."
)


def probe(root: Path = Path("/")) -> Available | Unavailable:
    """The result of `qcore_probe`; ``root``: the directory whose device files are examined."""
    return _torch_fault(root) or _device_fault(root) or _found()


class Seen(NamedTuple):
    """An Intel GPU that the machine reports: its place, and whether it is part of the processor."""

    where: str
    integrated: bool


def seen(root: Path) -> Seen | None:
    """An Intel GPU below ``root``, preferably on a card."""
    found = [Seen(gpu.seen, gpu.seen.endswith(_INTEGRATED)) for gpu in on_pci(root) if "xpu" in gpu.plugins]
    nodes = sorted((root / "sys/class/drm").glob("renderD*"))  # visible in a container that hides the PCI tree
    found += [
        Seen(f"/dev/dri/{node.name}", (node / "device").resolve().name == _INTEGRATED)
        for node in nodes
        if word(node / "device/vendor") == _INTEL
    ]
    return min(found, key=lambda gpu: gpu.integrated, default=None)


def _runtime() -> str | None:
    return getattr(torch.version, "xpu", None)


def _torch_fault(root: Path) -> Unavailable | None:
    """Why this build of torch cannot use an Intel GPU."""
    if _runtime():
        return None
    gpu, built = seen(root), _built_for()
    release = torch.__version__.partition("+")[0]
    remedy = f"install its XPU build, torch=={release}+xpu: see pytorch.org."
    if gpu is None:
        return Unavailable(
            f"no Intel GPU was found, and torch {torch.__version__} is built for {built}. "
            f"On a machine with one, {remedy}"
        )
    what = "an integrated Intel GPU" if gpu.integrated else "an Intel GPU"
    note = " It runs on graphics of Core Ultra processors and later." if gpu.integrated else ""
    return Unavailable(
        f"{what} was found ({gpu.where}), but torch {torch.__version__} is built for {built}; {remedy}{note}",
        # A torch for another GPU was chosen on purpose, and many laptops have integrated Intel graphics.
        broken=built == "the CPU only" and not gpu.integrated,
    )


def _built_for() -> str:
    return "CUDA" if torch.version.cuda else "ROCm" if torch.version.hip else "the CPU only"


def _device_fault(root: Path) -> Unavailable | None:
    """Why torch finds no GPU."""
    count, why = _count()
    if count:
        return None
    gpu = seen(root)
    if gpu is None:
        if not why:
            return Unavailable("no Intel GPU was found.")
        return Unavailable(f"torch {torch.__version__} finds no Intel GPU{why}. {_DRIVER}", broken=True)
    here, closed = f"an Intel GPU was found ({gpu.where})", _closed(root)
    if closed:
        return Unavailable(f"{here}, but {closed}", broken=True)
    filters = {name: os.environ[name] for name in _VISIBLE if name in os.environ}
    for name, value in filters.items():
        if _names_no_gpu(name, value):
            return Unavailable(f"{here}, but {name}={value} hides it; unset the variable, or include the GPU.")
    remedy = _DRIVER
    if filters:
        told = " and ".join(f"{name}={value}" for name, value in filters.items())
        remedy = f"It may be hidden by {told}: unset that, or include the GPU. If that does not help: {_DRIVER}"
    return Unavailable(f"{here}, but torch {torch.__version__} cannot use it{why}. {remedy}", broken=True)


def _names_no_gpu(name: str, value: str) -> bool:
    """Whether a filter of devices certainly leaves no GPU: an empty one, or one like ``opencl:cpu``."""
    wide = ("gpu", "level_zero", "*") if name == "ONEAPI_DEVICE_SELECTOR" else ("",)
    return not value.strip() or not any(part in value.lower() for part in wide)


def _closed(root: Path) -> str:
    """Why the kernel denies this user access to the GPU; empty if it does not."""
    nodes = sorted((root / "dev/dri").glob("renderD*"))
    if not nodes:
        return (
            "there is no /dev/dri/renderD* for it. In a container, pass it through (docker run --device /dev/dri); "
            "otherwise, load its kernel driver (xe or i915)."
        )
    closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if len(closed) == len(nodes):
        return (
            f"this user has no permission to open /dev/dri/{closed[0].name}. Join its group, usually render "
            f"(sudo usermod -aG render $USER), and log in again; in a container, use docker run --group-add."
        )
    return ""


def _count() -> tuple[int, str]:
    """The number of GPUs that torch finds, and its message if it fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about missing GPUs, which are counted here
            return torch.xpu.device_count(), ""
    except RuntimeError as error:
        return 0, f" ({first_line(error)})"


def _found() -> Available | Unavailable:
    count, _ = _count()
    try:
        gpus = [torch.xpu.get_device_properties(index) for index in range(count)]
    except RuntimeError as error:
        return Unavailable(
            f"torch {torch.__version__} finds {count} Intel GPUs, but cannot initialize them ({first_line(error)}). "
            f"{_DRIVER}",
            broken=True,
        )
    drivers = " and ".join(dict.fromkeys(str(gpu.driver_version) for gpu in gpus))
    versions = (f"driver {drivers}", f"torch {torch.__version__}", f"SYCL {_runtime()}", f"triton {triton_version()}")
    names = ", ".join(f"{number} x {name}" for name, number in Counter(gpu.name for gpu in gpus).items())
    return Available(names, ", ".join(versions), _details(gpus))


def _details(gpus: list[Any]) -> dict[str, Any]:
    details: dict[str, Any] = {"device": "xpu:0", "gpus": len(gpus)}  # tensors are on a device with an index
    if not all(getattr(gpu, "has_fp64", True) for gpu in gpus):
        details["float64"] = "not supported by this GPU (Arc A and some integrated ones): run float64 on another device"
    if fault := why_not_triton():
        details["triton"] = fault
    if lacks := [reason for name in (aten.INT4, aten.INT8, aten.INT) if (reason := aten.missing(name))]:
        details["ops"] = " ".join(lacks)
    return details


def triton_version() -> str:
    """The version of Triton, from package metadata, without importing it; "none" if it is not installed."""
    return next(filter(None, map(installed_version, _TRITON_NAMES)), "none")
