"""``torch.compile(model, backend="qcore_xla")``: captured graphs as single JAX programs; see `qcore.graphs`.

`backend` is imported when torch looks the backend up; the others, which import JAX, when a graph is compiled.
"""
