"""Bridges between the tensors of a torch device and XLA; `base` says what one has to do."""
