"""The meaning of a weight's bytes: element types, layouts, formats. Nothing here depends on a device.

May import: `qcore.errors`. Imported by: weights, contracts, discovery, resolving, fallback, functional, nn, parallel,
checkpoint, hf, testing, plugin_api, `qcore`.
"""

from .elements import Element, ElementType, find_element, register_element, registered_elements
from .format import Format, ZeroPoint, grouped_int4, match_text
from .layouts import (
    PLAIN,
    PLAIN_INT32,
    BrokenLayoutError,
    Layout,
    UnknownLayoutError,
    find_layout,
    layout_origin,
    register_layout,
    registered_layouts,
)
from .scales import FLOAT_SCALES, ScaleType, effective_scale

__all__ = [
    "FLOAT_SCALES",
    "PLAIN",
    "PLAIN_INT32",
    "BrokenLayoutError",
    "Element",
    "ElementType",
    "Format",
    "Layout",
    "ScaleType",
    "UnknownLayoutError",
    "ZeroPoint",
    "effective_scale",
    "find_element",
    "find_layout",
    "grouped_int4",
    "layout_origin",
    "match_text",
    "register_element",
    "register_layout",
    "registered_elements",
    "registered_layouts",
]
