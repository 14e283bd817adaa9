"""Recorded traffic: when deltas came, how many together, how large. No names, no content.

Pure: it makes bytes of batches, and batches of bytes. A name becomes a hash under a salt that is drawn for
each file and never written, so equal names can be told within a file and nowhere else.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import AckLevel, Priority, Source
from delta_prop_wire.errors import UsageError
from delta_prop_wire.layout import Column
from delta_prop_wire.spec import BATCH_ROWS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch

MAGIC = b"\xd3traffic"
VERSION = 1
SALT_BYTES = 32
BLOCK_ROWS = 8192
"""A block ends with the batch that brings it here."""
BLOCK_ROWS_MAX = BLOCK_ROWS - 1 + BATCH_ROWS_MAX

FILE_HEAD = struct.Struct("<8sHHQI")
"""magic, version, 0, microseconds since 1970 when the recording began, CRC32C of all that: 24 bytes."""
BLOCK_HEAD = struct.Struct("<IIIIQI")
"""bytes that follow, batches, rows, CRC32C of what follows, microseconds since 1970 of the first batch,
CRC32C of all that: 28 bytes. A block without batches is the last one: its time is when recording ended."""

_CRC_BYTES = 4
_COUNT_BYTES, _BATCH_BYTES, _ROW_BYTES = 4, 21, 21
"""What a block's columns have: the number of namespaces (8 bytes each), and so much a batch and a row."""
_COMPRESSION = 1  # of hashes hardly a byte could be spared


@dataclass(frozen=True, slots=True, eq=False)
class RecordedBatch:
    """Deltas that came together. `time_us`: when the log took them, since 1970, never before the one before.

    `origin`, `keys`, `namespaces`: hashes. `numbers`: values of each row's vector. `sizes`: bytes of all that
    each row says: vector id, values, indices, bytes, metadata.
    """

    time_us: int
    origin: int
    priority: Priority
    level: AckLevel
    source: Source
    kinds: bytes
    keys: NDArray[np.uint64]
    namespaces: NDArray[np.uint64]
    numbers: NDArray[np.uint32]
    sizes: NDArray[np.uint32]

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.kinds)


class Arrival(NamedTuple):
    """A batch, and how long after the first one it comes."""

    at_s: float
    batch: RecordedBatch


class RecordedTraffic:
    """A recording, read as often as wanted, block by block. `fault`, after a reading: why it ended early."""

    def __init__(self, pieces: Callable[[], Iterable[bytes]], name: str = "the recording") -> None:
        """`pieces`: the bytes of the file, in parts of any size, from its start on. `name`: for people."""
        self._pieces = pieces
        self._name = name
        self.fault: str | None = None
        self.began_us = 0
        self.ended_us: int | None = None
        """When the recording ended as it was meant to; known behind its last batch."""

    def batches(self) -> Iterator[RecordedBatch]:
        """All of them, up to the end or to what is damaged. Raises UsageError where it is no recording."""
        self.fault, self.ended_us = None, None
        reading = _Reading(iter(self._pieces()))
        self.began_us = self._begin(reading)
        last_us = 0
        while True:
            at = reading.at
            try:
                block = _next_block(reading)
            except _NotSoundError as error:
                self.fault = (
                    f"{self._name} cannot be read from byte {at} on ({error}): what is before it counts"
                )
                return
            if not block.counts:
                self.ended_us = block.time_us
                return
            for batch in _batches_of(block, last_us):
                last_us = batch.time_us
                yield batch

    def arrivals(self, speed: float = 1.0) -> Iterator[Arrival]:
        """All of them, each with its time since the first, `speed` times as fast. Raises UsageError."""
        if not 0 < speed < float("inf"):
            raise UsageError(f"speed {speed!r}: give a number above 0, as 2 for twice as fast")
        first_us: int | None = None
        for batch in self.batches():
            first_us = batch.time_us if first_us is None else first_us
            yield Arrival((batch.time_us - first_us) / (1e6 * speed), batch)

    def _begin(self, reading: _Reading) -> int:
        raw = reading.take(FILE_HEAD.size)
        magic, version, _, began_us, crc = FILE_HEAD.unpack(raw.ljust(FILE_HEAD.size, b"\0"))
        if magic != MAGIC:
            raise UsageError(
                f"{self._name} is no recording of traffic: make one with `delta-prop trace record`"
            )
        if version != VERSION:
            raise UsageError(
                f"{self._name} is a recording of version {version}, and this program reads {VERSION}: "
                "take the version of delta-prop that made it, or record again"
            )
        if crc != crc32c(raw[:-_CRC_BYTES]):
            raise UsageError(f"{self._name} is damaged in its first bytes: take another copy")
        return int(began_us)


