"""Checkpoints: what stands beside the log so that a start need not read all of it.

A checkpoint holds named sections, opaque here, that sum up everything below one offset, and the index of the
segment that was growing then. What is large and changes little lies in parts: files written once, named by
every checkpoint that needs them. The frames stay the truth. A checkpoint says which stamp its offset follows,
so that it fits this log's history or is not used, and it is written only once all it speaks of is synced.
"""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.log.files.identity import read_small, replace_file
from delta_prop_broker.log.files.segment import NAME_DIGITS
from delta_prop_broker.log.files.sparse_index import SparseIndex
from delta_prop_broker.log.files.writing import write_all
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from typing_extensions import Buffer

    from delta_prop_broker.disk import Disk, File

SUFFIX = ".checkpoint"
PART_SUFFIX = ".part"
KEPT = 2
"""The newest, and one to fall back to."""
SECTION_BYTES_MAX = 1 << 30
SECTIONS_MAX = 64

_MAGIC = b"dp-check"
_VERSION = 1
_HEADER = struct.Struct("<8sII16sQQIIQ")
"""magic, version, 0, log id, offset, end, CRC of the stamp before the offset, sections, base of the index.

Then for each section its name, bytes and CRC32C; the CRC32C of all that; the sections, end to end."""
_SECTION = struct.Struct("<16sQI4x")
_CRC = struct.Struct("<I")
_INDEX, _PARTS = "index", "parts"


