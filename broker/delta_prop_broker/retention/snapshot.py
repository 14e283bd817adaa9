"""Snapshots: the state of every vector at an offset, in one file per snapshot beside the segments.

`<offset, 20 digits>.snapshot` holds a header, frames of state rows sorted by namespace and vector id, the
origins with their watermarks and clocks, and an index of the frames. Checksums cover every byte. The first
frame names the log's last stamp before the offset, so a snapshot of another history is detected.

The interface for readers: `Snapshot.offset` (the log continues there), `.log_id`, `.lamport`, `.time_us`,
`.rows`, `.bytes`, `.watermarks`, `.frames()`, `.find(namespace, vector_id)`, `.verify()`, `.close()`.
"""

from __future__ import annotations

import errno
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from delta_prop_broker.corruption import BadFrame, LogCorrupted
from delta_prop_broker.retention.tombstones import NO_AGE, TombstoneAge
from delta_prop_broker.segments.frames import FrameScanner
from delta_prop_broker.segments.paths import TEMPORARY
from delta_prop_broker.segments.segment import NAME_DIGITS, segment_bases
from delta_prop_broker.segments.small_file import write_all
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.codec import encode_head
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Dot, Source
from delta_prop_wire.spec import HEADER_BYTES
from delta_prop_wire.stamp import Stamp, stamp_crc

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk, File

SUFFIX = ".snapshot"
FRAME_ROWS_MAX = 4096
FRAME_BYTES_MAX = 1024 * 1024
"""Maximum bytes of a frame of states; a frame with a single state may be larger."""

_MAGIC = b"dp-state"
_VERSION = 2
_HEADERS = {1: struct.Struct("<8sII16sQQQQQQQQQQQQIIIII"), 2: struct.Struct("<8sII16sQQQQQQQQQQQQIIIIIQQQ")}
"""magic, version, 0, log id, then the numbers in the order of `_pack`, then the CRC32C of all before it.

Version 1 lacks the age of tombstones."""
_VERSION_AT = struct.Struct("<8sI")
_CRC = struct.Struct("<I")
FRAMES_START = _HEADERS[_VERSION].size + _CRC.size
_ORIGIN = struct.Struct("<QQII")
"""origin, counter, epoch, number of clock entries; then (origin u64, counter u64) each."""
_ENTRY = struct.Struct("<QQIHH")
"""position, first row, CRC of the stamp before, bytes of the first row's namespace and of its vector id."""
_SYNC_BYTES = 16 * 1024 * 1024
_TRIES = 5


