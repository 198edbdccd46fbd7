"""The first example of the page "Several GPUs" runs on two processes of a CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "several-gpus.md"
BLOCK = re.compile(r"test_page.py runs it.*?-->\n```python\n(.*?)```", re.DOTALL)
ON_A_CPU = {
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n': "",
    '"nccl"': '"gloo"',
    "model.cuda()": "model.cpu()",
}
BEFORE = """
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

def build():
    return nn.ModuleDict({"mlp": Mlp()})
"""
MADE = """
import qcore
model = build()
qcore.quantize_(model, "w4a16-g32")
qcore.save(model, "model-int4")
"""
AFTER = """
import weakref

x = torch.linspace(-1, 1, 320).view(5, 64)
whole = build()
qcore.load_(whole, "model-int4")
with torch.no_grad():
    error = (model["mlp"](x) - whole["mlp"](x)).norm() / whole["mlp"](x).norm()
assert type(model["mlp"].down_proj).__name__ == "RowParallelLinear"
assert error < 1e-5, error
# A group that something holds keeps its threads, which abort a process that ends while they drop a tensor.
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert group() is None
"""


def test_page(tmp_path):
    (block,) = BLOCK.findall(PAGE.read_text("utf-8"))
    for gpu, cpu in ON_A_CPU.items():
        assert gpu in block
        block = block.replace(gpu, cpu)
    (tmp_path / "make.py").write_text(BEFORE + MADE, "utf-8")
    (tmp_path / "program.py").write_text(BEFORE + block + AFTER, "utf-8")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py")
    for command in (("make.py",), torchrun):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
