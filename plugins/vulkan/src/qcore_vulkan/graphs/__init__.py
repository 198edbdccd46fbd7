"""``torch.compile(model, backend="qcore_vulkan")``: captured graphs as recorded programs; see `qcore.graphs`.

`backend` is imported when torch looks the backend up; the others, which need the native library, when a graph is
compiled.
"""
