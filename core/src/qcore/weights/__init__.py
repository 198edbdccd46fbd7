"""Quantized weights and activations: `QTensor`, the quantizers that create them, activation quantization, schemes.

May import: `qcore.formats`, `qcore.errors`. Imported by: contracts, discovery, resolving, fallback, functional, nn,
model, parallel, checkpoint, adapters, hf, testing, plugin_api, `qcore`.
"""
