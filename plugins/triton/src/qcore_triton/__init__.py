"""Triton kernels that do not depend on the GPU vendor, and the packed layouts that they read.

A library for qcore-cuda and qcore-xpu, not a plugin. Imports `qcore`, `qcore.plugin_api` and Triton (in `kernels`).
"""

__version__ = "26.11.0"
