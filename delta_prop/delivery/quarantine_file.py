"""A sink's quarantine as a file beside the log: quarantined deltas with their bytes, and dropped offsets.

The file is a sequence of *groups*, each with a number and a checksum over all of it. A change appends one
group, written and synced as one, so only the last one can be torn; a torn one is truncated and reported. An
invalid group before a valid one is corruption, and is refused. A file of mostly outdated groups is rewritten
under another name, which replaces the old file. Frames are stored as in the log: a delta can be applied again
long after the log has removed it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

import msgpack

from delta_prop_broker.disk import Disk, File
from delta_prop_broker.log.contract import Log
from delta_prop_broker.segments.frames import read_head
from delta_prop_broker.segments.paths import TEMPORARY
from delta_prop_broker.segments.small_file import read_file, replace_file, write_all
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import DeltaPropError
from delta_prop_wire.spec import HEADER_BYTES, STAMP_BYTES

DIRECTORY = "quarantine"
SUFFIX = ".journal"
VERSION = 1
GROUP_BYTES = 4 * 1024 * 1024
"""Approximate size of a group in a rewritten file."""

_HEAD_BYTES = HEADER_BYTES + STAMP_BYTES
_GROUP = struct.Struct("<8sIII")
"""magic, number within the file, payload length, CRC32C of number, length and payload."""
_MAGIC = b"dp-quar\n"
_NUMBERS = struct.Struct("<II")
_STEM_BYTES_MAX = 200

JournalGroup: TypeAlias = dict[str, Any]
EpochEnd: TypeAlias = Callable[[int], int | None]
"""Function from an epoch of the log to its end offset (exclusive), None for the current epoch."""


class QuarantineCorrupted(DeltaPropError):
    """A quarantine file that differs from what was written; `position`: the byte from which on."""

    def __init__(self, path: str, position: int, reason: str) -> None:
        super().__init__(
            f"{path} is corrupted at byte {position}: {reason}; nothing was changed: restore a valid copy, "
            "or `delta-prop sinks forget` this sink, and attach it as a new one"
        )
        self.path = path
        self.position = position
        self.reason = reason


class QuarantineRecord(NamedTuple):
    """One quarantined delta. `frame`: offset of the frame that holds it; `at_us`: time (µs since 1970).

    `reason`: why the sink rejected it; None if it was not rejected, but is blocked by another delta.
    """

    frame: int
    at_us: int
    reason: str | None


@dataclass(slots=True)
class StoredQuarantine:
    """Content of a quarantine file: the sink's name, the held deltas by offset, their frames, the dropped
    offsets, and the log's epoch at the last write.

    `torn`: description of the end that was truncated, None if nothing was.
    """

    sink: str = ""
    log_id: bytes = b""
    held: dict[int, QuarantineRecord] = field(default_factory=dict)
    frames: dict[int, bytes] = field(default_factory=dict)
    dropped_offsets: dict[int, None] = field(default_factory=dict)
    torn: str | None = None
    epoch: int = 0

    def truncate(self, end: int | None) -> None:
        """Drop what lies from `end` on: the log lost it, and other deltas now have these offsets."""
        if end is not None:
            self.held = {offset: record for offset, record in self.held.items() if offset < end}
            self.dropped_offsets = {offset: None for offset in self.dropped_offsets if offset < end}

    def batches(self) -> dict[int, LoggedBatch]:
        """Return the frames of all held deltas."""
        return {offset: _decode_frame(raw) for offset, raw in self.frames.items()}

    def apply_group(self, group: JournalGroup, epoch_end: EpochEnd) -> None:
        """Apply a group's changes. Raises KeyError, TypeError, ValueError if it is malformed."""
        epoch = int(group.get("epoch", self.epoch))
        if epoch != self.epoch:
            self.truncate(epoch_end(self.epoch) if self.epoch else None)
            self.epoch = epoch
        if "version" in group:
            if group["version"] != VERSION:
                raise ValueError(f"version {group['version']}: use a program that knows it, not {VERSION}")
            self.sink, self.log_id = str(group["sink"]), bytes(group["log_id"])
        self.frames.update(group["frames"])
        for offset in group["gone"]:
            self.held.pop(offset, None)
            self.dropped_offsets.pop(offset, None)
        for offset in group["given_up"]:
            self.held.pop(offset, None)
            self.dropped_offsets[offset] = None
        for offset, *rest in group["held"]:
            self.held[offset] = QuarantineRecord(*rest)


def make_group(
    held: Iterable[tuple[int, QuarantineRecord]] = (),
    frames: Iterable[LoggedBatch] = (),
    removed: Sequence[int] = (),
    dropped: Sequence[int] = (),
) -> JournalGroup:
    """Return a group of changes in the form in which it is written; an offset occurs in it once."""
    return {
        "held": [[offset, *record] for offset, record in held],
        "frames": {logged.offset: logged.head + logged.batch.body for logged in frames},
        "gone": list(removed),
        "given_up": list(dropped),
    }


def quarantine_path(sink: str) -> str:
    """Return the path of a sink's quarantine file."""
    stem = quote(sink, safe="", errors="surrogatepass")  # an operator may name any sink
    if len(stem) > _STEM_BYTES_MAX:  # longer than the names that file systems allow
        stem = blake2b(sink.encode(errors="surrogatepass"), digest_size=20).hexdigest()
    return f"{DIRECTORY}/{stem}{SUFFIX}"


def read_stored(disk: Disk, sink: str, epoch_end: EpochEnd) -> StoredQuarantine | None:
    """Return the stored quarantine of a sink, None if there is none. Raises QuarantineCorrupted, OSError."""
    return _read(disk, quarantine_path(sink), epoch_end)


