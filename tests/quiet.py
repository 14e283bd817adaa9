"""Tests that judge time have the machine to themselves: while one runs, no other worker runs a test.

Two locks between the workers, on files that exist anyway. Every test holds the run lock while it runs:
shared, or exclusive if the test judges time. A worker holds the turn lock only while it waits for the run
lock, so that tests which share the run lock cannot overtake one that waits for it for ever.
"""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN_LOCK = Path(__file__)
TURN_LOCK = RUN_LOCK.with_name("conftest.py")


@contextmanager
def hold_machine(*, exclusive: bool) -> Iterator[None]:
    """Run beside other tests, or alone; waits as long as the tests that are running take."""
    with TURN_LOCK.open() as turn_lock, RUN_LOCK.open() as run_lock:
        fcntl.flock(turn_lock, fcntl.LOCK_EX)
        fcntl.flock(run_lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        fcntl.flock(turn_lock, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(run_lock, fcntl.LOCK_UN)  # a child may still hold the file open
