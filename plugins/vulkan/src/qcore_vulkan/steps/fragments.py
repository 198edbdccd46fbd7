"""The layout of a cooperative matrix's elements across the lanes of a subgroup.

VK_KHR_cooperative_matrix leaves it to the device. `coop_fragments` runs only on devices with `LAYOUT`, that of NVIDIA's
matrix instructions, found on an H100 and an H200.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from ..builder import Builder, Place
from ..device import Device
from ..native import Unsupported

_LANES, _ELEMENTS, _OF_LANE = 32, 16, 8
_layouts: weakref.WeakKeyDictionary[Device, bool] = weakref.WeakKeyDictionary()


def _layout() -> NDArray[np.int32]:
    lane, e = np.arange(_LANES, dtype=np.int32)[:, None], np.arange(_OF_LANE, dtype=np.int32)
    row = lane // 4 + 8 * (e // 4)
    column = lane % 4 * 2 + e % 2 + 8 * (e // 2 % 2)
    one = np.pad(row * 16 + column, ((0, 0), (0, _ELEMENTS - _OF_LANE)), constant_values=-1)
    return np.stack([one] * 3)


LAYOUT = _layout()
"""[3, 32, 16], of the matrices A, B (transposed) and C: row * 16 + column of each lane's elements, -1 beyond the last.

Lane 4 g + q holds columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of row g, and then those of row g + 8.
"""


def has_layout(device: Device) -> bool:
    """Whether this device's matrices have `LAYOUT`; determined once, on the device."""
    found = _layouts.get(device)
    if found is None:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():  # kernels are selected while torch traces with tensors without values, too
            found = _layouts[device] = _found_on(device)
    return found


def _found_on(device: Device) -> bool:
    description = device.description
    if not (description.subgroup.control and description.has_matrix((16, 16, 16), "f16", "f32")):
        return False
    b, found = Builder(device), torch.zeros((1, LAYOUT.size), dtype=torch.int32, device="cpu")
    ref = b.scratch(found.nbytes)
    try:
        b.dispatch("coop_layout", (), (1, 1, 1), [], [ref], subgroup=_LANES)
    except Unsupported:
        return False
    result = b.output(found.nbytes)
    b.copy(ref, result)
    b.program([], [Place(result, 1, found.nbytes, found.nbytes)]).run([], [found])
    return np.array_equal(found.numpy(), LAYOUT.reshape(1, -1))
