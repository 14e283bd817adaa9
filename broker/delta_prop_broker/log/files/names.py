"""Where things are in the directory of a log."""

from __future__ import annotations

FORMAT_PATH = "format"
LOCK_PATH = "lock"
RESERVE_PATH = "reserve"
STREAMS = "streams"
DIRECTORY = f"{STREAMS}/default/0"
"""Of the one partition: its segments, checkpoints and snapshots, and the three files named next."""
IDENTITY = "log"
MARK = "mark"
TIME = "time"
TEMPORARY = ".new"
"""What a file's name ends with until it is whole."""
ASIDE = ".aside"
"""What the name of a file ends with that a recovery has set aside."""
