"""What the benchmark scripts share: the head of a result file and a Markdown table."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

import qcore


def header(title: str) -> str:
    """Title, date, machine, versions and command: what makes a figure worth keeping."""
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    facts = [
        f"Date: {datetime.now(timezone.utc):%Y-%m-%d}",
        f"Machine: {machine()}",
        f"Versions: qcore {qcore.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        f"Command: `{command}`",
    ]
    return "\n".join([f"# {title}", "", *(f"- {fact}" for fact in facts)])


def machine() -> str:
    """Processor, threads and instruction set; the accelerator where there is one."""
    capability = torch.backends.cpu.get_cpu_capability()
    cpu = f"{_processor()}, {torch.get_num_threads()} threads, {capability}"
    return f"{torch.cuda.get_device_name()}; {cpu}" if torch.cuda.is_available() else cpu


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
