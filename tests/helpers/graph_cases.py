"""Calls of the op list with small tensors, for tests of graph backends against torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

X, Y = torch.linspace(-3, 3, 24).view(2, 3, 4), torch.linspace(2, -1, 24).view(2, 3, 4)
P = X.abs() + 0.1
I = torch.arange(-12, 12).view(2, 3, 4)  # noqa: E741
B = X > 0
ROWS = torch.tensor([2, 0])
IMAGE = torch.sin(torch.arange(2 * 4 * 7 * 6).float()).view(2, 4, 7, 6)


def ones_of(name, *rest):
    """A call of an ATen op."""
    op = getattr(torch.ops.aten, name)
    return lambda *tensors: op(*tensors, *rest)


UNARY = {
    "exp exp2 expm1 sin cos tan tanh erf sigmoid neg abs sign floor ceil trunc relu silu gelu mish "
    "hardsigmoid hardswish atan sinh cosh round isnan isinf": X,
    "log log1p log2 sqrt rsqrt reciprocal": P,
    "asin acos": X / 4,
    "abs neg sign bitwise_not logical_not relu": I,
    "bitwise_not logical_not": B,
}
CASES = [  # the name of an op that the function decomposes to, the function, its arguments
    *((name, ones_of(name), (x,)) for names, x in UNARY.items() for name in names.split()),
    *((name, ones_of(name), (X, Y)) for name in ("add", "sub", "mul", "div", "maximum", "minimum")),
    *((name, ones_of(name), (X, Y)) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *((name, ones_of(name), (X, Y)) for name in ("logical_and", "logical_or", "logical_xor", "remainder", "fmod")),
    *((name, ones_of(name), (I, I.flip(0))) for name in ("add", "sub", "mul", "div", "eq", "lt")),
    *((name, ones_of(name), (I, I.flip(0))) for name in ("bitwise_and", "bitwise_or")),
    ("add", ones_of("add", 2.5), (I,)), ("add", ones_of("add", 3), (B,)), ("mul", ones_of("mul", 2), (X,)),
    ("rsub", ones_of("rsub", 2.0), (X,)), ("sub", lambda a, b: torch.sub(a, b, alpha=3), (X, Y)),
    ("floor_divide", lambda x: x // 2.5, (X,)), ("floor_divide", lambda x: x // 5, (I,)),
    ("div", lambda x: torch.div(x, 4, rounding_mode="floor"), (I,)),
    ("div", lambda x: torch.div(x, 4, rounding_mode="trunc"), (I,)),
    ("remainder", lambda x: x % 5, (I,)), ("remainder", lambda x: x % -2.5, (X,)),
    ("pow", lambda x: x**2, (X,)), ("pow", lambda x: x**3, (I,)), ("pow", lambda x: x**0.5, (P,)),
    ("pow", lambda x: x**-1.5, (P,)), ("pow", lambda x: 2.0**x, (X,)), ("pow", torch.pow, (P, Y)),
    ("pow", lambda x: x**10, (X,)), ("pow", lambda x: x**-2, (P,)),
    ("gelu", lambda x: F.gelu(x, approximate="tanh"), (X,)), ("leaky_relu", lambda x: F.leaky_relu(x, 0.2), (X,)),
    ("elu", F.elu, (X,)), ("softplus", F.softplus, (X * 12,)), ("clamp", lambda x: x.clamp(-1, 2), (X,)),
    ("clamp", torch.clamp, (X, Y, P)), ("clamp", lambda x, y: x.clamp(min=y), (X, Y[:, :1])),
    ("clamp", lambda x: x.clamp(min=0.5), (X,)), ("clamp", lambda x: x.clamp(max=3), (I,)),
    ("hardtanh", lambda x: F.relu6(x * 4), (X,)), ("where", torch.where, (B, X, Y)),
    ("where", lambda b, x: torch.where(b, x, 0.0), (B, X)), ("masked_fill", lambda x, b: x.masked_fill(b, -7), (X, B)),
    ("lerp", lambda x, y: torch.lerp(x, y, 0.3), (X, Y)), ("addcmul", lambda x, y: torch.addcmul(x, x, y), (X, Y)),
    ("addcdiv", lambda x, y: torch.addcdiv(x, x, y, value=2), (X, P)), ("logical_not", torch.logical_not, (X,)),
    *(("_to_copy", lambda x, dtype=dtype: x.to(dtype), (x,))
      for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.bool)
      for x in (X, I, B)),
    # Views and moves.
    ("view", lambda x: x.view(6, -1), (X,)), ("view", lambda x: x.view(torch.int32), (X,)),
    ("expand", lambda x: x[:, :1].expand(5, 2, 3, 4), (X,)), ("expand", lambda x: x[:1].expand(7, -1, -1), (X,)),
    ("permute", lambda x: x.permute(2, 0, 1), (X,)), ("permute", lambda x: x.transpose(-1, 0), (X,)),
    ("unsqueeze", lambda x: x.unsqueeze(-1), (X,)), ("squeeze", lambda x: x[:, :1].squeeze(1), (X,)),
    ("squeeze", lambda x: x[:1, :1].squeeze(), (X,)), ("squeeze", lambda x: x.squeeze(0), (X,)),
    ("slice", lambda x: x[:, 1:], (X,)), ("slice", lambda x: x[..., -2:100], (X,)), ("slice", lambda x: x[::2], (X,)),
    ("slice", lambda x: x[:, 2:1], (X,)), ("select", lambda x: x[:, -1], (X,)),
    ("split_with_sizes", lambda x: x.split([1, 3], -1)[1], (X,)), ("unbind", lambda x: x.unbind(1)[2], (X,)),
    ("cat", lambda x, y: torch.cat((x, y), -1), (X, Y)), ("cat", lambda x, i: torch.cat((x, i), 1), (X, I)),
    ("cat", lambda x: torch.cat((x.new_empty(0), x)), (X[0, 0],)),
    ("stack", lambda x, y: torch.stack((x, y), 1), (X, Y)),
    ("flip", lambda x: x.flip(0, 2), (X,)), ("roll", lambda x: x.roll((1, -2), (0, 2)), (X,)),
    ("roll", lambda x: x.roll(3), (X,)), ("repeat", lambda x: x.repeat(2, 1, 3), (X,)),
    ("constant_pad_nd", lambda x: F.pad(x, (1, 2, 0, 3), value=2.0), (X,)),
    ("constant_pad_nd", lambda x: F.pad(x, (-1, 0, 2, -1)), (X,)),
    ("slice_scatter", lambda x, y: torch.slice_scatter(x, y[:, :2], 1, 1), (X, Y)),
    ("select_scatter", lambda x, y: torch.select_scatter(x, y[:, 0], 1, -1), (X, Y)),
    ("index", lambda x, i: x[i], (Y, ROWS - 1)), ("index", lambda x, i: x[:, i], (X, ROWS)),
    ("index", lambda x, i: x[:, i, i], (X, ROWS)), ("index", lambda x, i: x[torch.arange(2), i], (X, ROWS)),
    ("index_put", lambda x, i: torch.ops.aten.index_put(x, (None, i), x[:, :2] * 2), (X, ROWS)),
    ("index_put", lambda x, i: x.index_put((torch.zeros_like(i),), x, accumulate=True), (X, ROWS)),
    ("index_select", lambda x, i: x.index_select(1, i), (X, ROWS)),
    ("index_copy", lambda x, i, y: x.index_copy(1, i, y[:, :2]), (X, ROWS, Y)),
    ("index_copy", lambda x, i, y: x.index_copy(-2, i[:1], y[:, :1]), (X, ROWS, Y)),
    ("gather", lambda x: x.gather(1, torch.tensor([[[2, 0, 1, 1]]])), (X,)),
    ("scatter", lambda x, y: x.scatter(1, torch.tensor([[[2, 0, 1, 1]]]), y), (X, Y)),
    ("scatter", lambda x: x.scatter(-1, torch.tensor([[[2], [0]]]), 5.0), (X,)),
    *(("scatter", lambda x, f=f: x.scatter(1, torch.tensor([[[2, 0, 1, 1], [2, 2, 2, 2]]]), 3.0, reduce=f), (X,))
      for f in ("add", "multiply")),
    ("scatter_add", lambda x, y: x.scatter_add(0, torch.zeros(2, 3, 4, dtype=torch.long), y), (X, Y)),
    ("clone", lambda x: x.mT.contiguous(), (X,)), ("copy", ones_of("copy"), (X, Y[:1])),
    ("bitwise_xor", ones_of("bitwise_xor"), (I, I.flip(0))),
    ("native_layer_norm", lambda x, w: torch.native_layer_norm(x, (4,), w, w, 1e-5)[0], (X, P[0, 0])),
    ("_native_batch_norm_legit_no_training",
     lambda x, m, v: torch.ops.aten._native_batch_norm_legit_no_training(x, v, m, m, v, 0.1, 1e-5)[0],
     (IMAGE, X[0, 0], P[0, 0])),
    # Constants.
    ("empty", lambda x: torch.empty(0, 3), (X,)),
    ("empty_permuted", lambda x: torch.empty_permuted((0, 2), (1, 0)), (X,)),
    ("arange", lambda x: torch.arange(5) + x[0, 0, 0], (X,)), ("arange", lambda x: torch.arange(7, 1, -2), (X,)),
    ("arange", lambda x: torch.arange(0, 1, 0.3), (X,)), ("full", lambda x: torch.full((2, 3), -1.5), (X,)),
    ("full", lambda x: torch.full((2,), True), (X,)), ("full", lambda x: torch.full((2,), 7), (X,)),
    ("full_like", lambda x: torch.full_like(x, 3, dtype=torch.int32), (X,)),
    ("full", lambda x: x.new_zeros(2, 3), (X,)), ("full", lambda x: torch.ones_like(x, dtype=torch.bfloat16), (X,)),
    ("scalar_tensor", lambda x: torch.where(x > 0, x, torch.scalar_tensor(2.0)), (X,)),
    # Reductions.
    *((name, lambda x, f=f: f(x), (X,)) for name, f in {
        "sum": lambda x: x.sum(), "mean": lambda x: x.mean((0, 2)), "amax": lambda x: x.amax(-1, keepdim=True),
        "amin": lambda x: x.amin(1), "any": lambda x: (x > 2).any(), "all": lambda x: (x > -9).all(1),
        "prod": lambda x: x.prod(1), "argmax": lambda x: x.argmax(-1), "argmin": lambda x: x.argmin(),
        "max": lambda x: torch.cat([t.float() for t in x.max(1)]), "min": lambda x: torch.cat(list(x.min(0, True))[:1]),
        "var": lambda x: x.var(1), "cumsum": lambda x: x.cumsum(1), "_softmax": lambda x: x.softmax(1),
        "_log_softmax": lambda x: x.log_softmax(-1), "tril": lambda x: x.tril(-1), "triu": lambda x: x.triu(1),
        "sort": lambda x: x.sort(-1, descending=True)[0],
    }.items()),
    ("linalg_vector_norm", lambda x: F.normalize(x, dim=-1), (X,)),
    ("linalg_vector_norm", lambda x: torch.linalg.vector_norm(x, 3, (0, 2), keepdim=True), (X,)),
    ("linalg_vector_norm", lambda x: torch.linalg.vector_norm(x, float("inf"), 1), (X,)),
    *((name, lambda x, f=name: getattr(x, f)(0, dtype=torch.int64), (I,)) for name in ("sum", "cumsum")),
    ("cumsum", lambda x: x.cumsum(0), (torch.full((300,), 3, dtype=torch.uint8),)),
    ("eq", lambda x: x == 256, (I.to(torch.uint8),)), ("lt", lambda x: x < 200, (I.to(torch.int8),)),
    ("sum", lambda x: x.sum(-1), (I,)), ("sum", lambda x: x.sum((0, 1), keepdim=True), (B,)),
    ("mean", lambda x: x.mean(-1, dtype=torch.float32), (I,)), ("cumsum", lambda x: x.cumsum(0), (B,)),
    ("argmax", lambda x: x.argmax(0, keepdim=True), (X % 1.3,)), ("topk", lambda x: x.topk(2)[0], (X,)),
    ("topk", lambda x: x.topk(2, 0, largest=False)[1], (X,)), ("sort", lambda x: x.sort(1)[1], (X % 1.3,)),
    # Products.
    ("mm", torch.mm, (X[0], Y[0].T)), ("bmm", torch.bmm, (X, Y.mT)), ("mm", torch.mm, (I[0].int(), I[1].int().T)),
    ("addmm", lambda b, x, y: torch.addmm(b, x, y, beta=2, alpha=3), (X[0, :, :3], X[0], Y[0].T)),
    ("baddbmm", torch.baddbmm, (X[:, :, :3], X, Y.mT)),
    ("embedding", lambda t, i: F.embedding(i, t), (X[0], torch.tensor([[2, 0], [1, 1]]))),
    ("convolution", lambda x: F.conv2d(x, x[:, :, :3, :2], x[0, 0, 0, :2], 2, (1, 2), 1), (IMAGE,)),
    ("convolution", lambda x: F.conv2d(x, x[:, :1, :3, :2].repeat(2, 1, 1, 1), None, 1, 1, 2, groups=4), (IMAGE,)),
    ("convolution", lambda x: F.conv1d(x[:, 0], x[1, :, :, :3], padding=1), (IMAGE.transpose(1, 2),)),
    ("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), (IMAGE,)),
    ("avg_pool2d", lambda x: F.avg_pool2d(x, (2, 3), count_include_pad=False, padding=1), (IMAGE,)),
    ("mean", lambda x: F.adaptive_avg_pool2d(x, 1), (IMAGE,)),
    ("_native_batch_norm_legit_no_training",
     lambda x, m, v: F.batch_norm(x, m, v, v, m, False), (IMAGE, X[0, 0], P[0, 0])),
    ("native_group_norm", lambda x, w: F.group_norm(x, 2, w, w), (IMAGE, X[0, 0])),
    # Ops that are kept whole.
    *((f"qcore_graph.{name}", getattr(torch.ops.qcore_graph, name), args) for name, args in {
        "dense": (X, Y[0], Y[0, :, 0]), "rms_norm": (X, P[0, 0], 1e-5), "layer_norm": (X, P[0, 0], Y[0, 0], 1e-5),
        "rope": (X, Y, P[0]),
    }.items()),
]  # fmt: skip

MASKS = {
    "none": None,
    "added": torch.tensor([[0.0, -1.0, 2.0, float("-inf"), 0.5]]).expand(3, 5),
    "bool": torch.tensor([[True, False, True, True, False]]).expand(3, 5),
    "blind": torch.tensor([[True], [False], [True]]).expand(3, 5),
}

ZERO = torch.tensor(0)
ALONG_NO_DIMENSION = {
    "_softmax": lambda x: x.softmax(0), "_log_softmax": lambda x: x.log_softmax(-1), "sort": lambda x: x.sort()[0],
    "topk": lambda x: x.topk(1)[0], "argmax": lambda x: x.argmax(0), "max": lambda x: x.max(0)[0],
    "index_select": lambda x: x.index_select(0, ZERO[None]), "gather": lambda x: x.gather(0, ZERO),
    "scatter": lambda x: x.scatter(0, ZERO, 2.0), "scatter_add": lambda x: x.scatter_add(0, ZERO, x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, ZERO, x, "sum"),
}  # fmt: skip
"""Functions along a dimension of a tensor that has none."""