class TrafficWriter:
    """Makes the bytes of a recording. Holds one block: BLOCK_ROWS_MAX rows of about 30 bytes at most."""

    def __init__(self, salt: bytes) -> None:
        """`salt`: SALT_BYTES drawn for this file alone."""
        assert len(salt) == SALT_BYTES
        self._origin, self._namespace, self._vector = (
            blake2b(digest_size=8, key=salt, person=what) for what in (b"origin", b"namespace", b"vector")
        )
        self._batches: list[tuple[int, int, int]] = []  # origin, rows, marks
        self._times: list[int] = []
        self._rows: list[_Rows] = []
        self.waiting = 0
        """Rows of the block that is not made yet."""

    def begin(self, time_us: int) -> bytes:
        """The first bytes of the file."""
        head = FILE_HEAD.pack(MAGIC, VERSION, 0, time_us, 0)[:-_CRC_BYTES]
        return head + struct.pack("<I", crc32c(head))

    def add(self, batch: Batch, time_us: int, source: Source, first: int = 0) -> bytes:
        """Take a batch's rows from `first` on; the bytes of a block where one is full, else none.

        `time_us`: when the log took it. Rows that only fill places count for nothing.
        """
        rows = batch.count - first
        if batch.is_control or rows < 1:
            return b""
        marks = batch.priority | batch.ack_level << 2 | source << 4
        self._batches.append((_hash(self._origin, str(batch.origin)), rows, marks))
        self._times.append(time_us)
        self._rows.append(self._look_at(batch, first))
        self.waiting += rows
        return self.flush() if self.waiting >= BLOCK_ROWS else b""

    def flush(self) -> bytes:
        """The bytes of a block of all that is waiting, none where nothing is."""
        if not self._batches:
            return b""
        origins, counts, marks = zip(*self._batches, strict=True)
        spaces, places = np.unique(
            np.concatenate([one.namespaces for one in self._rows]), return_inverse=True
        )
        steps = np.diff(np.array([self._times[0], *self._times], np.int64))
        columns = (
            _planes(np.array([len(spaces)], "<u4")),
            _planes(spaces.astype("<u8")),
            _planes(steps.astype("<i8")),
            _planes(np.array(origins, "<u8")),
            _planes(np.array(counts, "<u4")),
            bytes(marks),
            b"".join(one.kinds for one in self._rows),
            _planes(places.reshape(-1).astype("<u4")),
            _planes(np.concatenate([one.numbers for one in self._rows]).astype("<u4")),
            _planes(np.concatenate([one.sizes for one in self._rows]).astype("<u4")),
            _planes(np.concatenate([one.keys for one in self._rows]).astype("<u8")),
        )
        raw = zlib.compress(b"".join(columns), _COMPRESSION)
        block = _head(len(raw), len(counts), self.waiting, crc32c(raw), self._times[0]) + raw
        self._batches, self._times, self._rows, self.waiting = [], [], [], 0
        return block

    def end(self, time_us: int) -> bytes:
        """The last bytes of the file: what is waiting, and that it ended as it was meant to."""
        return self.flush() + _head(0, 0, 0, 0, time_us)

    def _look_at(self, batch: Batch, first: int) -> _Rows:
        namespaces, names = batch.namespaces[first:], batch.keys[first:]
        spaces = {name: _hash(self._namespace, name) for name in set(namespaces)}
        keys = [
            _hash(self._vector, f"{space}\0{name}") for space, name in zip(namespaces, names, strict=True)
        ]
        values = np.diff(batch.value_bounds)
        sizes = 4 * (values + np.diff(batch.index_bounds)) + np.diff(batch.blob_bounds)
        for ends in (Column.KEY_ENDS, Column.METADATA_ENDS):
            raw = batch.column(ends)
            if raw is not None:
                sizes = sizes + np.diff(np.frombuffer(raw, "<u4"), prepend=np.uint32(0))
        return _Rows(
            batch.kinds[first:],
            np.array(keys, np.uint64),
            np.array([spaces[name] for name in namespaces], np.uint64),
            values[first:].astype(np.uint32),
            sizes[first:].astype(np.uint32),
        )


# --- blocks


class _NotSoundError(Exception):
    """What is wrong with a block."""


class _Rows(NamedTuple):
    kinds: bytes
    keys: NDArray[np.uint64]
    namespaces: NDArray[np.uint64]
    numbers: NDArray[np.uint32]
    sizes: NDArray[np.uint32]


class _Block(NamedTuple):
    time_us: int
    steps: list[int]
    origins: list[int]
    counts: list[int]
    marks: bytes
    rows: _Rows


