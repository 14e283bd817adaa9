"""Paths in the directory of a log."""

from __future__ import annotations

FORMAT_PATH = "format"
LOCK_PATH = "lock"
RESERVE_PATH = "reserve"
STREAMS = "streams"
DIRECTORY = f"{STREAMS}/default/0"
"""Directory of the one partition: its segments, checkpoints and snapshots, and the three files named next."""
IDENTITY = "log"
RECOVERY_POINT = "mark"
TIME = "time"
TEMPORARY = ".new"
"""Suffix of a file until it is complete."""
STAGED = ".aside"
"""Suffix of a file that a recovery has staged."""
