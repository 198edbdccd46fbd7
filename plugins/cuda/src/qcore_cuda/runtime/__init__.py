"""What every launch rests on: the device's facts, compiled kernels found quickly, calls replayed, counters."""
