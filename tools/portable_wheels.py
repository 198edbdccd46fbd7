"""Make wheels of qcore-cpu portable: `python tools/portable_wheels.py PROJECT DIST`.

Each wheel in DIST is tagged with the oldest glibc that its symbols need. On x86-64 with a compiler for Arm, the wheel
for Arm is built beside it, unless the variable ARM_WHEEL is 0.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ARM = {
    "CMAKE_ARGS": "-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 "
    "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
    "_PYTHON_HOST_PLATFORM": "linux-aarch64",
}


def run(*command: str, **environ: str) -> None:
    """Run a module of Python with further variables; a failure is an exception."""
    subprocess.run([sys.executable, "-m", *command], check=True, env={**os.environ, **environ})  # noqa: S603


def main() -> None:
    """See the module."""
    project, dist = sys.argv[1:]
    wanted = os.environ.get("ARM_WHEEL") != "0"
    if wanted and platform.machine() == "x86_64" and shutil.which("aarch64-linux-gnu-g++"):
        options = ("--no-isolation", "--wheel", "--config-setting=build-dir=build/aarch64")
        run("build", *options, "--outdir", dist, project, **ARM)
    for wheel in Path(dist).glob("qcore_cpu-*-linux_*.whl"):
        run("auditwheel", "repair", "--exclude", "libtorch_cpu.so", "--wheel-dir", dist, str(wheel))
        wheel.unlink()


if __name__ == "__main__":
    main()
