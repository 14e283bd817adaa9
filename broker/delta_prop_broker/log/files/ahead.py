"""Zeros ahead of the last frame: a sync of what lies in them moves no end of file and takes no new room.

Where a file grows with each commit, the file system has to write its own journal before each sync returns,
which takes about as long as the frames do. So a commit that comes to the end of what was taken writes zeros
behind its frames, for about as many bytes as the next commits bring. They are cut off when the segment is
sealed or the log is closed; after a crash whoever reads the last segment finds nothing but zeros there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log.files.frames import CHUNK_BYTES
from delta_prop_broker.log.files.reserve import is_no_room
from delta_prop_broker.log.files.writing import write_all

if TYPE_CHECKING:
    from delta_prop_broker.disk import File
    from delta_prop_broker.log.files.segment import Segment
    from delta_prop_broker.log.settings import LogSettings

COMMITS = 16
"""So many commits like this one are to find zeros."""
AHEAD_BYTES_MIN, AHEAD_BYTES_MAX = 256 * 1024, 4 * 1024 * 1024
LARGE_BYTES = 512 * 1024
"""A commit of so many bytes takes long by itself: writing as many zeros would cost more than it saves."""
_ZEROS = bytes(AHEAD_BYTES_MIN)


def fill(file: File, segment: Segment, at: int, end: int, *, end_max: int) -> None:
    """Write zeros behind frames that were just written from `at` to `end`, before they are synced, where
    they came to the end of what was taken. `end_max`: how long the file may become. Raises OSError.
    """
    if end <= segment.taken or end - at >= LARGE_BYTES:
        return
    size = min(max(COMMITS * (end - at), AHEAD_BYTES_MIN), AHEAD_BYTES_MAX, end_max - end)
    if size <= 0:
        return
    segment.taken = end + size
    try:
        while size > 0:
            some = memoryview(_ZEROS)[:size]
            end = write_all(file, end, [some], len(some))
            size -= len(some)
    except OSError as error:
        if not is_no_room(error):
            raise


def bound(free_bytes: int, settings: LogSettings) -> int:
    """How long a file may become by zeros: as a segment, where the disk has room for one more; else 0."""
    room = settings.unwritten_bytes_max + settings.segment_bytes_max
    roomy = free_bytes >= settings.free_bytes_min + room
    return settings.segment_bytes_max if roomy else 0


def cut(file: File, segment: Segment, end: int) -> None:
    """Cut off what was taken behind `end`. A sync is to follow. Raises OSError."""
    if segment.taken:
        segment.taken = 0
        file.truncate(end)


def cut_off(segment: Segment | None) -> None:
    """The same at the end of the log, of which all is written. It is synced then. Raises OSError."""
    if segment is not None and segment.file is not None and segment.taken:
        cut(segment.file, segment, segment.size)
        segment.file.sync()


def content_end(file: File, position: int, end: int) -> int:
    """Behind the last byte between these that is not 0; `position` where there is none. Raises OSError."""
    while end > position:
        at = max(end - CHUNK_BYTES, position)
        found = len(file.read(at, end - at).rstrip(b"\0"))
        if found:
            return at + found
        end = at
    return position
