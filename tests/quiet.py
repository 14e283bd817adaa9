"""Tests that judge time have the machine to themselves: while one runs, no other worker runs a test.

Two locks between the workers, on files that are there anyway. The room is shared by all tests, and taken
whole by those that run alone. The door is held only while waiting for the room, so that those who share
it do not pass by for ever.
"""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOM = Path(__file__)
DOOR = ROOM.with_name("conftest.py")


@contextmanager
def in_the_room(*, alone: bool) -> Iterator[None]:
    """Run beside other tests, or alone; waits as long as the tests that are running take."""
    with DOOR.open() as door, ROOM.open() as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # a child may still hold the file open
