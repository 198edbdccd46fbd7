"""Prints the memory of each rank that trains adapters over frozen quantized weights: whole on every rank, or sharded.

A stack of linear layers in w4a16-g32 with LoRA of rank 8, bfloat16, on gloo ranks of this machine. Per rank: bytes of
quantized weights held between steps, and how far the resident set of the process rises above that of the made model
during three steps (Linux):

    python benchmarks/qlora_memory.py --width 2048 --layers 24 --ranks 1,2,4
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from _table import header, markdown
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import qcore
from qcore.nn import NeutralLinear, QuantizedLinear
from qcore.parallel import unpack_

MODES = ("packed, whole", "sharded by FSDP2")
MB = 1e6


class Lora(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(8, base.in_features).mul_(0.02).bfloat16())
        self.b = nn.Parameter(torch.zeros(base.out_features, 8).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + x @ self.a.t() @ self.b.t()


def made(width: int, layers: int, mode: str) -> nn.Module:
    """The model; of the whole float weights one at a time is in memory."""
    torch.manual_seed(0)
    stack = nn.Sequential()
    for i in range(layers):
        dense = torch.randn(width, width, generator=torch.Generator().manual_seed(i)).mul_(0.1 * width**-0.5).bfloat16()
        weight = qcore.quantize(dense, "int4-g32", "absmax")
        one = nn.Sequential(QuantizedLinear.from_qtensor(weight, None, "w4a16-g32", dtype=torch.bfloat16))
        if mode == MODES[1]:
            unpack_(one)
        stack.append(Lora(one[0]))
        if mode == MODES[1]:
            fully_shard(stack[-1])  # the memory of the whole layer is freed before the next one is made
    if mode == MODES[1]:
        fully_shard(stack)
    return stack


def held(model: nn.Module) -> int:
    """Bytes of quantized weights on this rank."""
    layers = [m for m in model.modules() if isinstance(m, (NeutralLinear, QuantizedLinear))]
    parts = [t for m in layers for t in (m.weight.parameters() if isinstance(m, NeutralLinear) else m.buffers())]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in parts]
    return sum(t.numel() * t.element_size() for t in local)


def resident(field: str) -> int:
    """``VmRSS``, the bytes of this process in memory, or ``VmHWM``, their peak since `reset_peak`."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", "utf-8")


def trained(model: nn.Module, width: int) -> list[float]:
    """The losses of three steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(1)
    x, wanted, losses = torch.randn(16, width).bfloat16(), torch.randn(16, width).bfloat16(), []
    for _ in range(3):
        loss = nn.functional.mse_loss(model(x).float(), wanted.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def work(rank: int, ranks: int, args: argparse.Namespace, mode: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    trained(made(64, 1, mode), 64)  # modules that are imported at the first step are not memory of the model
    model = made(args.width, args.layers, mode)
    before = resident("VmRSS")
    reset_peak()
    losses = trained(model, args.width)
    torch.save((held(model), resident("VmHWM") - before, losses), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def measured(ranks: int, mode: str, args: argparse.Namespace) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (ranks, args, mode, folder), nprocs=ranks)
        found = [torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)]
    most, peak = max(row[0] for row in found), max(row[1] for row in found)
    first, *_, last = found[0][2]
    return str(ranks), mode, f"{most / MB:.1f}", f"{peak / MB:.0f}", f"{first:.4f} to {last:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    args = parser.parse_args()
    rows = [measured(ranks, mode, args) for ranks in args.ranks for mode in MODES]
    heads = [
        "ranks",
        "frozen weights",
        "weights per rank, MB",
        "peak above the model, MB",
        "loss of the first to third step",
    ]
    print(header(f"Adapters over {args.layers} layers of {args.width} x {args.width}, w4a16-g32"))
    print()
    print(markdown(heads, rows))


if __name__ == "__main__":
    main()
