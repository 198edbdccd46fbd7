"""Plugins: their interface (hooks, kernels, offers), their discovery and their status.

May import: contracts, weights, formats, runtime. Imported by: fallback, resolving and every package above.
"""
