"""Products of several experts, each with rows of its own: the choice of a kernel, and its launch."""
