"""Plugins: what they implement (hooks, kernels, offers), how they are found, and the state that they are in.

May import: contracts, weights, formats, runtime. Imported by: fallback, resolving and every package above.
"""