class _Reading:
    """Bytes that come in parts, taken in others."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held = b""
        self.at = 0

    def take(self, size: int) -> bytes:
        """So many bytes; fewer only where it ends."""
        while len(self._held) < size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._held += piece
        taken, self._held = self._held[:size], self._held[size:]
        self.at += len(taken)
        return taken


def _head(size: int, batches: int, rows: int, crc: int, time_us: int) -> bytes:
    head = BLOCK_HEAD.pack(size, batches, rows, crc, time_us, 0)[:-_CRC_BYTES]
    return head + struct.pack("<I", crc32c(head))


def _next_block(reading: _Reading) -> _Block:
    """Read one. Raises _NotSoundError."""
    raw = reading.take(BLOCK_HEAD.size)
    if len(raw) < BLOCK_HEAD.size:
        raise _NotSoundError("the file was broken off there")
    size, batches, rows, crc, time_us, head_crc = BLOCK_HEAD.unpack(raw)
    if head_crc != crc32c(raw[:-_CRC_BYTES]):
        raise _NotSoundError("a checksum is wrong")
    none = np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.uint32), np.zeros(0, np.uint32)
    if not batches:
        return _Block(time_us, [], [], [], b"", _Rows(b"", *none))
    bytes_max = _COUNT_BYTES + 8 * rows + _BATCH_BYTES * batches + _ROW_BYTES * rows
    if not batches <= rows <= BLOCK_ROWS_MAX or size > bytes_max + bytes_max // 100 + 64:
        raise _NotSoundError("a block tells an impossible size")
    body = reading.take(size)
    if len(body) < size:
        raise _NotSoundError("the file was broken off there")
    if crc != crc32c(body):
        raise _NotSoundError("a checksum is wrong")
    return _decode(_inflated(body, bytes_max), time_us, batches, rows)


def _inflated(raw: bytes, bytes_max: int) -> bytes:
    inflating = zlib.decompressobj()
    try:
        found = inflating.decompress(raw, bytes_max)
    except zlib.error as error:
        raise _NotSoundError(str(error)) from None
    if not inflating.eof:
        raise _NotSoundError("a block is larger than it tells")
    return found


def _decode(raw: bytes, time_us: int, batches: int, rows: int) -> _Block:
    (spaces,) = _array(raw, "<u4", 0, 1).tolist() if len(raw) >= _COUNT_BYTES else (0,)
    if len(raw) != _COUNT_BYTES + 8 * spaces + _BATCH_BYTES * batches + _ROW_BYTES * rows:
        raise _NotSoundError("a block is not as long as it tells")
    at = _COUNT_BYTES

    def next_array(dtype: str, count: int) -> NDArray[np.generic]:
        nonlocal at
        found = _array(raw, dtype, at, count)
        at += found.nbytes
        return found

    names = next_array("<u8", spaces).astype(np.uint64)
    steps, origins, counts = (next_array(one, batches).tolist() for one in ("<i8", "<u8", "<u4"))
    marks = bytes(next_array("u1", batches))
    kinds = bytes(next_array("u1", rows))
    places, numbers, sizes = (next_array("<u4", rows).astype(np.uint32) for _ in range(3))
    keys = next_array("<u8", rows).astype(np.uint64)
    if sum(counts) != rows or min(counts) < 1 or int(places.max()) >= spaces or max(marks) > 63:
        raise _NotSoundError("a block's columns do not belong together")
    return _Block(time_us, steps, origins, counts, marks, _Rows(kinds, keys, names[places], numbers, sizes))


def _batches_of(block: _Block, last_us: int) -> Iterator[RecordedBatch]:
    """The batches of a block; a clock that was put back makes none earlier than `last_us`, or another."""
    time_us, at = block.time_us, 0
    rows = block.rows
    for step, origin, count, marks in zip(block.steps, block.origins, block.counts, block.marks, strict=True):
        time_us += step
        last_us = max(last_us, time_us)
        end = at + count
        yield RecordedBatch(
            last_us,
            origin,
            Priority(marks & 3),
            AckLevel(marks >> 2 & 3),
            Source(marks >> 4 & 3),
            rows.kinds[at:end],
            rows.keys[at:end],
            rows.namespaces[at:end],
            rows.numbers[at:end],
            rows.sizes[at:end],
        )
        at = end


def _hash(salted: blake2b, name: str) -> int:
    hashing = salted.copy()
    hashing.update(name.encode())
    return int.from_bytes(hashing.digest(), "little")


def _planes(numbers: NDArray[np.generic]) -> bytes:
    """First the lowest byte of each number, then the next: bytes that are often the same lie together."""
    width = numbers.dtype.itemsize
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, width).T.tobytes()


def _array(raw: bytes, dtype: str, at: int, count: int) -> NDArray[np.generic]:
    width = np.dtype(dtype).itemsize
    planes = np.frombuffer(raw, np.uint8, count * width, at).reshape(width, count)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
