"""The places of a cooperative matrix's elements among the lanes of a subgroup: which lane holds which of them.

VK_KHR_cooperative_matrix leaves them to the device. `coop_fragments` needs them, and runs only where they are as
`PLACES` says: those of NVIDIA's matrix instructions, found on an H100 and an H200.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..builder import Builder, Place
from ..device import Device
from ..native import Unsupported

_LANES, _ELEMENTS, _OF_LANE = 32, 16, 8
_known: weakref.WeakKeyDictionary[Device, bool] = weakref.WeakKeyDictionary()


def _places() -> Tensor:
    lane, e = torch.arange(_LANES).unsqueeze(1), torch.arange(_OF_LANE)
    row = lane // 4 + 8 * (e // 4)
    column = lane % 4 * 2 + e % 2 + 8 * (e // 2 % 2)
    return torch.nn.functional.pad(row * 16 + column, (0, _ELEMENTS - _OF_LANE), value=-1).to(torch.int32)


PLACES = _places().expand(3, -1, -1)
"""[3, 32, 16], int32: what coop_layout finds where `coop_fragments` runs, of the matrices A, B (transposed) and C.

Lane 4 g + q holds columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of row g, and then those of row g + 8.
"""


def known(device: Device) -> bool:
    """Whether this device's matrices have these places; asked once, on the device."""
    found = _known.get(device)
    if found is None:
        found = _known[device] = device.description.subgroup.control and torch.equal(_found(device), PLACES)
    return found


def _found(device: Device) -> Tensor:
    """What coop_layout finds; empty if the device cannot run it."""
    b, places = Builder(device), torch.zeros(PLACES.shape, dtype=torch.int32)
    ref = b.scratch(places.nbytes)
    try:
        b.dispatch("coop_layout", (), (1, 1, 1), [], [ref], subgroup=_LANES)
    except Unsupported:
        return torch.empty(0, dtype=torch.int32)
    result = b.output(places.nbytes)
    b.copy(ref, result)
    b.program([], [Place(result, 1, places.nbytes, places.nbytes)]).run([], [places.view(1, -1)])
    return places
