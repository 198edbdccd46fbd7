"""Any strides, steps of 0, offsets and the negative bit, of every tensor that a call or a weight brings along."""

from __future__ import annotations

import odd_layouts
import pytest

import qcore


def kernel_for(request):
    from qcore_xpu_stand_in import plugin

    answer = getattr(plugin, f"qcore_{request.contract}")(request=request)
    return answer.kernel if isinstance(answer, qcore.Offer) else None


@pytest.mark.parametrize(("contract", "count"), [("linear", 10), ("conv2d", 10), ("embedding", 20)])
def test_every_tensor_may_lie_in_any_way(interpreter, stand_in, contract, count):
    served, wrong = odd_layouts.wrong_layouts(contract, kernel_for, seed=1, count=count)
    assert served >= 8
    assert not wrong, "\n".join(wrong)
