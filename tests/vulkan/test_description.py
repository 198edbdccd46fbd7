"""The choice of a device among several."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qcore_vulkan import device as devices
from qcore_vulkan.description import select
from qcore_vulkan.native import NoDevice


@pytest.fixture
def known():
    """A machine with one device of each type; the discrete one comes twice, and once more with an old driver."""
    one = devices.devices()[0]
    kinds = [
        ("llvmpipe", "cpu", ""),
        ("Intel Arc iGPU", "integrated", ""),
        ("Radeon 9070", "discrete", "its driver is older than Vulkan 1.2"),
        ("Radeon 7900", "discrete", ""),
        ("Radeon 7900", "discrete", ""),
        ("Thing", "other", ""),
    ]
    return [
        replace(one, index=index, name=name, type=kind, missing=missing)
        for index, (name, kind, missing) in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("wanted", "index"),
    [(None, 3), ("", 3), (0, 0), ("0", 0), ("4", 4), ("arc", 1), ("RADEON", 3), ("thing", 5), ("7900", 3)],
)
def test_the_best_that_fits_is_chosen(known, wanted, index):
    assert select(known, wanted).index == index


def test_types_have_an_order(known):
    assert select(known[:2] + known[5:]).type == "integrated"
    assert select([known[5], known[0]]).type == "cpu"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (9, "no device: no Vulkan device here matches 9; choose one of 0: llvmpipe, 1: "),
        ("9070", "no device: Radeon 9070 cannot be used: its driver is older than Vulkan 1.2"),
        (2, "no device: Radeon 9070 cannot be used"),
        ("79", "no device: no Vulkan device here matches '79'"),
        ("7", "no device: no Vulkan device here matches '7'"),
    ],
)
def test_why_none_is_chosen(known, wanted, why):
    with pytest.raises(NoDevice) as raised:
        select(known, wanted)
    assert str(raised.value).startswith(why)


def test_no_device_at_all():
    with pytest.raises(NoDevice, match="no device: the installed Vulkan drivers report no device"):
        select([])
