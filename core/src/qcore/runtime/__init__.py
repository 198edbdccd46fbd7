"""The process that qcore is a guest in: settings, guarded calls, locks that survive forks, records on disk.

May import: `qcore.errors` (nothing here knows what a weight is). Imported by: discovery and every package above.
"""
