"""The numbers that a log on disk reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DurableLogStatistics:
    """Offsets, contents and bounds of a log; names with `bytes` are sizes in bytes, other counts are numbers.

    `written`, `synced`: offsets up to which rows are written, or synced. `refused`: number of refused
    appends; `held_by`: the slowest holder; `reopened`: number of recoveries in place. `time_us`: log time, in
    microseconds since 1970; `clock_ahead_s`: seconds by which the wall clock is ahead of it; `clock_jumps`:
    jumps of the wall clock since the log was opened.
    """

    start_offset: int
    next_offset: int
    written: int
    synced: int
    high_watermark: int
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
