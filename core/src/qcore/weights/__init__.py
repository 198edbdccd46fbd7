"""Quantized weights and activations: `QTensor`, the quantizers that create them, activation quantization, schemes.

May import: `qcore.formats`, `qcore.errors`. Imported by: contracts and every package above them.
"""
