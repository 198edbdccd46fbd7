"""The Triton kernels. Importing one imports triton, so this happens inside ops, when they first run."""
