"""Is an Intel GPU here that torch can use? Asks device files and package metadata first.

Only where torch sees a GPU is it asked for the name and the driver, by which verdicts on kernels are kept. That starts
torch's XPU runtime (its list of devices and their context): there is no other way to know the driver.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qcore import Available, Unavailable
from qcore.plugin_api import installed_version, on_pci, word

from . import aten
from .device import why_not_triton

_INTEL, _INTEGRATED = "0x8086", "0000:00:02.0"
_VISIBLE = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")
_TRITON_NAMES = ("triton-xpu", "pytorch-triton-xpu", "triton")
"""The distributions that bring the package ``triton`` for XPU: the last in newer releases, as a version ``+xpu``."""
_DRIVER = (
    "Install or upgrade Intel's compute runtime, as your torch wants it: on Ubuntu the packages libze1, "
    "libze-intel-gpu1 and intel-opencl-icd. What fails to load is told by "
    "SYCL_UR_TRACE=1 python -c 'import torch; print(torch.xpu.device_count())'."
)


def probe(root: Path = Path("/")) -> Available | Unavailable:
    """The answer of `qcore_probe`; ``root``: the directory whose device files are examined."""
    return _torch_fault(root) or _device_fault(root) or _found()


class Seen(NamedTuple):
    """An Intel GPU that the machine reports: its place, and whether it is part of the processor."""

    where: str
    integrated: bool


def seen(root: Path) -> Seen | None:
    """An Intel GPU below ``root``, one on a card first."""
    found = [Seen(gpu.seen, gpu.seen.endswith(_INTEGRATED)) for gpu in on_pci(root) if "xpu" in gpu.plugins]
    nodes = sorted((root / "sys/class/drm").glob("renderD*"))  # what a container shows that hides the PCI tree
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
            f"no Intel GPU is in sight, and torch {torch.__version__} is built for {built}. "
            f"On a machine with one, {remedy}"
        )
    what = "an Intel GPU in the processor" if gpu.integrated else "an Intel GPU"
    note = " It runs on graphics of Core Ultra processors and later." if gpu.integrated else ""
    return Unavailable(
        f"{what} is here ({gpu.where}), but torch {torch.__version__} is built for {built}; {remedy}{note}",
        # A torch for another GPU was somebody's choice, and every other laptop has Intel's graphics in its processor.
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
            return Unavailable("no Intel GPU is here.")
        return Unavailable(f"torch {torch.__version__} finds no Intel GPU{why}. {_DRIVER}", broken=True)
    here, closed = f"an Intel GPU is here ({gpu.where})", _closed(root)
    if closed:
        return Unavailable(f"{here}, but {closed}", broken=True)
    filters = {name: os.environ[name] for name in _VISIBLE if name in os.environ}
    for name, value in filters.items():
        if _names_no_gpu(name, value):
            return Unavailable(f"{here}, but {name}={value} leaves torch none; unset it, or let it name that GPU.")
    remedy = _DRIVER
    if filters:
        told = " and ".join(f"{name}={value}" for name, value in filters.items())
        remedy = f"Is it hidden by {told}? Unset that, or let it name the GPU. If that changes nothing: {_DRIVER}"
    return Unavailable(f"{here}, but torch {torch.__version__} cannot use it{why}. {remedy}", broken=True)


def _names_no_gpu(name: str, value: str) -> bool:
    """Whether a filter of devices leaves no GPU for certain: an empty one, or one like ``opencl:cpu``."""
    wide = ("gpu", "level_zero", "*") if name == "ONEAPI_DEVICE_SELECTOR" else ("",)
    return not value.strip() or not any(part in value.lower() for part in wide)


def _closed(root: Path) -> str:
    """Why the kernel does not let this user to the GPU; empty if it does."""
    nodes = sorted((root / "dev/dri").glob("renderD*"))
    if not nodes:
        return (
            "there is no /dev/dri/renderD* for it. In a container, pass it on (docker run --device /dev/dri); "
            "elsewhere, load the kernel's driver for it (xe or i915)."
        )
    closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if len(closed) == len(nodes):
        return (
            f"this user may not open /dev/dri/{closed[0].name}. Join the group it belongs to, usually render "
            f"(sudo usermod -aG render $USER), and log in again; in a container, docker run --group-add."
        )
    return ""


def _count() -> tuple[int, str]:
    """The number of GPUs that torch finds, and its message if it fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing GPUs, which are counted here
            return torch.xpu.device_count(), ""
    except RuntimeError as error:
        return 0, f" ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _found() -> Available | Unavailable:
    count, _ = _count()
    try:
        gpus = [torch.xpu.get_device_properties(index) for index in range(count)]
    except RuntimeError as error:
        return Unavailable(
            f"torch {torch.__version__} finds {count} Intel GPUs, but cannot start them ({_first_line(error)}). "
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
        details["float64"] = "not on this GPU (Arc A and some integrated ones): work in float64 has to run elsewhere"
    if fault := why_not_triton():
        details["triton"] = fault
    if lacks := [reason for name in (aten.INT4, aten.INT8, aten.INT) if (reason := aten.missing(name))]:
        details["ops"] = " ".join(lacks)
    return details


def triton_version() -> str:
    """The version of Triton, from package metadata, without importing it; "none" if it is not installed."""
    return next(filter(None, map(installed_version, _TRITON_NAMES)), "none")
