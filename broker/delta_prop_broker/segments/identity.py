"""The identity of a log: the format of its directory, its id, its epochs, in small files."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from delta_prop_broker.corruption import FormatOutdated, FormatUnknown, LogCorrupted, add_directory_to_errors
from delta_prop_broker.segments.paths import FORMAT_PATH
from delta_prop_broker.segments.small_file import (
    Checksum,
    read_checked,
    read_file,
    replace_checked,
    replace_file,
)
from delta_prop_wire.crc import crc32c
from delta_prop_wire.cursor import LOG_ID_BYTES

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk

FORMAT = 2
"""The format of a directory; since format 2, each control row begins with its type."""
OLDEST_FORMAT = 1
"""The oldest format that a migration can begin with."""
OPENINGS_MAX = (1 << 32) - 1
EPOCHS_MAX = 4096
"""Maximum number of stored epochs; a cursor of an older epoch counts as a cursor of the oldest stored one."""

_HEADER = struct.Struct("<8sII16sQ")
"""magic, version, openings, log id, number of epochs; then (epoch, first offset) each; then a CRC32C."""
_EPOCH = struct.Struct("<QQ")
_MAGIC = b"dp-logid"
_VERSION = 1
_FORMAT_FIX = ": copy the format file of a data directory that the same version made"


class Randomness(Protocol):
    """A source of random bytes."""

    def bytes(self, count: int, /) -> bytes:
        """Return `count` random bytes."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The id of a log, and (epoch, first offset) of each of its epochs, in ascending order.

    `openings`: number of openings for writing since the log was created.
    """

    log_id: bytes
    epochs: tuple[tuple[int, int], ...]
    openings: int = 0

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self.epochs[-1][0]

    def next_epoch(self, start: int, *, step: int = 1) -> Identity:
        """Return the same log in a new epoch, higher by `step`, whose first offset is `start`."""
        return replace(self, epochs=(*self.epochs, (self.epoch + step, start))[-EPOCHS_MAX:])

    def with_opening(self) -> Identity:
        """Return the same log with one more opening."""
        return self.with_openings(self.openings + 1)

    def with_openings(self, openings: int) -> Identity:
        """Return the same log with at least this many openings."""
        return replace(self, openings=min(max(self.openings, openings), OPENINGS_MAX))

    def epoch_end(self, epoch: int) -> int | None:
        """Return the end offset (exclusive) of a past epoch; None for the present epoch."""
        return min((start for later, start in self.epochs if later > epoch), default=None)


class Format(NamedTuple):
    """The content of the format file. `unfinished`: a migration to this format must still rename files."""

    number: int
    made_by: str
    unfinished: bool = False


def check_format(disk: Disk, *, oldest: int = FORMAT) -> bool:
    """Return True if the directory has a format file, and check that its format is one of `oldest` to FORMAT.

    Raises FormatUnknown, FormatOutdated, LogCorrupted, OSError.
    """
    with add_directory_to_errors(disk.name):
        found = read_format(disk)
    if found is not None and (found.number < oldest or found.unfinished):
        raise FormatOutdated(disk.name, found.number, FORMAT, unfinished=found.unfinished)
    return found is not None


def read_format(disk: Disk) -> Format | None:
    """Read the format file; None if there is none. Raises FormatUnknown, LogCorrupted, OSError."""
    raw = read_file(disk, FORMAT_PATH)
    if raw is None:
        return None
    try:
        fields = json.loads(raw)
        found = Format(int(fields["format"]), str(fields.get("made_by", "")), bool(fields.get("unfinished")))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LogCorrupted(FORMAT_PATH, f"its {len(raw)} bytes are not a format file{_FORMAT_FIX}") from None
    if found.number > FORMAT:  # its other fields may have another meaning
        raise FormatUnknown(f"{disk.name}/{FORMAT_PATH}", found.number, FORMAT, found.made_by)
    if raw != _pack_format(found) or found.number < OLDEST_FORMAT:
        raise LogCorrupted(FORMAT_PATH, f"its fields do not fit their checksum{_FORMAT_FIX}")
    return found


def write_format(disk: Disk, made_by: str, *, unfinished: bool = False) -> None:
    """Write the format file, before any other file of the directory."""
    replace_file(disk, FORMAT_PATH, [_pack_format(Format(FORMAT, made_by, unfinished))])


def _pack_format(found: Format) -> bytes:
    fields: dict[str, int | str] = {"format": found.number, "made_by": found.made_by}
    if found.unfinished:
        fields["unfinished"] = True
    fields["crc32c"] = f"{crc32c(json.dumps(fields).encode()):08x}"
    return json.dumps(fields).encode() + b"\n"


def read_identity(disk: Disk, path: str) -> Identity | None:
    """Read the identity of a log; None if there is no such file. Raises LogCorrupted."""
    raw = read_checked(disk, path, Checksum.TRAILER)
    if raw is None:
        return None
    magic, version, openings, log_id, count = _HEADER.unpack_from(raw.ljust(_HEADER.size))
    if (magic, version) != (_MAGIC, _VERSION) or len(raw) != _HEADER.size + count * _EPOCH.size:
        raise LogCorrupted(path, "it is not a log's identity file, or has another version")
    epochs = tuple(_EPOCH.iter_unpack(raw[_HEADER.size :]))
    return Identity(log_id, epochs, openings)


def write_identity(disk: Disk, path: str, identity: Identity) -> None:
    """Replace the identity file; durable when this returns."""
    raw = _HEADER.pack(_MAGIC, _VERSION, identity.openings, identity.log_id, len(identity.epochs))
    raw += b"".join(_EPOCH.pack(*entry) for entry in identity.epochs)
    replace_checked(disk, path, raw, Checksum.TRAILER)


def new_identity(randomness: Randomness) -> Identity:
    """Return the identity of a new log."""
    return Identity(randomness.bytes(LOG_ID_BYTES), ((1, 0),))
