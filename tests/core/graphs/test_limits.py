"""Functions that torch has compiled as often as it may, of which it runs other calls without the backend."""

import inspect

import pytest
import torch

from qcore import graphs

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore:keeps_all")]

HAS_OWN_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters


def step(count, number):
    """Compiled anew for each number."""
    count.add_(number)
    return count * 2


def check(compiled, count, numbers):
    """Calls in turn, beside the same in torch; ``count`` may be NaN before."""
    expected = torch.zeros(3)
    count.zero_()
    for number in numbers:
        assert torch.equal(compiled(count, number), step(expected, number))
    return expected


@torch.no_grad()
def test_torch_computes_with_current_states_past_its_limit(backend):
    compiled, count = backend.compiled(step, dynamic=False), torch.zeros(3)
    with torch._dynamo.config.patch(recompile_limit=2):
        check(compiled, count, [1, 1])
        assert count.isnan().all()
        assert not backend.asked
        with pytest.warns(match="'step' or another function as often as its recompile_limit allows") as warned:
            expected = check(compiled, count, [1, 2, 3, 1, 3, 4, 2, 3])
        assert len(warned) == 1
        assert len(backend.parts) == 2
        assert torch.equal(count, expected)
    expected = check(compiled, count, [1, 5, 1])  # torch compiles no more, whatever its limit
    assert torch.equal(count, expected)
    torch._dynamo.reset()
    check(compiled, count, [1, 2, 3])
    assert count.isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("raises", [{"fullgraph": True}, {}])
def test_states_stay_where_torch_raises_at_its_limit(raises, backend):
    compiled, count = backend.compiled(step, dynamic=False, **raises), torch.zeros(3)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=not raises):
        check(compiled, count, [1, 2, 1])
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            compiled(count, 3)
    assert count.isnan().all()
    assert not backend.asked


@torch.no_grad()
def test_states_stay_while_the_limit_is_higher(backend):
    compiled, count = backend.compiled(step, dynamic=False), torch.zeros(3)
    with torch._dynamo.config.patch(recompile_limit=4):
        check(compiled, count, [1, 2, 3, 1])
        assert count.isnan().all()
    check(compiled, count, [1, 2, 3, 1])
    assert count.isnan().all()
    with torch._dynamo.config.patch(recompile_limit=3):  # lowered after it was reached
        expected = check(compiled, count, [1, 2, 5])
    assert torch.equal(count, expected)


@torch.no_grad()
def test_the_limit_of_all_compilations_counts(backend):
    compiled, count = backend.compiled(step, dynamic=False), torch.zeros(3)
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        assert torch.equal(check(compiled, count, [1, 2, 3, 1, 3]), count)


@torch.no_grad()
@pytest.mark.skipif(not HAS_OWN_LIMIT, reason="torch.compile takes no recompile_limit")
def test_a_limit_of_one_call_of_torch_compile(backend):
    options = {"dynamic": False, "isolate_recompiles": True}
    few, count = backend.compiled(step, recompile_limit=2, **options), torch.zeros(3)
    many = torch.compile(step, backend=graphs.torch_compile_backend(backend), recompile_limit=99, **options)
    check(many, count, [*range(12)])
    assert count.isnan().all()
    check(few, count, [1, 1])
    assert count.isnan().all()
    assert torch.equal(check(few, count, [1, 2, 3, 1, 3]), count)


@torch.no_grad()
def test_states_of_other_functions_come_back_as_well(backend):
    def shift(count, number):
        return count - number

    written, read, count = backend.compiled(step), backend.compiled(shift, dynamic=False), torch.zeros(3)
    with torch._dynamo.config.patch(recompile_limit=1):
        for number in range(1, 4):
            written(count, 1)
            assert torch.equal(read(count, number), torch.zeros(3))
