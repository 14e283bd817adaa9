"""Exclusive use of the machine for tests that measure time: while one runs, no other worker runs a test.

The workers share two locks, on files that exist anyway. Every test holds the run lock while it runs: shared,
or exclusive if the test measures time. A worker holds the turn lock only while it waits for the run lock, so
tests that share the run lock cannot starve a test that waits for it.
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
    """Hold the run lock, shared or exclusive; wait for the tests that are running."""
    with TURN_LOCK.open() as turn_lock, RUN_LOCK.open() as run_lock:
        fcntl.flock(turn_lock, fcntl.LOCK_EX)
        fcntl.flock(run_lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        fcntl.flock(turn_lock, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(run_lock, fcntl.LOCK_UN)  # a child may still hold the file open
