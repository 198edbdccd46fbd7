"""The ops as pure functions on JAX arrays: every engine jits these, or lowers them for its device. No torch here."""
