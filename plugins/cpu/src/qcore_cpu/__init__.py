"""Native quantized kernels for CPUs, as a plugin of qcore: installing the package is enough.

Kernels are compiled for several instruction sets; the best one that the processor supports is used. `QCORE_CPU_ISA`
forces a lower one; ``qcore doctor`` lists them.
"""

__version__ = "26.11.0"