def read_all(disk: Disk, epoch_end: EpochEnd = lambda _: None) -> list[StoredQuarantine]:
    """Return the stored quarantines of all sinks, by name. Raises QuarantineCorrupted, OSError."""
    names = (name for name in disk.list(DIRECTORY) if name.endswith(SUFFIX))
    quarantines = (_read(disk, f"{DIRECTORY}/{name}", epoch_end) for name in names)
    return sorted((stored for stored in quarantines if stored is not None), key=lambda stored: stored.sink)


def remove_stored(disk: Disk, sink: str) -> bool:
    """Remove the stored quarantine of a sink, durably; return False if there was none. Raises OSError."""
    path = quarantine_path(sink)
    files = {f"{DIRECTORY}/{name}" for name in disk.list(DIRECTORY)}
    for file in (path + TEMPORARY, path):
        if file in files:
            disk.remove(file)
            disk.sync_directory(DIRECTORY)
    return path in files


class QuarantineFile:
    """The quarantine file of one sink, for its writer; calls block, and come from one thread at a time.

    After a failed call only `rewrite` may follow, since the content on the disk is unknown.
    """

    def __init__(self, disk: Disk, sink: str, log: Log) -> None:
        """Create it for a sink of this log, whose present epoch each group gets."""
        self.size = 0
        self._log = log
        self._disk = disk
        self._path = quarantine_path(sink)
        self._header: JournalGroup = {"version": VERSION, "sink": sink, "log_id": log.log_id}
        self._file: File | None = None
        self._number = 0

    def append(self, group: JournalGroup) -> None:
        """Append a change; durable when it returns. Raises OSError."""
        assert self._file is not None
        self.size = write_all(self._file, self.size, [self._pack_group(self._number, group)])
        self._file.sync()
        self._number += 1

    def rewrite(self, groups: Iterable[JournalGroup]) -> None:
        """Replace the file by a new one with these groups; durable when it returns. Raises OSError."""
        self.close()
        self._disk.make_directory(DIRECTORY)
        self._disk.sync_directory("")
        number = size = 0

        def parts() -> Iterator[bytes]:
            nonlocal number, size
            for group in (self._header | make_group(), *groups):
                part = self._pack_group(number, group)
                number, size = number + 1, size + len(part)
                yield part

        replace_file(self._disk, self._path, parts())
        self._file = self._disk.open(self._path)
        self._number, self.size = number, size

    def _pack_group(self, number: int, group: JournalGroup) -> bytes:
        payload: bytes = msgpack.packb(group | {"epoch": self._log.epoch})
        checksum = crc32c(payload, crc32c(_NUMBERS.pack(number, len(payload))))
        return _GROUP.pack(_MAGIC, number, len(payload), checksum) + payload

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _read(disk: Disk, path: str, epoch_end: EpochEnd) -> StoredQuarantine | None:
    raw = read_file(disk, path, bytes_max=1 << 62)
    if raw is None:
        return None
    view, position, number, stored = memoryview(raw), 0, 0, StoredQuarantine()
    while position < len(raw):
        payload = _read_payload(view, position, number)
        if payload is None:
            if number == 0:
                raise QuarantineCorrupted(path, position, "its first group is not valid")
            if _has_valid_group_after(raw, position + 1):
                raise QuarantineCorrupted(path, position, "a group is not valid, but a later one is")
            stored.torn = (
                f"{path}: {len(raw) - position} bytes at its end, from byte {position} on, were torn"
            )
            break
        try:
            stored.apply_group(msgpack.unpackb(payload, strict_map_key=False), epoch_end)
        except (KeyError, TypeError, ValueError) as error:
            raise QuarantineCorrupted(path, position, f"it cannot be parsed: {error}") from None
        position += _GROUP.size + len(payload)
        number += 1
    stored.truncate(epoch_end(stored.epoch) if stored.epoch else None)
    needed = {record.frame for record in stored.held.values()}
    stored.frames = {offset: frame for offset, frame in stored.frames.items() if offset in needed}
    if needed - stored.frames.keys():
        raise QuarantineCorrupted(
            path, position, f"the frame of offset {min(needed - stored.frames.keys())} is missing"
        )
    return stored


def _read_payload(view: memoryview, position: int, number: int | None) -> memoryview | None:
    """Return the payload of the group at this position, None if there is no valid one of this number."""
    if position + _GROUP.size > len(view):
        return None
    magic, found_number, length, checksum = _GROUP.unpack_from(view, position)
    payload = view[position + _GROUP.size : position + _GROUP.size + length]
    if magic != _MAGIC or len(payload) < length or (number is not None and found_number != number):
        return None
    is_valid = crc32c(payload, crc32c(_NUMBERS.pack(found_number, length))) == checksum
    return payload if is_valid else None


def _has_valid_group_after(raw: bytes, position: int) -> bool:
    """True if a valid group follows the position: then the invalid group before it was complete once."""
    view = memoryview(raw)
    while (position := raw.find(_MAGIC, position)) >= 0:
        if _read_payload(view, position, None) is not None:
            return True
        position += 1
    return False


def _decode_frame(raw: bytes) -> LoggedBatch:
    head = read_head(memoryview(raw))
    batch, stamp = Batch(raw[_HEAD_BYTES:]), head.stamp
    return LoggedBatch(
        batch, head.offset, stamp.lamport, stamp.source, raw[:_HEAD_BYTES], known_ids=stamp.known_ids
    )  # fmt: skip