class CheckpointDamaged(DeltaPropError):
    """A checkpoint, or a part that it names, is not as it was written, or of another log or version."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}; it is not used, what it saved is read from the log instead")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Position:
    """The end of a log at one moment; `crc` is of the last stamp before it, 0 where there is none.

    `index` is of the growing segment and goes on growing; `size` and `latest_time` (us since 1970) say
    how far it was.
    """

    offset: int
    crc: int
    index: SparseIndex | None = None
    size: int = 0
    latest_time: int = 0


class PartName(NamedTuple):
    """A part as a checkpoint names it: file name, bytes, checksum."""

    name: str
    size: int
    crc: int


class Checkpoint:
    """A stored checkpoint whose header is sound; sections and parts are checked when they are read.

    Everything below `offset` is summed up; `end` (exclusive) was on stable storage when it was written.
    """

    def __init__(
        self, disk: Disk, directory: str, name: str, *, offset: int, end: int, crc: int, index_base: int,
        places: Mapping[str, tuple[int, int, int]],
    ) -> None:  # fmt: skip
        self.path = f"{directory}/{name}"
        self.name = name
        self.offset = offset
        self.end = end
        self.crc = crc
        self.index_base = index_base
        self.parts: dict[str, PartName] = {}
        self._disk = disk
        self._directory = directory
        self._places = places  # name -> position, size, CRC

    def section(self, name: str) -> bytes:
        """The bytes of a section. Raises CheckpointDamaged, KeyError (no such section), OSError."""
        position, size, crc = self._places[name]
        raw = _read(self._disk, self.path, position, size)
        if len(raw) != size or crc32c(raw) != crc:
            raise CheckpointDamaged(self.path, f"its section {name!r} does not fit its checksum")
        return raw

    def index(self) -> SparseIndex | None:
        """The index of the segment that was growing, None where none was. Raises CheckpointDamaged."""
        if _INDEX not in self._places:
            return None
        index = SparseIndex.unpack(self.section(_INDEX), self.index_base)
        if index is None:
            raise CheckpointDamaged(self.path, "its index cannot be read")
        return index

    def moved(self, log_id: bytes, crc: int, index: bytes | None) -> Iterable[bytes]:
        """Pack it for the same frames under other stamps: `crc` is of the last one before its offset.

        `index`: of the segment that was growing; None where that stays. Raises CheckpointDamaged, OSError.
        """
        sections = {name: self.section(name) for name in self._places}
        if index is not None:
            sections[_INDEX] = index
        return _pack(_Head(log_id, self.offset, self.end, crc, self.index_base), sections)

    def part(self, name: str) -> bytes:
        """The bytes of a part that it names. Raises CheckpointDamaged, OSError."""
        named = self.parts[name]
        path = f"{self._directory}/{name}"
        try:
            raw = _read(self._disk, path, 0, named.size)
        except FileNotFoundError:
            raise CheckpointDamaged(path, f"the file is missing, and {self.name} names it") from None
        if len(raw) != named.size or crc32c(raw) != named.crc:
            raise CheckpointDamaged(path, f"its {len(raw)} bytes do not fit what {self.name} says of it")
        return raw

    def verify(self) -> None:
        """Read and check all sections and parts. Raises CheckpointDamaged, OSError."""
        for name in self._places:
            self.section(name)
        self.index()
        for name in self.parts:
            self.part(name)

    def read_parts(self) -> None:
        """Learn which parts it names. Raises CheckpointDamaged, OSError."""
        told = json.loads(self.section(_PARTS))
        self.parts = {name: PartName(name, size, crc) for name, size, crc in told}


class PartWriter:
    """A part that grows; it is synced when `finish` returns."""

    def __init__(self, disk: Disk, directory: str, name: str) -> None:
        self.name = name
        self._path = f"{directory}/{name}"
        self._disk = disk
        self._file = disk.open(self._path, create=True)
        self._open = True
        self._file.truncate(0)
        self._at = self._crc = 0

    def add(self, chunk: Buffer) -> None:
        """Write the next bytes. Raises OSError."""
        if memoryview(chunk).nbytes > 0:
            self._at = write_all(self._file, self._at, [chunk])
            self._crc = crc32c(chunk, self._crc)

    def finish(self) -> PartName:
        """Sync it. Raises OSError."""
        self._file.sync()
        self._close()
        return PartName(self.name, self._at, self._crc)

    def abort(self) -> None:
        """Close and remove it."""
        self._close()
        with suppress(OSError):
            self._disk.remove(self._path)

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._file.close()


class Checkpoints:
    """All checkpoints of one log, newest first. Its calls block and come from one thread at a time.

    A part is kept from when it is begun until it is let go of, or a checkpoint that is kept names it.
    """

    def __init__(self, disk: Disk, directory: str, log_id: bytes) -> None:
        self.kept: list[Checkpoint] = []
        self._held: set[str] = set()  # parts that no checkpoint names yet
        self._disk = disk
        self._directory = directory
        self._log_id = log_id

    @classmethod
    def read(
        cls, disk: Disk, directory: str, log_id: bytes, names: Sequence[str], notes: list[str]
    ) -> Checkpoints:
        """Find them among the files of a directory; what cannot be used is left out, and `notes` says why."""
        found = cls(disk, directory, log_id)
        for name in sorted(checkpoint_names(names), reverse=True):
            try:
                found.kept.append(read_checkpoint(disk, directory, name, log_id))
            except CheckpointDamaged as error:
                notes.append(str(error))
            except OSError as error:
                notes.append(f"{directory}/{name} cannot be read ({error}) and is not used")
        return found

    def drop(self, checkpoint: Checkpoint) -> None:
        """Use one no more; its file goes when the next one is written."""
        self.kept.remove(checkpoint)

    def free_name(self, offset: int, kind: str) -> str:
        """Return a part name of that offset and kind that no other part has."""
        number = 0
        while (name := part_name(offset, f"{kind}{number}")) in self._held or self._is_named(name):
            number += 1
        return name

    def begin_part(self, name: str) -> PartWriter:
        """Begin to write a part. `name` is one that no kept checkpoint names. Raises OSError."""
        assert not self._is_named(name), "a part that is named is not written again"
        self._held.add(name)
        return PartWriter(self._disk, self._directory, name)

    def write_part(self, name: str, chunks: Iterable[Buffer]) -> PartName:
        """Write a part, synced when this returns. `name` as for `begin_part`. Raises OSError."""
        part = self.begin_part(name)
        try:
            for chunk in chunks:
                part.add(chunk)
            return part.finish()
        except BaseException:
            self.let_go(name)
            part.abort()
            raise

    def open_part(self, part: PartName) -> File:
        """Open a part that was written, for reading. Raises OSError."""
        return self._disk.open(self.path_of(part), read_only=True)

    def path_of(self, part: PartName) -> str:
        """Return the path of a part."""
        return f"{self._directory}/{part.name}"

    def let_go(self, name: str) -> None:
        """Release a part: it goes, unless a kept checkpoint names it."""
        self._held.discard(name)

    def _is_named(self, name: str) -> bool:
        return any(name in one.parts for one in self.kept)

    def write(
        self, position: Position, end: int, sections: Mapping[str, bytes], parts: Sequence[PartName]
    ) -> Checkpoint:
        """Write a checkpoint, durable when this returns; then remove what no kept one needs. Raises OSError.

        The log is synced up to `end` at least, and `sections` speak of nothing behind that.
        """
        name = f"{position.offset:0{NAME_DIGITS}d}{SUFFIX}"
        all_sections = {**sections, _PARTS: json.dumps(parts).encode()}
        base = 0
        if position.index is not None:
            index = position.index.until(position.offset, position.size, position.crc, position.latest_time)
            all_sections[_INDEX], base = index.pack(), index.base
        head = _Head(self._log_id, position.offset, end, position.crc, base)
        path = f"{self._directory}/{name}"
        try:
            replace_file(self._disk, self._directory, path, _pack(head, all_sections))
        except OSError:
            # The name may be in the cache alone for good: the next process must not find it, and trust it.
            with suppress(OSError):
                self._disk.remove(path)
            raise
        written = read_checkpoint(self._disk, self._directory, name, self._log_id)
        self.kept = [written, *(one for one in self.kept if one.offset < position.offset)][:KEPT]
        self._held.difference_update(written.parts)
        self.sweep(self._disk.list(self._directory))
        return written

    def sweep(self, names: Sequence[str]) -> None:
        """Remove, of these files, checkpoints that are not kept and parts that nobody needs."""
        kept = {one.name for one in self.kept}
        named = self._held.union(*(one.parts for one in self.kept))
        for name in checkpoint_names(names):
            if name not in kept:
                self._remove(name)
        for name in _ours(names, PART_SUFFIX):
            if name not in named:
                self._remove(name)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._disk.remove(f"{self._directory}/{name}")


def part_name(offset: int, kind: str) -> str:
    """The file name of a part first named by the checkpoint at an offset."""
    return f"{offset:0{NAME_DIGITS}d}-{kind}{PART_SUFFIX}"


def checkpoint_names(names: Sequence[str]) -> list[str]:
    """Return the file names of checkpoints among these."""
    return _ours(names, SUFFIX)


class _Head(NamedTuple):
    log_id: bytes
    offset: int
    end: int
    crc: int
    index_base: int


def _pack(head: _Head, sections: Mapping[str, bytes]) -> list[bytes]:
    assert len(sections) <= SECTIONS_MAX
    numbers = head.offset, head.end, head.crc
    raw = _HEADER.pack(_MAGIC, _VERSION, 0, head.log_id, *numbers, len(sections), head.index_base)
    for key, section in sections.items():
        raw += _SECTION.pack(key.encode(), len(section), crc32c(section))
    raw += _CRC.pack(crc32c(raw))
    return [raw, *filter(None, sections.values())]


def _ours(names: Sequence[str], suffix: str) -> list[str]:
    return [name for name in names if name.endswith(suffix) and name[:NAME_DIGITS].isdecimal()]


def _read(disk: Disk, path: str, position: int, size: int) -> bytes:
    file = disk.open(path, read_only=True)
    try:
        return file.read(position, min(size, max(file.size() - position, 0)))
    finally:
        file.close()


def read_checkpoint(disk: Disk, directory: str, name: str, log_id: bytes) -> Checkpoint:
    """Read the head of a checkpoint, and the names of its parts. Raises CheckpointDamaged, OSError."""
    path = f"{directory}/{name}"
    raw = read_small(disk, path, bytes_max=_HEADER.size + SECTIONS_MAX * _SECTION.size + _CRC.size) or b""
    if len(raw) < _HEADER.size:
        raise CheckpointDamaged(path, f"it ends after {len(raw)} bytes")
    magic, version, _, told_id, offset, end, crc, count, base = _HEADER.unpack_from(raw)
    if magic != _MAGIC:
        raise CheckpointDamaged(path, "it is no checkpoint")
    if version != _VERSION:
        raise CheckpointDamaged(path, f"it has version {version}, this program knows {_VERSION}")
    at = _HEADER.size + count * _SECTION.size
    if count > SECTIONS_MAX or len(raw) < at + _CRC.size or crc32c(raw[:at]) != _CRC.unpack_from(raw, at)[0]:
        raise CheckpointDamaged(path, "its head does not fit its checksum")
    if told_id != log_id:
        raise CheckpointDamaged(path, f"it belongs to log {told_id.hex()}, not to this one")
    if name != f"{offset:0{NAME_DIGITS}d}{SUFFIX}":
        raise CheckpointDamaged(path, f"it was written for offset {offset}, under another name")
    places, position = {}, at + _CRC.size
    for key, size, section_crc in _SECTION.iter_unpack(raw[_HEADER.size : at]):
        if size > SECTION_BYTES_MAX:
            raise CheckpointDamaged(path, f"a section of {size} bytes, at most {SECTION_BYTES_MAX} are read")
        places[key.rstrip(b"\0").decode("ascii", "replace")] = (position, size, section_crc)
        position += size
    found = Checkpoint(
        disk, directory, name, offset=offset, end=end, crc=crc, index_base=base, places=places
    )  # fmt: skip
    found.read_parts()
    return found
