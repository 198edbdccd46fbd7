"""Any strides, steps of 0, offsets and the negative bit, of every tensor that a call or a weight brings along."""

from __future__ import annotations

import odd_layouts
import plugin_answers
import pytest

from qcore_xla import plugin


@pytest.mark.parametrize(("contract", "count"), [("linear", 10), ("conv2d", 10), ("embedding", 20)])
def test_every_tensor_may_lie_in_any_way(contract, count):
    served, wrong = odd_layouts.wrong_layouts(contract, odd_layouts.offered_by(plugin), seed=1, count=count)
    assert served >= 8
    assert not wrong, "\n".join(wrong)


def test_answers_are_plain_values():
    assert not list(plugin_answers.faults(plugin, lambda contract: getattr(plugin, f"qcore_{contract}")))
