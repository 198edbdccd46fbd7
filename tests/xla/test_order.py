"""Weights with an order: x is permuted in front of this plugin's kernels."""

from ordered_weights import check_order


def test_kernels_get_x_in_the_stored_order():
    check_order("xla")
