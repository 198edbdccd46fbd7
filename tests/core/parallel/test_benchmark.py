"""The benchmark for several GPUs runs, on two processes of a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "parallel_mlp.py"


def test_benchmark_prints_a_row_for_each_number_of_rows():
    sizes = ["--k", "64", "--hidden", "128", "--rows", "1,3", "--schemes", "w8a16"]
    command = [sys.executable, str(SCRIPT), "--ranks", "2", "--device", "cpu", *sizes]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| w8a16")]
    assert [row[1] for row in rows] == ["1", "3"]
    assert all(float(row[-1]) < 2e-2 and float(row[2]) > 0 for row in rows)
