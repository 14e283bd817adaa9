"""A sink's quarantine as a file beside the log: what was set aside, with its own bytes, and what was dropped.

The file is a row of *groups*, each with a number and a checksum over all of it. A change is one more group,
written and synced as a whole, so only the last one can be torn; that one is cut off, and told. An unsound
group before a sound one is damage, and is refused. A file that is mostly past is written anew, under
another name, and takes the old one's place. Frames stand in it as the log keeps them: a delta can be
applied again long after the log has let go of it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import quote

import msgpack

from delta_prop_broker.log.files.frames import read_head
from delta_prop_broker.log.files.identity import read_small, replace_file
from delta_prop_broker.log.files.names import TEMPORARY
from delta_prop_broker.log.files.writing import write_all
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import DeltaPropError
from delta_prop_wire.spec import HEADER_BYTES, STAMP_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from delta_prop_broker.disk import Disk, File

DIRECTORY = "quarantine"
SUFFIX = ".journal"
VERSION = 1
GROUP_BYTES = 4 * 1024 * 1024
"""About how much of a file that is written anew goes into one group."""

_HEAD_BYTES = HEADER_BYTES + STAMP_BYTES
_GROUP = struct.Struct("<8sIII")
"""magic, number within the file, length of what follows, CRC32C of the two and of that."""
_MAGIC = b"dp-quar\n"
_NUMBERS = struct.Struct("<II")
_STEM_BYTES_MAX = 200

Group: TypeAlias = dict[str, Any]
EpochEnd: TypeAlias = Callable[[int], int | None]
"""Where an epoch of the log ended (exclusive), None where it is the present one."""


class QuarantineDamaged(DeltaPropError):
    """A quarantine's file cannot be read as what was written. `path` names it, `position` the byte."""

    def __init__(self, path: str, position: int, reason: str) -> None:
        super().__init__(
            f"damage in {path}, byte {position}: {reason}; nothing was changed; put a sound copy in its "
            "place, or `delta-prop sinks forget` this sink, and let it begin anew"
        )
        self.path = path
        self.position = position
        self.reason = reason


class Held(NamedTuple):
    """One delta that is set aside: offset of its frame, when it came (µs since 1970), why; None: it lines
    up behind another one."""

    frame: int
    at_us: int
    reason: str | None


@dataclass(slots=True)
class Kept:
    """What a file says: whose it is, what is held (by offset), the frames of that, what was dropped, and
    the log's epoch when it was written last.

    `torn`: why the end of the file was left out, None where nothing was.
    """

    sink: str = ""
    log_id: bytes = b""
    held: dict[int, Held] = field(default_factory=dict)
    frames: dict[int, bytes] = field(default_factory=dict)
    given_up: dict[int, None] = field(default_factory=dict)
    torn: str | None = None
    epoch: int = 0

    def cut(self, end: int | None) -> None:
        """Leave out what lies from `end` on: the log lost it, and other deltas have these offsets."""
        if end is not None:
            self.held = {offset: one for offset, one in self.held.items() if offset < end}
            self.given_up = {offset: None for offset in self.given_up if offset < end}

    def batches(self) -> dict[int, LoggedBatch]:
        """The frames of all that is held."""
        return {offset: _logged(raw) for offset, raw in self.frames.items()}

    def take(self, group: Group, epoch_end: EpochEnd) -> None:
        """Go on with what a group says. Raises KeyError, TypeError, ValueError where it says nothing."""
        epoch = int(group.get("epoch", self.epoch))
        if epoch != self.epoch:
            self.cut(epoch_end(self.epoch) if self.epoch else None)
            self.epoch = epoch
        if "version" in group:
            if group["version"] != VERSION:
                raise ValueError(f"it says version {group['version']}, this program knows {VERSION}")
            self.sink, self.log_id = str(group["sink"]), bytes(group["log_id"])
        self.frames.update(group["frames"])
        for offset in group["gone"]:
            self.held.pop(offset, None)
            self.given_up.pop(offset, None)
        for offset in group["given_up"]:
            self.held.pop(offset, None)
            self.given_up[offset] = None
        for offset, *rest in group["held"]:
            self.held[offset] = Held(*rest)


def group_of(
    held: Iterable[tuple[int, Held]] = (),
    frames: Iterable[LoggedBatch] = (),
    gone: Sequence[int] = (),
    given_up: Sequence[int] = (),
) -> Group:
    """What changed, as it is written: each offset once."""
    return {
        "held": [[offset, *one] for offset, one in held],
        "frames": {logged.offset: logged.head + logged.batch.body for logged in frames},
        "gone": list(gone),
        "given_up": list(given_up),
    }


def path_of(sink: str) -> str:
    """Where a sink's quarantine is kept."""
    stem = quote(sink, safe="", errors="surrogatepass")  # an operator may name any sink
    if len(stem) > _STEM_BYTES_MAX:  # longer than file systems take
        stem = blake2b(sink.encode(errors="surrogatepass"), digest_size=20).hexdigest()
    return f"{DIRECTORY}/{stem}{SUFFIX}"


def read_kept(disk: Disk, sink: str, epoch_end: EpochEnd) -> Kept | None:
    """What is kept for a sink, None where nothing is. Raises QuarantineDamaged, OSError."""
    return _read(disk, path_of(sink), epoch_end)


