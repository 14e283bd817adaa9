"""Sendfile ranges: contiguous frames as a segment holds them, sent without being decoded one by one.

The sparse index locates the range, and the heads at both ends are checked against it. The frames in between
are not read: the receiver verifies the checksums of each. Frames of a compressed segment are read into memory
and verified, since each has a seal that is not sent: a checksum of the stored frame, for the disk only. If
anything is in doubt there is no range; the caller then reads the frames one by one, which reports corruption.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.disk import Disk, File, FileRange
from delta_prop_broker.segments.compressed import PEEK_BYTES
from delta_prop_broker.segments.frames import FrameHead, read_head
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.header import unpack_header
from delta_prop_wire.spec import CRC_BYTES, HEADER_BYTES, STAMP_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop_broker.log.writing import LogMarks
    from delta_prop_broker.segments.segment import Segment, Segments
    from delta_prop_broker.segments.sparse_index import Entry, SparseIndex

BYTES_MIN = 64 * 1024
"""Minimum bytes of a range: to read the frames of a few batches costs no more than to locate them.
For compressed frames there is no minimum, since reading them one by one would decompress them."""
FILES_MAX = 16
"""Maximum number of open files; a file that is removed from the log uses disk space until it is closed."""
_HEADS_MAX = 64
"""Maximum number of frames that are read from an index entry on. Entries are about 4 KB apart, and an
uncompressed frame has at least 128 bytes, so there are about 32 between two entries; the rest is a margin."""


class RangeBounds(NamedTuple):
    """Bounds of a range; a range below `bytes_min` is not used.

    `read_bytes_max`: replaces `bytes_max` for frames of compressed segments, which are read into memory, if
    it is smaller; if the first frame exceeds it, that frame is read alone. `verified`: use only frames of
    compressed segments, which are verified as they are read; set for a part of the log that no reader
    has checked.
    """

    deltas_max: int
    bytes_max: int
    bytes_min: int = BYTES_MIN
    read_bytes_max: int | None = None
    verified: bool = False


class SendfileRange(NamedTuple):
    """Contiguous frames up to `next_offset`, all below the high watermark, without control rows."""

    content: FileRange | list[Buffer]
    delta_count: int
    bytes: int
    next_offset: int


class SendfilePool:
    """Creates the readers of one log, and opens each file once for all of them."""

    def __init__(self, disk: Disk, segments: Segments, marks: LogMarks) -> None:
        self._disk = disk
        self._segments = segments
        self._marks = marks
        self._open_files: dict[tuple[int, int], _OpenFile] = {}

    def resume(self, segments: Segments) -> None:
        """Continue with the segments of the recovered log: other files may have the names of open ones."""
        self._segments, self._open_files = segments, {}

    def reader(self) -> SendfileReader:
        """Return a new reader; the caller closes it."""
        return SendfileReader(self)

    def find(
        self, offset: int, bounds: RangeBounds, codecs: frozenset[int]
    ) -> tuple[SendfileRange, _OpenFile] | None:
        """Find the range that begins at `offset`; return it and its file, which then has one more user.

        None if there is no range. Raises LogCorrupted, OSError.
        """
        segments, high_watermark = self._segments, self._marks.high_watermark
        if not self._marks.start_offset <= offset < high_watermark:
            return None
        segment = segments.segment_at(offset)
        index = segments.index_of(segment)
        if not _is_readable(index, codecs) or (bounds.verified and not index.codecs):
            return None
        offset_max = min(offset + bounds.deltas_max, high_watermark, _first_control(index, offset))
        opened = self._acquire(segment, index)
        if opened is None:
            return None
        try:
            if index.codecs:
                found = opened.read_frames(index, offset, offset_max, bounds)
            else:
                found = opened.locate_range(
                    index, offset, offset_max, bounds, is_active=segment is segments.last
                )
        except BaseException:
            opened.release()
            raise
        if found is None:
            opened.release()
            return None
        return found, opened

    def _acquire(self, segment: Segment, index: SparseIndex) -> _OpenFile | None:
        key = (segment.base, index.codecs)
        opened = self._open_files.get(key)
        if opened is None:
            if len(self._open_files) >= FILES_MAX:
                return None
            opened = _OpenFile(self._disk.open(segment.path, read_only=True), key, self._open_files)
            self._open_files[key] = opened
        opened.users += 1
        return opened


class SendfileReader:
    """One reader; a range is valid until the following `next`, even if its segment is removed."""

    def __init__(self, pool: SendfilePool) -> None:
        self._pool = pool
        self._opened: _OpenFile | None = None

    def next(
        self, offset: int, bounds: RangeBounds, *, codecs: frozenset[int] = frozenset()
    ) -> SendfileRange | None:
        """Return the range that begins at `offset`, within these bounds; None if there is none.

        `codecs`: numbers of the codecs that its frames may use. Raises LogCorrupted, OSError.
        """
        found = self._pool.find(offset, bounds, codecs)
        self.close()
        if found is None:
            return None
        found_range, self._opened = found
        return found_range

    def close(self) -> None:
        """Release the file."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.release()


