"""Reports have one line for the same layer of many blocks, and a line for every layer on request."""

import pytest
import torch
from torch import nn

import qcore
from qcore.model.grouping import grouped


def labels(names, alike=lambda _: 0):
    return [label for label, _ in grouped(names, lambda name: name, alike)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)


class Net(nn.Module):
    def __init__(self, count=12):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(32, 16)


def lines(report):
    """Lines of the layers: without header, total and hints."""
    return [line for line in str(report).splitlines()[1:] if line.split()[0] not in {str(len(report)), "hint:"}]


def test_equal_blocks_share_a_line_with_the_sum_of_their_bytes():
    report = qcore.quantize_(Net(), "w8a16", exclude="head")
    up = next(line for line in lines(report) if "layers.*.up" in line)
    assert [line.split("  ")[0] for line in lines(report)] == [
        "embed",
        "12 x layers.*.up",
        "12 x layers.*.down",
        "head",
    ]
    assert "QuantizedLinear" in up
    assert "w8a16" in up
    assert report["layers.0.up"].kernel in up
    assert f"{12 * 32 * 64 * 4 / 2**10:.1f} KiB" in up
    assert f"{12 * report['layers.0.up'].bytes_after / 2**10:.1f} KiB" in up


def test_the_total_and_the_hints_are_the_same_in_both_tables():
    report = qcore.quantize_(Net(), "w4a16-g32")
    both = [text.splitlines()[-1 - len(report.hints) :] for text in (str(report), report.details())]
    assert both[0] == both[1]
    assert both[0][0].startswith("26 layers: 26 quantized")


def test_details_have_a_line_for_every_layer():
    report = qcore.quantize_(Net(), "w8a16")
    text = report.details()
    assert [line.split()[0] for line in text.splitlines()[1:27]] == [row.name for row in report]
    assert "layers.*" not in text


def test_the_report_of_loading_lists_what_is_missing(tmp_path):
    qcore.save(Net(3).layers, tmp_path / "m.safetensors")
    report = qcore.load_(Net(3), tmp_path / "m.safetensors", strict=False)
    for text in (str(report), report.details()):
        assert "\nmissing: embed.weight" in text


def test_blocks_with_another_scheme_get_lines_that_say_which():
    first = [f"layers.{i}.*" for i in range(5)]
    report = qcore.quantize_(Net(), {**dict.fromkeys(first, "w8a16"), "*": "w4a16-g32"})
    found = [line.split("  ")[0] for line in lines(report)]
    assert "5 x layers.{0-4}.up" in found
    assert "7 x layers.{5-11}.up" in found


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["a", "b"], ["a", "b"]),
        (["0", "1"], ["0", "1"]),
        (["0", "1", "2"], ["3 x *"]),
        (["a.1.b", "x", "a.2.b", "a.3.b"], ["3 x a.*.b", "x"]),
        (["a.1.0", "a.2.0", "a.3.0"], ["3 x a.*.0"]),
        (["a1.b", "a2.b", "a3.b"], ["a1.b", "a2.b", "a3.b"]),
        ([f"a.{digit * 5000}" for digit in "123"], [f"a.{digit * 5000}" for digit in "123"]),
        (["", "1", "2"], ["", "1", "2"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1"], ["4 x l.*.e.*"]),
    ],
)
def test_names_are_grouped_by_their_numbers(names, expected):
    assert labels(names) == expected


def test_numbers_are_spelled_out_where_a_star_would_say_too_much():
    names = [f"b.{i}.w" for i in (0, 1, 2, 3, 7, 9, 10)]
    found = labels(names, alike=lambda name: name in {"b.3.w", "b.9.w"})
    assert found == ["5 x b.{0-2,7,10}.w", "b.3.w", "b.9.w"]


def test_every_row_is_in_one_group():
    generator = torch.Generator().manual_seed(0)
    names = [f"m.{i}.{part}" for i in range(40) for part in ("q", "k", "0")]
    kinds = {name: int(torch.randint(4, (), generator=generator)) for name in names}
    rows = [row for _, together in grouped(names, str, kinds.__getitem__) for row in together]
    assert sorted(rows) == sorted(names)
