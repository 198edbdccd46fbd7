"""`BindSettings`: the settings under which a layer is bound to a kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ..runtime.settings import Settings, in_force


@dataclass(frozen=True)
class BindSettings:
    """The settings under which a layer is bound: copied with the layer, but not pickled.

    A layer that is read from a pickle is bound under the settings of the process that reads it.
    """

    settings: Settings | None = None

    def in_force(self) -> AbstractContextManager[None]:
        return nullcontext() if self.settings is None else in_force(self.settings)

    def __deepcopy__(self, _memo: Any) -> BindSettings:
        return self

    def __reduce__(self) -> Any:
        return BindSettings, ()
