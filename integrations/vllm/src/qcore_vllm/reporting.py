"""What a load tells in vLLM's log, and what strict mode refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from logging import Logger
from typing import TYPE_CHECKING

from vllm.distributed import get_tensor_model_parallel_rank

from qcore import Report, UnsupportedError

from .stored import Notes

if TYPE_CHECKING:
    from .config import QcoreConfig

_INNER = re.compile(r"\.qcore(?:\.parts\.0)?(?=\.|$)")


def tell(report: Report, notes: Notes, logger: Logger) -> None:
    """Log the report of a model on the first rank, and the weights that are not served as they are stored."""
    if get_tensor_model_parallel_rank() == 0:
        logger.info("qcore serves this model:\n%s", with_names_of_vllm(report))
    if notes.dense:
        logger.warning(
            "qcore: vLLM's model takes these weights as floats, so they were dequantized: %s.", _few(notes.dense)
        )


def with_names_of_vllm(report: Report) -> Report:
    """The report with the names of vLLM's layers: those of qcore are inside of them."""
    return replace(report, layers=tuple(replace(row, name=_INNER.sub("", row.name)) for row in report))


def check_strict(config: QcoreConfig, model: str) -> None:
    """Raise `UnsupportedError` in strict mode if weights that are stored quantized run as floats."""
    if config.strict and config.notes.dense:
        raise UnsupportedError(
            f"{model}: strict, but vLLM's model takes these weights as floats: {_few(config.notes.dense)}.\n"
            f"Serve it without strict, or quantize it with these layers excluded."
        )


def _few(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
