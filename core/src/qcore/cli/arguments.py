"""Arguments shared by several commands, and their parsers."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from ..errors import did_you_mean

_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
}
MEASURED = ("w8a16", "w4a16-g128", "w8a8", "w4a8-g32")
"""The schemes measured by default."""

ALL = "print a line for every tensor, even if three or more differ only in the numbers in their names"
"""Help of ``--all``."""

_GIVEN = "options given so far"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Once(argparse.Action):
    """The action of options that take one value: argparse would silently replace an earlier value."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        del parser
        if option and self.dest in vars(namespace).setdefault(_GIVEN, {}):
            remedy = "; separate its values with commas" if self.type is counts or self.metavar == "NAMES" else ""
            raise argparse.ArgumentError(self, f"may be given only once{remedy}")
        vars(namespace).setdefault(_GIVEN, {})[self.dest] = values
        setattr(namespace, self.dest, values)


_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


class Parser(argparse.ArgumentParser):
    """A parser that rejects repeated options, except for options declared repeatable, and suggests similar names."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("action", None, Once)
        self.register("action", "store", Once)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in `argparse.ArgumentParser`; subcommand parsers go through this method, too."""
        found, rest = super().parse_known_args(args, namespace)
        found.__dict__.pop(_GIVEN, None)
        return found, rest

    def error(self, message: str) -> NoReturn:
        """As in `argparse.ArgumentParser`, with a suggestion if an unknown name is similar to a known one."""
        found = _CHOICE.search(message)
        names = [name.strip("' ") for name in found[2].split(",")] if found else []
        super().error(message + (did_you_mean(found[1], names) if found else ""))


def dtype(text: str) -> Any:
    """A float dtype by its torch name or an abbreviation: ``bf16``."""
    import torch

    name = _DTYPES.get(text.removeprefix("torch."))
    if name is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_DTYPES)}")
    return getattr(torch, name)


def device(text: str) -> Any:
    """A torch device: ``cpu``, ``cuda:1``."""
    import torch

    try:
        return torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a torch device, such as cpu, cuda:0 or xpu") from None


def count(text: str) -> int:
    """A positive integer."""
    value = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def count_or_none(text: str) -> int:
    """A positive integer, or 0."""
    return 0 if text == "0" else count(text)


def counts(text: str) -> tuple[int, ...]:
    """Comma-separated positive integers: ``1,16,256``."""
    return tuple(count(part.strip()) for part in text.split(","))


def byte_count(text: str) -> int:
    """A size with a unit: ``4GB``, ``512MiB``, ``1000``."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]i?)?b?", text.strip().lower())
    value = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 4GB, 512MiB or 1000000")
    return value


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """``--n`` and ``--k``."""
    parser.add_argument("--n", type=count, default=4096, help="output features (default: %(default)s)")
    parser.add_argument("--k", type=count, default=4096, help="input features (default: %(default)s)")


def add_device_and_dtype(parser: argparse.ArgumentParser) -> None:
    """``--device`` and ``--dtype``."""
    parser.add_argument("--device", type=device, default="cpu", help="torch device (default: %(default)s)")
    parser.add_argument(
        "--dtype", type=dtype, default="bfloat16", help="dtype of the activations (default: %(default)s)"
    )


def add_measured(parser: argparse.ArgumentParser) -> None:
    """``--scheme``, ``--rows`` and ``--seconds`` of ``bench`` and ``tune``."""
    add_repeatable(parser, "--scheme", f"scheme to measure (default: {' '.join(MEASURED)})")
    parser.add_argument("--rows", type=counts, default="1,16,256", help="row counts of x, M (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=seconds, default=0.3, help="seconds per kernel and row count (default: %(default)s)"
    )


def add_repeatable(parser: argparse.ArgumentParser, flag: str, text: str, metavar: str | None = None) -> None:
    """An option that may be repeated."""
    parser.add_argument(flag, action="append", default=[], metavar=metavar, help=f"{text}; may be repeated")
