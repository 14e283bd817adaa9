"""What the disk has left: asked now and then, reckoned between."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.disk import Disk

ASKED_US = 100_000
"""How long what was reckoned since the disk was asked last is good enough."""


class FreeSpace:
    """`bytes`: what is left, as far as is known."""

    def __init__(self, disk: Disk, seen_us: Callable[[], int], *, read_only: bool) -> None:
        self._disk = disk
        self._seen_us = seen_us
        self._asked_us = seen_us()
        self.bytes = 0 if read_only else disk.free_bytes()

    def ask(self) -> int:
        """Ask the disk now. Raises OSError."""
        self.bytes = self._disk.free_bytes()
        return self.bytes

    def is_due(self) -> bool:
        """Whether a commit is to ask the disk; whoever is told so sees to it."""
        seen_us = self._seen_us()
        due = seen_us - self._asked_us >= ASKED_US
        if due:
            self._asked_us = seen_us
        return due

    def written(self, size: int, told: int | None) -> None:
        """So much was written; `told`: what the disk said it had left then, if it was asked."""
        self.bytes = self.bytes - size if told is None else told

    def forget(self) -> None:
        """Nothing is known any more: the next who needs it asks."""
        self.bytes = 0
