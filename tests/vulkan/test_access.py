"""Which steps of a program wait: by what their shaders read and write."""

from __future__ import annotations

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from vulkan_problems import vulkan  # noqa: F401

from qcore_vulkan import access, native
from qcore_vulkan.builder import Builder, Place
from qcore_vulkan.steps.operand import Operand, over
from qcore_vulkan.steps.pointwise import binary, unary

R, W, A = access.READ, access.WRITE, access.ATOMIC


def test_modules_say_what_they_read_and_write():
    known = {
        "rope": (R, R, R, 0, 0, 0, 0, W),
        "checked": (R, R | W, 0, 0, 0, 0, 0, W),
        "quantize": (R, R, R, 0, 0, W, 0, W),
        "gemv_split": (R, W, W, W, 0, 0, 0, 0),
        "gemv_row_placed_dot": (R, R, R, R, R, R, W, R, R, R, R),
        "attention_joined": (R, R, R, R, R | W, W, R | W, R | W),
    }
    for variant, flags in known.items():
        assert access.of_variant(variant) == (*flags, *[0] * (native.BINDINGS - len(flags))), variant


def test_every_variant_has_something_that_it_writes():
    folder = next(one / "spirv" for one in native.folders() if (one / "spirv").is_dir())
    names = [path.stem for path in folder.glob("*.spv")]
    assert len(names) > 20
    assert all(any(flags & W for flags in access.of_variant(name)) for name in names)


def use(buffer: int, start: int, end: int, flags: int) -> access.Use:
    return access.Use((buffer, start, end), flags)


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (R, R, False),
        (R, W, True),
        (W, R, True),
        (W, W, True),
        (R | W, R, True),
        (A, A, False),
        (A, R, True),
        (R, A, True),
        (A, W, True),
        (W, A, True),
    ],
)
def test_steps_wait_if_one_of_them_writes(first, second, waits):
    hazards = access.Hazards()
    assert not hazards.waits([use(1, 0, 64, first)])
    assert hazards.waits([use(1, 32, 128, second)]) is waits


@pytest.mark.parametrize("span", [(1, 64, 128), (2, 0, 64)])
def test_steps_on_other_bytes_do_not_wait(span):
    hazards = access.Hazards()
    assert not hazards.waits([use(1, 0, 64, W)])
    assert not hazards.waits([use(*span, W)])
    assert hazards.waits([use(1, 60, 64, R)])


def test_a_step_that_waits_is_all_that_later_ones_see():
    hazards = access.Hazards()
    hazards.waits([use(1, 0, 64, W)])
    assert hazards.waits([use(1, 0, 64, R), use(1, 64, 128, W)])
    assert not hazards.waits([use(1, 0, 64, R)])
    assert hazards.waits([use(1, 64, 128, R)])


def test_bindings_that_are_not_used_do_not_count():
    assert access.uses([(1, 0, 4), None, (1, 4, 8)], [0, W, R]) == [use(1, 4, 8, R)]


def test_levels_are_those_of_a_search_over_all_pairs():
    draw = torch.Generator().manual_seed(3)

    def number(most: int) -> int:
        return int(torch.randint(most, (), generator=draw))

    for _ in range(20):
        steps = []
        for _ in range(60):
            starts = [number(20) for _ in range(3)]
            steps.append([use(number(2), start, start + 1 + number(5), 1 + number(4)) for start in starts])
        expected: list[int] = []
        for i, own in enumerate(steps):
            before = [
                expected[j] + 1 for j in range(i) for a in own for b in steps[j]
                if (a.flags | b.flags) & (W | A) and not a.flags == b.flags == A and a.span[0] == b.span[0]
                and a.span[1] < b.span[2] and b.span[1] < a.span[2]
            ]  # fmt: skip
            expected.append(max(before, default=0))
        assert access.levels(steps) == expected


def operand(b: Builder, n: int) -> Operand:
    return over(b.scratch(4 * n), (n,), torch.float32)


def test_a_program_waits_where_it_must(vulkan):  # noqa: F811
    b = Builder(vulkan)
    x, y = operand(b, 64), operand(b, 64)
    b.fill(x.ref, 0x3F800000)  # 1.0
    b.fill(y.ref, 0x40000000)  # 2.0
    doubled = binary(b, "add", x, x)
    negated = unary(b, "neg", y)
    out = over(b.output(256), (64,), torch.float32)
    binary(b, "mul", doubled, negated, out)
    b.program()
    assert [(step.name, step.barrier) for step in b.described()] == [
        ("fill", False), ("fill", False), ("binary", True), ("unary", False), ("binary", True),
    ]  # fmt: skip


def test_steps_run_as_early_as_they_can(vulkan):  # noqa: F811
    b = Builder(vulkan)
    x, y = operand(b, 64), operand(b, 64)
    b.fill(x.ref, 0x3F800000)
    total = binary(b, "add", binary(b, "add", x, x), x)
    b.fill(y.ref, 0x40000000)
    ref = b.output(256)
    binary(b, "mul", total, unary(b, "neg", y), over(ref, (64,), torch.float32))
    result = torch.empty(64)
    b.program((), [Place(ref, 1, 256, 256)]).run([], [result])
    assert [step.name for step in b.described()] == ["fill", "fill", "binary", "unary", "binary", "binary"]
    assert [step.barrier for step in b.described()] == [False, False, True, False, True, True]
    assert result.eq(-6).all()


def test_a_launch_without_a_barrier_hides_nothing(vulkan):  # noqa: F811
    b = Builder(vulkan)
    x, first, second, copied = (b.scratch(64) for _ in range(4))
    b.launch(1, (1, 1, 1), [], [x, first], barrier=False)
    b.launch(1, (1, 1, 1), [], [x, second], barrier=False)
    b.copy(first, copied)
    assert [step.barrier for step in b.described()] == [False, False, True]
