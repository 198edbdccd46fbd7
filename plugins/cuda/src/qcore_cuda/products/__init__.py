"""Products of activations with packed weights: one module per kernel, whose object holds everything known about it.

The object says which problems the kernel supports, with which configurations, and how it is launched; `catalog` lists
the objects in order of preference.
"""
