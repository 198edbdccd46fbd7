"""Convolutions with int8 activations: one module per kernel, whose object holds everything known about it.

The object says which convolutions the kernel supports, with which configurations, and how it is launched; `catalog`
lists the objects in order of preference.
"""
