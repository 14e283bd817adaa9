"""Room that is kept for the day on which the disk is full: small files and recovery still find some then.

A file of allocated blocks. It is given up (cut to nothing) when a write that must happen finds no room, and
taken again when there is room. Appends never get it: while it is given up they are refused.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from delta_prop_broker.log.files.names import RESERVE_PATH
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delta_prop_broker.disk import Disk

T = TypeVar("T")

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_no_room(error: OSError) -> bool:
    """Whether this says that the disk is full."""
    return error.errno in _NO_ROOM


class DiskFull(DeltaPropError, OSError):
    """A log cannot be opened for want of room. `free_bytes`: what the disk says (None: it says nothing)."""

    def __init__(self, failure: OSError, free_bytes: int | None) -> None:
        what = failure.strerror or "no room left"
        where = f" ({failure.filename})" if failure.filename else ""
        left = "an unknown number of" if free_bytes is None else f"{free_bytes}"
        super().__init__(
            f"the disk is full: {what}{where}, {left} bytes are free, and no reserve was left to give up; "
            "opening a log for writing writes a few small files: make some MB of room (or raise a quota), "
            "open it again; nothing is lost, and `delta-prop status` and `get` read it meanwhile"
        )
        self.errno = failure.errno
        self.free_bytes = free_bytes


@contextmanager
def tells_full_disk(disk: Disk) -> Iterator[None]:
    """Raise DiskFull for an OSError that says there is no room."""
    try:
        yield
    except OSError as error:
        if not is_no_room(error):
            raise
        free_bytes: int | None = None
        with suppress(OSError):
            free_bytes = disk.free_bytes()
        raise DiskFull(error, free_bytes) from error


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
