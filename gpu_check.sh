#!/usr/bin/env bash
# Checks and times tables and e4m3 activations on a GPU.
set -u
export PYTHONPATH=core/src:plugins/triton/src:plugins/cuda/src:benchmarks:tests/helpers QCORE_CACHE_DIR=$(mktemp -d)
start=$SECONDS
timeout 70 python tests/cuda/tables_on_gpu.py --seconds 55 wfp8afp8 wfp8afp8-g128 2>&1 | grep -v resource_tracker | tail -c 9000
timeout 60 python tests/cuda/tables_on_gpu.py --seconds 45 wfp4a16-g32-e8m0 wfp8a16-g32-e8m0 2>&1 | grep -v resource_tracker | tail -c 3000
echo "== checks took $((SECONDS - start)) s"
timeout 70 python benchmarks/_cuda_table_cells.py
echo "== all took $((SECONDS - start)) s"
