"""Weights and activations as numbers: `QTensor`, the quantizers that make them, activation quantization, schemes.

May import: `qcore.formats`, `qcore.errors`. Imported by: contracts and every package above them.
"""
