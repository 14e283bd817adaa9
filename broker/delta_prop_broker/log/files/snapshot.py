"""Snapshots: the state of every vector at an offset, in a file of its own beside the segments.

`<offset, 20 digits>.snapshot` holds a header, frames of state rows sorted by namespace and vector id, the
origins with their watermarks and clocks, and an index of the frames. Every byte is under a checksum, and the
frames are chained on from the log's last one before the offset: they belong to this history or to none.

What readers use: `Snapshot.offset` (the tail goes on there), `.log_id`, `.lamport`, `.time_us`, `.rows`,
`.bytes`, `.watermarks`, `.frames()`, `.find(namespace, vector_id)`, `.verify()`, `.close()`.
"""

from __future__ import annotations

import errno
import struct
from bisect import bisect_left, bisect_right
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.log.damage import BadFrame, LogDamaged
from delta_prop_broker.log.files.frames import Walk
from delta_prop_broker.log.files.names import TEMPORARY
from delta_prop_broker.log.files.segment import NAME_DIGITS, segment_bases
from delta_prop_broker.log.files.writing import write_all
from delta_prop_wire.codec import encode_head
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Dot, Source
from delta_prop_wire.spec import HEADER_BYTES
from delta_prop_wire.stamp import Stamp, stamp_crc

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from delta_prop_broker.disk import Disk, File
    from delta_prop_wire.batch import Batch, LoggedBatch

SUFFIX = ".snapshot"
FRAME_ROWS_MAX = 4096
FRAME_BYTES_MAX = 1024 * 1024
"""Where a frame of states ends; one that holds a single state may be larger."""

_MAGIC = b"dp-state"
_VERSION = 1
_HEADER = struct.Struct("<8sII16sQQQQQQQQQQQQIIIII")
"""magic, version, 0, log id, then the numbers in the order of `_pack`, then the CRC32C of all before it."""
_CRC = struct.Struct("<I")
FRAMES_AT = _HEADER.size + _CRC.size
_ORIGIN = struct.Struct("<QQII")
"""origin, counter, epoch, number of clock entries; then (origin u64, counter u64) each."""
_ENTRY = struct.Struct("<QQIHH")
"""position, first row, CRC of the stamp before, bytes of the first row's namespace and of its vector id."""
_SYNC_BYTES = 16 * 1024 * 1024
_TRIES = 5


