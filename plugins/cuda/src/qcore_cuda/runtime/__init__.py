"""The runtime of every launch: facts of the device, a quick way to compiled kernels, replayed calls, counters."""
