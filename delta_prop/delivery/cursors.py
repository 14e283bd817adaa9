"""The cursors of all sinks, in a file beside the log.

A cursor in the file can only lag behind its sink: then deltas are redelivered, and the sink detects the
duplicates. Each write makes a new file, synced before it replaces the old one, so there is always a complete
one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.delivery.status import SavedCursor
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.segments.small_file import Checksum, read_checked, replace_checked
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.delivery.feed import Feed
    from delta_prop.partition.partition import Partition
    from delta_prop_broker.disk import Disk

logger = logging.getLogger("delta_prop")

PATH = "cursors"
STORE_CURSORS_S = 1.0
"""Seconds between two writes of the cursors' file."""
_READ_BYTES_MAX = 64 * 1024 * 1024


class CursorStore:
    """The cursors of all sinks, attached or not: holds the log for them, and writes them beside it.

    `stored`: those written last, as the next start will find them.
    """

    def __init__(self, partition: Partition, stored: dict[str, SavedCursor]) -> None:
        self.stored = stored
        self.log = partition.log
        self._storage = partition.storage
        self._threads = partition.world.new_threads()
        self._lock = anyio.Lock()
        self._detached: dict[str, SavedCursor] = {}
        self._attached: dict[str, AttachedCursor] = {}
        for name, cursor in stored.items():
            self.save(name, cursor)

    @classmethod
    async def open(cls, partition: Partition) -> CursorStore:
        """Read the cursors beside the log; there are none beside a log in memory. Raises OSError."""
        storage = partition.storage
        if storage is None:
            return cls(partition, {})
        read = partial(read_cursors, storage.disk, storage.log.log_id, storage.recovery.notes)
        return cls(partition, await partition.world.new_threads().run(read))

    @property
    def names(self) -> frozenset[str]:
        """Names of all sinks that have a cursor, attached or not."""
        return frozenset(self._detached.keys() | self._attached.keys())

    @property
    def detached_names(self) -> list[str]:
        """Names of the sinks for which a cursor was stored when they were detached, or by an operator."""
        return sorted(self._detached)

    def find(self, name: str) -> SavedCursor | None:
        """Return the stored cursor of a detached sink; None if there is none."""
        return self._detached.get(name)

    def require(self, name: str) -> SavedCursor:
        """Return the stored cursor of a detached sink. Raises UsageError."""
        if name not in self._detached:
            raise UsageError(
                f"no sink named {name!r} is attached or stored: give one of {sorted(self.names)}"
            )
        return self._detached[name]

    def save(self, name: str, cursor: SavedCursor) -> None:
        """Store the cursor of a detached sink; the log retains its deltas if it is required."""
        self._detached[name] = cursor
        self.log.release(name)
        if cursor.required:
            self.log.hold(
                name,
                lambda: resume_offset(cursor, self.stored.get(name, cursor)),
                partial(self._invalidate, name) if cursor.evictable else None,
            )

    def _invalidate(self, name: str) -> None:
        """Note that the log retains nothing for a detached sink any more."""
        logger.warning(
            "sink %r is detached and keeps the log full: the log retains nothing for it any more", name
        )
        self._detached[name] = self._detached[name]._replace(required=False)

    def forget(self, name: str) -> None:
        """Drop the cursor of a detached sink; the log retains nothing for it any more."""
        self.log.release(name)
        self._detached.pop(name, None)

    def attach(self, feed: Feed, *, required: bool, evictable: bool) -> AttachedCursor:
        """Ask this feed for its sink's cursor until `detach`; hold the log for it if it is required."""
        cursor = self._attached[feed.name] = AttachedCursor(
            self, feed, required=required, evictable=evictable
        )
        self.log.release(feed.name)
        if required:
            cursor.hold()
        return cursor

    def detach(self, name: str) -> None:
        """Stop asking the sink's feed; from now on, its stored cursor counts."""
        self._attached.pop(name, None)

    def resume_offset(self, name: str, current: SavedCursor) -> int | None:
        """Return the offset at which an attached sink continues after a crash; None if nothing is stored."""
        if self._storage is None:
            return None
        return resume_offset(current, self.stored.get(name, SavedCursor(0, 0)))

    async def write(self) -> None:
        """Store all cursors durably, if they have changed. Raises OSError."""
        storage = self._storage
        if storage is None:
            await anyio.lowlevel.checkpoint()
            return
        # read under the lock, so that older cursors never overwrite newer ones
        async with self._lock:
            durable_offset = self.log.offset_at_level(AckLevel.DURABLE)
            attached = {name: cursor.saved for name, cursor in self._attached.items()}
            # Rows that are not synced may be lost in a power cut, and other deltas take their offsets.
            current = {
                name: cursor._replace(processed=min(cursor.processed, durable_offset))
                for name, cursor in (self._detached | attached).items()
            }
            if current != self.stored:
                write = partial(write_cursors, storage.disk, storage.log.log_id, current)
                await self._threads.run(partial(self.log.write_small, write))
                self.stored = current

    async def run(self) -> None:
        """Store the cursors once a second. After a disk failure they lag, so deltas are redelivered."""
        while self._storage is not None:
            await anyio.sleep(STORE_CURSORS_S)
            try:
                await self.write()
            except OSError as error:
                logger.warning("the sinks' cursors could not be written; the service retries: %s", error)


