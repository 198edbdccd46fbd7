"""Whole models on a device: the front half that every graph backend of `torch.compile` shares.

``torch.compile(model, backend="qcore_xla")`` goes through five steps, of which a plugin writes the last:

1. **Capture** (`capture`): Dynamo records the model. Each layer of `qcore.nn` is one node with its scheme, whatever
   kernel it is bound to (`qcore.nn.graph_ops`); linear layers, attention and norms in floats stay whole as well
   (`rewriting`).
2. **Decomposition** (`ops`): AOT autograd makes the record functional, with torch's decompositions to core ATen ops.
   The op list is documented in `qcore.graphs.ops`. Patterns of simpler ops become the named ones of the list if the
   backend asks for it (`recognizing`): rms_norm, rope, attention with grouped heads.
3. **Cutting** (`cutting`): `GraphBackend.why_not` says of each node why the device does not run it. The others form the
   largest parts that need nothing from the host in between; nodes with a reason run in torch, and `explain` lists them.
   Constants among these are computed once (`folding`).
4. **States** (`states`): a buffer or argument that the model mutates (a KV cache) becomes a state of the part that
   mutates it, which the device keeps and updates in place. What torch sees of it, and when: see `states`.
5. **The backend** (`backends`): `GraphBackend.compile` gets a `Part` with static shapes, and returns a callable.

**Lengths.** Dynamo compiles the first shapes it sees as constants, and makes a dimension dynamic once it changes. A
graph with dynamic sizes is decomposed and compiled anew for each set of sizes; a model that is called with many lengths
should pad its inputs to a few (`bucket`), as decoders with a static cache do for prompts: only the model knows what
padding means. Backends may keep programs on disk. A Python float that changes from call to call is a constant of its
program, too: pass a tensor. A Python integer is passed as one if it is not a size (`integers`): a position, or the
tokens that a cache counts. A graph that is compiled for many values warns.

**Replays** (`replaying`). Before each call Dynamo checks that the model is still what was captured; `make_replay`
returns a function that repeats a call without these checks.

**Inference only.** A call that needs gradients runs in torch, with a `QcoreWarning`; so does a graph that a backend
fails to compile, and a part that it refuses when it is called (`PartRefused`). `explain` has the reason.

**Aliases.** For each way in which arguments overlap what a graph writes there is a program of its own (`overlaps`).
Results have torch's strides where they fill their memory, and share it where torch's do (`aliases`).

Public: the names below; plugins import them from `qcore.plugin_api`. May import: nn and the floors below it. Imported
by: checkpoint, plugin_api, `qcore`.
"""

from ..nn.graph_ops import owners as layers_of
from ..nn.graph_ops import scheme_of, weight_of
from .backends import Compiled, GraphBackend, Input, Part, PartRefused, Role
from .capture import torch_compile_backend
from .explaining import Explanation, HostNode, PartReport, Report, explain
from .folding import constant_value, is_constant
from .lengths import bucket
from .ops import base_name, is_whole
from .replaying import Replay, make_replay
from .states import Resident, Stamp, synchronize, version, why_shared

__all__ = [
    "Compiled",
    "Explanation",
    "GraphBackend",
    "HostNode",
    "Input",
    "Part",
    "PartRefused",
    "PartReport",
    "Replay",
    "Report",
    "Resident",
    "Role",
    "Stamp",
    "base_name",
    "bucket",
    "constant_value",
    "explain",
    "is_constant",
    "is_whole",
    "layers_of",
    "make_replay",
    "scheme_of",
    "synchronize",
    "torch_compile_backend",
    "version",
    "weight_of",
    "why_shared",
]
