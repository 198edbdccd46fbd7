"""The places of a cooperative matrix's elements among the lanes of a subgroup: which lane holds which of them.

VK_KHR_cooperative_matrix leaves them to the device. `coop_fragments` needs them, and runs only where they are as
`PLACES` says: those of NVIDIA's matrix instructions, found on an H100 and an H200.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from ..builder import Builder, Place
from ..description import Description
from ..device import Device
from ..native import Unsupported

_LANES, _ELEMENTS, _OF_LANE = 32, 16, 8
_known: weakref.WeakKeyDictionary[Device, bool] = weakref.WeakKeyDictionary()


def _places() -> NDArray[np.int32]:
    lane, e = np.arange(_LANES, dtype=np.int32)[:, None], np.arange(_OF_LANE, dtype=np.int32)
    row = lane // 4 + 8 * (e // 4)
    column = lane % 4 * 2 + e % 2 + 8 * (e // 2 % 2)
    one = np.pad(row * 16 + column, ((0, 0), (0, _ELEMENTS - _OF_LANE)), constant_values=-1)
    return np.stack([one] * 3)


PLACES = _places()
"""[3, 32, 16]: what coop_layout finds where `coop_fragments` runs, of the matrices A, B (transposed) and C.

Lane 4 g + q holds columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of row g, and then those of row g + 8.
"""


def known(device: Device) -> bool:
    """Whether this device's matrices have these places; asked once, on the device."""
    found = _known.get(device)
    if found is None:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():  # kernels are selected while torch traces with tensors without values, too
            found = _known[device] = _may_have(device.description) and _has_places(device)
    return found


def _may_have(description: Description) -> bool:
    shapes = ((x.m, x.n, x.k, x.a, x.b, x.c, x.scope) for x in description.cooperative_matrix)
    return description.subgroup.control and (16, 16, 16, "f16", "f16", "f32", "subgroup") in shapes


def _has_places(device: Device) -> bool:
    b, places = Builder(device), torch.zeros((1, PLACES.size), dtype=torch.int32, device="cpu")
    ref = b.scratch(places.nbytes)
    try:
        b.dispatch("coop_layout", (), (1, 1, 1), [], [ref], subgroup=_LANES)
    except Unsupported:
        return False
    result = b.output(places.nbytes)
    b.copy(ref, result)
    b.program([], [Place(result, 1, places.nbytes, places.nbytes)]).run([], [places])
    return np.array_equal(places.numpy(), PLACES.reshape(1, -1))