class _OpenFile:
    """The file of a segment, open while readers send from it; `users` counts them."""

    def __init__(
        self, file: File, key: tuple[int, int], open_files: dict[tuple[int, int], _OpenFile]
    ) -> None:
        """`open_files`: has this file at `key` until its last user releases it."""
        self.file = file
        self.users = 0
        self._key = key
        self._open_files = open_files

    def locate_range(
        self, index: SparseIndex, offset: int, offset_max: int, bounds: RangeBounds, *, is_active: bool
    ) -> SendfileRange | None:
        """Return the range from `offset` to about `offset_max`; None if the file does not fit the index."""
        file, entry = self.file, index.entry_before(offset)
        next_offset, end = _last_known_end(index, offset_max, entry.position + bounds.bytes_max)
        if next_offset <= offset or end - entry.position < bounds.bytes_min:
            return None
        start = _locate(file, entry, offset)
        if start is None or end <= start:
            return None
        if end == index.size:
            if not (file.size() >= end if is_active else file.size() == end):
                return None
        else:
            head = _head_at(file, end)
            if head is None or head.offset != next_offset:
                return None
        return SendfileRange(
            FileRange(file, start, end - start), next_offset - offset, end - start, next_offset
        )

    def read_frames(
        self, index: SparseIndex, offset: int, offset_max: int, bounds: RangeBounds
    ) -> SendfileRange | None:
        """Return the frames of a compressed segment from `offset` up to `offset_max`, without their seals."""
        file, start = self.file, _locate(self.file, index.entry_before(offset), offset)
        head = None if start is None else _head_at(file, start)
        if start is None or head is None or head.size > bounds.bytes_max:
            return None
        size = min(bounds.bytes_max, bounds.read_bytes_max or bounds.bytes_max)
        raw = memoryview(file.read(start, max(size, head.size) + PEEK_BYTES))
        is_last = start + len(raw) == index.size == file.size()
        parts: list[Buffer] = []
        position, next_offset = 0, offset
        while head is not None and (not parts or position + head.size <= size):
            frame_end = position + head.size
            next_head = _read_head(raw[frame_end : frame_end + PEEK_BYTES])
            next_frame_offset = (
                index.end if is_last and frame_end == len(raw) else next_head and next_head.offset
            )
            if not next_frame_offset or next_frame_offset > offset_max:
                break
            frame = _unseal(raw[position:frame_end], head)
            if frame is None:
                break  # the frames before it are sent; the next call then reports the corruption
            parts.append(frame)
            position, next_offset, head = frame_end, next_frame_offset, next_head
        if not parts:
            return None
        return SendfileRange(
            parts, next_offset - offset, sum(memoryview(part).nbytes for part in parts), next_offset
        )

    def release(self) -> None:
        """End one use of the file; the last user closes it."""
        self.users -= 1
        if not self.users:
            self._open_files.pop(self._key, None)
            self.file.close()


def _is_readable(index: SparseIndex, codecs: frozenset[int]) -> bool:
    return index.controls is not None and not index.codecs & ~sum(1 << codec for codec in codecs)


def _first_control(index: SparseIndex, offset: int) -> int:
    """Return the offset of the first control rows from `offset` on; the segment's end if it has none."""
    assert index.controls is not None
    index_position = bisect_left(index.controls, offset)
    return index.controls[index_position] if index_position < len(index.controls) else index.end


def _last_known_end(index: SparseIndex, offset: int, position: int) -> tuple[int, int]:
    """Return (offset, position) of the last frame boundary in the index that is within both bounds."""
    if index.end <= offset and index.size <= position:
        return index.end, index.size
    last = index.entry_before_both(offset, position)
    return last.offset, last.position


def _locate(file: File, entry: Entry, offset: int) -> int | None:
    """Return the position of the frame that begins with `offset`; None if none does."""
    position = entry.position
    for _ in range(_HEADS_MAX):
        head = _head_at(file, position)
        if head is None or head.offset > offset:
            return None
        if head.offset == offset:
            return position
        position += head.size
    return None


def _head_at(file: File, position: int) -> FrameHead | None:
    return _read_head(memoryview(file.read(position, PEEK_BYTES)))


def _read_head(raw: memoryview) -> FrameHead | None:
    """Return the head of a frame, from its first bytes; None if they are not a head."""
    if len(raw) < PEEK_BYTES:
        return None
    try:
        return read_head(raw)
    except ProtocolError:
        return None


def _unseal(frame: memoryview, head: FrameHead) -> memoryview | None:
    """Return a frame of a compressed segment without its seal, if it has one; None if it is corrupted."""
    # A frame without a seal ends with the checksum of its body, not of the whole frame.
    checked_from = HEADER_BYTES + STAMP_BYTES if head.uncompressed_header is None else 0
    if crc32c(frame[checked_from:-CRC_BYTES]) != int.from_bytes(frame[-CRC_BYTES:], "little"):
        return None
    return frame if head.uncompressed_header is None else frame[: HEADER_BYTES + unpack_header(frame).length]
