"""Preallocation: zeros after the last frame, so that a sync of later frames need not grow the file.

When a commit grows a file, its sync also waits for the journal of the file system, which takes about as long
as the frames do. So a commit that reaches the end of the zeros writes more zeros after its frames, about as
many bytes as the next commits need. They are truncated when the segment is sealed or the log is closed; after
a crash, readers of the last segment find only zeros there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.segments.frames import CHUNK_BYTES
from delta_prop_broker.segments.reserve import is_disk_full
from delta_prop_broker.segments.small_file import write_all

if TYPE_CHECKING:
    from delta_prop_broker.disk import File
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.segments.segment import Segment

COMMITS = 16
"""Number of commits of the present size for which zeros are written."""
AHEAD_BYTES_MIN, AHEAD_BYTES_MAX = 256 * 1024, 4 * 1024 * 1024
"""Bounds of the zeros that are written at once."""
LARGE_BYTES = 512 * 1024
"""Minimum size of a commit after which no zeros are written, as this would cost more than it saves."""
_ZEROS = bytes(AHEAD_BYTES_MIN)


def fill(file: File, segment: Segment, start: int, end: int, *, end_max: int) -> None:
    """Write zeros after frames that were just written from `start` to `end`, before their sync.

    Does nothing while zeros are left after the frames, or after a large commit. `end_max`: maximum size of
    the file. Raises OSError.
    """
    if end <= segment.preallocated_end or end - start >= LARGE_BYTES:
        return
    size = min(max(COMMITS * (end - start), AHEAD_BYTES_MIN), AHEAD_BYTES_MAX, end_max - end)
    if size <= 0:
        return
    segment.preallocated_end = end + size
    try:
        while size > 0:
            zeros = memoryview(_ZEROS)[:size]
            end = write_all(file, end, [zeros], len(zeros))
            size -= len(zeros)
    except OSError as error:
        if not is_disk_full(error):
            raise


def file_size_max(free_bytes: int, settings: LogSettings) -> int:
    """Return the maximum size of a file with zeros: that of a segment, or 0 if the disk lacks the space."""
    needed = settings.free_bytes_min + settings.unwritten_bytes_max + settings.segment_bytes_max
    return settings.segment_bytes_max if free_bytes >= needed else 0


def truncate(file: File, segment: Segment, end: int) -> None:
    """Truncate the zeros after `end`. The caller syncs the file. Raises OSError."""
    if segment.preallocated_end:
        segment.preallocated_end = 0
        file.truncate(end)


def truncate_last(segment: Segment | None) -> None:
    """Truncate the zeros at the end of a log that is fully written, and sync. Raises OSError."""
    if segment is not None and segment.file is not None and segment.preallocated_end:
        truncate(segment.file, segment, segment.size)
        segment.file.sync()


def content_end(file: File, position: int, end: int) -> int:
    """Return the end of the last byte in this range that is not 0; `position` if all are. Raises OSError."""
    while end > position:
        chunk_start = max(end - CHUNK_BYTES, position)
        content_bytes = len(file.read(chunk_start, end - chunk_start).rstrip(b"\0"))
        if content_bytes:
            return chunk_start + content_bytes
        end = chunk_start
    return position
