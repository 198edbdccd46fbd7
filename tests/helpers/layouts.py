"""A layout of a third party, for tests of plugins that bring their own."""

from __future__ import annotations

from qcore.formats import PLAIN, Layout


class Nibbles(Layout):
    """As PLAIN int4, by other names; each test breaks one method."""

    name = "nibbles"

    def encode(self, codes):
        return PLAIN.encode(codes)

    def decode(self, data, k):
        return PLAIN.decode(data, k)

    def check(self, data, n, k):
        PLAIN.check(data, n, k)

    def encode_zero(self, zero):
        return zero + 8

    def decode_zero(self, zero):
        return zero - 8
