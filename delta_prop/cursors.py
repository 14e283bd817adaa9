"""What the service remembers of sinks that are not attached: how far each is, in a file beside the log.

A cursor in the file can only lag behind the truth: then deltas come again, and sinks tell repeats. Each
writing makes a new file, synced before it takes the old one's name, so there is always a whole one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from delta_prop.route.status import KeptCursor
from delta_prop_wire.crc import crc32c

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delta_prop_broker.disk import Disk

PATH = "cursors"
_NEW = "cursors.new"
_READ_BYTES_MAX = 64 * 1024 * 1024


def read_cursors(disk: Disk, log_id: bytes) -> dict[str, KeptCursor]:
    """The cursors of this log by name; none where the file is not there, damaged, or of another log."""
    try:
        file = disk.open(PATH, read_only=True)
    except FileNotFoundError:
        return {}
    try:
        raw = file.read(0, _READ_BYTES_MAX)
    finally:
        file.close()
    checksum, _, body = raw.partition(b"\n")
    if checksum != b"%08x" % crc32c(body):
        return {}
    told = json.loads(body)
    if told["log_id"] != log_id.hex():
        return {}
    return {name: KeptCursor(*cursor) for name, cursor in told["cursors"].items()}


def write_cursors(disk: Disk, log_id: bytes, cursors: Mapping[str, KeptCursor]) -> None:
    """Put these in place of those that are there; durable when it returns. Raises OSError."""
    body = json.dumps({"log_id": log_id.hex(), "cursors": cursors}, sort_keys=True).encode()
    raw = b"%08x\n" % crc32c(body) + body
    file = disk.open(_NEW, create=True)
    try:
        file.truncate(0)
        at = 0
        while at < len(raw):
            at += file.write(at, [raw[at:]])
        file.sync()
    finally:
        file.close()
    disk.rename(_NEW, PATH)
    disk.sync_directory("")
