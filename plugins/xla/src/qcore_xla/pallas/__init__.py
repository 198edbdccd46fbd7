"""Kernels for TPUs in Pallas, where XLA alone would write an unpacked weight to memory."""
