"""What does not depend on the maker of the GPU: the packed layouts, and kernels in plain Triton.

Nothing here imports from the rest of the plugin, because qcore-xpu ships these files as well: a link in its tree leads
here, and its wheel holds a copy.
"""
