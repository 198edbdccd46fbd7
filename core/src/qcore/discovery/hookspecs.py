"""The hook specifications that a plugin implements (pluggy project ``qcore``), and the marker for implementations.

A plugin is a module (or object) found through the entry-point group ``qcore.plugins.v1``, whose functions carry
``@qcore.hookimpl``. Importing it must not import the device's stack: do that inside the kernel. Hooks run once per
request, one plugin at a time, inside a guard. An implementation may take fewer arguments than its specification.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from ..contracts import Conv2dRequest, EmbeddingRequest, GroupedLinearRequest, LinearRequest
from ..formats import Element, Layout
from ..weights.registered_quantizers import Quantizer
from .kernels import Available, Offer, Refusal, Unavailable

if TYPE_CHECKING:
    Answer = Offer | Refusal | Sequence[Offer]

PROJECT = "qcore"
ENTRY_POINT_GROUP = "qcore.plugins.v1"
"""The group's name is the API version: a plugin for another version is reported without being imported."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook of the same name."""


@hookspec(firstresult=True)
def qcore_probe() -> Available | Unavailable:  # type: ignore[empty-body]
    """Report whether the device is present, and its name, driver and toolchain versions.

    Called once per process, at the first resolve or listing. Keep it cheap and create no device context: check
    device files, ``find_spec`` and package metadata. A probe that takes over 10 seconds counts as hung.
    """


@hookspec(firstresult=True)
def qcore_linear(request: LinearRequest) -> Answer:  # type: ignore[empty-body]
    """Offer a kernel for `LinearRequest`, or refuse with a reason. A list of offers is ranked one by one."""


@hookspec(firstresult=True)
def qcore_conv2d(request: Conv2dRequest) -> Answer:  # type: ignore[empty-body]
    """Offer a kernel for `Conv2dRequest`, or refuse with a reason. A list of offers is ranked one by one."""


@hookspec(firstresult=True)
def qcore_embedding(request: EmbeddingRequest) -> Answer:  # type: ignore[empty-body]
    """Offer a kernel for `EmbeddingRequest`, or refuse with a reason. A list of offers is ranked one by one."""


@hookspec(firstresult=True)
def qcore_grouped_linear(request: GroupedLinearRequest) -> Answer:  # type: ignore[empty-body]
    """Offer a kernel for `GroupedLinearRequest`, or refuse with a reason. A list of offers is ranked one by one."""


@hookspec
def qcore_elements() -> Iterable[Element]:  # type: ignore[empty-body]
    """Return extra elements that formats and schemes may name; see `Element`. Called once, before `qcore_formats`."""


@hookspec
def qcore_quantizers() -> Iterable[Quantizer]:  # type: ignore[empty-body]
    """Return extra quantizers that schemes may name; see `Quantizer`. Called once, when the plugin is loaded."""


@hookspec
def qcore_formats() -> Iterable[Layout]:  # type: ignore[empty-body]
    """Return extra layouts that checkpoints and formats can name; see `Layout`. Called once, at load."""


@hookspec
def qcore_importers() -> Iterable[Any]:  # type: ignore[empty-body]
    """Return importers of other tools' checkpoints; see `qcore.plugin_api.Importer`. Called for each checkpoint."""


@hookspec
def qcore_decided(decision: Any) -> None:
    """Observe a new `Decision`; return values and exceptions are ignored."""
