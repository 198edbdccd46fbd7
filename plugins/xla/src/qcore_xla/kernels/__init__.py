"""The kernels that qcore calls, one per contract: torch tensors in, torch tensors out, through an engine.

Not in the package itself: there `qcore_xla.linear` and its like are functions of JAX arrays.
"""
