"""Linear problems for the kernels of qcore-cuda, and their weights packed."""

from __future__ import annotations

from linear_problems import assert_right, linear_problem

__all__ = ["assert_right", "linear_problem", "packed_weight"]


def packed_weight(problem, sums=False):
    """The plugin's `Weight` of a problem, and the sums of its codes, if wanted."""
    from qcore_triton import packing
    from qcore_triton.weights import Weight

    form, parts = problem.weight.format, packing.pack(problem.weight, sums=sums)
    n, k = problem.request.n, problem.request.k
    weight = Weight(parts["data"], parts["scale"], parts.get("zero"), n, k, form.bits, form.group_size or k)
    return weight, parts.get("sums")
