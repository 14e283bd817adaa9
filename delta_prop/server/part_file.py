"""The file of one attempt of one part of a job: what it is, then its frames' bodies as they came.

Each record has a head with its length and a checksum over all records up to its own, so that a torn end is
found, and a file that says the same as another one has the same checksum. What is unsound is cut off: it was
never acknowledged, or is found missing when the job is decided.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from delta_prop_broker.log.files.writing import write_all
from delta_prop_wire.batch import Batch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.spec import FRAME_PAYLOAD_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop_broker.disk import Disk, File

DIRECTORY = "jobs"
SUFFIX = ".part"
VERSION = 1
READ_BYTES = 1024 * 1024
"""About how much is read at once."""

_RECORD = struct.Struct("<4sII")
"""magic, length of what follows, CRC32C of all lengths and contents up to the end of that."""
_LENGTH = struct.Struct("<I")
_HEAD, _FRAME = b"dpj1", b"dpj2"


class PartHead(NamedTuple):
    """What is staged here, and for whom. `origin`: of all its deltas; `source`: where they come from, as its
    client said; `owner`: whose token it was; `begun_us`: in the log's seen time.
    """

    job: str
    part: int
    attempt: int
    origin: int
    source: int
    owner: str
    begun_us: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a part: behind a sound record. `counter`: of the last delta before it; `content`: the
    checksum of what all batches before it say.
    """

    position: int = 0
    checksum: int = 0
    counter: int = 0
    content: int = 0


class StagedFrame(NamedTuple):
    """A frame of a part, and the place behind it."""

    batch: Batch
    end: Mark


def path_of(stem: str, part: int, attempt: int) -> str:
    """Where an attempt of a part is kept; `stem` stands for its job."""
    return f"{DIRECTORY}/{stem}-{part}-{attempt}{SUFFIX}"


def begin(disk: Disk, path: str, head: PartHead) -> tuple[File, Mark]:
    """Make the file, or empty what is there, and write its head. Syncs nothing. Raises OSError."""
    file = disk.open(path, create=True)
    try:
        file.truncate(0)
        content: bytes = msgpack.packb([VERSION, *head])
        return file, _append(file, Mark(), [(_HEAD, content, 0)])
    except BaseException:
        file.close()
        raise


def append(file: File, mark: Mark, batches: Sequence[Batch]) -> Mark:
    """Write these behind `mark`. Syncs nothing. Raises OSError."""
    end = _append(file, mark, [(_FRAME, batch.raw, batch.count) for batch in batches])
    content = mark.content
    for batch in batches:
        content = batch.content_crc(content)
    return replace(end, content=content)


def read_head(file: File) -> tuple[PartHead, Mark] | None:
    """What a file says of itself, None where it does not say it whole."""
    found = _read(file, Mark(), _HEAD)
    if found is None:
        return None
    content, end = found
    try:
        version, *fields = msgpack.unpackb(content)
        return (PartHead(*fields), end) if version == VERSION else None
    except (ValueError, TypeError):
        return None


def frames(file: File, mark: Mark) -> Iterator[StagedFrame]:
    """The frames behind `mark`, up to the first that is not sound, or to the end. Raises OSError."""
    while (found := _read(file, mark, _FRAME)) is not None:
        content, end = found
        batch = Batch(content)
        counter, crc = mark.counter + batch.count, batch.content_crc(mark.content)
        mark = Mark(end.position, end.checksum, counter, crc)
        yield StagedFrame(batch, mark)


def _append(file: File, mark: Mark, records: Sequence[tuple[bytes, bytes | memoryview, int]]) -> Mark:
    parts: list[bytes | memoryview] = []
    checksum, counter = mark.checksum, mark.counter
    for magic, content, rows in records:
        checksum = crc32c(content, crc32c(_LENGTH.pack(len(content)), checksum))
        parts += (_RECORD.pack(magic, len(content), checksum), content)
        counter += rows
    return Mark(write_all(file, mark.position, parts), checksum, counter)


def _read(file: File, mark: Mark, wanted: bytes) -> tuple[bytes, Mark] | None:
    raw = file.read(mark.position, _RECORD.size)
    if len(raw) < _RECORD.size:
        return None
    magic, length, told = _RECORD.unpack(raw)
    if magic != wanted or length > FRAME_PAYLOAD_BYTES_MAX:
        return None
    content = file.read(mark.position + _RECORD.size, length)
    checksum = crc32c(content, crc32c(_LENGTH.pack(length), mark.checksum))
    if len(content) < length or checksum != told:
        return None
    return content, Mark(mark.position + _RECORD.size + length, checksum, mark.counter)
