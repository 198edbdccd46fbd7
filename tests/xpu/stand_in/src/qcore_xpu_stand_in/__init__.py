"""qcore-xpu without an Intel GPU: its kernels on CPU tensors, with torch's XPU ops replaced.

It shows that what qcore-xpu hands to those ops is what they ask for, and that what it makes of their results is right.
Nothing here says that a device computes: kernels are called ``xpu_stand_in.*``, and their rank is EMULATED.
"""

from __future__ import annotations

from .recording import Call, calls, forget

__all__ = ["Call", "calls", "forget"]
