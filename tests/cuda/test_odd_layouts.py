"""Any strides, steps of 0, offsets and the negative bit, of every tensor that a call or a weight brings along."""

from __future__ import annotations

import odd_layouts
import pytest
import torch

from qcore_cuda import conv2d, conv_ops, embedding, linear, ops
from qcore_cuda.products.aligned import on_lines
from qcore_cuda.runtime.device import device_of
from qcore_triton.weights import Weight

KERNELS = {"linear": linear.kernel, "conv2d": conv2d.kernel, "embedding": embedding.CudaEmbedding}


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    """The ops also for the CPU, which the plugin does not register them for."""
    library = torch.library.Library(ops.NAMESPACE, "IMPL")
    for name in ("linear_a16", "linear_a8", "embedding"):
        library.impl(name, getattr(ops, name), "CPU")
    for name in ("conv2d_a16", "conv2d_a8", "conv2d_groups_a8"):
        library.impl(name, getattr(conv_ops, name), "CPU")
    yield
    library._destroy()


def kernel_for(request):
    if request.contract == "conv2d" and conv2d.why_not(request):
        return None
    return KERNELS[request.contract](request)


@pytest.mark.parametrize(("contract", "count"), [("linear", 10), ("conv2d", 10), ("embedding", 20)])
def test_every_tensor_may_lie_in_any_way(interpreter, contract, count):
    served, wrong = odd_layouts.wrong_layouts(contract, kernel_for, seed=1, count=count)
    assert served >= 8
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("pitch", [0, 8, 72])
def test_rows_that_overlap_are_copied_for_descriptors(interpreter, pitch):
    """Copies through a tensor descriptor with a pitch of 0 bring zeros, and no GPU is here to show it."""
    x = torch.arange(40 * 72.0).as_strided((40, 64), (pitch, 1))
    weight = Weight(torch.zeros(16, 64, dtype=torch.int8), torch.ones(1, 16), None, 16, 64, 8, 64)
    read = on_lines(x, weight, device_of(x.device))
    assert torch.equal(read, x)
    assert read.stride(0) == max(pitch, 64)
    assert on_lines(x, weight, device_of(x.device), described=False) is x
