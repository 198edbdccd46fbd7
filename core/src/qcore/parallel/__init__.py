"""Tensor parallel: quantized layers cut over the ranks of a process group of torch.distributed.

Each rank holds a part of the neutral weight and packs it for its own device; one all_reduce follows a layer that is cut
along its input features. May import: model, nn and the floors below. Imported by: hf, plugin_api. Users import it.

```python
import torch.distributed as dist
import qcore.parallel

dist.init_process_group()                        # under torchrun
qcore.quantize_(model, "w4a16-g128")             # the same on every rank, or loaded from one file
qcore.parallel.shard_(model)                     # attention by heads, MLPs by columns and rows, experts by expert
```
"""

from ..nn import NeutralLinear
from ..nn.parts import named_by_rank
from .agreement import disagreements
from .cutting import Cut
from .embedding import VocabParallelEmbedding
from .experts import ParallelExperts
from .floats import FloatColumnParallelLinear, FloatRowParallelLinear
from .linear import ColumnParallelLinear, RowParallelLinear
from .neutral import pack_, unpack_
from .order import fold_order_
from .plans import plan_for
from .sharding import shard_

__all__ = [
    "ColumnParallelLinear",
    "Cut",
    "FloatColumnParallelLinear",
    "FloatRowParallelLinear",
    "NeutralLinear",
    "ParallelExperts",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "disagreements",
    "fold_order_",
    "named_by_rank",
    "pack_",
    "plan_for",
    "shard_",
    "unpack_",
]
