"""The runtime of every launch: device properties, fast launches of compiled kernels, replayed calls, counters."""
