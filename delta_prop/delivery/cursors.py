"""Saved cursors of sinks, in a file beside the log, for sinks that are not attached.

A cursor in the file can only lag behind its sink: then deltas are redelivered, and the sink detects the
duplicates. Each write makes a new file, synced before it replaces the old one, so there is always a complete
one.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.lowlevel

from delta_prop.delivery.status import SavedCursor
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.segments.identity import read_small_file, replace_file
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delta_prop.partition.partition import Partition
    from delta_prop_broker.disk import Disk

PATH = "cursors"
_READ_BYTES_MAX = 64 * 1024 * 1024


class CursorStore:
    """The sinks' cursors as the next start will find them. `stored`: those stored last."""

    def __init__(self, partition: Partition, stored: dict[str, SavedCursor]) -> None:
        self.stored = stored
        self._log = partition.log
        self._storage = partition.storage
        self._threads = partition.world.new_threads()
        self._lock = anyio.Lock()

    @classmethod
    async def open(cls, partition: Partition) -> CursorStore:
        """Read the cursors beside the log; there are none beside a log in memory. Raises OSError."""
        store, storage = cls(partition, {}), partition.storage
        if storage is not None:
            read = partial(read_cursors, storage.disk, storage.log.log_id, storage.recovery.notes)
            store.stored = await store._threads.run(read)
        return store

    async def write(self, owner: CursorOwner) -> None:
        """Store the owner's cursors durably, if they have changed. Raises OSError."""
        storage = self._storage
        if storage is None:
            await anyio.lowlevel.checkpoint()
            return
        # read under the lock, so that older cursors never overwrite newer ones
        async with self._lock:
            durable_offset = self._log.offset_at_level(AckLevel.DURABLE)
            # Rows that are not synced may be lost in a power cut, and other deltas take their offsets.
            current = {
                name: cursor._replace(processed=min(cursor.processed, durable_offset))
                for name, cursor in owner.cursors().items()
            }
            if current != self.stored:
                write = partial(write_cursors, storage.disk, storage.log.log_id, current)
                await self._threads.run(partial(self._log.write_small, write))
                self.stored = current


class CursorOwner(Protocol):
    """What knows the present cursors."""

    def cursors(self) -> Mapping[str, SavedCursor]:
        """Return the cursor of each sink by its name."""


def read_cursors(disk: Disk, log_id: bytes, notes: list[str] | None = None) -> dict[str, SavedCursor]:
    """Return the cursors of this log by name; none if the file is missing, corrupted, or of another log.

    The corruption is added to `notes`: sinks without a cursor of their own then get the whole log again.
    """
    body = _read(disk)
    if isinstance(body, LogCorrupted):
        if notes is not None:
            notes.append(body.description)
        return {}
    fields = {} if body is None else json.loads(body)
    if fields.get("log_id") != log_id.hex():
        return {}
    return {name: SavedCursor(*cursor) for name, cursor in fields["cursors"].items()}


def cursors_corruption(disk: Disk) -> LogCorrupted | None:
    """Return the corruption of the file; None if it is valid or missing. Raises OSError."""
    body = _read(disk)
    return body if isinstance(body, LogCorrupted) else None


def _read(disk: Disk) -> bytes | LogCorrupted | None:
    """Return the file's content, or its corruption; None if it is missing."""
    raw = read_small_file(disk, PATH, bytes_max=_READ_BYTES_MAX)
    if raw is None:
        return None
    checksum, _, body = raw.partition(b"\n")
    if checksum == b"%08x" % crc32c(body):
        return body
    return LogCorrupted(
        PATH,
        f"its {len(raw)} bytes do not fit their checksum, so it is not used: sinks without a cursor of "
        "their own start at the log start offset, and the log retains nothing for detached ones",
    )


def write_cursors(disk: Disk, log_id: bytes, cursors: Mapping[str, SavedCursor]) -> None:
    """Replace the saved cursors; durable when it returns. Raises OSError."""
    body = json.dumps({"log_id": log_id.hex(), "cursors": cursors}, sort_keys=True).encode()
    replace_file(disk, "", PATH, [b"%08x\n" % crc32c(body), body])
