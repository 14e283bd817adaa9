"""The quarantines of all sinks, attached or not. Beside a log in a directory each has a file.

A change of a quarantine is on stable storage before its sink, or its sink's cursor, passes the delta: the
feed asks for that (`Keeper.keep`) before it goes on. A file is read when its sink is attached.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import anyio

from delta_prop.operator_requests import forget_requests
from delta_prop.quarantine_file import (
    GROUP_BYTES,
    Group,
    Held,
    QuarantineFile,
    group_of,
    read_kept,
    remove_kept,
)
from delta_prop.route.quarantine import Quarantine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop.ports import Threads, World
    from delta_prop.quarantine_file import Kept
    from delta_prop.route.quarantine import SetAside
    from delta_prop.route.status import FeedLimits
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import LoggedBatch

logger = logging.getLogger("delta_prop")

SPARE_BYTES = 1024 * 1024
"""A file may hold so much, and as much again as is alive, that is past, before it is written anew."""
_RECORD_BYTES = 64


class Keeper:
    """Writes one quarantine down. One call at a time."""

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
        self._frames: set[int] = set()  # that are in the file
        self._anew = True  # what the disk has of the file is not known
        self._failed = False

    @property
    def due(self) -> bool:
        """Whether something has changed that is not on stable storage."""
        return bool(self.quarantine.touched) or self._failed

    async def keep(self) -> None:
        """Write down what has changed; durable when it returns. Raises OSError; call it again then."""
        touched = self.quarantine.touched or set()
        self.quarantine.touched = set()
        anew = self._anew or self._file.size > 2 * self._alive_bytes() + self._spare_bytes
        self._anew = self._failed = True  # until the disk has said otherwise
        if anew:
            records, given_up = self.quarantine.records(), self.quarantine.given_up
            await self._threads.run(lambda: self._file.rewrite(_groups(records, given_up)))
            self._frames = {one.logged.offset for one in records}
        else:
            group, frames = self._change(touched)
            await self._threads.run(lambda: self._file.append(group))
            self._frames |= frames
        self._anew = self._failed = False

    def _change(self, touched: set[int]) -> tuple[Group, set[int]]:
        held: list[tuple[int, Held]] = []
        frames: dict[int, LoggedBatch] = {}
        gone, given_up = [], []
        for offset in sorted(touched):
            one = self.quarantine.get(offset)
            if one is not None:
                held.append((offset, _held(one)))
                if one.logged.offset not in self._frames:
                    frames[one.logged.offset] = one.logged
            elif self.quarantine.withholds(offset):
                given_up.append(offset)
            else:
                gone.append(offset)
        return group_of(held, frames.values(), gone, given_up), set(frames)

    def _alive_bytes(self) -> int:
        quarantine = self.quarantine
        return quarantine.bytes + _RECORD_BYTES * (len(quarantine) + len(quarantine.given_up))

    async def close(self) -> None:
        """Let go of the file."""
        self._anew = True
        await self._threads.run(self._file.close)


class Quarantines:
    """By the name of the sink. `disk` None: in memory, as the log is."""

    def __init__(self, disk: Disk | None, log: Log, world: World) -> None:
        self._disk = disk
        self._log = log
        self._world = world
        self._threads = world.new_threads()
        self._opening = anyio.Lock()
        self._known: dict[str, tuple[Quarantine, Keeper | None]] = {}
        self._forgotten: set[str] = set()  # whose files are to be removed

    async def open(self, name: str, limits: FeedLimits) -> tuple[Quarantine, Keeper | None]:
        """A sink's quarantine, as it was when the sink was here last. Raises QuarantineDamaged, OSError."""
        async with self._opening:
            if name not in self._known:
                await self._tidy()
                self._known[name] = await self._read(name, limits)
        return self._known[name]

    async def _read(self, name: str, limits: FeedLimits) -> tuple[Quarantine, Keeper | None]:
        quarantine = Quarantine(limits.quarantine_deltas_max, limits.quarantine_bytes_max)
        disk = self._disk
        if disk is None:
            return quarantine, None
        log = self._log
        kept = await self._threads.run(lambda: read_kept(disk, name, log.epoch_end))
        if kept is not None and kept.torn is not None:
            logger.warning("the quarantine of sink %r was being written when the process ended: %s",
                           name, kept.torn)  # fmt: skip
        if kept is not None and kept.log_id == log.log_id:
            bring_back(quarantine, kept)
        file = QuarantineFile(disk, name, log.log_id, lambda: log.epoch)
        return quarantine, Keeper(quarantine, file, self._world.new_threads())

    def knows(self, name: str) -> bool:
        """Whether something is in that sink's quarantine, or was dropped from it."""
        return name in self._known and self._known[name][0].matters

    def forget(self, name: str) -> None:
        """Give up all that is held for a sink that is not attached; `tidy` removes its file."""
        self._known.pop(name, None)
        self._forgotten.add(name)

    async def close(self, name: str) -> None:
        """Its sink goes. What is in its file is read again when it returns, else it waits in memory."""
        quarantine, keeper = self._known[name]
        if keeper is not None:
            await keeper.close()
        if not quarantine.matters or (keeper is not None and not keeper.due):
            self._known.pop(name, None)

    async def tidy(self) -> None:
        """Remove the files of sinks that were forgotten. Raises OSError."""
        async with self._opening:  # one that comes back meanwhile keeps what it writes from then on
            await self._tidy()

    async def _tidy(self) -> None:
        disk = self._disk
        for name in sorted(self._forgotten):
            if disk is not None:
                await self._threads.run(partial(remove_kept, disk, name))
                await self._threads.run(partial(forget_requests, disk, name))
            self._forgotten.discard(name)


def bring_back(quarantine: Quarantine, kept: Kept) -> None:
    """Fill a quarantine with what a file says."""
    batches = kept.batches()
    for offset, one in sorted(kept.held.items()):
        quarantine.bring_back(batches[one.frame], offset - one.frame, one.reason, one.at_us)
    quarantine.bring_back_given_up(kept.given_up)


def _groups(records: list[SetAside], given_up: list[int]) -> Iterator[Group]:
    """Everything, in groups of a size that memory does not feel. Records come in log order."""
    yield group_of(given_up=given_up)
    held: list[tuple[int, Held]] = []
    frames: dict[int, LoggedBatch] = {}
    size = 0
    for one in records:
        if one.logged.offset not in frames:
            if size >= GROUP_BYTES:
                yield group_of(held, frames.values())
                held, frames, size = [], {}, 0
            frames[one.logged.offset] = one.logged
            size += one.logged.batch.size
        held.append((one.offset, _held(one)))
    yield group_of(held, frames.values())


def _held(one: SetAside) -> Held:
    return Held(one.logged.offset, one.at_us, one.reason)
