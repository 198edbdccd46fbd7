"""Calls of ops over windows, of running products, sorted tables and special functions, for tests against torch."""

from __future__ import annotations

import torch
from graph_cases import IMAGE, I, P, X
from torch.nn import functional as F

TABLE = torch.tensor([-2.0, -1.0, -1.0, 0.5, 2.0])
PLACES = torch.tensor([[[2, 0, 1, 1]] * 3] * 2)
VOLUME, NAN = IMAGE[None], IMAGE.masked_fill(IMAGE > 0.95, float("nan"))


def transposed(x, groups=1, **kwargs):
    return F.conv_transpose2d(
        x, x[0, :, :3, :2].reshape(4, 1, 3, 2).repeat(1, 2, 1, 1), x[0, 0, 0, : 2 * groups], groups=groups, **kwargs
    )


def reduced(name, own):
    return lambda x, i: (x + 1).scatter_reduce(1, i, x, name, include_self=own)


CASES = {
    "max_pool2d_with_indices": [
        (lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGE,)), (lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True), (IMAGE,)),
        (lambda x: F.max_pool2d(x, (2, 3), 1, (1, 0), (2, 1)), (NAN,)), (lambda x: F.max_pool1d(x, 2), (X,)),
        (lambda x: F.max_pool2d(x, 5, 4, 2, ceil_mode=True), (IMAGE,)),
    ],
    "max_pool3d_with_indices": [(lambda x: F.max_pool3d(x, 2, 1, 1), (VOLUME,))],
    "avg_pool2d": [
        (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (IMAGE,)),
        (lambda x: F.avg_pool2d(x, 4, 3, 2, True, False), (IMAGE,)),
        (lambda x: F.avg_pool2d(x, 2, ceil_mode=True, divisor_override=3), (IMAGE,)),
    ],
    "avg_pool3d": [
        (lambda x: F.avg_pool3d(x, (2, 3, 2), 2, 1), (VOLUME,)), (lambda x: F.local_response_norm(x, 3), (IMAGE,)),
    ],
    "_adaptive_avg_pool2d": [(lambda x: F.adaptive_avg_pool2d(x, (3, 4)), (IMAGE,))],
    "adaptive_max_pool2d": [(lambda x: F.adaptive_max_pool2d(x, (1, 3)), (IMAGE,))],
    "convolution": [
        (transposed, (IMAGE,)), (lambda x: transposed(x, stride=(2, 3), padding=1, output_padding=1), (IMAGE,)),
        (lambda x: transposed(x, groups=2, dilation=(1, 2)), (IMAGE,)),
        (lambda x: F.conv_transpose1d(x, x[0, :, :3].view(3, 1, 3), stride=2), (X,)),
    ],
    "_native_batch_norm_legit": [
        (lambda x, w: torch.ops.aten._native_batch_norm_legit(x, w, w, True, 0.1, 1e-5)[0], (IMAGE, P[0, 0])),
        (lambda x: torch.ops.aten._native_batch_norm_legit(x, None, None, True, 0.1, 1e-5)[0], (IMAGE,)),
    ],
    "as_strided": [(lambda x: x.as_strided((3, 4), (5, 2), 3), (X,)), (lambda x: x.as_strided((5, 2), (1, 0)), (X,))],
    "unfold": [(lambda x: x.unfold(1, 2, 1), (X,)), (lambda x: x.unfold(-1, 2, 2), (X,))],
    "diagonal": [(lambda x: x.diagonal(1, -1, 0), (X,))],
    "cumprod": [(lambda x: x.cumprod(1), (X,)), (lambda x: x.cumprod(0, dtype=torch.float32), (I,))],
    "logcumsumexp": [(lambda x: x.logcumsumexp(-1), (X,))],
    "var_mean": [(lambda x: torch.cat(torch.var_mean(x, (0, 2), correction=0)), (X,))],
    "searchsorted": [
        (lambda x, t: torch.searchsorted(t, x), (X.round(), TABLE)),
        (lambda x, t: torch.searchsorted(t, x, right=True), (X.round(), TABLE)),
        (lambda x: torch.searchsorted(x.cumsum(-1), x.flip(-1), side="right"), (P,)),
    ],
    "bucketize": [(lambda x, t: torch.bucketize(x, t, right=True, out_int32=True), (X.round(), TABLE))],
    "scatter_reduce": [
        (reduced(name, own), (X, PLACES)) for name in ("sum", "prod", "mean", "amax", "amin") for own in (False, True)
    ],
    **{name: [(getattr(torch, name), (X,))] for name in ("asinh", "erfc")},
    **{name: [(getattr(torch, name), (P,))] for name in ("lgamma", "digamma")},
    "acosh": [(lambda x: (x + 1).acosh(), (P,))], "atanh": [(torch.atanh, (X / 4,))],
    "erfinv": [(torch.erfinv, (X / 4,))],
    **{name: [(getattr(torch, name), (X, P.flip(0)))] for name in ("atan2", "hypot", "copysign", "fmax", "fmin")},
}  # fmt: skip
