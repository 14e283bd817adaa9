"""Reading of a full log: one `read` may return less, e.g. only up to the first batch in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_broker.log.contract import Log
    from delta_prop_broker.log.files.frames import LoggedBatch


def read_all(log: Log) -> list[LoggedBatch]:
    """Return every batch up to the high watermark, in order."""
    found: list[LoggedBatch] = []
    offset = log.start_offset
    while offset < log.high_watermark:
        found += log.read(offset, rows_max=1_000_000, bytes_max=1 << 30)
        offset = found[-1].offset + found[-1].count
    return found
