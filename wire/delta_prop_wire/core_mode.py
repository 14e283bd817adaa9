"""The switch between the fast paths and the general way that stands behind them.

`DELTA_PROP_CORE=general` turns all fast paths off when the program starts; nothing else about the program
changes. Each fast path asks `core_mode.is_fast` before its first step, so in mode `general` every result
comes from the general way.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "DELTA_PROP_CORE"
_MODES = {"fast": True, "general": False}


class CoreMode:
    """The mode of the process. `is_fast`: True if fast paths are used; read it, never set it."""

    __slots__ = ("is_fast",)

    def __init__(self) -> None:
        self.is_fast = True

    def choose(self, name: str) -> None:
        """Choose the mode by its name, once, at the start. Raises UsageError."""
        if name not in _MODES:
            raise UsageError(f"{VARIABLE}={name!r:.40}: give fast or general")
        self.is_fast = _MODES[name]

    @contextmanager
    def switched(self, name: str) -> Iterator[None]:
        """Use a mode inside a `with`, in a test that compares both."""
        before = self.is_fast
        self.choose(name)
        try:
            yield
        finally:
            self.is_fast = before


core_mode = CoreMode()
