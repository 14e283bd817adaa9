"""Segments: the files that hold the frames, each named by the offset of its first row."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

from delta_prop_broker.corruption import BadFrame, LogCorrupted
from delta_prop_broker.segments.frames import CHUNK_BYTES, FrameLocation, FrameScanner, heads_after
from delta_prop_broker.segments.small_file import read_file, write_all
from delta_prop_broker.segments.sparse_index import STEP_BYTES, Entry, SparseIndex
from delta_prop_wire.batch import LoggedBatch

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk, File

NAME_DIGITS = 20
SUFFIX = ".log"
INDEX_SUFFIX = ".index"
INDEXES_MAX = 16
FILES_MAX = 16
"""Maximum number of sealed segments whose index, or open file, is cached."""
SCANNERS_MAX = 4
"""Maximum number of stopped scanners that are cached, each with up to `CHUNK_BYTES` of the next frames."""
INDEX_BYTES_MAX = 1 << 30
_SMALLEST_CHUNK_BYTES = 64 * 1024
_HEADS_BYTES = 2 * STEP_BYTES


def segment_bases(names: list[str], suffix: str = SUFFIX) -> list[int]:
    """Return the base offsets of the segments (or indexes) among these file names, sorted."""
    stems = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    return sorted(int(stem) for stem in stems if len(stem) == NAME_DIGITS and stem.isdecimal())


class Segment:
    """One segment file. `size` counts the appended bytes, `readable` those that are written to it."""

    __slots__ = (
        "base",
        "compressed",
        "compression_tried",
        "end",
        "file",
        "index",
        "index_path",
        "last_crc",
        "latest_time",
        "path",
        "preallocated_end",
        "readable",
        "seen_first_us",
        "seen_last_us",
        "size",
    )

    def __init__(self, directory: str, base: int) -> None:
        stem = f"{directory}/{base:0{NAME_DIGITS}d}"
        self.base = base  # offset of its first row
        self.path = stem + SUFFIX
        self.index_path = stem + INDEX_SUFFIX
        self.end = base  # offset after its last row
        self.size = 0
        self.readable = 0
        self.preallocated_end = 0  # the end of the zeros after its frames, if there are any
        self.seen_first_us = 0  # seen time (see `log_clock`) of its first append
        self.seen_last_us = 0  # seen time of its last append
        self.latest_time = 0  # append time (us since 1970) of its last frame
        self.last_crc: int | None = None  # checksum of its last stamp
        self.compressed = False  # at least one frame is compressed
        self.compression_tried = False  # it was compressed, or compression saves too little
        self.file: File | None = None  # of the segment that is written to, or being rewritten
        self.index: SparseIndex | None = None  # of the active segment; those of sealed ones are cached

    def apply_index(self, index: SparseIndex) -> None:
        """Set the end, size and last stamp of the segment from an index of all its frames."""
        self.end, self.size, self.readable = index.end, index.size, index.size
        self.latest_time, self.last_crc = index.latest_time, index.last_crc
        self.compressed, self.compression_tried = (
            bool(index.codecs),
            index.compression_tried or bool(index.codecs),
        )


class Segments:
    """All segments of a log, oldest first, with the operations that read them."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self.directory = directory
        self.last: Segment | None = None  # the segment that appends go to
        self.indexes_rebuilt = 0
        self._disk = disk
        self._by_base: SortedDict[int, Segment] = SortedDict()
        self.all: Sequence[Segment] = self._by_base.values()  # a view, not a copy
        self._files: OrderedDict[int, File] = OrderedDict()
        self._indexes: OrderedDict[int, SparseIndex] = OrderedDict()
        # Stopped scanners, each with its segment, by their next offset.
        self._scanners: OrderedDict[int, tuple[Segment, FrameScanner]] = OrderedDict()
        self._current_scanner: tuple[Segment, FrameScanner] | None = None  # the scanner started last
        # Bases of segments whose index was rebuilt after it led to corruption.
        self._rebuilt: set[int] = set()

    def add(self, segment: Segment) -> None:
        """Add the next segment."""
        self._by_base[segment.base] = segment
        self.last = segment

    def drop_first(self) -> Segment:
        """Remove the oldest segment from the table and return it; the caller removes its file."""
        segment: Segment = self._by_base.popitem(0)[1]
        self.last = self.last if self._by_base else None
        self._indexes.pop(segment.base, None)
        self._rebuilt.discard(segment.base)
        self._forget_scanners(segment)
        file = self._files.pop(segment.base, None)
        if file is not None:
            file.close()
        return segment

    def segment_at(self, offset: int) -> Segment:
        """Return the segment that holds an offset; the first segment if the offset is before it."""
        segment: Segment = self.all[max(self._by_base.bisect_right(offset) - 1, 0)]
        return segment

    def segments_from(self, offset: int) -> Iterator[Segment]:
        """Return all segments from the one that holds `offset` on, oldest first."""
        first = max(self._by_base.bisect_right(offset) - 1, 0)
        return (self._by_base[base] for base in self._by_base.islice(first))

    def close(self) -> None:
        """Close all files."""
        for segment in self.all:
            if segment.file is not None:
                segment.file.close()
                segment.file = None
        self._scanners.clear()
        while self._files:
            self._files.popitem()[1].close()

    # --- reading

    def read(self, offset: int, end: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Return batches from the one of `offset` on, up to offset `end`. Raises LogCorrupted, OSError."""
        batches: list[LoggedBatch] = []
        row_count = size = 0
        chunk_bytes = min(max(bytes_max, _SMALLEST_CHUNK_BYTES), CHUNK_BYTES)
        self._current_scanner = None
        beyond: FrameLocation | None = None
        try:
            for location in self.scan(offset, end, chunk_bytes):
                logged = location.logged
                if batches and (row_count + logged.count > rows_max or size + logged.batch.size > bytes_max):
                    beyond = location
                    break
                batches.append(logged)
                row_count += logged.count
                size += logged.batch.size
                if row_count >= rows_max or size >= bytes_max:
                    break
        except LogCorrupted:
            if not batches:  # batches before the corruption are returned first
                raise
        else:
            self._store_scanner(beyond)
        return batches

    def _store_scanner(self, beyond: FrameLocation | None) -> None:
        """Cache a stopped scanner with the bytes that it has read, for a reader that continues there."""
        if self._current_scanner is None:
            return
        segment, scanner = self._current_scanner
        if beyond is not None and beyond.end == scanner.position:
            scanner.step_back(beyond)
        if scanner.buffered_bytes <= CHUNK_BYTES:
            self._scanners[scanner.offset] = (segment, scanner)
            while len(self._scanners) > SCANNERS_MAX:
                self._scanners.popitem(last=False)

    def scan(self, offset: int, end: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[FrameLocation]:
        """Yield frames from the one of `offset` on, up to offset `end`. Raises LogCorrupted, OSError."""
        while offset < end:
            segment = self.segment_at(offset)
            for frame in self._scan_segment(segment, offset, chunk_bytes):
                if frame.logged.offset >= end:
                    return
                yield frame
                offset = frame.logged.next_offset
            if offset < end and offset < segment.end:
                raise LogCorrupted(segment.path, "the file ends early", offset=offset, end=segment.end)

    def find(self, origin: int, counter: int, fetch: Callable[[int], LoggedBatch | None]) -> int | None:
        """Return the offset of a dot, or None. `fetch` reads the batch that holds an offset."""
        for segment in reversed(self.all):
            index = self.index_of(segment)
            run = index.find_run(origin, counter)
            if run is None:
                continue
            run_start, offset_without_gaps = run
            # If the run has gaps, the dot is in the batch at the run's start, or not in this segment.
            for candidate in (offset_without_gaps, run_start):
                logged = fetch(candidate) if candidate < segment.end else None
                row = None if logged is None else _row_of(logged, origin, counter)
                if logged is not None and row is not None:
                    return logged.offset + row
        return None

    def offset_at(self, time: int, end: int) -> int:
        """Return the first offset stamped at `time` (us since 1970) or later; `end` if there is none."""
        for segment in self.all:
            if segment.latest_time < time or segment.base >= end:
                continue
            entry = self.index_of(segment).entry_before_time(time)
            for frame in self._scan_segment(segment, entry.offset, CHUNK_BYTES):
                if frame.logged.offset >= end:
                    break
                if frame.stamp.append_time >= time:
                    return frame.logged.offset
        return end

    def append_time(self, offset: int) -> int | None:
        """Return the append time (us since 1970) of the batch at an offset; None if its head is not valid.

        Reads the heads of frames from the index entry before the offset on. Raises LogCorrupted, OSError.
        """
        segment = self.segment_at(offset)
        position, time = self.index_of(segment).entry_before(offset).position, None
        for _, head in heads_after(self._file(segment), position, segment.readable, chunk_bytes=_HEADS_BYTES):
            if head.offset > offset:
                break
            time = head.stamp.append_time
        return time

    def index_of(self, segment: Segment) -> SparseIndex:
        """Return the index of a segment: cached, read, or rebuilt. Raises LogCorrupted, OSError."""
        if segment.index is not None:
            return segment.index
        index = self._indexes.get(segment.base)
        if index is None:
            index = load_index(self._disk, segment)
            if index is None or (index.end, index.size, index.last_crc) != _index_facts(segment):
                return self._rebuild(segment)
            self._rebuilt.discard(segment.base)
            self._cache_index(segment, index)
        self._indexes.move_to_end(segment.base)
        return index

    def cache_index(self, segment: Segment, index: SparseIndex) -> None:
        """Cache the index of a segment that was just sealed."""
        segment.index = None
        self._cache_index(segment, index)

    def exchange(self, segment: Segment, index: SparseIndex) -> None:
        """Adopt another file of a sealed segment, with the same frames and this index."""
        file = self._files.pop(segment.base, None)
        if file is not None:
            file.close()
        segment.apply_index(index)
        self._rebuilt.discard(segment.base)
        self._forget_scanners(segment)
        self._cache_index(segment, index)

    def _forget_scanners(self, segment: Segment) -> None:
        """Remove the scanners of a segment whose frames have moved, or were removed."""
        for offset in [offset for offset, (scanned, _) in self._scanners.items() if scanned is segment]:
            del self._scanners[offset]

    def _cache_index(self, segment: Segment, index: SparseIndex) -> None:
        self._indexes[segment.base] = index
        while len(self._indexes) > INDEXES_MAX:
            self._indexes.popitem(last=False)

    def _rebuild(self, segment: Segment) -> SparseIndex:
        self.indexes_rebuilt += 1
        index = SparseIndex(segment.base)
        scanner = FrameScanner(
            self._file(segment), position=0, offset=segment.base, end=segment.size, previous_crc=None
        )
        try:
            for frame in scanner:
                index_frame(index, frame)
        except BadFrame as bad:
            raise corruption_error(segment, self._file(segment), bad) from None
        if (index.end, index.size, index.last_crc) != _index_facts(segment):
            raise LogCorrupted(segment.path, "the file has other frames than before", offset=segment.base)
        self._cache_index(segment, index)
        return index

    def _scan_segment(self, segment: Segment, offset: int, chunk_bytes: int) -> Iterator[FrameLocation]:
        """Yield frames from the one that holds `offset` on; skip corruption that ends before it."""
        file = self._file(segment)
        entry: Entry | None = None
        stopped = self._scanners.pop(offset, None)
        while True:
            if stopped is not None and stopped[0] is segment:
                scanner = stopped[1]
                scanner.resume(file, segment.readable)
            else:
                entry = entry or self.index_of(segment).entry_before(offset)
                scanner = FrameScanner(
                    file,
                    position=entry.position,
                    offset=entry.offset,
                    end=segment.readable,
                    previous_crc=entry.previous_crc,
                    chunk_bytes=chunk_bytes,
                )
            self._current_scanner, stopped = (segment, scanner), None
            try:
                for frame in scanner:
                    if frame.logged.next_offset > offset:
                        yield frame
                        offset = frame.logged.next_offset
                return
            except BadFrame as bad:
                if entry is None:
                    continue  # retry from the index entry, as a new reader
                rebuilt = self._try_rebuild(segment)
                if rebuilt is not None and rebuilt.entry_before(offset) != entry:
                    entry = rebuilt.entry_before(offset)
                    continue
                after = _head_after(segment, file, bad)
                if bad.offset >= offset or after is None or after.offset > offset:
                    raise corruption_error(segment, file, bad) from None
                entry = after

    def _try_rebuild(self, segment: Segment) -> SparseIndex | None:
        """Rebuild the index, once, if it was read from a file; return None if the frames are corrupted."""
        if segment.index is not None or segment.base in self._rebuilt:
            return None
        try:
            return self._rebuild(segment)
        except LogCorrupted:
            return None
        finally:
            self._rebuilt.add(segment.base)

    def _file(self, segment: Segment) -> File:
        if segment.file is not None:
            return segment.file
        file = self._files.get(segment.base)
        if file is None:
            file = self._files[segment.base] = self._disk.open(segment.path, read_only=True)
            if segment.index is None and file.size() != segment.size:
                self._refresh(segment, file)
            while len(self._files) > FILES_MAX:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(segment.base)
        return file

    def _refresh(self, segment: Segment, file: File) -> None:
        """Adopt a file that replaced that of a segment, if it holds the same frames.

        The process that writes the log replaces a sealed segment by one with compressed frames. If the frames
        differ, or cannot be read, nothing changes here: a reader then finds the corruption.
        """
        size = file.size()
        index = load_index(self._disk, segment)
        if index is None or (index.size, index.end, index.last_crc) != (size, *_frame_identity(segment)):
            index = SparseIndex(segment.base)
            try:
                for frame in FrameScanner(file, position=0, offset=segment.base, end=size, previous_crc=None):
                    index_frame(index, frame)
            except BadFrame:
                return
        if (index.end, index.last_crc) == _frame_identity(segment):
            segment.apply_index(index)
            self._rebuilt.discard(segment.base)
            self._forget_scanners(segment)
            self._cache_index(segment, index)


def load_index(disk: Disk, segment: Segment) -> SparseIndex | None:
    """Return the stored index; None if there is no valid one, or after an error, since it is only a hint."""
    try:
        raw = read_file(disk, segment.index_path, bytes_max=INDEX_BYTES_MAX)
    except OSError:
        return None
    return None if raw is None else SparseIndex.unpack(raw, segment.base)


def write_index(disk: Disk, segment: Segment, index: SparseIndex) -> None:
    """Store the index of a sealed segment. Ignores errors, since it can be rebuilt at any time."""
    with suppress(OSError), closing(disk.open(segment.index_path, create=True)) as file:
        file.truncate(0)
        write_all(file, 0, [index.pack()])


def index_frame(index: SparseIndex, frame: FrameLocation) -> None:
    """Add a frame to an index."""
    stamp = frame.stamp
    index.add(
        frame.logged.batch,
        offset=frame.logged.offset,
        size=frame.size,
        time=stamp.append_time,
        previous_crc=stamp.previous_crc,
        crc=stamp.crc,
        codec=frame.codec,
    )


def corruption_error(segment: Segment, file: File, bad: BadFrame) -> LogCorrupted:
    """Return the error for a corrupted frame, with the range that is in doubt."""
    after = _head_after(segment, file, bad)
    end = segment.end if after is None else after.offset
    return LogCorrupted(segment.path, bad.reason, position=bad.position, offset=bad.offset, end=end)


def _head_after(segment: Segment, file: File, bad: BadFrame) -> Entry | None:
    """Return the location of the next frame that looks valid, without the checksum of the bad one before."""
    for position, head in heads_after(file, bad.position + bad.skip, segment.size):
        if bad.offset < head.offset < segment.end:
            return Entry(head.offset, position, None)
    return None


def _frame_identity(segment: Segment) -> tuple[int, int | None]:
    """Return facts that are equal for two files if these hold the same frames."""
    return segment.end, segment.last_crc


def _index_facts(segment: Segment) -> tuple[int, int, int | None]:
    """Return facts that an index of all frames of the segment must have, too."""
    return segment.end, segment.size, segment.last_crc


def _row_of(logged: LoggedBatch, origin: int, counter: int) -> int | None:
    batch = logged.batch
    if batch.origin != origin or not batch.base <= counter <= batch.last:
        return None
    if not batch.has_gaps or batch.counters is None:
        return counter - batch.base
    rows = batch.counters.tolist()
    return rows.index(counter) if counter in rows else None
