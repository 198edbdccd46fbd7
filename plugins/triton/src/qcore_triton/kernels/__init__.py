"""The kernels in plain Triton. Importing one imports triton, so ops import them when they first run."""
