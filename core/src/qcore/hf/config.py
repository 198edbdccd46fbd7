"""`QcoreConfig`: the settings with which ``from_pretrained`` quantizes a model, stored in its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.quantizers import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from .._version import __version__
from ..errors import FormatError, did_you_mean, quoted
from ..model.selection import Patterns, as_patterns
from ..weights.schemes import Scheme

METHOD = "qcore"


@register_quantization_config(METHOD)
class QcoreConfig(QuantizationConfigMixin):  # type: ignore[misc, unused-ignore]
    """The settings of `qcore.quantize_`, for ``from_pretrained(..., quantization_config=...)``.

    **Arguments:**

    - ``scheme``: e.g. ``"w4a16-g128"``, or a mapping from patterns of layer names to schemes. Schemes that need
      calibration are rejected: load the float model and call `qcore.quantize_`.
    - ``include``, ``exclude``: patterns of layer names, as for `qcore.quantize_`.
    - ``layers``: set by qcore in ``config.json``: layer to ``{"format", "scheme", "scale_dtype"}``.

    Raises `FormatError` for an invalid scheme or pattern, and for unknown arguments.
    """

    def __init__(
        self,
        scheme: str | Scheme | Mapping[str, str | Scheme] | None = None,
        *,
        include: Patterns | None = None,
        exclude: Patterns = (),
        layers: Mapping[str, Mapping[str, str]] | None = None,
        **others: Any,
    ) -> None:
        # Settings that transformers and earlier versions write in addition to our own.
        unknown = others.keys() - {"quant_method", "version"}
        if unknown:
            name = min(unknown)
            raise FormatError(
                f"QcoreConfig has no setting {name!r}.{did_you_mean(name, ['scheme', 'include', 'exclude'])}"
            )
        self.quant_method = METHOD
        self.version = __version__
        rules = scheme if isinstance(scheme, Mapping) else {"*": scheme}
        texts = {pattern: str(Scheme.parse(value)) for pattern, value in rules.items() if value is not None}
        self.scheme: str | dict[str, str] | None = texts if isinstance(scheme, Mapping) else texts.get("*")
        self.include = None if include is None else list(as_patterns(include) or ())
        self.exclude = list(as_patterns(exclude) or ())
        if not isinstance(layers or {}, Mapping):
            raise FormatError(f"layers is a {type(layers).__name__}; it must map names to their formats.")
        described: list[Any] = list((layers or {}).values())
        wrong = [about for about in described if not isinstance(about, Mapping)]
        if wrong:
            raise FormatError(f"layers holds {quoted(wrong[0])}; it must map names to their formats.")
        self.layers = {name: dict(about) for name, about in (layers or {}).items()}

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, for ``config.json``."""
        found = {"quant_method": METHOD, "version": self.version, "scheme": self.scheme, "exclude": self.exclude}
        return {**found, **({"include": self.include} if self.include is not None else {}), "layers": self.layers}

    def to_diff_dict(self) -> dict[str, Any]:
        """The same as `to_dict`: every setting is meaningful."""
        return self.to_dict()


class ForeignConfig(QuantizationConfigMixin):  # type: ignore[misc, unused-ignore]
    """The settings of a tool that is unknown to transformers, kept unchanged."""

    def __init__(self, quant_method: str = "", **settings: Any) -> None:
        self.quant_method = quant_method
        self.__dict__.update(settings)
