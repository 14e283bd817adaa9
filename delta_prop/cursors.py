"""What the service remembers of sinks that are not attached: how far each is, in a file beside the log.

A cursor in the file can only lag behind the truth: then deltas come again, and sinks tell repeats. Each
writing makes a new file, synced before it takes the old one's name, so there is always a whole one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from delta_prop.route.status import KeptCursor
from delta_prop_broker.log.damage import LogDamaged
from delta_prop_broker.log.files.identity import read_small, replace_file
from delta_prop_wire.crc import crc32c

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delta_prop_broker.disk import Disk

PATH = "cursors"
_READ_BYTES_MAX = 64 * 1024 * 1024


def read_cursors(disk: Disk, log_id: bytes, notes: list[str] | None = None) -> dict[str, KeptCursor]:
    """The cursors of this log by name; none where the file is not there, damaged, or of another log.

    That it is damaged is added to `notes`: sinks then get all that the log has once more.
    """
    body = _read(disk)
    if isinstance(body, LogDamaged):
        if notes is not None:
            notes.append(body.description)
        return {}
    told = {} if body is None else json.loads(body)
    if told.get("log_id") != log_id.hex():
        return {}
    return {name: KeptCursor(*cursor) for name, cursor in told["cursors"].items()}


def cursors_damage(disk: Disk) -> LogDamaged | None:
    """Report what is wrong with the file; None where it is sound, or not there. Raises OSError."""
    body = _read(disk)
    return body if isinstance(body, LogDamaged) else None


def _read(disk: Disk) -> bytes | LogDamaged | None:
    """Return what the file holds, or what is wrong with it; None where it is not there."""
    raw = read_small(disk, PATH, bytes_max=_READ_BYTES_MAX)
    if raw is None:
        return None
    checksum, _, body = raw.partition(b"\n")
    if checksum == b"%08x" % crc32c(body):
        return body
    return LogDamaged(
        PATH,
        f"its {len(raw)} bytes do not fit their checksum, so it is not used: sinks that keep no cursor of "
        "their own begin where the log does, and nothing is kept for absent ones",
    )


def write_cursors(disk: Disk, log_id: bytes, cursors: Mapping[str, KeptCursor]) -> None:
    """Put these in place of those that are there; durable when it returns. Raises OSError."""
    body = json.dumps({"log_id": log_id.hex(), "cursors": cursors}, sort_keys=True).encode()
    replace_file(disk, "", PATH, [b"%08x\n" % crc32c(body), body])