class AttachedCursor:
    """The cursor of one attached sink in the store: the feed owns it; the log is held for it."""

    def __init__(self, store: CursorStore, feed: Feed, *, required: bool, evictable: bool) -> None:
        self.required = required
        self.evictable = evictable
        self._store = store
        self._feed = feed

    @property
    def saved(self) -> SavedCursor:
        """The cursor to store."""
        return self._feed.cursor.saved._replace(required=self.required, evictable=self.evictable)

    def needed_from(self) -> int:
        """Return the offset from which the sink needs the log, should the service crash now."""
        needed = self._feed.cursor.needed_from
        resumed = self._store.resume_offset(self._feed.name, self._feed.cursor.saved)
        return needed if resumed is None else min(needed, resumed)

    def hold(self) -> None:
        """Let the log retain what the sink needs, until `release`."""
        can_evict = self.evictable or not self.required
        invalidate = self._feed.invalidate_cursor if can_evict else None
        self._store.log.hold(self._feed.name, self.needed_from, invalidate)

    def release(self) -> None:
        """Let the log drop what the sink needs, unless the sink is required."""
        if not self.required:
            self._store.log.release(self._feed.name)

    async def write(self) -> None:
        """Store this cursor durably, with all others. Raises OSError."""
        await self._store.write()


def resume_offset(current: SavedCursor, written: SavedCursor) -> int:
    """Return the offset at which a sink continues after a crash, given its cursor now and the stored one."""
    offset = min(current.processed, written.processed)
    return max(current.reported, offset) if current.own else offset


def read_cursors(disk: Disk, log_id: bytes, notes: list[str] | None = None) -> dict[str, SavedCursor]:
    """Return the cursors of this log by name; none if the file is corrupted, which `notes` then says."""
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
    try:
        return read_checked(disk, PATH, Checksum.FIRST_LINE, bytes_max=_READ_BYTES_MAX)
    except LogCorrupted as error:
        return LogCorrupted(
            PATH,
            f"{error.reason}, so it is not used: sinks without a cursor of their own start at the log start "
            "offset, and the log retains nothing for detached ones",
        )


def write_cursors(disk: Disk, log_id: bytes, cursors: Mapping[str, SavedCursor]) -> None:
    """Replace the saved cursors; durable when it returns. Raises OSError."""
    body = json.dumps({"log_id": log_id.hex(), "cursors": cursors}, sort_keys=True).encode()
    replace_checked(disk, PATH, body, Checksum.FIRST_LINE)
