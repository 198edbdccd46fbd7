"""Plugins: their interface (hooks, kernels, offers), their discovery and their status.

May import: contracts, weights, formats, runtime. Imported by: resolving, fallback, functional, nn, graphs, checkpoint,
cli, testing, plugin_api, `qcore`.
"""