class OriginMark(NamedTuple):
    """How far an origin had come: its epoch, its last counter, what that delta had seen of the others."""

    epoch: int
    counter: int
    clock: tuple[Dot, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """What a snapshot says of itself. `chain` is the checksum of the log's last stamp before `offset`.

    `begin`: the first offset that is counted in; 0 but where a log had lost its beginning before its first
    snapshot. `late`: deltas that came after a state they sort before, and have no effect; `unfolded`: deltas
    of kinds that this version cannot fold, with no effect either. `time_us`: the latest time of an append.
    """

    log_id: bytes
    offset: int
    begin: int = 0
    time_us: int = 0
    lamport: int = 0
    chain: int = 0
    rows: int = 0
    alive: int = 0
    late: int = 0
    unfolded: int = 0


def snapshot_path(directory: str, offset: int) -> str:
    """The file of the snapshot at this offset."""
    return f"{directory}/{offset:0{NAME_DIGITS}d}{SUFFIX}"


def snapshot_offsets(names: list[str]) -> list[int]:
    """The offsets of the snapshots among these file names, sorted."""
    return segment_bases(names, SUFFIX)


def sort_key(namespace: str, vector_id: str) -> str:
    """What rows of a snapshot are sorted by; neither name can hold the character between them."""
    return f"{namespace}\0{vector_id}"


def sort_keys(batch: Batch) -> list[str]:
    """The same for each row."""
    name = batch.namespace
    if name is not None:
        head = name + "\0"
        return [head + key for key in batch.keys]
    return [f"{name}\0{key}" for name, key in zip(batch.namespaces, batch.keys, strict=True)]


# --- reading


class Snapshot:
    """One snapshot, open for reading. Close it; what is read meanwhile stays, though the file be removed."""

    def __init__(
        self, file: File, path: str, facts: SnapshotFacts, marks: dict[int, OriginMark], index: _Index
    ) -> None:
        """Use `open_snapshot`."""
        self.path = path
        self.facts = facts
        self.watermarks: Mapping[int, OriginMark] = marks
        self.bytes = index.size
        self._file = file
        self._index = index
        self._last: tuple[int, LoggedBatch, list[str]] | None = None

    @property
    def log_id(self) -> bytes:
        """The log whose vectors these are."""
        return self.facts.log_id

    @property
    def offset(self) -> int:
        """All deltas below it are counted in, none from it on: a reader goes on with the log here."""
        return self.facts.offset

    @property
    def begin(self) -> int:
        """The first offset that is counted in; 0 but where the log had lost its beginning before."""
        return self.facts.begin

    @property
    def rows(self) -> int:
        """States held, tombstones too."""
        return self.facts.rows

    @property
    def lamport(self) -> int:
        """The highest Lamport number below the offset."""
        return self.facts.lamport

    @property
    def time_us(self) -> int:
        """When the last delta below the offset was appended, in microseconds since 1970."""
        return self.facts.time_us

    @property
    def frame_count(self) -> int:
        """How many frames hold the states."""
        return len(self._index.entries)

    def frames(self, begin: int = 0, stop: int | None = None) -> Iterator[LoggedBatch]:
        """All states, sorted by namespace and vector id, a frame at a time; or those of some frames.

        From frame number `begin` up to `stop`, which is left out. Raises LogDamaged, OSError.
        """
        index = self._index
        entries = [*index.entries, (index.frames_end, self.rows, index.last_crc)]
        position, row, crc = entries[begin]
        end, *closed_with = entries[-1 if stop is None else stop]
        walk = Walk(self._file, position=position, offset=row, end=end, previous_crc=crc)
        try:
            for place in walk:
                yield place.logged
        except BadFrame as bad:
            raise LogDamaged(self.path, bad.reason, position=bad.position) from None
        if [walk.offset, walk.crc] != closed_with:
            raise LogDamaged(self.path, "its frames are not those that it was closed with", position=end)

    def find(self, namespace: str, vector_id: str) -> tuple[LoggedBatch, int] | None:
        """The frame and row of one vector, None where no delta of it lies below the offset.

        Raises LogDamaged, OSError.
        """
        wanted = sort_key(namespace, vector_id)
        place = bisect_right(self._index.firsts, wanted) - 1
        if place < 0:
            return None
        logged, keys = self._frame(place)
        at = bisect_left(keys, wanted)
        return (logged, at) if at < len(keys) and keys[at] == wanted else None

    def _frame(self, place: int) -> tuple[LoggedBatch, list[str]]:
        """One frame and its sort keys; the last one is held, as who looks for many vectors sorts them."""
        if self._last is None or self._last[0] != place:
            position, row, previous_crc = self._index.entries[place]
            end = self._index.frames_end
            walk = Walk(self._file, position=position, offset=row, end=end, previous_crc=previous_crc)
            try:
                logged = next(iter(walk)).logged
            except BadFrame as bad:
                raise LogDamaged(self.path, bad.reason, position=bad.position) from None
            self._last = place, logged, sort_keys(logged.batch)
        return self._last[1:]

    def verify(self) -> None:
        """Read and check everything. Raises LogDamaged, OSError."""
        before, at = "", 0
        for logged in self.frames():
            keys = sort_keys(logged.batch)
            if keys[0] <= before and logged.offset:
                raise LogDamaged(self.path, f"row {logged.offset} is not in its place", position=FRAMES_AT)
            told = self._index.entries[at][1], self._index.firsts[at]
            if told != (logged.offset, keys[0]):
                raise LogDamaged(self.path, f"the index does not lead to row {logged.offset}")
            before, at = keys[-1], at + 1

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class _Index(NamedTuple):
    """Where frames are: `entries` (position, row, CRC of the stamp before), and their first sort keys."""

    size: int
    frames_end: int
    last_crc: int
    entries: list[tuple[int, int, int]]
    firsts: list[str]


def open_snapshot(disk: Disk, directory: str, offset: int) -> Snapshot:
    """Open the snapshot at this offset; its frames are checked when they are read.

    Raises LogDamaged, FileNotFoundError, OSError.
    """
    path = snapshot_path(directory, offset)
    file = disk.open(path, read_only=True)
    try:
        return _opened(file, path, offset)
    except BaseException:
        file.close()
        raise


def newest_snapshot(disk: Disk, directory: str, log_id: bytes) -> Snapshot | None:
    """Open the newest snapshot of this log, None where there is none. Raises LogDamaged, OSError.

    An older one is never taken for it: the log has let go of what lies between them.
    """
    for _ in range(_TRIES):
        offsets = snapshot_offsets(disk.list(directory))
        if not offsets:
            return None
        try:
            found = open_snapshot(disk, directory, offsets[-1])
        except FileNotFoundError:
            continue  # a newer one has taken its place since
        if found.log_id != log_id:
            found.close()
            raise LogDamaged(found.path, f"it is of log {found.log_id.hex()}, this one is {log_id.hex()}")
        return found
    raise OSError(errno.EIO, "snapshots come and go faster than they can be opened", directory)


def _opened(file: File, path: str, offset: int) -> Snapshot:
    size, raw = file.size(), file.read(0, FRAMES_AT)
    if len(raw) < FRAMES_AT or _CRC.unpack_from(raw, _HEADER.size)[0] != crc32c(raw[: _HEADER.size]):
        raise LogDamaged(path, "its header does not fit its checksum", position=0)
    magic, version, zero, log_id, *numbers = _HEADER.unpack_from(raw)
    if (magic, version, zero) != (_MAGIC, _VERSION, 0):
        raise LogDamaged(path, f"it is no snapshot, or one of version {version}; known is {_VERSION}")
    told, begin, time_us, lamport, rows, alive, late, unfolded, end, origins, index, frames = numbers[:12]
    chain, last_crc, origins_crc, index_crc, _ = numbers[12:]
    if told != offset:
        raise LogDamaged(path, f"it is the snapshot at offset {told} under another name", position=0)
    if end + origins + index != size:
        raise LogDamaged(path, f"it has {size} bytes, and was closed with {end + origins + index}")
    marks_raw, index_raw = file.read(end, origins), file.read(end + origins, index)
    if crc32c(marks_raw) != origins_crc:
        raise LogDamaged(path, "its origins do not fit their checksum", position=end)
    if crc32c(index_raw) != index_crc:
        raise LogDamaged(path, "its index does not fit its checksum", position=end + origins)
    entries, firsts = _read_index(index_raw)
    if len(entries) != frames:
        raise LogDamaged(path, f"its index leads to {len(entries)} of {frames} frames", position=end)
    facts = SnapshotFacts(log_id, told, begin, time_us, lamport, chain, rows, alive, late, unfolded)
    return Snapshot(file, path, facts, _read_marks(marks_raw), _Index(size, end, last_crc, entries, firsts))


def _read_marks(raw: bytes) -> dict[int, OriginMark]:
    marks, at = {}, 0
    while at < len(raw):
        origin, counter, epoch, entries = _ORIGIN.unpack_from(raw, at)
        words = struct.unpack_from(f"<{2 * entries}Q", raw, at + _ORIGIN.size)
        at += _ORIGIN.size + 16 * entries
        clock = tuple(map(Dot, words[::2], words[1::2]))
        marks[origin] = OriginMark(epoch, counter, clock)
    return marks


def _read_index(raw: bytes) -> tuple[list[tuple[int, int, int]], list[str]]:
    entries, firsts, at = [], [], 0
    while at < len(raw):
        position, row, crc, first, second = _ENTRY.unpack_from(raw, at)
        at += _ENTRY.size
        namespace, key = raw[at : at + first].decode(), raw[at + first : at + first + second].decode()
        at += first + second
        entries.append((position, row, crc))
        firsts.append(sort_key(namespace, key))
    return entries, firsts


# --- writing


class StateFile:
    """Writes frames of rows one behind the other, chained: snapshots, and what compaction sets aside."""

    def __init__(self, disk: Disk, path: str, *, begin_at: int, chain: int, time_us: int = 0) -> None:
        self.path = path
        self.position = begin_at
        self.rows = 0
        self.chain = chain
        self.file = disk.open(path, create=True)
        self.file.truncate(0)
        self._time_us = time_us
        self._synced = begin_at

    def add(self, batch: Batch) -> None:
        """Write the next frame. Raises OSError."""
        stamp = Stamp(0, Source.LOCAL, self._time_us, self.chain, batch.crc)
        head = encode_head(batch, self.rows, stamp)
        self.position = write_all(self.file, self.position, [head, batch.body])
        self.chain = stamp_crc(head[HEADER_BYTES:])
        self.rows += batch.count

    def sync_now_and_then(self) -> None:
        """Sync in portions: one great sync at the end would stand in the way of the log's commits."""
        if self.position - self._synced >= _SYNC_BYTES:
            self.file.sync()
            self._synced = self.position


class SnapshotWriter:
    """Writes a snapshot under another name; `finish` gives it its own, and it is durable then.

    Frames come sorted by `sort_keys`, each key once. The first error leaves a file that `discard` removes.
    """

    def __init__(self, disk: Disk, directory: str, facts: SnapshotFacts) -> None:
        self._disk = disk
        self._directory = directory
        self._facts = facts
        self._path = snapshot_path(directory, facts.offset)
        self._out = StateFile(
            disk, self._path + TEMPORARY, begin_at=FRAMES_AT, chain=facts.chain, time_us=facts.time_us
        )
        self._index: list[bytes] = []

    @property
    def bytes(self) -> int:
        """Written so far."""
        return self._out.position

    def add(self, batch: Batch) -> None:
        """Write the next frame of states. Raises OSError."""
        first = batch.namespaces[0].encode(), batch.keys[0].encode()
        out = self._out
        self._index.append(_ENTRY.pack(out.position, out.rows, out.chain, *map(len, first)) + b"".join(first))
        out.add(batch)
        out.sync_now_and_then()

    def finish(self, marks: Mapping[int, OriginMark], *, alive: int, late: int, unfolded: int) -> Snapshot:
        """Close, sync and name it, then open it. Raises OSError."""
        self.seal(marks, alive=alive, late=late, unfolded=unfolded)
        self._disk.rename(self._out.path, self._path)
        try:
            self._disk.sync_directory(self._directory)
        except OSError:
            # The name may be in the cache alone for good: the next process must not find it, and trust it.
            with suppress(OSError):
                self._disk.remove(self._path)
            raise
        return open_snapshot(self._disk, self._directory, self._facts.offset)

    def seal(self, marks: Mapping[int, OriginMark], *, alive: int, late: int, unfolded: int) -> None:
        """Close and sync it under its temporary name. Raises OSError."""
        out = self._out
        facts = replace(self._facts, rows=out.rows, alive=alive, late=late, unfolded=unfolded)
        origins, index = _pack_marks(marks), b"".join(self._index)
        end = out.position
        write_all(out.file, end, [origins, index])
        write_all(
            out.file,
            0,
            [_pack(facts, end, origins=origins, index=index, frames=len(self._index), last_crc=out.chain)],
        )
        out.file.sync()
        out.file.close()

    def discard(self) -> None:
        """Let go of what was written so far. Raises OSError."""
        self._out.file.close()
        self._disk.remove(self._out.path)


def _pack(
    facts: SnapshotFacts, end: int, *, origins: bytes, index: bytes, frames: int, last_crc: int
) -> bytes:
    numbers = (facts.offset, facts.begin, facts.time_us, facts.lamport)
    counts = (facts.rows, facts.alive, facts.late, facts.unfolded, end, len(origins), len(index), frames)
    sums = (facts.chain, last_crc, crc32c(origins), crc32c(index), 0)
    raw = _HEADER.pack(_MAGIC, _VERSION, 0, facts.log_id, *numbers, *counts, *sums)
    return raw + _CRC.pack(crc32c(raw))


def _pack_marks(marks: Mapping[int, OriginMark]) -> bytes:
    parts = []
    for origin, mark in sorted(marks.items()):
        words = [word for entry in mark.clock for word in entry]
        parts.append(_ORIGIN.pack(origin, mark.counter, mark.epoch, len(mark.clock)))
        parts.append(struct.pack(f"<{len(words)}Q", *words))
    return b"".join(parts)
