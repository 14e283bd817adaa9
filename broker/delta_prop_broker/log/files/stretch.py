"""Stretches: whole frames as they lie in a segment, to be sent on without being opened one by one.

The sparse index says which bytes these are, and the heads at both ends prove it; what lies between is not
looked at: every frame carries its own checksums, and whoever gets it verifies those. Frames of a compressed
segment are read into memory and verified, as each has a seal that does not travel. Where anything is in doubt
there is no stretch, and the frames are read one by one, which tells of damage.
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
"""Less than that is read: the frames of a few batches cost no more than finding out where they lie.
Compressed ones are a stretch in any number: reading costs more, as it unpacks them."""
FILES_MAX = 16
"""Segments that are sent from at a time. One that the log let go keeps its room on the disk until then."""
_HEADS_MAX = 64
"""Frames between two entries of an index are at most 4 KB, of 128 bytes and more each."""


class Bounds(NamedTuple):
    """Of a stretch. About so many bytes at least, or it is not worth it.

    `read_bytes_max`: of frames that must be read into memory, as those of compressed segments, or one that is
    larger; None: as others. `verified`: only such frames, as nobody has read here and found the log sound.
    """

    deltas_max: int
    bytes_max: int
    bytes_min: int = BYTES_MIN
    read_bytes_max: int | None = None
    verified: bool = False


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
        if not _readable(index, codecs) or (bounds.verified and not index.codecs):
            return None
        limit = min(offset + bounds.deltas_max, visible, _first_control(index, offset))
        opened = self._acquire(segments, segment, index)
        if opened is None:
            return None
        try:
            if index.codecs:
                found = opened.unseal(index, offset, limit, bounds)
            else:
                found = opened.prove(index, offset, limit, bounds, growing=segment is segments.last)
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
        self, index: SparseIndex, offset: int, limit: int, bounds: Bounds, *, growing: bool
    ) -> Stretch | None:
        """Give the range from the frame of `offset` on up to about `limit`, if the file says so too."""
        file, entry = self.file, index.before(offset)
        next_offset, end = _stop(index, limit, entry.position + bounds.bytes_max)
        if next_offset <= offset or end - entry.position < bounds.bytes_min:
            return None
        begin = _locate(file, entry, offset)
        if begin is None or end <= begin:
            return None
        if end == index.size:
            if not (file.size() >= end if growing else file.size() == end):
                return None
        else:
            head = _head_at(file, end)
            if head is None or head.offset != next_offset:
                return None
        return Stretch(FileRange(file, begin, end - begin), next_offset - offset, end - begin, next_offset)

    def unseal(self, index: SparseIndex, offset: int, limit: int, bounds: Bounds) -> Stretch | None:
        """Give the frames of a compressed segment from `offset` on as they travel, without their seals."""
        file, begin = self.file, _locate(self.file, index.before(offset), offset)
        head = None if begin is None else _head_at(file, begin)
        if begin is None or head is None or head.size > bounds.bytes_max:
            return None
        size = min(bounds.bytes_max, bounds.read_bytes_max or bounds.bytes_max)
        raw = memoryview(file.read(begin, max(size, head.size) + PEEK_BYTES))
        is_last = begin + len(raw) == index.size == file.size()
        parts: list[Buffer] = []
        at, reached = 0, offset
        while head is not None and (not parts or at + head.size <= size):
            stop = at + head.size
            following = _head(raw[stop : stop + PEEK_BYTES])
            end = index.end if is_last and stop == len(raw) else following and following.offset
            if not end or end > limit:
                break
            frame = _unsealed(raw[at:stop], head)
            if frame is None:
                break  # what lies before it is sent, then reading tells of the damage
            parts.append(frame)
            at, reached, head = stop, end, following
        if not parts:
            return None
        return Stretch(parts, reached - offset, sum(memoryview(part).nbytes for part in parts), reached)

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


def _unsealed(frame: memoryview, head: Head) -> memoryview | None:
    """A frame of a compressed segment as it travels, without its seal if it has one; None if unsound."""
    body = HEADER_BYTES + STAMP_BYTES if head.plain is None else 0  # what the checksum at the end is of
    if crc32c(frame[body:-CRC_BYTES]) != int.from_bytes(frame[-CRC_BYTES:], "little"):
        return None
    return frame if head.plain is None else frame[: HEADER_BYTES + unpack_header(frame).length]
