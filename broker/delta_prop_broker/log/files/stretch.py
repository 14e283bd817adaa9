"""Stretches: whole frames as they lie in a segment, to be sent on without being opened one by one.

The sparse index says which bytes these are, and the heads at both ends prove it; what lies between is not
looked at: every frame carries its own checksums, and whoever gets it verifies those. Where anything is in
doubt there is no stretch, and the frames are read one by one, which tells of damage.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.disk import FileRange
from delta_prop_broker.log.files.compressed import PEEK_BYTES
from delta_prop_broker.log.files.frames import read_head
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import PeerError
from delta_prop_wire.header import unpack_header
from delta_prop_wire.spec import CRC_BYTES, HEADER_BYTES, STAMP_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from delta_prop_broker.disk import Disk, File
    from delta_prop_broker.log.files.frames import Head
    from delta_prop_broker.log.files.segment import Segment, Segments
    from delta_prop_broker.log.files.sparse_index import Entry, SparseIndex

BYTES_MIN = 64 * 1024
"""Less than that is read: the frames of a few batches cost no more than finding out where they lie."""
FILES_MAX = 16
"""Segments that are sent from at a time. One that the log let go keeps its room on the disk until then."""
_HEADS_MAX = 64
"""Frames between two entries of an index are at most 4 KB, of 128 bytes and more each."""


class Bounds(NamedTuple):
    """Of a stretch. About so many bytes at least, or it is not worth it.

    `read_bytes_max`: where frames must be read into memory, as those of compressed segments; None: as others.
    """

    deltas_max: int
    bytes_max: int
    bytes_min: int = BYTES_MIN
    read_bytes_max: int | None = None


class Stretch(NamedTuple):
    """Frames from one offset up to `next_offset`, without a hole or control rows, all of them visible."""

    what: FileRange | list[Buffer]
    deltas: int
    bytes: int
    next_offset: int


class Stretches:
    """One log's. Gives each reader its own `StretchReader`; a file is opened once for all of them."""

    def __init__(self, disk: Disk, held: Callable[[], tuple[Segments, int, int]]) -> None:
        """`held` gives the segments now, the oldest offset and up to where readers may read."""
        self._disk = disk
        self._held = held
        self._open: dict[tuple[int, int], _OpenFile] = {}
        self._of: Segments | None = None

    def reader(self) -> StretchReader:
        """A new reader. Close it."""
        return StretchReader(self)

    def find(self, offset: int, bounds: Bounds, codecs: frozenset[int]) -> tuple[Stretch, _OpenFile] | None:
        """The stretch that begins at `offset`, and the file it lies in, which has one user more now."""
        segments, start, visible = self._held()
        if not start <= offset < visible:
            return None
        segment = segments.holding(offset)
        index = segments.index_of(segment)
        entry = index.before(offset)
        if not _readable(index, codecs):
            return None
        limit = min(offset + bounds.deltas_max, visible, _first_control(index, offset))
        size = bounds.bytes_max
        if index.codecs and bounds.read_bytes_max is not None:
            size = min(size, bounds.read_bytes_max)
        stop_offset, stop = _stop(index, limit, entry.position + size)
        if stop_offset <= offset or stop - entry.position < bounds.bytes_min:
            return None
        opened = self._acquire(segments, segment, index)
        if opened is None:
            return None
        try:
            found = opened.prove(index, offset, (stop_offset, stop), growing=segment is segments.last)
        except BaseException:
            opened.release()
            raise
        if found is None:
            opened.release()
            return None
        return found, opened

    def _acquire(self, segments: Segments, segment: Segment, index: SparseIndex) -> _OpenFile | None:
        if self._of is not segments:  # the log was recovered: other files may have these names
            self._of, self._open = segments, {}
        key = (segment.base, index.codecs)
        opened = self._open.get(key)
        if opened is None:
            if len(self._open) >= FILES_MAX:
                return None
            file = self._disk.open(segment.path, read_only=True)
            held = self._open
            opened = held[key] = _OpenFile(file, lambda: held.pop(key, None))
        opened.users += 1
        return opened


