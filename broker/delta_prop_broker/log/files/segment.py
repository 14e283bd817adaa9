"""Segments: the files that hold the frames, each named by the offset of its first row."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

from delta_prop_broker.log.damage import BadFrame, LogDamaged
from delta_prop_broker.log.files.frames import CHUNK_BYTES, Walk, heads_behind
from delta_prop_broker.log.files.identity import read_small
from delta_prop_broker.log.files.sparse_index import STEP_BYTES, Entry, SparseIndex
from delta_prop_broker.log.files.writing import write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from delta_prop_broker.disk import Disk, File
    from delta_prop_broker.log.files.frames import Place
    from delta_prop_wire.batch import LoggedBatch

NAME_DIGITS = 20
SUFFIX = ".log"
INDEX_SUFFIX = ".index"
INDEXES_MAX = 16
FILES_MAX = 16
"""Sealed segments whose index, or file, is kept at hand."""
WALKS_MAX = 4
"""Readers for whom it is kept where they stopped, with up to `CHUNK_BYTES` of what comes next."""
INDEX_BYTES_MAX = 1 << 30
_SMALLEST_CHUNK_BYTES = 64 * 1024
_HEADS_BYTES = 2 * STEP_BYTES


def segment_bases(names: list[str], suffix: str = SUFFIX) -> list[int]:
    """The base offsets of the segments (or indexes) among these file names, sorted."""
    stems = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    return sorted(int(stem) for stem in stems if len(stem) == NAME_DIGITS and stem.isdecimal())


class Segment:
    """One file, as far as it was appended. `size` counts what is appended, `readable` what is on disk."""

    __slots__ = (
        "base",
        "compressed",
        "end",
        "file",
        "index",
        "index_path",
        "last_crc",
        "latest_time",
        "path",
        "readable",
        "seen_first_us",
        "seen_last_us",
        "size",
        "taken",
        "tried",
    )

    def __init__(self, directory: str, base: int) -> None:
        stem = f"{directory}/{base:0{NAME_DIGITS}d}"
        self.base = base
        self.path = stem + SUFFIX
        self.index_path = stem + INDEX_SUFFIX
        self.end = base
        self.size = 0
        self.readable = 0
        self.taken = 0  # up to where the file holds zeros behind its frames, if it does
        self.seen_first_us = 0  # the seen time of its first append, and of its last one
        self.seen_last_us = 0
        self.latest_time = 0
        self.last_crc: int | None = None
        self.compressed = False  # some frame of it is
        self.tried = False  # compressing it is done, or was found to save too little
        self.file: File | None = None  # of the one that is written to, or being rewritten
        self.index: SparseIndex | None = None  # of one that grows; of sealed ones a few are at hand

    def describe(self, index: SparseIndex) -> None:
        """Take over what an index says of the whole segment."""
        self.end, self.size, self.readable = index.end, index.size, index.size
        self.latest_time, self.last_crc = index.latest_time, index.last_crc
        self.compressed, self.tried = bool(index.codecs), index.tried or bool(index.codecs)


class Segments:
    """All segments of a log, oldest first, and reading from them."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self.directory = directory
        self.last: Segment | None = None  # where appends go
        self.indexes_rebuilt = 0
        self._disk = disk
        self._held: SortedDict[int, Segment] = SortedDict()  # by base
        self.all: Sequence[Segment] = self._held.values()  # a view of it, not a copy
        self._files: OrderedDict[int, File] = OrderedDict()
        self._indexes: OrderedDict[int, SparseIndex] = OrderedDict()
        self._walks: OrderedDict[int, tuple[Segment, Walk]] = (
            OrderedDict()
        )  # that stopped, by what comes next
        self._walking: tuple[Segment, Walk] | None = None  # the last that began
        self._proven: set[int] = set()  # whose index in memory led to damage, and was made anew then

    def add(self, segment: Segment) -> None:
        """The next one."""
        self._held[segment.base] = segment
        self.last = segment

    def drop_first(self) -> Segment:
        """Forget the oldest one; its file is somebody else's task."""
        segment: Segment = self._held.popitem(0)[1]
        self.last = self.last if self._held else None
        self._indexes.pop(segment.base, None)
        self._proven.discard(segment.base)
        self._forget_walks(segment)
        file = self._files.pop(segment.base, None)
        if file is not None:
            file.close()
        return segment

    def holding(self, offset: int) -> Segment:
        """The segment that holds an offset; the first one where it lies below that."""
        found: Segment = self.all[max(self._held.bisect_right(offset) - 1, 0)]
        return found

    def since(self, offset: int) -> Iterator[Segment]:
        """All segments from the one that holds `offset` on, oldest first."""
        first = max(self._held.bisect_right(offset) - 1, 0)
        return (self._held[base] for base in self._held.islice(first))

    def close(self) -> None:
        """Let go of all files."""
        for segment in self.all:
            if segment.file is not None:
                segment.file.close()
                segment.file = None
        self._walks.clear()
        while self._files:
            self._files.popitem()[1].close()

    # --- reading

    def read(self, offset: int, end: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Batches from the one that holds `offset` on, up to offset `end`. Raises LogDamaged, OSError."""
        found: list[LoggedBatch] = []
        rows = size = 0
        chunk = min(max(bytes_max, _SMALLEST_CHUNK_BYTES), CHUNK_BYTES)
        self._walking = None
        beyond: Place | None = None
        try:
            for place in self.walk(offset, end, chunk):
                logged = place.logged
                if found and (rows + logged.count > rows_max or size + logged.batch.size > bytes_max):
                    beyond = place
                    break
                found.append(logged)
                rows += logged.count
                size += logged.batch.size
                if rows >= rows_max or size >= bytes_max:
                    break
        except LogDamaged:
            if not found:  # what lies before the damage is given first
                raise
        else:
            self._stop(beyond)
        return found

    def _stop(self, beyond: Place | None) -> None:
        """Remember where a walk stopped, and what it holds of the file: who reads on begins there."""
        if self._walking is None:
            return
        segment, walk = self._walking
        if beyond is not None and beyond.end == walk.position:
            walk.back(beyond)
        if walk.chunk_bytes <= CHUNK_BYTES:
            self._walks[walk.offset] = (segment, walk)
            while len(self._walks) > WALKS_MAX:
                self._walks.popitem(last=False)

    def walk(self, offset: int, end: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Place]:
        """Frames from the one that holds `offset` on, up to offset `end`. Raises LogDamaged, OSError."""
        while offset < end:
            segment = self.holding(offset)
            for found in self._walk_segment(segment, offset, chunk_bytes):
                if found.logged.offset >= end:
                    return
                yield found
                offset = found.logged.next_offset
            if offset < end and offset < segment.end:
                raise LogDamaged(segment.path, "the file ends early", offset=offset, end=segment.end)

    def find(self, origin: int, counter: int, fetch: Callable[[int], LoggedBatch | None]) -> int | None:
        """The offset of a dot, None where no segment has it. `fetch` reads the batch that holds an offset."""
        for segment in reversed(self.all):
            index = self.index_of(segment)
            run = index.run_of(origin, counter)
            if run is None:
                continue
            begin, offset = run
            for candidate in (offset, begin):
                logged = fetch(candidate) if candidate < segment.end else None
                row = None if logged is None else _row_of(logged, origin, counter)
                if logged is not None and row is not None:
                    return logged.offset + row
        return None

    def offset_at(self, time: int, end: int) -> int:
        """The first offset whose batch was stamped at `time` (us since 1970) or later; `end` if none was."""
        for segment in self.all:
            if segment.latest_time < time or segment.base >= end:
                continue
            entry = self.index_of(segment).before_time(time)
            for found in self._walk_segment(segment, entry.offset, CHUNK_BYTES):
                if found.logged.offset >= end:
                    break
                if found.stamp.append_time >= time:
                    return found.logged.offset
        return end

    def append_time(self, offset: int) -> int | None:
        """When the batch that holds an offset was stamped (us since 1970); None where its head is unsound.

        Reads the heads behind the entry of the index that leads there. Raises LogDamaged, OSError.
        """
        segment = self.holding(offset)
        at, time = self.index_of(segment).before(offset).position, None
        for _, head in heads_behind(self._file(segment), at, segment.readable, chunk_bytes=_HEADS_BYTES):
            if head.offset > offset:
                break
            time = head.stamp.append_time
        return time

    def index_of(self, segment: Segment) -> SparseIndex:
        """The index of a segment: in memory, or read, or made anew. Raises LogDamaged, OSError."""
        if segment.index is not None:
            return segment.index
        index = self._indexes.get(segment.base)
        if index is None:
            index = load_index(self._disk, segment)
            if index is None or (index.end, index.size, index.last_crc) != _facts(segment):
                return self._rebuild(segment)
            self._proven.discard(segment.base)
            self._keep(segment, index)
        self._indexes.move_to_end(segment.base)
        return index

    def keep_index(self, segment: Segment, index: SparseIndex) -> None:
        """The index of a segment that was sealed just now."""
        segment.index = None
        self._keep(segment, index)

    def exchange(self, segment: Segment, index: SparseIndex) -> None:
        """Another file has the name of a sealed segment now, with the same frames, as this index says."""
        file = self._files.pop(segment.base, None)
        if file is not None:
            file.close()
        segment.describe(index)
        self._proven.discard(segment.base)
        self._forget_walks(segment)
        self._keep(segment, index)

    def _forget_walks(self, segment: Segment) -> None:
        """Its frames lie elsewhere now, or are gone."""
        for offset in [offset for offset, (other, _) in self._walks.items() if other is segment]:
            del self._walks[offset]

    def _keep(self, segment: Segment, index: SparseIndex) -> None:
        self._indexes[segment.base] = index
        while len(self._indexes) > INDEXES_MAX:
            self._indexes.popitem(last=False)

    def _rebuild(self, segment: Segment) -> SparseIndex:
        self.indexes_rebuilt += 1
        index = SparseIndex(segment.base)
        walk = Walk(self._file(segment), position=0, offset=segment.base, end=segment.size, previous_crc=None)
        try:
            for found in walk:
                index_frame(index, found)
        except BadFrame as bad:
            raise damaged(segment, self._file(segment), bad) from None
        if (index.end, index.size, index.last_crc) != _facts(segment):
            raise LogDamaged(segment.path, "other frames lie in it than before", offset=segment.base)
        self._keep(segment, index)
        return index

    def _walk_segment(self, segment: Segment, offset: int, chunk_bytes: int) -> Iterator[Place]:
        """Frames from the one that holds `offset` on; steps over damage that lies wholly before it."""
        file = self._file(segment)
        entry: Entry | None = None
        stopped = self._walks.pop(offset, None)
        while True:
            if stopped is not None and stopped[0] is segment:
                walk = stopped[1]
                walk.go_on(file, segment.readable)
            else:
                entry = entry or self.index_of(segment).before(offset)
                walk = Walk(
                    file,
                    position=entry.position,
                    offset=entry.offset,
                    end=segment.readable,
                    previous_crc=entry.previous_crc,
                    chunk_bytes=chunk_bytes,
                )
            self._walking, stopped = (segment, walk), None
            try:
                for found in walk:
                    if found.logged.next_offset > offset:
                        yield found
                        offset = found.logged.next_offset
                return
            except BadFrame as bad:
                if entry is None:
                    continue  # once more as one who comes anew, who knows what to do
                better = self._other_index(segment)
                if better is not None and better.before(offset) != entry:
                    entry = better.before(offset)
                    continue
                behind = _head_behind(segment, file, bad)
                if bad.offset >= offset or behind is None or behind.offset > offset:
                    raise damaged(segment, file, bad) from None
                entry = behind

    def _other_index(self, segment: Segment) -> SparseIndex | None:
        """The index made anew, once, where the one in use was stored; None where the frames are to blame."""
        if segment.index is not None or segment.base in self._proven:
            return None
        try:
            return self._rebuild(segment)
        except LogDamaged:
            return None
        finally:
            self._proven.add(segment.base)

    def _file(self, segment: Segment) -> File:
        if segment.file is not None:
            return segment.file
        file = self._files.get(segment.base)
        if file is None:
            file = self._files[segment.base] = self._disk.open(segment.path, read_only=True)
            if segment.index is None and file.size() != segment.size:
                self._describe_anew(segment, file)
            while len(self._files) > FILES_MAX:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(segment.base)
        return file

    def _describe_anew(self, segment: Segment, file: File) -> None:
        """Another file has the name of a segment: where it holds the very same frames, read on in that one.

        The process that writes the log exchanges a sealed segment for one with compressed frames. Where they
        are others, or none, nothing is changed here: it is damage, and found where it is read.
        """
        size = file.size()
        index = load_index(self._disk, segment)
        if index is None or (index.size, index.end, index.last_crc) != (size, *_frames(segment)):
            index = SparseIndex(segment.base)
            try:
                for found in Walk(file, position=0, offset=segment.base, end=size, previous_crc=None):
                    index_frame(index, found)
            except BadFrame:
                return
        if (index.end, index.last_crc) == _frames(segment):
            segment.describe(index)
            self._proven.discard(segment.base)
            self._forget_walks(segment)
            self._keep(segment, index)


def load_index(disk: Disk, segment: Segment) -> SparseIndex | None:
    """The stored index, None where there is none that is sound. It is only a hint: errors mean none."""
    try:
        raw = read_small(disk, segment.index_path, bytes_max=INDEX_BYTES_MAX)
    except OSError:
        return None
    return None if raw is None else SparseIndex.unpack(raw, segment.base)


def write_index(disk: Disk, segment: Segment, index: SparseIndex) -> None:
    """Store the index of a sealed segment. It can be made anew at any time, so what fails is let be."""
    with suppress(OSError):
        file = disk.open(segment.index_path, create=True)
        try:
            file.truncate(0)
            write_all(file, 0, [index.pack()])
        finally:
            file.close()


def index_frame(index: SparseIndex, found: Place) -> None:
    """Add a frame that was read."""
    stamp = found.stamp
    index.add(
        found.logged.batch,
        offset=found.logged.offset,
        size=found.size,
        time=stamp.append_time,
        previous_crc=stamp.previous_crc,
        crc=stamp.crc,
        codec=found.codec,
    )


def damaged(segment: Segment, file: File, bad: BadFrame) -> LogDamaged:
    """The error for a frame that is not as it was written, with the range that is in doubt."""
    behind = _head_behind(segment, file, bad)
    end = segment.end if behind is None else behind.offset
    return LogDamaged(segment.path, bad.reason, position=bad.position, offset=bad.offset, end=end)


def _head_behind(segment: Segment, file: File, bad: BadFrame) -> Entry | None:
    """Where the next frame begins that looks sound; what it follows is not known then."""
    for position, head in heads_behind(file, bad.position + bad.skip, segment.size):
        if bad.offset < head.offset < segment.end:
            return Entry(head.offset, position, None)
    return None


def _frames(segment: Segment) -> tuple[int, int | None]:
    """What two files with the same frames have in common."""
    return segment.end, segment.last_crc


def _facts(segment: Segment) -> tuple[int, int, int | None]:
    return segment.end, segment.size, segment.last_crc


def _row_of(logged: LoggedBatch, origin: int, counter: int) -> int | None:
    batch = logged.batch
    if batch.origin != origin or not batch.base <= counter <= batch.last:
        return None
    if not batch.leaps or batch.counters is None:
        return counter - batch.base
    rows = batch.counters.tolist()
    return rows.index(counter) if counter in rows else None
