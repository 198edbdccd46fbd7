"""Where Intel's runtimes lie once pip has installed them, and what has to be said and loaded before they work.

The wheels put their libraries into the environment's own folder `lib`, where no loader looks: each is opened by path.
"""

from __future__ import annotations

import ctypes
import os
from importlib import metadata
from pathlib import Path

PACKAGES = ("pyopencl", "intel-opencl-rt", "intel-sycl-rt", "onednn")
"""What the session `xpu_peers` installs; the rest comes with them."""

# What libdnnl.so needs, in the order in which they need each other. Its search path names no folder at all.
_BELOW_ONEDNN = (
    ("intel-cmplr-lib-rt", "libintlc.so.5"),
    ("intel-cmplr-lib-rt", "libimf.so"),
    ("intel-cmplr-lib-rt", "libsvml.so"),
    ("tbb", "libtbb.so.12"),
    ("intel-sycl-rt", "libsycl.so.9"),
)


def missing() -> list[str]:
    """Those of `PACKAGES` that are not installed."""
    return [name for name in PACKAGES if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def library(package: str, name: str) -> Path:
    """The file ``name`` of an installed package; raises `RuntimeError` with the remedy where there is none."""
    try:
        files = metadata.files(package) or ()
    except metadata.PackageNotFoundError:
        raise RuntimeError(f"{package} is not installed.\nThese tests run in `nox -s xpu_peers`.") from None
    found = [Path(str(file.locate())).resolve() for file in files if file.name == name]
    if not found or not found[0].is_file():
        raise RuntimeError(f"{package} {metadata.version(package)} holds no {name}.")
    return found[0]


def show_opencl(folder: Path) -> None:
    """Tell the OpenCL loaders where Intel's CPU runtime is; before pyopencl is imported or SYCL has started.

    The wheel's own description of it names a folder of the machine that built it. ``folder`` gets a right one: the
    loader inside pyopencl reads such folders, the one that SYCL brings reads file names.
    """
    runtime = library("intel-opencl-rt", "libintelocl.so")
    (folder / "intel.icd").write_text(f"{runtime}\n", "utf-8")
    os.environ["OCL_ICD_VENDORS"] = str(folder)
    os.environ["OCL_ICD_FILENAMES"] = str(runtime)
    os.environ["PYOPENCL_NO_CACHE"] = "1"  # kernels are built from the sources that are there now
    os.environ.pop("ONEAPI_DEVICE_SELECTOR", None)  # it could hide the CPU from SYCL


def open_onednn() -> ctypes.CDLL:
    """oneDNN's library, with what it needs; after `show_opencl`."""
    for package, name in _BELOW_ONEDNN:
        ctypes.CDLL(str(library(package, name)), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library("onednn", "libdnnl.so.3")))
