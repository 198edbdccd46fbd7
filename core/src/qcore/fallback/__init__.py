"""The built-in plugin ``torch``: supports every request on any device with torch's own ops.

May import: discovery and the floors below it. Imported by: nn, plugin_api. The registry loads it by
entry point.
"""
