"""Checkpoints: files beside the log that spare a start from reading all of it.

A checkpoint holds named sections, opaque here, that sum up all rows below one offset, and the index of the
segment that was active then. Large data that rarely changes is in part files: each is written once, and named
by every checkpoint that needs it. The frames stay authoritative: a checkpoint names the stamp before its
offset, so that a checkpoint of another history is not used, and it is written only after all rows that it
sums up are synced.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.segments.segment import NAME_DIGITS
from delta_prop_broker.segments.small_file import read_file, replace_file, write_all
from delta_prop_broker.segments.sparse_index import SparseIndex
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop_broker.disk import Disk, File

SUFFIX = ".checkpoint"
PART_SUFFIX = ".part"
CHECKPOINTS_MAX = 2
"""Number of stored checkpoints: the newest, and an earlier one to fall back to."""
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


class CheckpointCorrupted(DeltaPropError):
    """A checkpoint or part file is not as it was written, or is of another log or version."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}; it is not used: the log is read instead")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Position:
    """The end of a log at one moment. `crc`: the checksum of the last stamp before it; 0 if there is none.

    `index` is the index of the active segment, to which later frames are added; `size` and `latest_time` (us
    since 1970) are its values at that moment.
    """

    offset: int
    crc: int
    index: SparseIndex | None = None
    size: int = 0
    latest_time: int = 0


class CheckpointFile(NamedTuple):
    """The entry of a part file in a checkpoint: file name, bytes, checksum."""

    name: str
    size: int
    crc: int


class Checkpoint:
    """A stored checkpoint with a valid header; sections and part files are checked when they are read.

    It sums up all rows below `offset`; rows up to `end` (exclusive) were synced before it was written. `crc`:
    of the last stamp before `offset`. `index_base`: first offset of the segment that was active. `files`: its
    part files by name.
    """

    def __init__(
        self, disk: Disk, directory: str, name: str, *, offset: int, end: int, crc: int, index_base: int,
        sections: Mapping[str, tuple[int, int, int]],
    ) -> None:  # fmt: skip
        self.path = f"{directory}/{name}"
        self.name = name
        self.offset = offset
        self.end = end
        self.crc = crc
        self.index_base = index_base
        self.files: dict[str, CheckpointFile] = {}
        self._disk = disk
        self._directory = directory
        self._sections = sections  # name -> position, size, CRC

    def section(self, name: str) -> bytes:
        """Return the bytes of a section. Raises CheckpointCorrupted, KeyError (no such section), OSError."""
        position, size, crc = self._sections[name]
        raw = _read(self._disk, self.path, position, size)
        if len(raw) != size or crc32c(raw) != crc:
            raise CheckpointCorrupted(self.path, f"section {name!r} does not fit its checksum")
        return raw

    def index(self) -> SparseIndex | None:
        """Return the index of the segment that was active; None if none was. Raises CheckpointCorrupted."""
        if _INDEX not in self._sections:
            return None
        index = SparseIndex.unpack(self.section(_INDEX), self.index_base)
        if index is None:
            raise CheckpointCorrupted(self.path, "its index cannot be read")
        return index

    def repack(self, log_id: bytes, crc: int, index: bytes | None) -> Iterable[bytes]:
        """Pack the checkpoint for the same frames under new stamps. Raises CheckpointCorrupted, OSError.

        `crc`: of the last new stamp before its offset. `index`: the new index of the segment that was active;
        None if it stays.
        """
        sections = {name: self.section(name) for name in self._sections}
        if index is not None:
            sections[_INDEX] = index
        return _pack(_Head(log_id, self.offset, self.end, crc, self.index_base), sections)

    def read_file(self, name: str) -> bytes:
        """Return the bytes of a part file of this checkpoint. Raises CheckpointCorrupted, OSError."""
        entry = self.files[name]
        path = f"{self._directory}/{name}"
        try:
            raw = _read(self._disk, path, 0, entry.size)
        except FileNotFoundError:
            raise CheckpointCorrupted(path, f"the file is missing, and {self.name} names it") from None
        if len(raw) != entry.size or crc32c(raw) != entry.crc:
            raise CheckpointCorrupted(path, f"its {len(raw)} bytes do not fit their entry in {self.name}")
        return raw

    def verify(self) -> None:
        """Read and check all sections and part files. Raises CheckpointCorrupted, OSError."""
        for name in self._sections:
            self.section(name)
        self.index()
        for name in self.files:
            self.read_file(name)

    def read_file_table(self) -> None:
        """Read the table of the part files into `files`. Raises CheckpointCorrupted, OSError."""
        rows = json.loads(self.section(_PARTS))
        self.files = {name: CheckpointFile(name, size, crc) for name, size, crc in rows}


