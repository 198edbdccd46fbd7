"""The device that would be used, or why there is none. Lists physical devices only: none is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache

from qcore import EMULATED, OFFLOAD, Available, Rank, Unavailable

from .description import Description
from .device import VARIABLE, devices, preferred
from .native import NoDevice, VulkanError, left_out

_REMEDIES = {
    "not built": "",
    "no loader": "Install the Vulkan loader: apt-get install libvulkan1, or your system's vulkan-loader.",
    "no driver": "Install your GPU vendor's driver, or Mesa's: apt-get install mesa-vulkan-drivers, which also "
    "includes lavapipe for the CPU. A container needs access to the driver's files (NVIDIA_DRIVER_CAPABILITIES=all).",
    "no device": "'vulkaninfo --summary' lists the devices that the drivers report.",
}
"""Remedies by the first words of a `NoDevice` message."""


def probe() -> Available | Unavailable:
    """The result of `qcore_probe`."""
    try:
        return _found(preferred(), devices())
    except NoDevice as error:
        state = str(error).partition(":")[0]
        text = " ".join(filter(None, (f"{str(error).removesuffix('.')}.", _REMEDIES.get(state, ""))))
        return Unavailable(text, broken=state == "not built" or bool(os.environ.get(VARIABLE)))
    except VulkanError as error:
        return Unavailable(f"the Vulkan driver failed: {error}", broken=True)


def _found(chosen: Description, known: Sequence[Description]) -> Available:
    driver = f"{chosen.driver_name} {chosen.driver_info}, Vulkan {chosen.api_version}"
    off = why_off(chosen)
    others = [f"{one.index}: {one.name}" + (f" ({one.missing})" if one.missing else "") for one in known]
    details = {
        "device": "cpu",  # where tensors are
        "type": chosen.type,
        "uses": ", ".join(name for name in _USES if name not in off) or "plain arithmetic",
        **({"off": "; ".join(f"{name}: {why}" for name, why in off.items())} if off else {}),
        **({"devices": ", ".join(others)} if len(known) > 1 else {}),
    }
    return Available(chosen.name, driver, details)


_COOPERATIVE_16, _COOPERATIVE_8 = "float16 cooperative matrices", "int8 cooperative matrices"
_DOT = "integer dot product"
_USES = (_COOPERATIVE_16, _COOPERATIVE_8, _DOT)
"""Features that make shaders faster, the best first; without any of them shaders use plain arithmetic."""


def why_off(chosen: Description) -> Mapping[str, str]:
    """The features of `_USES` that this device lacks, and why."""
    found = {}
    for name, elements, variant in ((_COOPERATIVE_16, "f16", "coop_f16"), (_COOPERATIVE_8, "s8", "coop_int8")):
        if not chosen.features["cooperative_matrix"]:
            found[name] = "the driver has no VK_KHR_cooperative_matrix"
        elif not any(
            (one.a, one.b, one.scope) == (elements, elements, "subgroup") for one in chosen.cooperative_matrix
        ):
            found[name] = f"the device has none with {elements} elements"
        elif why := left_out(variant):
            found[name] = f"the glslc that built the plugin does not support {why}"
    if not chosen.features["integer_dot"]:
        found[_DOT] = "the driver has no shaderIntegerDotProduct"
    return found


@lru_cache(maxsize=1)
def rank() -> Rank:
    """`EMULATED` if the preferred device is software, else `OFFLOAD`."""
    return EMULATED if preferred().type == "cpu" else OFFLOAD
