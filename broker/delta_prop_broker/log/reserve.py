"""Room that is kept for the day on which the disk is full: small files and recovery still find some then.

A file of allocated blocks. It is given up (cut to nothing) when a write that must happen finds no room, and
taken again when there is room. Appends never get it: while it is given up they are refused.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.disk import Disk

T = TypeVar("T")

RESERVE_PATH = "reserve"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_no_room(error: OSError) -> bool:
    """Whether this says that the disk is full."""
    return error.errno in _NO_ROOM


class Reserve:
    """The file `reserve` in the data directory. Calls block; they may come from any thread that writes."""

    def __init__(self, disk: Disk, size: int) -> None:
        """`size`: how many bytes; 0 keeps none. Touches nothing."""
        self.bytes = 0
        """What is held now."""
        self.missing = 0
        """What was given up and is still to be taken again, in bytes: room that appends must leave."""
        self.given_up = 0
        """How often it was given up."""
        self._disk = disk
        self._size = size

    def take(self, free_bytes_min: int) -> bool:
        """Hold it, durably, where that leaves `free_bytes_min`; whether it is held. Raises OSError."""
        if self.bytes or not self._size:
            return bool(self.bytes)
        file = self._disk.open(RESERVE_PATH, create=True)
        try:
            if file.size() < self._size and self._disk.free_bytes() < self._size + free_bytes_min:
                return False
            file.allocate(self._size)
            file.sync()
        except OSError:
            with suppress(OSError):
                file.truncate(0)  # half of it helps nobody
            raise
        finally:
            file.close()
        self._disk.sync_directory("")
        self.bytes, self.missing = self._size, 0
        return True

    def give_up(self) -> bool:
        """Let others have the room; whether there was any. Raises OSError."""
        try:
            file = self._disk.open(RESERVE_PATH)
        except FileNotFoundError:
            return False
        try:
            held = file.size() > 0
            if held:
                file.truncate(0)
                self.given_up += 1
                self.missing = self._size
            self.bytes = 0
            return held
        finally:
            file.close()

    def use(self, work: Callable[[], T]) -> T:
        """Do some writing; where the disk is full for it, give up the reserve and do it once more.

        Raises what `work` raises.
        """
        try:
            return work()
        except OSError as error:
            if not is_no_room(error) or not self._given_up():
                raise
        return work()

    def _given_up(self) -> bool:
        try:
            return self.give_up()
        except OSError:  # what went wrong first is told
            return False
