"""Recorded traffic: times, counts and sizes of deltas, but neither names nor contents.

Pure: it encodes batches, and decodes them. A name becomes a hash under a salt that is random for each file
and never written, so equal names can be recognized within a file and nowhere else.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
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
    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch

MAGIC = b"\xd3traffic"
VERSION = 1
SALT_BYTES = 32
BLOCK_ROWS = 8192
"""Number of rows from which on a block ends; it includes the whole batch that reaches the number."""
BLOCK_ROWS_MAX = BLOCK_ROWS - 1 + BATCH_ROWS_MAX

FILE_HEAD = struct.Struct("<8sHHQI")
"""magic, version, 0, microseconds since 1970 at the start of the recording, CRC32C of all that: 24 bytes."""
BLOCK_HEAD = struct.Struct("<IIIIQI")
"""numbers of bytes that follow, of batches and of rows, CRC32C of what follows, microseconds since 1970 of
the first batch, CRC32C of all that: 28 bytes. A block without batches is the last one: its time is the end
of the recording.
"""

_CRC_BYTES = 4
_COUNT_BYTES, _BATCH_BYTES, _ROW_BYTES = 4, 21, 21
"""Bytes of a block's columns: the number of namespaces (8 bytes each), each batch, each row."""
_COMPRESSION = 1  # a higher level would save hardly a byte of hashes


@dataclass(frozen=True, slots=True, eq=False)
class RecordedBatch:
    """Deltas that came together. `time_us`: when the log accepted them, since 1970, never falling.

    `origin`, `keys`, `namespaces`: hashes. `numbers`: number of values of each row. `sizes`: total bytes of
    each row: vector id, values, indices, bytes, metadata.
    """

    time_us: int
    origin: int
    priority: Priority
    ack_level: AckLevel
    source: Source
    kinds: bytes
    keys: NDArray[np.uint64]
    namespaces: NDArray[np.uint64]
    numbers: NDArray[np.uint32]
    sizes: NDArray[np.uint32]

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.kinds)


class Arrival(NamedTuple):
    """A batch, and its time since the first one."""

    at_s: float
    batch: RecordedBatch


class RecordedTraffic:
    """A recording that can be read repeatedly. `fault`: why the last reading ended early, else None."""

    def __init__(self, chunks: Iterable[bytes], name: str = "the recording") -> None:
        """Create a reader. `chunks`: the file's bytes, anew at each iteration; `name`: for messages."""
        self._chunks = chunks
        self._name = name
        self.fault: str | None = None
        self.began_us = 0
        self.ended_us: int | None = None
        """Time of the recording's regular end; known after its last batch."""

    def batches(self) -> Iterator[RecordedBatch]:
        """Yield all batches, up to the end or to corruption. Raises UsageError if it is not a recording."""
        self.fault, self.ended_us = None, None
        reader = _ChunkReader(iter(self._chunks))
        self.began_us = self._read_head(reader)
        last_us = 0
        while True:
            position = reader.position
            try:
                block = _read_block(reader)
            except _CorruptedBlockError as error:
                self.fault = (
                    f"{self._name} cannot be read from byte {position} on ({error}): only what is before it "
                    "counts"
                )
                return
            if not block.counts:
                self.ended_us = block.time_us
                return
            for batch in _decode_batches(block, last_us):
                last_us = batch.time_us
                yield batch

    def arrivals(self, speed: float = 1.0) -> Iterator[Arrival]:
        """Yield all batches, each with its time since the first, `speed` times as fast. Raises UsageError."""
        if not 0 < speed < float("inf"):
            raise UsageError(f"speed {speed!r}: give a number above 0, such as 2 for twice as fast")
        first_us: int | None = None
        for batch in self.batches():
            first_us = batch.time_us if first_us is None else first_us
            yield Arrival((batch.time_us - first_us) / (1e6 * speed), batch)

    def _read_head(self, reader: _ChunkReader) -> int:
        raw = reader.take(FILE_HEAD.size)
        magic, version, _, began_us, crc = FILE_HEAD.unpack(raw.ljust(FILE_HEAD.size, b"\0"))
        if magic != MAGIC:
            raise UsageError(
                f"{self._name} is not a traffic recording: create one with `delta-prop trace record`"
            )
        if version != VERSION:
            raise UsageError(
                f"{self._name} is a recording of version {version}; this program reads {VERSION}: "
                "use the version of delta-prop that made it, or record again"
            )
        if crc != crc32c(raw[:-_CRC_BYTES]):
            raise UsageError(f"{self._name} is corrupted in its first bytes: use another copy")
        return int(began_us)


