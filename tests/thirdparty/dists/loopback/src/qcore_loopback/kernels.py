"""The kernels: quantize and round in torch ops, multiply and gather in ops of the plugin's own, in float64."""

import torch
from torch.nn import functional as F

import qcore
from qcore.formats import ZeroPoint
from qcore.plugin_api import check_indices
from qcore.weights.activations import dynamic_parameters, quantize_int8

_library = torch.library.Library("qcore_loopback", "DEF")
_library.define("product(Tensor a, Tensor codes, Tensor scale, Tensor? minus, Tensor? plus, int group) -> Tensor")
_library.define("gather(Tensor i, Tensor codes, Tensor scale, Tensor? minus, Tensor? plus, int group) -> Tensor")


def _dense(codes, scale, minus, plus, group):
    """``(q - minus) * scale + plus`` in float64, ``(N, K)``; parameters are ``(G, N)``."""
    spread = [
        None if p is None else p.t().repeat_interleave(group, 1)[:, : codes.shape[1]] for p in (scale, minus, plus)
    ]
    weight = codes.double() if spread[1] is None else codes.double() - spread[1].double()
    weight = weight * spread[0].double()
    return weight if spread[2] is None else weight + spread[2].double()


@torch.library.impl(_library, "product", "CPU")
def _product(a, codes, scale, minus, plus, group):
    return a @ _dense(codes, scale, minus, plus, group).t()


@torch.library.register_fake("qcore_loopback::product", lib=_library)
def _(a, codes, scale, minus, plus, group):
    return a.new_empty((a.shape[0], codes.shape[0]))


@torch.library.impl(_library, "gather", "CPU")
def _gather(i, codes, scale, minus, plus, group):
    check_indices(i, len(codes))
    parameters = [None if p is None else p.index_select(1, i) for p in (scale, minus, plus)]
    return _dense(codes.index_select(0, i), *parameters, group)


@torch.library.register_fake("qcore_loopback::gather", lib=_library)
def _(i, codes, scale, minus, plus, group):
    return scale.new_empty((i.shape[0], codes.shape[1]), dtype=torch.float64)


class Loopback(qcore.Kernel):
    """What the three have in common: codes, one byte each, and their parameters."""

    def __init__(self, request, plugin="loopback"):
        self.request, self.format, self.out_dtype = request, request.weight, request.out_dtype
        self.name = f"{plugin}.{request.contract}"
        self.group = request.weight.group(request.k)

    def pack(self, weight):
        packed = {"codes": weight.codes().clone(), "scale": weight.scale.clone()}
        zero = weight.integer_zero() if self.format.zero is ZeroPoint.INT else weight.zero
        return packed if zero is None else {**packed, "zero": zero.clone()}

    def unpack(self, packed):
        return qcore.QTensor.from_codes(packed["codes"], packed["scale"], packed.get("zero"), self.format)

    def weight(self, packed):
        """The arguments of both ops after the first."""
        zero, integer = packed.get("zero"), self.format.zero is ZeroPoint.INT
        return packed["codes"], packed["scale"], zero if integer else None, None if integer else zero, self.group

    def activations(self, x, given):
        """A(x) in float64."""
        kind = self.request.activation
        if kind is None:
            return x.double()
        if isinstance(kind, qcore.DynamicInt8):
            scale, zero = dynamic_parameters(x, kind.symmetric)
        else:
            scale, zero = _parameters(kind, given, "x")
        codes = x if x.dtype == torch.int8 else quantize_int8(x, scale, zero)
        return (codes.double() - (0 if zero is None else zero)) * scale

    def finish(self, y, given):
        """The one rounding at the end, or int8 codes."""
        output = self.request.output
        return y.to(self.out_dtype) if output is None else quantize_int8(y.float(), *_parameters(output, given, "out"))


def _parameters(kind, given, prefix):
    if not kind.per_token:
        return kind.scale, kind.zero_point
    return given[f"{prefix}_scale"].reshape(-1, 1).float(), given[f"{prefix}_zero_point"].reshape(-1, 1).float()


class Linear(Loopback):
    def __call__(self, x, packed, bias, **given):
        rows = (
            x.reshape(-1, self.request.k)
            if x.numel() or torch.compiler.is_compiling()
            else x.new_empty(0, self.request.k)
        )
        y = torch.ops.qcore_loopback.product(self.activations(rows, given), *self.weight(packed))
        y = y if bias is None else y + bias.double()
        return self.finish(y, given).reshape(*x.shape[:-1], self.request.n)


class Conv2d(Loopback):
    def __call__(self, x, packed, bias):
        r = self.request
        columns = F.unfold(x.float(), r.kernel_size, r.dilation, r.padding, r.stride)
        # (B, groups, IC, KH*KW, L) to (groups, B*L, KH*KW*IC)
        spots = columns.shape[2]
        size = r.kernel_size[0] * r.kernel_size[1]
        columns = columns.view(x.shape[0], r.groups, r.in_channels // r.groups, size, spots)
        columns = columns.permute(1, 0, 4, 3, 2).reshape(r.groups, x.shape[0] * spots, r.k)
        codes, *parameters, group = self.weight(packed)
        parts = zip(columns, codes.chunk(r.groups), *(_chunks(p, r.groups) for p in parameters), strict=True)
        y = torch.cat([torch.ops.qcore_loopback.product(self.activations(c, {}), *w, group) for c, *w in parts], 1)
        y = self.finish(y if bias is None else y + bias.double(), {})
        height, width = (
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, k, s, p, d in zip(x.shape[2:], r.kernel_size, r.stride, r.padding, r.dilation, strict=True)
        )
        return y.view(x.shape[0], height, width, r.n).permute(0, 3, 1, 2).contiguous()


def _chunks(parameter, groups):
    return [None] * groups if parameter is None else parameter.chunk(groups, 1)


class Embedding(Loopback):
    def __call__(self, x, packed, bias):
        rows = torch.ops.qcore_loopback.gather(x.reshape(-1), *self.weight(packed))
        return self.finish_rows(rows).reshape(*x.shape, self.request.k)

    def finish_rows(self, rows):
        return rows.to(self.out_dtype)