class CheckpointFileWriter:
    """Writes a part file; the file is synced when `finish` returns."""

    def __init__(self, disk: Disk, directory: str, name: str) -> None:
        self.name = name
        self._path = f"{directory}/{name}"
        self._disk = disk
        self._file = disk.open(self._path, create=True)
        self._is_open = True
        self._file.truncate(0)
        self._position = self._crc = 0

    def add(self, chunk: Buffer) -> None:
        """Write the next bytes. Raises OSError."""
        if memoryview(chunk).nbytes > 0:
            self._position = write_all(self._file, self._position, [chunk])
            self._crc = crc32c(chunk, self._crc)

    def finish(self) -> CheckpointFile:
        """Sync and close the file. Raises OSError."""
        self._file.sync()
        self._close()
        return CheckpointFile(self.name, self._position, self._crc)

    def abort(self) -> None:
        """Close and remove the file."""
        self._close()
        with suppress(OSError):
            self._disk.remove(self._path)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._file.close()


class Checkpoints:
    """All checkpoints of one log, newest first. All calls block, and come from one thread at a time.

    A part file stays from `begin_file` until `release`, and as long as a stored checkpoint names it.
    """

    def __init__(self, disk: Disk, directory: str, log_id: bytes) -> None:
        self.stored: list[Checkpoint] = []
        self._held: set[str] = set()  # part files that no checkpoint names yet
        self._disk = disk
        self._directory = directory
        self._log_id = log_id

    @classmethod
    def read(
        cls, disk: Disk, directory: str, log_id: bytes, names: Sequence[str], notes: list[str]
    ) -> Checkpoints:
        """Read the checkpoints of a directory; append to `notes` why some are not used."""
        checkpoints = cls(disk, directory, log_id)
        for name in sorted(checkpoint_names(names), reverse=True):
            try:
                checkpoints.stored.append(read_checkpoint(disk, directory, name, log_id))
            except CheckpointCorrupted as error:
                notes.append(str(error))
            except OSError as error:
                notes.append(f"{directory}/{name} cannot be read ({error}) and is not used")
        return checkpoints

    def drop(self, checkpoint: Checkpoint) -> None:
        """Stop using a checkpoint; its file is removed when the next one is written."""
        self.stored.remove(checkpoint)

    def free_name(self, offset: int, kind: str) -> str:
        """Return a name for a part file, from this offset and kind, that no other part file has."""
        number = 0
        while (name := file_name(offset, f"{kind}{number}")) in self._held or self._is_named(name):
            number += 1
        return name

    def begin_file(self, name: str) -> CheckpointFileWriter:
        """Begin to write a part file; no stored checkpoint names `name`. Raises OSError."""
        assert not self._is_named(name), "a checkpoint names the part file: write one under another name"
        self._held.add(name)
        return CheckpointFileWriter(self._disk, self._directory, name)

    def write_file(self, name: str, chunks: Iterable[Buffer]) -> CheckpointFile:
        """Write a part file, synced when this returns. `name` as for `begin_file`. Raises OSError."""
        part = self.begin_file(name)
        try:
            for chunk in chunks:
                part.add(chunk)
            return part.finish()
        except BaseException:
            self.release(name)
            part.abort()
            raise

    def open_file(self, file: CheckpointFile) -> File:
        """Open a finished part file for reading. Raises OSError."""
        return self._disk.open(self.path_of(file), read_only=True)

    def path_of(self, file: CheckpointFile) -> str:
        """Return the path of a part file."""
        return f"{self._directory}/{file.name}"

    def release(self, name: str) -> None:
        """Release a part file: the next sweep removes it, unless a stored checkpoint names it."""
        self._held.discard(name)

    def _is_named(self, name: str) -> bool:
        return any(name in checkpoint.files for checkpoint in self.stored)

    def write(
        self, position: Position, end: int, sections: Mapping[str, bytes], files: Sequence[CheckpointFile]
    ) -> Checkpoint:
        """Write a checkpoint durably, then remove files that are no longer needed. Raises OSError.

        The log must be synced at least up to `end`, and `sections` must cover no row from there on.
        """
        name = f"{position.offset:0{NAME_DIGITS}d}{SUFFIX}"
        all_sections = {**sections, _PARTS: json.dumps(files).encode()}
        base = 0
        if position.index is not None:
            index = position.index.copy_until(
                position.offset, position.size, position.crc, position.latest_time
            )
            all_sections[_INDEX], base = index.pack(), index.base
        head = _Head(self._log_id, position.offset, end, position.crc, base)
        path = f"{self._directory}/{name}"
        try:
            replace_file(self._disk, path, _pack(head, all_sections))
        except OSError:
            # The new name may be in the cache and never become durable: the next process must not use it.
            with suppress(OSError):
                self._disk.remove(path)
            raise
        written = read_checkpoint(self._disk, self._directory, name, self._log_id)
        self.stored = [
            written,
            *(checkpoint for checkpoint in self.stored if checkpoint.offset < position.offset),
        ][:CHECKPOINTS_MAX]
        self._held.difference_update(written.files)
        self.sweep(self._disk.list(self._directory))
        return written

    def drop_older(self) -> None:
        """Remove all checkpoints but the newest, with their part files; durable when it returns.

        Raises OSError.
        """
        del self.stored[1:]
        self.sweep(self._disk.list(self._directory))
        self._disk.sync_directory(self._directory)

    def sweep(self, names: Sequence[str]) -> None:
        """Remove the checkpoints among these files that are not stored, and the part files without a use."""
        stored = {checkpoint.name for checkpoint in self.stored}
        named = self._held.union(*(checkpoint.files for checkpoint in self.stored))
        for name in checkpoint_names(names):
            if name not in stored:
                self._remove(name)
        for name in _select_names(names, PART_SUFFIX):
            if name not in named:
                self._remove(name)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._disk.remove(f"{self._directory}/{name}")


