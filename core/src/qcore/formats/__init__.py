"""What the bytes of a weight mean: element types, layouts, formats; nothing of it depends on a device.

May import: `qcore.errors`. Imported by: every package above.
"""

from .elements import ElementType
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

__all__ = [
    "PLAIN",
    "PLAIN_INT32",
    "BrokenLayoutError",
    "ElementType",
    "Format",
    "Layout",
    "UnknownLayoutError",
    "ZeroPoint",
    "find_layout",
    "grouped_int4",
    "layout_origin",
    "match_text",
    "register_layout",
    "registered_layouts",
]
