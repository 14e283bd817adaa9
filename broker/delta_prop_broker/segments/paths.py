"""Paths in the directory of a log."""

from __future__ import annotations

FORMAT_PATH = "format"
LOCK_PATH = "lock"
RESERVE_PATH = "reserve"
STREAMS = "streams"
CATALOGUE_PATH = f"{STREAMS}/catalogue"
"""The list of streams; without the file there is only the default stream."""
DIRECTORY = f"{STREAMS}/default/0"
"""Directory of the only partition: its segments, checkpoints and snapshots, and the files `log`, `mark`
and `time`, named below."""
IDENTITY = "log"
RECOVERY_POINT = "mark"
TIME = "time"
JOBS = "jobs"
"""Directory of a server's jobs, beside the cursors of the log's readers."""
TEMPORARY = ".new"
"""Suffix of a file until it is complete."""
STAGED = ".aside"
"""Suffix of a segment for a moment: a recovery that finds the disk full renames the file there and back, and
syncs the directory, so that the segment's name becomes durable."""
