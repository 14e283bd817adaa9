"""Paths in the directory of a log."""

from __future__ import annotations

FORMAT_PATH = "format"
LOCK_PATH = "lock"
RESERVE_PATH = "reserve"
STREAMS = "streams"
DIRECTORY = f"{STREAMS}/default/0"
"""Directory of the only partition: its segments, checkpoints and snapshots, and the next three files."""
IDENTITY = "log"
RECOVERY_POINT = "mark"
TIME = "time"
TEMPORARY = ".new"
"""Suffix of a file until it is complete."""
STAGED = ".aside"
"""Suffix of a segment while a recovery renames it, and then back: this makes its name durable."""