def read_all(disk: Disk, epoch_end: EpochEnd = lambda _: None) -> list[Kept]:
    """What is kept for all sinks, by name. Raises QuarantineDamaged, OSError."""
    names = (name for name in disk.list(DIRECTORY) if name.endswith(SUFFIX))
    found = (_read(disk, f"{DIRECTORY}/{name}", epoch_end) for name in names)
    return sorted((kept for kept in found if kept is not None), key=lambda kept: kept.sink)


def remove_kept(disk: Disk, sink: str) -> bool:
    """Remove what is kept for a sink; whether anything was. Durable when it returns. Raises OSError."""
    path = path_of(sink)
    there = {f"{DIRECTORY}/{name}" for name in disk.list(DIRECTORY)}
    for one in (path + TEMPORARY, path):
        if one in there:
            disk.remove(one)
            disk.sync_directory(DIRECTORY)
    return path in there


class QuarantineFile:
    """One sink's file, for who writes it; calls block, and come from one thread at a time.

    After a call that failed only `rewrite` may follow: what the disk has of the file is not known.
    """

    def __init__(self, disk: Disk, sink: str, log_id: bytes, epoch: Callable[[], int]) -> None:
        """`epoch`: the log's at the moment."""
        self.size = 0
        self._epoch = epoch
        self._disk = disk
        self._path = path_of(sink)
        self._whose: Group = {"version": VERSION, "sink": sink, "log_id": log_id}
        self._file: File | None = None
        self._number = 0

    def append(self, group: Group) -> None:
        """Add a change; durable when it returns. Raises OSError."""
        assert self._file is not None
        self.size = write_all(self._file, self.size, [self._packed(self._number, group)])
        self._file.sync()
        self._number += 1

    def rewrite(self, groups: Iterable[Group]) -> None:
        """Put a file of these groups in place of what is there; durable when it returns. Raises OSError."""
        self.close()
        self._disk.make_directory(DIRECTORY)
        self._disk.sync_directory("")
        number = size = 0

        def parts() -> Iterator[bytes]:
            nonlocal number, size
            for group in (self._whose | group_of(), *groups):
                part = self._packed(number, group)
                number, size = number + 1, size + len(part)
                yield part

        replace_file(self._disk, DIRECTORY, self._path, parts())
        self._file = self._disk.open(self._path)
        self._number, self.size = number, size

    def _packed(self, number: int, group: Group) -> bytes:
        payload: bytes = msgpack.packb(group | {"epoch": self._epoch()})
        checksum = crc32c(payload, crc32c(_NUMBERS.pack(number, len(payload))))
        return _GROUP.pack(_MAGIC, number, len(payload), checksum) + payload

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _read(disk: Disk, path: str, epoch_end: EpochEnd) -> Kept | None:
    raw = read_small(disk, path, bytes_max=1 << 62)
    if raw is None:
        return None
    view, at, number, kept = memoryview(raw), 0, 0, Kept()
    while at < len(raw):
        payload = _payload(view, at, number)
        if payload is None:
            if number == 0 or _sound_behind(raw, at + 1, number):
                raise QuarantineDamaged(path, at, "a part does not fit its checksum, and what follows does")
            kept.torn = f"{path}: {len(raw) - at} bytes at its end, from byte {at} on, were never whole"
            break
        try:
            kept.take(msgpack.unpackb(payload, strict_map_key=False), epoch_end)
        except (KeyError, TypeError, ValueError) as error:
            raise QuarantineDamaged(path, at, f"it cannot be understood: {error}") from None
        at += _GROUP.size + len(payload)
        number += 1
    kept.cut(epoch_end(kept.epoch) if kept.epoch else None)
    needed = {one.frame for one in kept.held.values()}
    kept.frames = {offset: raw for offset, raw in kept.frames.items() if offset in needed}
    if needed - kept.frames.keys():
        raise QuarantineDamaged(
            path, at, f"the frame of offset {min(needed - kept.frames.keys())} is missing"
        )
    return kept


def _payload(view: memoryview, at: int, number: int | None) -> memoryview | None:
    """What a group at this place holds, None where no sound one of this number is."""
    if at + _GROUP.size > len(view):
        return None
    magic, told, length, checksum = _GROUP.unpack_from(view, at)
    payload = view[at + _GROUP.size : at + _GROUP.size + length]
    if magic != _MAGIC or len(payload) < length or (number is not None and told != number):
        return None
    sound = crc32c(payload, crc32c(_NUMBERS.pack(told, length))) == checksum
    return payload if sound else None


def _sound_behind(raw: bytes, at: int, number: int) -> bool:
    """Whether a sound group lies somewhere behind: then what is unsound was whole once."""
    view = memoryview(raw)
    while (at := raw.find(_MAGIC, at)) >= 0:
        if _payload(view, at, None) is not None:
            return True
        at += 1
    return False


def _logged(raw: bytes) -> LoggedBatch:
    head = read_head(memoryview(raw))
    batch, stamp = Batch(raw[_HEAD_BYTES:]), head.stamp
    return LoggedBatch(
        batch, head.offset, stamp.lamport, stamp.source, raw[:_HEAD_BYTES], known_ids=stamp.known_ids
    )  # fmt: skip
