"""Prints how much faster an MLP of a 70B model runs on several GPUs than on one, for each scheme and number of rows.

One process per GPU is started (or start it with torchrun). On CUDA, both sides are captured in CUDA graphs, and the sum
over the ranks is tried with NCCL and with torch's symmetric memory, without NVLink multicast. On a CPU it runs over
gloo, for a small shape, to show that it works:

    python benchmarks/parallel_mlp.py --ranks 2
    python benchmarks/parallel_mlp.py --ranks 2 --device cpu --k 128 --hidden 256 --rows 1,16
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import qcore
from qcore.nn import QuantizedLinear
from qcore.parallel import shard_

CALLS = 5
"""MLPs in one graph, so that its launch does not count."""
ONE_SHOT_BYTES = 1 << 18
"""Up to here every rank reads all parts itself; larger sums are shared out (two shots)."""


class Mlp(nn.Module):
    """Quantized weights of random values, made on the device."""

    def __init__(self, scheme: str, k: int, hidden: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(1)
        for name, n, columns in (("gate_proj", hidden, k), ("up_proj", hidden, k), ("down_proj", k, hidden)):
            dense = torch.randn(n, columns, generator=generator, device=device).mul_(columns**-0.5).bfloat16()
            made = qcore.Scheme.parse(scheme)
            weight = qcore.quantize(dense, made.weight, "absmax")
            self.add_module(name, QuantizedLinear.from_qtensor(weight, None, made, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Symmetric:
    """all_reduce over torch's symmetric memory, for the shapes that were prepared."""

    def __init__(self, group: str) -> None:
        self.group, self.buffers = group, {}

    def prepare(self, rows: int, columns: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        buffer = symmetric.empty(rows, columns, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(buffer, self.group)
        self.buffers[rows, columns] = buffer

    def __call__(self, y: Tensor) -> Tensor:
        buffer = self.buffers[tuple(y.shape)]
        buffer.copy_(y)
        if buffer.nbytes <= ONE_SHOT_BYTES:
            return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self.group)
        return torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", self.group)


def microseconds(call: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    """The median time of a call, and its result."""
    for _ in range(3):
        y = call()
    if device.type != "cuda":
        times = []
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            y = call()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times), y
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            y = call()
    times = []
    for _ in range(20):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS * 1e3)
    return statistics.median(times), y.clone()


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def models(scheme: str, args: argparse.Namespace, device: torch.device) -> dict[str, nn.Module]:
    """The whole MLP, and cut ones by the way in which they sum."""
    made = {"one": Mlp(scheme, args.k, args.hidden, device)}
    made["backend"] = Mlp(scheme, args.k, args.hidden, device)
    shard_(made["backend"])
    if device.type == "cuda" and not args.no_symmetric:
        symmetric = Symmetric(dist.group.WORLD.group_name)
        for rows in args.rows:
            symmetric.prepare(rows, args.k, device)
        made["symmetric"] = Mlp(scheme, args.k, args.hidden, device)
        shard_(made["symmetric"], all_reduce=symmetric)
    for model in made.values():
        qcore.fuse_(model)
    return made


def work(rank: int, args: argparse.Namespace, store: str) -> None:
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    # NVLink multicast is left alone: not every machine allows it.
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    given: dict[str, object] = {}
    if store:
        given = {"store": dist.FileStore(store, args.ranks), "rank": rank, "world_size": args.ranks}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        given["device_id"] = device
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **given)
    if rank == 0:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(f"{args.ranks} x {where}, torch {torch.__version__}, MLP {args.k} x {args.hidden}, bfloat16")
        print("| scheme | rows | one, us | cut, us | cut, symmetric memory, us | speed-up | error |")
        print("|---|---|---|---|---|---|---|")
    with torch.no_grad():
        for scheme in args.schemes:
            made = models(scheme, args, device)
            for rows in args.rows:
                generator = torch.Generator(device).manual_seed(2)
                x = torch.randn(rows, args.k, generator=generator, device=device).bfloat16()
                found = {name: microseconds(partial(model, x), device) for name, model in made.items()}
                if rank == 0:
                    report(scheme, rows, found)
    dist.destroy_process_group()


def report(scheme: str, rows: int, found: dict[str, tuple[float, Tensor]]) -> None:
    one, result = found.pop("one")
    best = min(found.values(), key=lambda pair: pair[0])
    cells = [f"{found[name][0]:.1f}" if name in found else "-" for name in ("backend", "symmetric")]
    error = max(relative(y, result) for _, y in found.values())
    print(f"| {scheme} | {rows} | {one:.1f} | {' | '.join(cells)} | {one / best[0]:.2f} | {error:.1e} |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--k", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=28672)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 256, 2048])
    parser.add_argument("--schemes", type=lambda text: text.split(","), default=["w4a16-g128", "w8a8"])
    parser.add_argument("--no-symmetric", action="store_true", help="sum with NCCL only")
    args = parser.parse_args(arguments)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        args.ranks = int(os.environ["WORLD_SIZE"])
        work(int(os.environ["RANK"]), args, "")
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (args, str(Path(folder) / "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
