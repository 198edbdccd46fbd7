"""3-bit weights: an element, a dense layout, a quantizer and a CPU kernel for `linear`."""
