"""The process around qcore: settings, guarded calls, locks that survive forks, records on disk.

May import: `qcore.errors` (nothing here depends on weights). Imported by: discovery and every package above.
"""