class TrafficWriter:
    """Encodes a recording. Holds one block: up to BLOCK_ROWS_MAX rows of about 30 bytes."""

    def __init__(self, salt: bytes) -> None:
        """Create a writer; `salt`: SALT_BYTES random bytes for this file only."""
        assert len(salt) == SALT_BYTES
        self._origin, self._namespace, self._vector = (
            blake2b(digest_size=8, key=salt, person=what) for what in (b"origin", b"namespace", b"vector")
        )
        self._batches: list[tuple[int, int, int]] = []  # origin, number of rows, flags
        self._times: list[int] = []
        self._rows: list[_Rows] = []
        self.pending_row_count = 0
        """Number of rows of the block that is not complete yet."""

    def begin(self, time_us: int) -> bytes:
        """Return the first bytes of the file."""
        head = FILE_HEAD.pack(MAGIC, VERSION, 0, time_us, 0)[:-_CRC_BYTES]
        return head + struct.pack("<I", crc32c(head))

    def add(self, batch: Batch, time_us: int, source: Source, first: int = 0) -> bytes:
        """Add a batch's rows from `first` on; return the bytes of a block if one is full, else none.

        `time_us`: when the log accepted it. Control rows are not recorded.
        """
        row_count = batch.count - first
        if batch.is_control or row_count < 1:
            return b""
        flags = batch.priority | batch.ack_level << 2 | source << 4
        self._batches.append((_hash(self._origin, str(batch.origin)), row_count, flags))
        self._times.append(time_us)
        self._rows.append(self._hash_rows(batch, first))
        self.pending_row_count += row_count
        return self.flush() if self.pending_row_count >= BLOCK_ROWS else b""

    def flush(self) -> bytes:
        """Return the bytes of a block of all pending rows, none if there are none."""
        if not self._batches:
            return b""
        origins, counts, flags = zip(*self._batches, strict=True)
        namespaces, namespace_indices = np.unique(
            np.concatenate([rows.namespaces for rows in self._rows]), return_inverse=True
        )
        steps = np.diff(np.array([self._times[0], *self._times], np.int64))
        columns = (
            _pack_planes(np.array([len(namespaces)], "<u4")),
            _pack_planes(namespaces.astype("<u8")),
            _pack_planes(steps.astype("<i8")),
            _pack_planes(np.array(origins, "<u8")),
            _pack_planes(np.array(counts, "<u4")),
            bytes(flags),
            b"".join(rows.kinds for rows in self._rows),
            _pack_planes(namespace_indices.reshape(-1).astype("<u4")),
            _pack_planes(np.concatenate([rows.numbers for rows in self._rows]).astype("<u4")),
            _pack_planes(np.concatenate([rows.sizes for rows in self._rows]).astype("<u4")),
            _pack_planes(np.concatenate([rows.keys for rows in self._rows]).astype("<u8")),
        )
        raw = zlib.compress(b"".join(columns), _COMPRESSION)
        block = _pack_head(len(raw), len(counts), self.pending_row_count, crc32c(raw), self._times[0]) + raw
        self._batches, self._times, self._rows, self.pending_row_count = [], [], [], 0
        return block

    def end(self, time_us: int) -> bytes:
        """Return the last bytes of the file: the pending rows, and the mark of the regular end."""
        return self.flush() + _pack_head(0, 0, 0, 0, time_us)

    def _hash_rows(self, batch: Batch, first: int) -> _Rows:
        namespaces, vector_ids = batch.namespaces[first:], batch.keys[first:]
        hash_of_namespace = {name: _hash(self._namespace, name) for name in set(namespaces)}
        keys = [
            _hash(self._vector, f"{namespace}\0{vector_id}")
            for namespace, vector_id in zip(namespaces, vector_ids, strict=True)
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
            np.array([hash_of_namespace[name] for name in namespaces], np.uint64),
            values[first:].astype(np.uint32),
            sizes[first:].astype(np.uint32),
        )


# --- blocks


class _CorruptedBlockError(Exception):
    """A fault of a block."""


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
    flags: bytes  # of each batch: priority, ack level and source, two bits each
    rows: _Rows


