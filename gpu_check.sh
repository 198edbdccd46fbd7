#!/usr/bin/env bash
# Checks and times tables and e4m3 activations on a GPU.
set -u
export PYTHONPATH=core/src:plugins/triton/src:plugins/cuda/src:benchmarks:tests/helpers QCORE_CACHE_DIR=$(mktemp -d)
start=$SECONDS
timeout 140 python tests/cuda/tables_on_gpu.py --seconds 120 2>&1 | grep -v resource_tracker | tail -c 9000
echo "== checks took $((SECONDS - start)) s"
timeout 70 python benchmarks/_cuda_table_cells.py
echo "== all took $((SECONDS - start)) s"
