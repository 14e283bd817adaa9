"""What a log on disk tells of itself, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DurableLogStatistics:
    """Marks, what the log holds and what bounds it, in bytes; `held_by` is the holder furthest behind.

    `time_us`: log time, in microseconds since 1970; `clock_ahead_s`: how far the wall clock is ahead of it;
    `clock_jumps`: how often the wall clock has jumped since the log was opened.
    """

    first_offset: int
    next_offset: int
    written: int
    synced: int
    visible: int
    segments: int
    compressed_segments: int
    bytes: int
    bytes_max: int
    unwritten_bytes: int
    tail_bytes: int
    commits: int
    syncs_skipped: int
    removed_segments: int
    indexes_rebuilt: int
    refused: int
    held_by: str | None
    reopened: int
    reserve_bytes: int
    snapshot_offset: int | None
    snapshot_rows: int
    snapshot_bytes: int
    snapshots_made: int
    compacting: bool
    time_us: int
    clock_ahead_s: float
    clock_jumps: int
