"""Kernels in Pallas, where XLA alone would write an unpacked weight to memory: `product` for TPUs, `few` for GPUs."""
