"""Who a log is: the format of its directory, its id, its epochs. Small files, replaced as a whole."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.log.damage import FormatOutdated, FormatUnknown, LogDamaged, naming
from delta_prop_broker.log.files.names import FORMAT_PATH, TEMPORARY
from delta_prop_broker.log.files.writing import write_all
from delta_prop_wire.crc import crc32c
from delta_prop_wire.cursor import LOG_ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from delta_prop_broker.disk import Disk

FORMAT = 2
"""Since 2 each control row says its type."""
OLDEST_FORMAT = 1
"""What a migration can begin with."""
OPENINGS_MAX = (1 << 32) - 1
EPOCHS_MAX = 4096
"""Epochs remembered; a cursor of an older one is taken as if it were of the oldest remembered."""

_HEADER = struct.Struct("<8sII16sQ")
"""magic, version, openings, log id, number of epochs; then (epoch, first offset) each; then a CRC32C."""
_EPOCH = struct.Struct("<QQ")
_CRC = struct.Struct("<I")
_MAGIC = b"dp-logid"
_VERSION = 1
_SMALL_FILE_BYTES = 1 << 20
_FORMAT_CURE = " (that of any data directory which the same version made has the right bytes)"


@dataclass(frozen=True, slots=True)
class Identity:
    """A log's id, and (epoch, offset that it began at) of each of its epochs, rising.

    `openings`: how often it was opened to be written, after it was made.
    """

    log_id: bytes
    epochs: tuple[tuple[int, int], ...]
    openings: int = 0

    @property
    def epoch(self) -> int:
        """The present one."""
        return self.epochs[-1][0]

    def next_epoch(self, begin: int, *, leap: int = 1) -> Identity:
        """The same log in a new epoch, higher by `leap`, whose first offset is `begin`."""
        return replace(self, epochs=(*self.epochs, (self.epoch + leap, begin))[-EPOCHS_MAX:])

    def opened(self) -> Identity:
        """The same log, opened once more."""
        return self.opened_so_often(self.openings + 1)

    def opened_so_often(self, openings: int) -> Identity:
        """The same log, as if it had been opened this often, or as often as it was."""
        return replace(self, openings=min(max(self.openings, openings), OPENINGS_MAX))

    def epoch_end(self, epoch: int) -> int | None:
        """Where a past epoch ended (exclusive): no later offset of it counts. None: it is the present one."""
        return min((begin for later, begin in self.epochs if later > epoch), default=None)


class Format(NamedTuple):
    """The content of the format file. `unfinished`: a migration to this format has files to exchange."""

    number: int
    made_by: str
    unfinished: bool = False


def check_format(disk: Disk, *, oldest: int = FORMAT) -> bool:
    """Refuse a directory of another format than `oldest` to FORMAT; True if it has one.

    Raises FormatUnknown, FormatOutdated, LogDamaged, OSError.
    """
    with naming(disk.name):
        found = read_format(disk)
    if found is not None and (found.number < oldest or found.unfinished):
        raise FormatOutdated(disk.name, found.number, FORMAT, unfinished=found.unfinished)
    return found is not None


def read_format(disk: Disk) -> Format | None:
    """Read the format file, None where there is none. Raises FormatUnknown, LogDamaged, OSError."""
    raw = read_small(disk, FORMAT_PATH)
    if raw is None:
        return None
    try:
        told = json.loads(raw)
        found = Format(int(told["format"]), str(told.get("made_by", "")), bool(told.get("unfinished")))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LogDamaged(FORMAT_PATH, f"its {len(raw)} bytes are no format file{_FORMAT_CURE}") from None
    if found.number > FORMAT:  # whatever else stands in it
        raise FormatUnknown(f"{disk.name}/{FORMAT_PATH}", found.number, FORMAT, found.made_by)
    if raw != _format_file(found) or found.number < OLDEST_FORMAT:
        raise LogDamaged(FORMAT_PATH, f"its parts do not fit their checksum{_FORMAT_CURE}")
    return found


def write_format(disk: Disk, made_by: str, *, unfinished: bool = False) -> None:
    """Mark the directory as ours, before anything else is made in it."""
    replace_file(disk, "", FORMAT_PATH, [_format_file(Format(FORMAT, made_by, unfinished))])


def _format_file(found: Format) -> bytes:
    told: dict[str, int | str] = {"format": found.number, "made_by": found.made_by}
    if found.unfinished:
        told["unfinished"] = True
    told["crc32c"] = f"{crc32c(json.dumps(told).encode()):08x}"
    return json.dumps(told).encode() + b"\n"


def read_identity(disk: Disk, path: str) -> Identity | None:
    """Who the log is, None where there is no such file. Raises LogDamaged."""
    raw = read_small(disk, path)
    if raw is None:
        return None
    if len(raw) < _HEADER.size + _CRC.size or crc32c(raw[: -_CRC.size]) != _CRC.unpack(raw[-_CRC.size :])[0]:
        raise LogDamaged(path, f"its {len(raw)} bytes do not fit their checksum")
    magic, version, openings, log_id, count = _HEADER.unpack_from(raw)
    if (magic, version) != (_MAGIC, _VERSION) or len(raw) != _HEADER.size + count * _EPOCH.size + _CRC.size:
        raise LogDamaged(path, "it is no file of a log's identity, or one of another version")
    epochs = tuple(_EPOCH.iter_unpack(raw[_HEADER.size : -_CRC.size]))
    return Identity(log_id, epochs, openings)


def write_identity(disk: Disk, directory: str, path: str, identity: Identity) -> None:
    """Put it in place of the file there was; durable when this returns."""
    raw = _HEADER.pack(_MAGIC, _VERSION, identity.openings, identity.log_id, len(identity.epochs))
    raw += b"".join(_EPOCH.pack(*entry) for entry in identity.epochs)
    replace_file(disk, directory, path, [raw, _CRC.pack(crc32c(raw))])


def new_identity(draw: Callable[[int], bytes]) -> Identity:
    """Of a log that begins."""
    return Identity(draw(LOG_ID_BYTES), ((1, 0),))


def read_small(disk: Disk, path: str, *, bytes_max: int = _SMALL_FILE_BYTES) -> bytes | None:
    """A whole small file, None where there is none; no more of it than `bytes_max`."""
    try:
        file = disk.open(path, read_only=True)
    except FileNotFoundError:
        return None
    try:
        return file.read(0, min(file.size(), bytes_max))
    finally:
        file.close()


def replace_file(disk: Disk, directory: str, path: str, parts: Iterable[bytes]) -> None:
    """Write a file under another name, sync it, give it its name, sync that: it is the old or the new one."""
    write_beside(disk, path, parts)
    disk.rename(path + TEMPORARY, path)
    disk.sync_directory(directory)


def write_beside(disk: Disk, path: str, parts: Iterable[bytes]) -> int:
    """Write a file under its temporary name and sync it; return its size. Raises OSError."""
    file = disk.open(path + TEMPORARY, create=True)
    try:
        file.truncate(0)
        at = 0
        for part in parts:
            at = write_all(file, at, [part])
        file.sync()
    finally:
        file.close()
    return at
