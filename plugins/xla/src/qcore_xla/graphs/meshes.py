"""Programs on several devices: layers cut over a mesh, everything else placed around them by XLA (GSPMD).

A quantized layer is cut as `qcore.parallel` cuts it: its neutral weight by output features or, along groups, by input
features. Every device packs its part for itself; the parts are stacked along a first dimension that is sharded over the
mesh, and `jax.shard_map` multiplies each with its part. A layer that is cut by input features adds up the devices'
results: the one all-reduce behind attention, and the one behind an MLP. The rest of a program has global shapes.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor, nn

from qcore import DynamicFP8, QcoreWarning, QTensor, Scheme, UnsupportedError
from qcore.plugin_api import layer_contract, layers_of, plan_for

_FINEST = 4
"""The smallest group that a cut may make, as in `qcore.parallel`."""


@dataclass(frozen=True)
class MeshCut:
    """How a linear layer is cut over an axis of a mesh.

    **Fields:** ``kind``: ``"column"`` or ``"row"``; ``mesh``, ``axis``; ``scales``: see `shard_`.
    """

    kind: str
    mesh: Mesh
    axis: str
    scales: str = "global"

    @property
    def size(self) -> int:
        """Devices along the axis."""
        return int(self.mesh.shape[self.axis])

    def why_not(self, n: int, k: int, group: int | None, *, order: bool = False) -> str:
        """Why a weight ``(n, k)`` stays whole, a clause; empty if it can be cut. ``order``: whether it has one."""
        if (n if self.kind == "column" else k) % self.size:
            return f"its {'output' if self.kind == 'column' else 'input'} features are no multiple of {self.size}"
        if self.kind == "row" and order:
            return "its columns have an order"
        fine = self.group(k, group)
        if fine is not None and fine < min(group or fine, _FINEST):
            return f"its groups of {group} would become groups of {fine}"
        return ""

    def why_not_weight(self, weight: QTensor) -> str:
        """`why_not` of a weight ``(N, K)``."""
        n, k = weight.shape
        return self.why_not(n, k, weight.format.group_size, order=weight.order is not None)

    def why_not_activation(self, activation: Any, k: int) -> str:
        """Why an activation of K features keeps a layer whole: groups with scales of their own that a cut divides."""
        group = activation.group if isinstance(activation, DynamicFP8) else None
        if self.scales == "local" or group is None or self.group(k, group) == group:
            return ""
        return f"groups of {group} activations would get several scales each, which scales='local' allows"

    def group(self, k: int, group: int | None) -> int | None:
        """The size of groups after the cut: the largest that divides them and the shares."""
        return group if self.kind == "column" or group is None else math.gcd(group, k // self.size)

    def parts(self, weight: QTensor) -> list[QTensor]:
        """The parts of a weight ``(N, K)``, one per device."""
        n, k = weight.shape
        if self.kind == "column":
            each = n // self.size
            return [weight.narrow(-2, i * each, each) for i in range(self.size)]
        fine, each = self.group(k, weight.format.group_size), k // self.size
        finer = weight if fine == weight.format.group_size or fine is None else weight.regroup(fine)
        return [finer.narrow(-1, i * each, each) for i in range(self.size)]


_cuts: weakref.WeakKeyDictionary[nn.Module, MeshCut] = weakref.WeakKeyDictionary()
"""By quantized layer."""


def shard_(
    model: nn.Module,
    mesh: Mesh,
    *,
    axis: str | None = None,
    plan: Mapping[str, str] | None = None,
    scales: Literal["global", "local"] = "global",
) -> dict[str, str]:
    """Let programs that ``torch.compile(model, backend="qcore_xla")`` makes from now on run on a mesh of devices.

    Called one by one, the layers go on as before. Compile the model after this call. If torch's tensors are on a device
    of the mesh, KV caches and other states are whole on every device. Torch has the memory of its own device's, and
    what it writes there reaches the others with the next call, unless torch does not count it: writes to
    ``tensor.data``, or by NumPy or another library to memory that it shares.

    **Arguments:**

    - ``model``: quantized.
    - ``mesh``: a `jax.sharding.Mesh`, for instance ``jax.make_mesh((4,), ("model",))``.
    - ``axis``: the axis to cut over; by default the only one.
    - ``plan``: names of linear layers to ``"column"`` (output features) or ``"row"`` (input features, summed
      afterwards); by default what `qcore.parallel.plan_for` finds: attention by heads, MLPs by hidden features.
    - ``scales``: of activations that are quantized per token at run time, in layers that are summed. ``"global"``:
      from all features, as on one device, by one more all-reduce of one number per token; a layer stays whole if
      that would divide groups of activations that have a scale each. ``"local"``: from each device's own features,
      finer and without communication, so results depend on the number of devices.

    Returns the kind of cut by name of layer. Layers that cannot be cut evenly stay whole, on every device, with a
    warning; key and value heads stay whole if they are fewer than the devices. Raises `UnsupportedError` if nothing can
    be cut, and for other ``scales``.
    """
    if scales not in {"global", "local"}:
        raise UnsupportedError(f"scales is {scales!r}; it must be 'global' or 'local'.")
    mesh, axis = axis_of(mesh, axis)
    size = int(mesh.shape[axis])
    wanted = _planned(model, size) if plan is None else dict(plan)
    found: dict[str, str] = {}
    for name, kind in wanted.items():
        layer, cut = model.get_submodule(name), MeshCut(kind, mesh, axis, scales)
        if kind not in {"column", "row"} or layer_contract(layer) != "linear":
            raise UnsupportedError(f"{name}: quantized linear layers are cut, by 'column' or 'row', not {kind!r}.")
        weight: QTensor = layer.weight  # type: ignore[assignment]
        scheme: Scheme = layer.scheme  # type: ignore[assignment]
        if why := cut.why_not_weight(weight) or cut.why_not_activation(scheme.activation, weight.shape[-1]):
            warnings.warn(f"{name} stays whole on every device: {why}.", QcoreWarning, stacklevel=2)
            continue
        _cuts[layer] = cut
        found[name] = kind
    if not found:
        raise UnsupportedError("no layer of the model can be cut over the mesh: quantize it first, or give a plan.")
    return found


def axis_of(mesh: Mesh, axis: str | None) -> tuple[Mesh, str]:
    """The mesh with axes that XLA may use as it likes, and the axis to cut over: ``axis``, or the only one."""
    names = [str(name) for name in mesh.axis_names]
    if axis not in names and (axis is not None or len(names) != 1):
        raise UnsupportedError(f"axis={axis!r}: say which axis of the mesh to cut over, one of {', '.join(names)}.")
    return Mesh(mesh.devices, mesh.axis_names), axis or names[0]


def _planned(model: nn.Module, size: int) -> dict[str, str]:
    """The cuts that programs of global shapes can make: heads in whole numbers, one part of features per layer."""
    return {
        name: cut.kind
        for name, cut in plan_for(model, size).items()
        if cut.kind in {"column", "row"} and cut.parts == 1 and not cut.replicate
        if layer_contract(model.get_submodule(name)) == "linear"
    }


def cuts_of(markers: Sequence[Tensor | None]) -> tuple[MeshCut | None, ...]:
    """The cuts of the layers whose weights tensors of a graph stand for; None for one that is whole."""
    if not _cuts:  # the usual case, in which a call should not wait for a search
        return (None,) * len(markers)
    return tuple(None if one is None else _cut_of(one) for one in markers)


def _cut_of(marker: Tensor) -> MeshCut | None:
    return next((cut for one in layers_of(marker) if (cut := _cuts.get(one))), None)


class Placement:
    """Where the arrays of a program are: on one device, or on a mesh.

    **Attributes:** ``here``: the device of the mesh that torch's tensors are on; None without a mesh, and if they are
    on none of its devices.
    """

    def __init__(self, cuts: Mapping[Any, MeshCut], device: torch.device | None = None) -> None:
        """``device``: of torch's tensors; None where there are none, as for a compiler."""
        first = next(iter(cuts.values()), None)
        self._mesh: Mesh | None = None if first is None else first.mesh
        self._axis = "" if first is None else first.axis
        devices = [] if self._mesh is None or device is None else list(self._mesh.devices.flat)
        self.here = next((one for one in devices if device is not None and _is_same(one, device)), None)

    @property
    def whole(self) -> NamedSharding | None:
        """On every device; None without a mesh."""
        return None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())

    def parts(self, cut: MeshCut | None) -> NamedSharding | None:
        """Of the arrays of a packed weight."""
        return self.whole if cut is None else NamedSharding(cut.mesh, PartitionSpec(cut.axis))

    def state(self, shape: tuple[int, ...]) -> NamedSharding | None:
        """Of a state: whole where torch can share its memory (`here`), which needs all of it on one device.

        Elsewhere a KV cache ``(B, heads, length, head_dim)`` is cut by heads, if they can be shared out.
        """
        if self._mesh is None or self.here is not None or len(shape) != 4 or shape[1] % self._mesh.shape[self._axis]:
            return self.whole
        return NamedSharding(self._mesh, PartitionSpec(None, self._axis))

    def gathered(self, array: Any) -> Any:
        """The whole array for torch, on one device: on a mesh on `here`, or, if that is None, on its first device."""
        if self._mesh is None:
            return array
        if self.here is not None and array.is_fully_replicated:
            return part_on(array, self.here)
        return jax.device_put(array, self.here or self._mesh.devices.flat[0])


def placed(array: Any, sharding: NamedSharding | None) -> Any:
    """The array where it belongs."""
    return array if sharding is None else jax.device_put(array, sharding)


def part_on(array: Any, device: Any) -> Any:
    """What a device of the mesh has of an array: all of it, if the array is whole on every device."""
    return next(part.data for part in array.addressable_shards if part.device == device)


def _is_same(one: Any, device: torch.device) -> bool:
    """Whether a device of JAX is this device of torch. `jax.make_mesh` may put another device first."""
    if device.type == "cuda":
        return bool(one.platform in {"gpu", "cuda", "rocm"} and one.local_hardware_id == (device.index or 0))
    return bool(one.platform == device.type)