class _ChunkReader:
    """Reads any number of bytes from chunks of any sizes."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = b""
        self.position = 0

    def take(self, size: int) -> bytes:
        """Return `size` bytes; fewer only at the end."""
        while len(self._buffer) < size:
            piece = next(self._chunks, None)
            if piece is None:
                break
            self._buffer += piece
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        self.position += len(taken)
        return taken


def _pack_head(size: int, batch_count: int, row_count: int, crc: int, time_us: int) -> bytes:
    head = BLOCK_HEAD.pack(size, batch_count, row_count, crc, time_us, 0)[:-_CRC_BYTES]
    return head + struct.pack("<I", crc32c(head))


def _read_block(reader: _ChunkReader) -> _Block:
    raw = reader.take(BLOCK_HEAD.size)
    if len(raw) < BLOCK_HEAD.size:
        raise _CorruptedBlockError("the file was truncated there")
    size, batch_count, row_count, crc, time_us, head_crc = BLOCK_HEAD.unpack(raw)
    if head_crc != crc32c(raw[:-_CRC_BYTES]):
        raise _CorruptedBlockError("a checksum is wrong")
    if not batch_count:
        u64, u32 = np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        return _Block(time_us, [], [], [], b"", _Rows(b"", u64, u64, u32, u32))
    bytes_max = _COUNT_BYTES + 8 * row_count + _BATCH_BYTES * batch_count + _ROW_BYTES * row_count
    if not batch_count <= row_count <= BLOCK_ROWS_MAX or size > bytes_max + bytes_max // 100 + 64:
        raise _CorruptedBlockError("a block states an impossible size")
    body = reader.take(size)
    if len(body) < size:
        raise _CorruptedBlockError("the file was truncated there")
    if crc != crc32c(body):
        raise _CorruptedBlockError("a checksum is wrong")
    return _decode(_inflate(body, bytes_max), time_us, batch_count, row_count)


def _inflate(raw: bytes, bytes_max: int) -> bytes:
    inflating = zlib.decompressobj()
    try:
        inflated = inflating.decompress(raw, bytes_max)
    except zlib.error as error:
        raise _CorruptedBlockError(str(error)) from None
    if not inflating.eof:
        raise _CorruptedBlockError("a block is larger than it states")
    return inflated


def _decode(raw: bytes, time_us: int, batch_count: int, row_count: int) -> _Block:
    (namespace_count,) = _read_array(raw, "<u4", 0, 1).tolist() if len(raw) >= _COUNT_BYTES else (0,)
    if len(raw) != _COUNT_BYTES + 8 * namespace_count + _BATCH_BYTES * batch_count + _ROW_BYTES * row_count:
        raise _CorruptedBlockError("a block is not as long as it states")
    position = _COUNT_BYTES

    def next_array(dtype: str, count: int) -> NDArray[np.generic]:
        nonlocal position
        array = _read_array(raw, dtype, position, count)
        position += array.nbytes
        return array

    namespaces = next_array("<u8", namespace_count).astype(np.uint64)
    steps, origins, counts = (next_array(dtype, batch_count).tolist() for dtype in ("<i8", "<u8", "<u4"))
    flags = bytes(next_array("u1", batch_count))
    kinds = bytes(next_array("u1", row_count))
    indices, numbers, sizes = (next_array("<u4", row_count).astype(np.uint32) for _ in range(3))
    keys = next_array("<u8", row_count).astype(np.uint64)
    has_invalid_index = int(indices.max()) >= namespace_count
    if sum(counts) != row_count or min(counts) < 1 or has_invalid_index or max(flags) > 63:
        raise _CorruptedBlockError("a block's columns do not belong together")
    rows = _Rows(kinds, keys, namespaces[indices], numbers, sizes)
    return _Block(time_us, steps, origins, counts, flags, rows)


def _decode_batches(block: _Block, last_us: int) -> Iterator[RecordedBatch]:
    """Yield the batches of a block, with times that never fall, even if the clock was set back."""
    time_us, start = block.time_us, 0
    rows = block.rows
    for step, origin, count, flags in zip(block.steps, block.origins, block.counts, block.flags, strict=True):
        time_us += step
        last_us = max(last_us, time_us)
        end = start + count
        yield RecordedBatch(
            last_us,
            origin,
            Priority(flags & 3),
            AckLevel(flags >> 2 & 3),
            Source(flags >> 4 & 3),
            rows.kinds[start:end],
            rows.keys[start:end],
            rows.namespaces[start:end],
            rows.numbers[start:end],
            rows.sizes[start:end],
        )
        start = end


def _hash(salted: blake2b, name: str) -> int:
    hashing = salted.copy()
    hashing.update(name.encode())
    return int.from_bytes(hashing.digest(), "little")


def _pack_planes(numbers: NDArray[np.generic]) -> bytes:
    """Pack the lowest byte of each number first, then the next: adjacent equal bytes compress well."""
    width = numbers.dtype.itemsize
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, width).T.tobytes()


def _read_array(raw: bytes, dtype: str, position: int, count: int) -> NDArray[np.generic]:
    width = np.dtype(dtype).itemsize
    planes = np.frombuffer(raw, np.uint8, count * width, position).reshape(width, count)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