def file_name(offset: int, kind: str) -> str:
    """Return the file name of a part file that the checkpoint at `offset` is the first to name."""
    return f"{offset:0{NAME_DIGITS}d}-{kind}{PART_SUFFIX}"


def checkpoint_names(names: Sequence[str]) -> list[str]:
    """Return the file names of checkpoints among these."""
    return _select_names(names, SUFFIX)


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


def _select_names(names: Sequence[str], suffix: str) -> list[str]:
    return [name for name in names if name.endswith(suffix) and name[:NAME_DIGITS].isdecimal()]


def _read(disk: Disk, path: str, position: int, size: int) -> bytes:
    with closing(disk.open(path, read_only=True)) as file:
        return file.read(position, min(size, max(file.size() - position, 0)))


def read_checkpoint(disk: Disk, directory: str, name: str, log_id: bytes) -> Checkpoint:
    """Read the head of a checkpoint, and the names of its part files. Raises CheckpointCorrupted, OSError."""
    path = f"{directory}/{name}"
    raw = read_file(disk, path, bytes_max=_HEADER.size + SECTIONS_MAX * _SECTION.size + _CRC.size) or b""
    if len(raw) < _HEADER.size:
        raise CheckpointCorrupted(path, f"it ends after {len(raw)} bytes")
    magic, version, _, found_id, offset, end, crc, count, base = _HEADER.unpack_from(raw)
    if magic != _MAGIC:
        raise CheckpointCorrupted(path, "it is not a checkpoint")
    if version != _VERSION:
        raise CheckpointCorrupted(path, f"it has version {version}, but this program knows {_VERSION}")
    head_end = _HEADER.size + count * _SECTION.size
    if (
        count > SECTIONS_MAX
        or len(raw) < head_end + _CRC.size
        or crc32c(raw[:head_end]) != _CRC.unpack_from(raw, head_end)[0]
    ):
        raise CheckpointCorrupted(path, "its head does not fit its checksum")
    if found_id != log_id:
        raise CheckpointCorrupted(path, f"it belongs to log {found_id.hex()}, not to this one")
    if name != f"{offset:0{NAME_DIGITS}d}{SUFFIX}":
        raise CheckpointCorrupted(path, f"it was written for offset {offset}, under another name")
    locations, position = {}, head_end + _CRC.size
    for key, size, section_crc in _SECTION.iter_unpack(raw[_HEADER.size : head_end]):
        if size > SECTION_BYTES_MAX:
            raise CheckpointCorrupted(
                path, f"a section has {size} bytes, more than the maximum of {SECTION_BYTES_MAX}"
            )
        locations[key.rstrip(b"\0").decode("ascii", "replace")] = (position, size, section_crc)
        position += size
    checkpoint = Checkpoint(
        disk, directory, name, offset=offset, end=end, crc=crc, index_base=base, sections=locations
    )  # fmt: skip
    checkpoint.read_file_table()
    return checkpoint
