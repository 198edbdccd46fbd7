"""The process around qcore: settings, guarded calls, locks that survive forks, records on disk, other libraries.

May import: `qcore.errors` (nothing here depends on weights). Imported by: discovery, resolving, functional, nn, model,
checkpoint, hf, cli, testing, plugin_api, `qcore`.
"""
