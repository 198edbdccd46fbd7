#!/usr/bin/env bash
# Checks and times tables and e4m3 activations on a GPU.
set -u
export PYTHONPATH=core/src:plugins/triton/src:plugins/cuda/src:benchmarks:tests/helpers QCORE_CACHE_DIR=$(mktemp -d)
start=$SECONDS
timeout 130 python tests/cuda/tables_on_gpu.py 2>&1 | tail -c 7000
echo "== checks took $((SECONDS - start)) s"
timeout 100 python - <<'P'
import torch, time
torch.manual_seed(0)
import _cuda_table_cells as c
t = time.time()
def show(rows):
    try:
        for row in rows: print(*row if isinstance(row, tuple) else (row,), flush=True)
    except Exception as e:
        import traceback; traceback.print_exc(limit=-3)
show(c.fp8_errors(4096, 1024, 512)); show(c.fp8_errors(512, 1024, 512))
show(c.fp8_cells(((4096, 4096), (8192, 28672)), (1, 2048)))
show(c.cells(((8192, 28672),), (1,), ("w4a16-g32", "mxfp4", "nvfp4", "nf4", "w4a16-g64", "w8a16", "wfp8a16", "mxfp8")))
show(c.cells(((4096, 14336),), (16, 64, 256, 2048), ("w4a16-g32", "mxfp4", "nvfp4", "nf4")))
show(c.cells(((4096, 4096),), (1, 2048), ("w4a16-g32", "mxfp4", "nvfp4", "nf4", "wfp8a16")))
print("seconds", time.time() - t)
P
echo "== all took $((SECONDS - start)) s"
