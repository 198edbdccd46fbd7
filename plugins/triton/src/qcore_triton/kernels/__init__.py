"""The kernels in plain Triton. Importing one imports triton, so this happens inside ops, when they first run."""
