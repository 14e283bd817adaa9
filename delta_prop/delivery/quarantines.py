"""Quarantines of all sinks, attached or not; with a log in a directory each has a file.

A change of a quarantine is durable before its sink, or its sink's cursor, passes the delta: the feed calls
`QuarantineWriter.write` before it continues. A file is read when its sink is attached.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import anyio

from delta_prop.delivery.held_deltas import QuarantinedDelta
from delta_prop.delivery.operator_requests import forget_requests
from delta_prop.delivery.quarantine import Quarantine
from delta_prop.delivery.quarantine_file import (
    GROUP_BYTES,
    JournalGroup,
    QuarantineFile,
    QuarantineRecord,
    StoredQuarantine,
    make_group,
    read_stored,
    remove_stored,
)
from delta_prop.delivery.status import FeedLimits
from delta_prop.platform.ports import Threads, World
from delta_prop_broker.disk import Disk
from delta_prop_broker.log.contract import Log
from delta_prop_wire.batch import LoggedBatch

logger = logging.getLogger("delta_prop")

SPARE_BYTES = 1024 * 1024
"""Bytes of outdated records, beyond the size of the live ones, above which a file is rewritten."""
_RECORD_BYTES = 64
"""Approximate bytes of a record without its frame."""


class QuarantineWriter:
    """Writes one quarantine to its file. One call at a time."""

    def __init__(
        self,
        quarantine: Quarantine,
        file: QuarantineFile,
        threads: Threads,
        *,
        spare_bytes: int = SPARE_BYTES,
    ) -> None:
        quarantine.touched = set()
        self._spare_bytes = spare_bytes
        self.quarantine = quarantine
        self._file = file
        self._threads = threads
        self._frames: set[int] = set()  # frames that are in the file
        self._must_rewrite = True  # the content of the file on the disk is unknown
        self._failed = False

    @property
    def is_dirty(self) -> bool:
        """True if a change is not durable yet."""
        return bool(self.quarantine.touched) or self._failed

    def rewrite_next(self) -> None:
        """Have the next `write` write a new file, without outdated records, even if nothing has changed."""
        self._must_rewrite = self._failed = True

    async def write(self) -> None:
        """Write what has changed; durable when it returns. Raises OSError; call it again then."""
        touched = self.quarantine.touched or set()
        self.quarantine.touched = set()
        must_rewrite = self._must_rewrite or self._file.size > 2 * self._live_bytes() + self._spare_bytes
        self._must_rewrite = self._failed = True  # reset below once the disk has succeeded
        if must_rewrite:
            records, dropped = self.quarantine.records(), self.quarantine.dropped_offsets
            await self._threads.run(lambda: self._file.rewrite(_make_groups(records, dropped)))
            self._frames = {delta.logged.offset for delta in records}
        else:
            group, frames = self._collect_changes(touched)
            await self._threads.run(lambda: self._file.append(group))
            self._frames |= frames
        self._must_rewrite = self._failed = False

    def _collect_changes(self, touched: set[int]) -> tuple[JournalGroup, set[int]]:
        held: list[tuple[int, QuarantineRecord]] = []
        frames: dict[int, LoggedBatch] = {}
        removed, dropped = [], []
        for offset in sorted(touched):
            delta = self.quarantine.get(offset)
            if delta is not None:
                held.append((offset, _make_record(delta)))
                if delta.logged.offset not in self._frames:
                    frames[delta.logged.offset] = delta.logged
            elif self.quarantine.is_withheld(offset):
                dropped.append(offset)
            else:
                removed.append(offset)
        return make_group(held, frames.values(), removed, dropped), set(frames)

    def _live_bytes(self) -> int:
        quarantine = self.quarantine
        return quarantine.bytes + _RECORD_BYTES * (len(quarantine) + len(quarantine.dropped_offsets))

    async def close(self) -> None:
        """Close the file."""
        self._must_rewrite = True
        await self._threads.run(self._file.close)


class Quarantines:
    """Quarantines by sink name; without a `disk` they are in memory, like the log."""

    def __init__(self, disk: Disk | None, log: Log, world: World) -> None:
        self.requests_disk = disk
        """The data directory with operators' requests: of several partitions all have the same."""
        self._disk = disk
        self._log = log
        self._world = world
        self._threads = world.new_threads()
        self._lock = anyio.Lock()
        self._known: dict[str, tuple[Quarantine, QuarantineWriter | None]] = {}
        self._forgotten: set[str] = set()  # sinks whose files are to be removed

    async def open(self, name: str, limits: FeedLimits) -> tuple[Quarantine, QuarantineWriter | None]:
        """Open a sink's quarantine, with its stored content. Raises QuarantineCorrupted, OSError."""
        async with self._lock:
            if name not in self._known:
                await self._tidy()
                self._known[name] = await self._read(name, limits)
        return self._known[name]

    async def _read(self, name: str, limits: FeedLimits) -> tuple[Quarantine, QuarantineWriter | None]:
        quarantine = Quarantine(limits.quarantine_deltas_max, limits.quarantine_bytes_max)
        disk = self._disk
        if disk is None:
            return quarantine, None
        log = self._log
        stored = await self._threads.run(lambda: read_stored(disk, name, log.epoch_end))
        if stored is not None and stored.torn is not None:
            logger.warning("the quarantine of sink %r was truncated, as the process ended in a write: %s",
                           name, stored.torn)  # fmt: skip
        if stored is not None and stored.log_id == log.log_id:
            restore_quarantine(quarantine, stored)
        file = QuarantineFile(disk, name, log)
        return quarantine, QuarantineWriter(quarantine, file, self._world.new_threads())

    def has_quarantine(self, name: str) -> bool:
        """True if the sink's quarantine holds something, or something was dropped from it."""
        return name in self._known and self._known[name][0].has_content

    @property
    def has_forgotten(self) -> bool:
        """True while `tidy` has something to remove."""
        return bool(self._forgotten)

    def forget(self, name: str) -> None:
        """Drop everything held for a detached sink; `tidy` removes its file."""
        self._known.pop(name, None)
        self._forgotten.add(name)

    async def close(self, name: str) -> None:
        """Close a detached sink's quarantine; the next attach reads its file, or finds it in memory."""
        quarantine, writer = self._known[name]
        if writer is not None:
            await writer.close()
        if not quarantine.has_content or (writer is not None and not writer.is_dirty):
            self._known.pop(name, None)

    async def tidy(self) -> None:
        """Remove the files of sinks that were forgotten. Raises OSError."""
        async with self._lock:  # a sink attached again meanwhile stores what it writes from then on
            await self._tidy()

    async def _tidy(self) -> None:
        disk, requests_disk = self._disk, self.requests_disk
        for name in sorted(self._forgotten):
            if disk is not None and requests_disk is not None:
                await self._threads.run(partial(remove_stored, disk, name))
                await self._threads.run(partial(forget_requests, requests_disk, name, self._log.log_id))
            self._forgotten.discard(name)


def restore_quarantine(quarantine: Quarantine, stored: StoredQuarantine) -> None:
    """Fill a quarantine with the content of a file."""
    batches = stored.batches()
    for offset, record in sorted(stored.held.items()):
        quarantine.restore(batches[record.frame], offset - record.frame, record.reason, record.at_us)
    quarantine.restore_dropped(stored.dropped_offsets)


def _make_groups(records: list[QuarantinedDelta], dropped: list[int]) -> Iterator[JournalGroup]:
    """Yield the full content, in groups small enough for memory. `records` are in log order."""
    yield make_group(dropped=dropped)
    held: list[tuple[int, QuarantineRecord]] = []
    frames: dict[int, LoggedBatch] = {}
    size = 0
    for delta in records:
        if delta.logged.offset not in frames:
            if size >= GROUP_BYTES:
                yield make_group(held, frames.values())
                held, frames, size = [], {}, 0
            frames[delta.logged.offset] = delta.logged
            size += delta.logged.batch.size
        held.append((delta.offset, _make_record(delta)))
    yield make_group(held, frames.values())


def _make_record(delta: QuarantinedDelta) -> QuarantineRecord:
    return QuarantineRecord(delta.logged.offset, delta.at_us, delta.reason)
