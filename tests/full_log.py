"""Read a whole log: one `read` may return less, e.g. only up to the first batch in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_broker.log.contract import Log
    from delta_prop_broker.segments.frames import LoggedBatch


def read_all(log: Log) -> list[LoggedBatch]:
    """Return every batch up to the high watermark, in order."""
    batches: list[LoggedBatch] = []
    offset = log.start_offset
    while offset < log.high_watermark:
        batches += log.read(offset, rows_max=1_000_000, bytes_max=1 << 30)
        offset = batches[-1].offset + batches[-1].count
    return batches
