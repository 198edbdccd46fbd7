"""Bridges between the tensors of a torch device and XLA; `base` defines their interface."""