class StretchReader:
    """One reader's: what `next` gives is there until the following call, whatever becomes of the segment."""

    def __init__(self, stretches: Stretches) -> None:
        self._stretches = stretches
        self._opened: _OpenFile | None = None

    def next(self, offset: int, bounds: Bounds, *, codecs: frozenset[int] = frozenset()) -> Stretch | None:
        """The stretch that begins at `offset`, within these bounds; None where there is none worth it.

        `codecs`: those whose frames may be in it, by number. Raises LogDamaged, OSError.
        """
        found = self._stretches.find(offset, bounds, codecs)
        self.close()
        if found is None:
            return None
        stretch, self._opened = found
        return stretch

    def close(self) -> None:
        """Let go of the file."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.release()


class _OpenFile:
    """A segment's file, open as long as somebody sends from it."""

    def __init__(self, file: File, forget: Callable[[], object]) -> None:
        self.file = file
        self.users = 0
        self._forget = forget

    def prove(
        self, index: SparseIndex, offset: int, stop: tuple[int, int], *, growing: bool
    ) -> Stretch | None:
        """What lies from the frame of `offset` on up to `stop`, if the file says so too."""
        file, (next_offset, end) = self.file, stop
        begin = _locate(file, index.before(offset), offset)
        if begin is None or end <= begin:
            return None
        if end == index.size:
            if not (file.size() >= end if growing else file.size() == end):
                return None
        else:
            head = _head_at(file, end)
            if head is None or head.offset != next_offset:
                return None
        size, deltas = end - begin, next_offset - offset
        if not index.codecs:
            return Stretch(FileRange(file, begin, size), deltas, size, next_offset)
        parts = _unsealed(memoryview(file.read(begin, size)), size)
        if parts is None:
            return None
        return Stretch(parts, deltas, sum(memoryview(part).nbytes for part in parts), next_offset)

    def release(self) -> None:
        """One user less."""
        self.users -= 1
        if not self.users:
            self._forget()
            self.file.close()


def _readable(index: SparseIndex, codecs: frozenset[int]) -> bool:
    return index.controls is not None and not index.codecs & ~sum(1 << codec for codec in codecs)


def _first_control(index: SparseIndex, offset: int) -> int:
    """Where the first control rows at or behind `offset` begin; the segment's end where there are none."""
    assert index.controls is not None
    place = bisect_left(index.controls, offset)
    return index.controls[place] if place < len(index.controls) else index.end


def _stop(index: SparseIndex, offset: int, position: int) -> tuple[int, int]:
    """The last place at or before these where frames are known to end: (offset, position)."""
    if index.end <= offset and index.size <= position:
        return index.end, index.size
    last = index.last_before(offset, position)
    return last.offset, last.position


def _locate(file: File, entry: Entry, offset: int) -> int | None:
    """The position of the frame that begins with `offset`; None where none does."""
    position = entry.position
    for _ in range(_HEADS_MAX):
        head = _head_at(file, position)
        if head is None or head.offset > offset:
            return None
        if head.offset == offset:
            return position
        position += head.size
    return None


def _head_at(file: File, position: int) -> Head | None:
    return _head(memoryview(file.read(position, PEEK_BYTES)))


def _head(raw: memoryview) -> Head | None:
    """The head of a frame, from its first bytes; None where that is none."""
    if len(raw) < PEEK_BYTES:
        return None
    try:
        return read_head(raw)
    except PeerError:
        return None


def _unsealed(raw: memoryview, size: int) -> list[Buffer] | None:
    """The frames of a compressed segment as they travel, without the seals that it has; None if unsound."""
    parts: list[Buffer] = []
    at = 0
    while at < size:
        head = _head(raw[at : at + PEEK_BYTES])
        if head is None:
            return None
        frame = raw[at : at + head.size]
        body = HEADER_BYTES + STAMP_BYTES if head.plain is None else 0  # what the checksum at the end is of
        if crc32c(frame[body:-CRC_BYTES]) != int.from_bytes(frame[-CRC_BYTES:], "little"):
            return None
        parts.append(frame if head.plain is None else frame[: HEADER_BYTES + unpack_header(frame).length])
        at += head.size
    return parts
