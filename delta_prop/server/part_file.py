"""The file of one attempt of one part of a job: a head record, then the frames' bodies as received.

Each record's header has its length and a checksum over all records up to it, so that a torn tail is detected,
and files with the same content have the same checksum. A torn tail is truncated. Its deltas were never
acknowledged; if corruption tore the file, the decision finds that deltas are missing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from delta_prop_broker.segments.paths import JOBS
from delta_prop_broker.segments.small_file import write_all
from delta_prop_wire.batch import Batch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.spec import FRAME_PAYLOAD_BYTES_MAX

if TYPE_CHECKING:
    from delta_prop.calls.receipt import Receipt
    from delta_prop.server.job_files import JobFiles
    from delta_prop.server.staging import Attempt
    from delta_prop_broker.disk import Disk, File

    Work = tuple[Attempt, Sequence[tuple[Batch, Receipt]]]

PART_SUFFIX = ".part"
VERSION = 1
READ_BYTES = 1024 * 1024
"""Approximate number of bytes that one read returns."""

_RECORD = struct.Struct("<4sII")
"""magic, length of the content, CRC32C of all lengths and contents up to its end."""
_LENGTH = struct.Struct("<I")
_HEAD_MAGIC, _FRAME_MAGIC = b"dpj1", b"dpj2"


class PartHead(NamedTuple):
    """The identity of an attempt of a part. `origin`, `source`: those of all its deltas.

    `owner`: the name of the client's token; `begun_us`: when the attempt began, in the log's seen time.
    """

    job: str
    part: int
    attempt: int
    origin: int
    source: int
    owner: str
    begun_us: int


@dataclass(frozen=True, slots=True)
class PartPosition:
    """A position after an intact record. `counter`: of the last delta before it.

    `checksum`: of all records before it; `content_checksum`: of the contents of all batches before it.
    """

    byte_offset: int = 0
    checksum: int = 0
    counter: int = 0
    content_checksum: int = 0


class StagedFrame(NamedTuple):
    """A frame of a part, and the position after it."""

    batch: Batch
    end: PartPosition


def path_of(stem: str, part: int, attempt: int) -> str:
    """Return the path of an attempt of a part; `stem` identifies its job."""
    return f"{JOBS}/{stem}-{part}-{attempt}{PART_SUFFIX}"


def create(disk: Disk, path: str, head: PartHead) -> tuple[File, PartPosition]:
    """Create or truncate the file, and write its head. Syncs nothing. Raises OSError."""
    file = disk.open(path, create=True)
    try:
        file.truncate(0)
        content: bytes = msgpack.packb([VERSION, *head])
        return file, _write_records(file, PartPosition(), [(_HEAD_MAGIC, content, 0)])
    except BaseException:
        file.close()
        raise


def append(file: File, position: PartPosition, batches: Sequence[Batch]) -> PartPosition:
    """Write batches after `position`. Syncs nothing. Raises OSError."""
    end = _write_records(file, position, [(_FRAME_MAGIC, batch.raw, batch.count) for batch in batches])
    checksum = position.content_checksum
    for batch in batches:
        checksum = batch.content_crc(checksum)
    return replace(end, content_checksum=checksum)


def read_head(file: File) -> tuple[PartHead, PartPosition] | None:
    """Return the head of a file; None if it is incomplete or of another version."""
    record = _read_record(file, PartPosition(), _HEAD_MAGIC)
    if record is None:
        return None
    content, end = record
    try:
        version, *fields = msgpack.unpackb(content)
        return (PartHead(*fields), end) if version == VERSION else None
    except (ValueError, TypeError):
        return None


def read_frames(file: File, position: PartPosition) -> Iterator[StagedFrame]:
    """Yield the frames after `position`, up to the first torn one, or the end. Raises OSError."""
    while (record := _read_record(file, position, _FRAME_MAGIC)) is not None:
        content, end = record
        batch = Batch(content)
        counter, crc = position.counter + batch.count, batch.content_crc(position.content_checksum)
        position = PartPosition(end.byte_offset, end.checksum, counter, crc)
        yield StagedFrame(batch, position)


def _write_records(
    file: File, position: PartPosition, records: Sequence[tuple[bytes, bytes | memoryview, int]]
) -> PartPosition:
    parts: list[bytes | memoryview] = []
    checksum, counter = position.checksum, position.counter
    for magic, content, rows in records:
        checksum = crc32c(content, crc32c(_LENGTH.pack(len(content)), checksum))
        parts += (_RECORD.pack(magic, len(content), checksum), content)
        counter += rows
    return PartPosition(write_all(file, position.byte_offset, parts), checksum, counter)


def _read_record(
    file: File, position: PartPosition, expected_magic: bytes
) -> tuple[bytes, PartPosition] | None:
    raw = file.read(position.byte_offset, _RECORD.size)
    if len(raw) < _RECORD.size:
        return None
    magic, length, stored = _RECORD.unpack(raw)
    if magic != expected_magic or length > FRAME_PAYLOAD_BYTES_MAX:
        return None
    content = file.read(position.byte_offset + _RECORD.size, length)
    checksum = crc32c(content, crc32c(_LENGTH.pack(length), position.checksum))
    if len(content) < length or checksum != stored:
        return None
    return content, PartPosition(position.byte_offset + _RECORD.size + length, checksum, position.counter)


# --- the writer thread: after a failed write, a part resumes at its last synced position


class WriteResult(NamedTuple):
    """The result of `write_parts`. `outcomes`: for each part, the end of its synced batches, or the error.

    `free_bytes`: on the disk; None if unknown.
    """

    outcomes: list[PartPosition | OSError]
    free_bytes: int | None


def write_parts(files: JobFiles, work: Sequence[Work]) -> WriteResult:
    """Write and sync the batches of each part; close the files of parts without a connection."""
    outcomes: list[PartPosition | OSError] = []
    for attempt, pending in work:
        outcomes.append(_write(files, attempt, [batch for batch, _ in pending]))
        if attempt.holder is None:
            _close(attempt)
    free_bytes = None
    with suppress(OSError):
        files.prepare()
        free_bytes = files.disk.free_bytes()
    return WriteResult(outcomes, free_bytes)


def close_files(attempts: Iterable[Attempt]) -> None:
    """Close the files of attempts."""
    for attempt in attempts:
        _close(attempt)


def _write(files: JobFiles, attempt: Attempt, batches: Sequence[Batch]) -> PartPosition | OSError:
    position = attempt.synced_position
    if not batches:
        return position or PartPosition()
    is_new = position is None
    try:
        files.prepare()
        if position is None:
            attempt.file, position = create(files.disk, attempt.path, attempt.head)
        elif attempt.file is None:
            attempt.file = files.disk.open(attempt.path)
            attempt.file.truncate(position.byte_offset)
        assert attempt.file is not None
        position = append(attempt.file, position, batches)
        attempt.file.sync()
        if is_new:
            files.disk.sync_directory(JOBS)
    except OSError as error:
        _close(attempt)
        if is_new:  # the name may be lost, as its sync failed: the next write creates the file again
            with suppress(OSError):
                files.disk.remove(attempt.path)
        return error
    return position


def _close(attempt: Attempt) -> None:
    file, attempt.file = attempt.file, None
    if file is not None:
        with suppress(OSError):
            file.close()
