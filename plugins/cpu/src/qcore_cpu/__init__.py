"""Native quantized kernels for CPUs, as a plugin of qcore: installing the distribution is all there is to do.

Kernels are compiled for several instruction sets; the best one of the processor serves. `QCORE_CPU_ISA` forces a lower
one: ``qcore doctor`` lists them.
"""

__version__ = "26.11.0"
