"""Runs named cases on several gloo ranks: one start of processes for all of them."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(module: str, world: int, folder: Path, names: Collection[str] | None = None) -> dict[str, list[Any]]:
    """The result of the cases called ``names``, default all, in ``module.CASES`` on each rank, or its traceback.

    A case is a function of rank and world. Calls with neighbouring folders share verdicts about kernels, which take
    as long as the cases.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # One thread per rank, or the ranks fight for the processors.
    own = {"OMP_NUM_THREADS": "1", "QCORE_CACHE_DIR": str(folder.parent / "caches" / "ranks")}
    kept = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        mp.spawn(_work, (world, module, str(folder), names, list(sys.path)), nprocs=world)
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    every = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]
    return {name: [found[name] for found in every] for name in every[0]}


def _work(rank: int, world: int, module: str, folder: str, names: Collection[str] | None, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for text in ("torch.jit.script_method", "should not be instantiated"):  # torch's own
        warnings.filterwarnings("ignore", f".*{text}.*", DeprecationWarning)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # torch 2.9's own, while DCP saves
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=dt.timedelta(seconds=120))
    cases: Mapping[str, Callable[..., Any]] = import_module(module).CASES
    results = {}
    for name, case in cases.items():
        if names is not None and name not in names:
            continue
        try:
            torch.manual_seed(0)
            start = time.time()
            results[name] = case(rank, world)
            if rank == 0 and os.environ.get("GLOO_TIMES"):
                print(f"{time.time() - start:6.2f} s  {name}", flush=True)
        except Exception:  # noqa: BLE001 - the test of this case shows it; the other cases run on
            results[name] = "raised " + traceback.format_exc()
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    # On a busy machine a rank whose peers have left ends in std::terminate.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()