class OriginWatermark(NamedTuple):
    """The watermark of an origin: its epoch, its last counter, and the clock of that delta."""

    epoch: int
    counter: int
    clock: tuple[Dot, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """Facts about a snapshot. `chain_crc` is the checksum of the log's last stamp before `offset`.

    `begin`: the first offset that it covers; above 0 only if rows had been removed before the first snapshot.
    `rows`: number of states; `alive`: of these, states of vectors that are not deleted. `out_of_order`:
    number of deltas without effect because they sort before the state that they met; `unfolded`: number of
    deltas without effect because this version cannot fold their kind. `time_us`: the latest append time.
    `tombstones`: which of them were left out, and when more will be.
    """

    log_id: bytes
    offset: int
    begin: int = 0
    time_us: int = 0
    lamport: int = 0
    chain_crc: int = 0
    rows: int = 0
    alive: int = 0
    out_of_order: int = 0
    unfolded: int = 0
    tombstones: TombstoneAge = NO_AGE


def snapshot_path(directory: str, offset: int) -> str:
    """Return the path of the snapshot at this offset."""
    return f"{directory}/{offset:0{NAME_DIGITS}d}{SUFFIX}"


def snapshot_offsets(names: list[str]) -> list[int]:
    """Return the offsets of the snapshots among these file names, sorted."""
    return segment_bases(names, SUFFIX)


def sort_key(namespace: str, vector_id: str) -> str:
    """Return the sort key of a row of a snapshot; neither name can contain the separator."""
    return f"{namespace}\0{vector_id}"


def sort_keys(batch: Batch) -> list[str]:
    """Return the sort key of each row."""
    name = batch.namespace
    if name is not None:
        head = name + "\0"
        return [head + key for key in batch.keys]
    return [f"{name}\0{key}" for name, key in zip(batch.namespaces, batch.keys, strict=True)]


# --- reading


class PresentSnapshot(NamedTuple):
    """The snapshot that a log has now. `offset`: None if there is none; then the other fields are 0.

    `tombstones_below`: those of vectors whose last delta has a lower offset are left out.
    """

    offset: int | None = None
    bytes: int = 0
    rows: int = 0
    tombstones_below: int = 0


class Snapshot:
    """An open `LogSnapshot`. Until it is closed, it can be read even if its file is removed."""

    def __init__(
        self,
        file: File,
        path: str,
        facts: SnapshotFacts,
        watermarks: dict[int, OriginWatermark],
        index: _Index,
    ) -> None:
        """Use `open_snapshot`."""
        self.path = path
        self.facts = facts
        self.watermarks: Mapping[int, OriginWatermark] = watermarks
        self.bytes = index.size
        self._file = file
        self._index = index
        self._cached_frame: tuple[int, LoggedBatch, list[str]] | None = None

    @property
    def log_id(self) -> bytes:
        """The id of the log whose vectors these are."""
        return self.facts.log_id

    @property
    def offset(self) -> int:
        """The end (exclusive) of the deltas that it covers: a reader continues with the log here."""
        return self.facts.offset

    @property
    def begin(self) -> int:
        return self.facts.begin

    @property
    def rows(self) -> int:
        return self.facts.rows

    @property
    def lamport(self) -> int:
        return self.facts.lamport

    @property
    def time_us(self) -> int:
        """Append time of the last delta below the offset, in microseconds since 1970."""
        return self.facts.time_us

    @property
    def frame_count(self) -> int:
        """Number of frames of states."""
        return len(self._index.entries)

    def frames(self, first: int = 0, end: int | None = None) -> Iterator[LoggedBatch]:
        """Yield the frames number `first` to `end` (exclusive; None: all that follow), sorted by key.

        Raises LogCorrupted, OSError.
        """
        index = self._index
        entries = [*index.entries, (index.frames_end, self.rows, index.last_crc)]
        position, row, crc = entries[first]
        end_position, *expected = entries[-1 if end is None else end]
        scanner = FrameScanner(self._file, position=position, offset=row, end=end_position, previous_crc=crc)
        try:
            for location in scanner:
                yield location.logged
        except BadFrame as bad:
            raise LogCorrupted(self.path, bad.reason, position=bad.position) from None
        if [scanner.offset, scanner.crc] != expected:
            raise LogCorrupted(self.path, "its frames do not fit its index", position=end_position)

    def find(self, namespace: str, vector_id: str) -> tuple[LoggedBatch, int] | None:
        """Return the frame and row of one vector; None if it has no delta below the offset.

        Raises LogCorrupted, OSError.
        """
        key = sort_key(namespace, vector_id)
        number = bisect_right(self._index.first_keys, key) - 1
        if number < 0:
            return None
        logged, keys = self._frame(number)
        row = bisect_left(keys, key)
        return (logged, row) if row < len(keys) and keys[row] == key else None

    def _frame(self, number: int) -> tuple[LoggedBatch, list[str]]:
        """Return one frame and its sort keys; cache the last one, since readers ask in sorted order."""
        if self._cached_frame is None or self._cached_frame[0] != number:
            position, row, previous_crc = self._index.entries[number]
            end = self._index.frames_end
            scanner = FrameScanner(
                self._file, position=position, offset=row, end=end, previous_crc=previous_crc
            )
            try:
                logged = next(iter(scanner)).logged
            except BadFrame as bad:
                raise LogCorrupted(self.path, bad.reason, position=bad.position) from None
            self._cached_frame = number, logged, sort_keys(logged.batch)
        return self._cached_frame[1:]

    def verify(self) -> None:
        """Read and check everything. Raises LogCorrupted, OSError."""
        last_key, frame_number = "", 0
        for logged in self.frames():
            keys = sort_keys(logged.batch)
            if keys[0] <= last_key and logged.offset:
                reason = f"row {logged.offset} is not in sort order"
                raise LogCorrupted(self.path, reason, position=FRAMES_START)
            indexed = self._index.entries[frame_number][1], self._index.first_keys[frame_number]
            if indexed != (logged.offset, keys[0]):
                raise LogCorrupted(self.path, f"the index does not lead to row {logged.offset}")
            last_key, frame_number = keys[-1], frame_number + 1

    def close(self) -> None:
        self._file.close()


def present_snapshot(snapshot: Snapshot) -> PresentSnapshot:
    """Return what a log remembers of its snapshot."""
    return PresentSnapshot(snapshot.offset, snapshot.bytes, snapshot.rows, snapshot.facts.tombstones.below)


class _Index(NamedTuple):
    """Index of the frames: `entries` (position, row, CRC of the stamp before), and their first sort keys."""

    size: int
    frames_end: int
    last_crc: int
    entries: list[tuple[int, int, int]]
    first_keys: list[str]


def open_snapshot(disk: Disk, directory: str, offset: int) -> Snapshot:
    """Open the snapshot at this offset; its frames are checked when they are read.

    Raises LogCorrupted, FileNotFoundError, OSError.
    """
    path = snapshot_path(directory, offset)
    file = disk.open(path, read_only=True)
    try:
        return _read_snapshot(file, path, offset)
    except BaseException:
        file.close()
        raise


def newest_snapshot(disk: Disk, directory: str, log_id: bytes) -> Snapshot | None:
    """Open the newest snapshot of this log; None if there is none. Raises LogCorrupted, OSError.

    Never opens an older one, since the log has removed the rows after it.
    """
    for _ in range(_TRIES):
        offsets = snapshot_offsets(disk.list(directory))
        if not offsets:
            return None
        try:
            snapshot = open_snapshot(disk, directory, offsets[-1])
        except FileNotFoundError:
            continue  # a newer one has replaced it since
        if snapshot.log_id != log_id:
            snapshot.close()
            reason = f"it belongs to log {snapshot.log_id.hex()}, not to {log_id.hex()}"
            raise LogCorrupted(snapshot.path, reason)
        return snapshot
    raise OSError(errno.EIO, "snapshots are replaced faster than they can be opened", directory)


def _read_snapshot(file: File, path: str, offset: int) -> Snapshot:
    size, (log_id, *numbers) = file.size(), _read_header(file, path)
    found_offset, begin, time_us, lamport, *counts, end, origins, index, frames = numbers[:12]
    chain_crc, last_crc, origins_crc, index_crc, _ = numbers[12:17]
    if found_offset != offset:
        reason = f"it is the snapshot at offset {found_offset} under another name"
        raise LogCorrupted(path, reason, position=0)
    if end + origins + index != size:
        raise LogCorrupted(path, f"it has {size} bytes, but was closed with {end + origins + index}")
    origins_raw, index_raw = file.read(end, origins), file.read(end + origins, index)
    if crc32c(origins_raw) != origins_crc:
        raise LogCorrupted(path, "its origins do not fit their checksum", position=end)
    if crc32c(index_raw) != index_crc:
        raise LogCorrupted(path, "its index does not fit its checksum", position=end + origins)
    entries, first_keys = _read_index(index_raw)
    if len(entries) != frames:
        raise LogCorrupted(path, f"its index leads to {len(entries)} of {frames} frames", position=end)
    tombstones = TombstoneAge(*numbers[17:])
    rows, alive, out_of_order, unfolded = counts
    facts = SnapshotFacts(
        log_id,
        found_offset,
        begin,
        time_us,
        lamport,
        chain_crc,
        rows,
        alive,
        out_of_order,
        unfolded,
        tombstones,
    )
    return Snapshot(
        file, path, facts, _read_watermarks(origins_raw), _Index(size, end, last_crc, entries, first_keys)
    )


def _read_header(file: File, path: str) -> tuple[Any, ...]:
    """Return the log id and the numbers of the header."""
    raw = file.read(0, FRAMES_START)
    magic, version = _VERSION_AT.unpack_from(raw) if len(raw) >= _VERSION_AT.size else (b"", 0)
    if magic != _MAGIC or version > _VERSION:
        reason = f"it is not a snapshot, or has version {version}, but this program knows up to {_VERSION}"
        raise LogCorrupted(path, reason)
    header = _HEADERS.get(version, _HEADERS[_VERSION])
    end = header.size + _CRC.size
    if len(raw) < end or _CRC.unpack_from(raw, header.size)[0] != crc32c(raw[: header.size]):
        raise LogCorrupted(path, "its header does not fit its checksum", position=0)
    return header.unpack_from(raw)[3:]


def _read_watermarks(raw: bytes) -> dict[int, OriginWatermark]:
    watermarks, position = {}, 0
    while position < len(raw):
        origin, counter, epoch, entries = _ORIGIN.unpack_from(raw, position)
        words = struct.unpack_from(f"<{2 * entries}Q", raw, position + _ORIGIN.size)
        position += _ORIGIN.size + 16 * entries
        clock = tuple(map(Dot, words[::2], words[1::2]))
        watermarks[origin] = OriginWatermark(epoch, counter, clock)
    return watermarks


def _read_index(raw: bytes) -> tuple[list[tuple[int, int, int]], list[str]]:
    entries, first_keys, index_position = [], [], 0
    while index_position < len(raw):
        position, row, crc, namespace_bytes, key_bytes = _ENTRY.unpack_from(raw, index_position)
        index_position += _ENTRY.size
        namespace, key = (
            raw[index_position : index_position + namespace_bytes].decode(),
            raw[index_position + namespace_bytes : index_position + namespace_bytes + key_bytes].decode(),
        )
        index_position += namespace_bytes + key_bytes
        entries.append((position, row, crc))
        first_keys.append(sort_key(namespace, key))
    return entries, first_keys


# --- writing


class StateFile:
    """Writes frames of rows, each with the checksum of the stamp before it: snapshots, and spill files.

    `position`, `rows` and `chain_crc`: the end of the file, number of rows and last stamp's checksum so far.
    """

    def __init__(self, disk: Disk, path: str, *, position: int, chain_crc: int, time_us: int = 0) -> None:
        self.path = path
        self.position = position
        self.rows = 0
        self.chain_crc = chain_crc
        self.file = disk.open(path, create=True)
        self.file.truncate(0)
        self._time_us = time_us
        self._synced = position

    def add(self, batch: Batch) -> None:
        """Write the next frame. Raises OSError."""
        stamp = Stamp(0, Source.LOCAL, self._time_us, self.chain_crc, batch.crc)
        head = encode_head(batch, self.rows, stamp)
        self.position = write_all(self.file, self.position, [head, batch.body])
        self.chain_crc = stamp_crc(head[HEADER_BYTES:])
        self.rows += batch.count

    def sync_periodically(self) -> None:
        """Sync if enough was written since the last sync: one large sync would delay the log's commits."""
        if self.position - self._synced >= _SYNC_BYTES:
            self.file.sync()
            self._synced = self.position


class SnapshotWriter:
    """Writes a snapshot under a temporary name; `finish` makes it durable under its final name.

    Frames must come sorted by `sort_keys`, each key once. After an error, call `discard`.
    """

    def __init__(self, disk: Disk, directory: str, facts: SnapshotFacts) -> None:
        self._disk = disk
        self._directory = directory
        self._facts = facts
        self._path = snapshot_path(directory, facts.offset)
        self._out = StateFile(
            disk,
            self._path + TEMPORARY,
            position=FRAMES_START,
            chain_crc=facts.chain_crc,
            time_us=facts.time_us,
        )
        self._index: list[bytes] = []

    @property
    def bytes(self) -> int:
        """Bytes written so far."""
        return self._out.position

    def append(self, batch: Batch) -> None:
        """Write the next frame of states. Raises OSError."""
        first = batch.namespaces[0].encode(), batch.keys[0].encode()
        out = self._out
        self._index.append(
            _ENTRY.pack(out.position, out.rows, out.chain_crc, *map(len, first)) + b"".join(first)
        )
        out.add(batch)
        out.sync_periodically()

    def finish(
        self, watermarks: Mapping[int, OriginWatermark], *, alive: int, out_of_order: int, unfolded: int
    ) -> Snapshot:
        """Seal, sync and rename the file, then open it. Raises OSError."""
        self.seal(watermarks, alive=alive, out_of_order=out_of_order, unfolded=unfolded)
        self._disk.rename(self._out.path, self._path)
        try:
            self._disk.sync_directory(self._directory)
        except OSError:
            # The new name may be in the cache and never become durable: the next process must not use it.
            with suppress(OSError):
                self._disk.remove(self._path)
            raise
        return open_snapshot(self._disk, self._directory, self._facts.offset)

    def seal(
        self, watermarks: Mapping[int, OriginWatermark], *, alive: int, out_of_order: int, unfolded: int
    ) -> None:
        """Complete, sync and close the file under its temporary name. Raises OSError."""
        out = self._out
        facts = replace(self._facts, rows=out.rows, alive=alive, out_of_order=out_of_order, unfolded=unfolded)
        origins, index = _pack_watermarks(watermarks), b"".join(self._index)
        end = out.position
        write_all(out.file, end, [origins, index])
        write_all(
            out.file,
            0,
            [
                _pack(
                    facts, end, origins=origins, index=index, frames=len(self._index), last_crc=out.chain_crc
                )
            ],
        )
        out.file.sync()
        out.file.close()

    def discard(self) -> None:
        """Remove the file that was written so far. Raises OSError."""
        self._out.file.close()
        self._disk.remove(self._out.path)


def _pack(
    facts: SnapshotFacts, end: int, *, origins: bytes, index: bytes, frames: int, last_crc: int
) -> bytes:
    numbers = (facts.offset, facts.begin, facts.time_us, facts.lamport)
    counts = (
        facts.rows,
        facts.alive,
        facts.out_of_order,
        facts.unfolded,
        end,
        len(origins),
        len(index),
        frames,
    )
    sums = (facts.chain_crc, last_crc, crc32c(origins), crc32c(index), 0)
    raw = _HEADERS[_VERSION].pack(
        _MAGIC, _VERSION, 0, facts.log_id, *numbers, *counts, *sums, *facts.tombstones
    )
    return raw + _CRC.pack(crc32c(raw))


def _pack_watermarks(watermarks: Mapping[int, OriginWatermark]) -> bytes:
    parts = []
    for origin, mark in sorted(watermarks.items()):
        words = [word for entry in mark.clock for word in entry]
        parts.append(_ORIGIN.pack(origin, mark.counter, mark.epoch, len(mark.clock)))
        parts.append(struct.pack(f"<{len(words)}Q", *words))
    return b"".join(parts)
