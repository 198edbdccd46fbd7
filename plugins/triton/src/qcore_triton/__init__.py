"""Triton kernels that do not depend on the maker of the GPU, and the packed layouts that they read.

A library of qcore-cuda and qcore-xpu, no plugin. Imports `qcore` and `qcore.plugin_api`, and Triton in `kernels` only.
"""

__version__ = "26.11.0"
