"""Products of activations with packed weights: a module for each kernel, whose object knows all about it.

Which problems it serves, with which configurations, and how it is launched; `catalog` has them in order of preference.
"""
