"""The log of one service from start to end: opened, read back into the chain, committed, closed.

In memory there is nothing to open or commit. In a directory a thread of its own does what waits for the disk.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.checkpointing import Checkpointer
from delta_prop.checks import check_instance, path_of
from delta_prop.committing import Committer
from delta_prop.compacting import compact
from delta_prop.compressing import compress_sealed
from delta_prop.cursors import read_cursors, write_cursors
from delta_prop.ingest.epochs import epochs_until, openings_for
from delta_prop.log_times import LogTimes
from delta_prop.reopening import Reopening
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from delta_prop.config import Settings
    from delta_prop.ingest.origins import Origins
    from delta_prop.pipeline import Chain
    from delta_prop.ports import Threads, World
    from delta_prop.route.status import KeptCursor
    from delta_prop.turns import Turn
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.parts.recovered import RecoveryReport
    from delta_prop_wire.errors import Refused

logger = logging.getLogger("delta_prop")

KEEP_HOUSE_S = 1.0
_RESTORE_ROWS, _RESTORE_BYTES = 100_000, 16 * 1024 * 1024


class ServiceLog:
    """A log with whoever commits it. `disk` and `recovery` are None beside a log in memory."""

    def __init__(
        self,
        log: MemoryLog | DurableLog,
        threads: Threads,
        disk: Disk | None = None,
        recovery: RecoveryReport | None = None,
    ) -> None:
        self.log = log
        self.disk = disk
        self.recovery = recovery
        self.committer: Committer | None = None
        self.reopening: Reopening | None = None
        self.checkpointer: Checkpointer | None = None
        self.cursors: dict[str, KeptCursor] = {}
        self._times = LogTimes(log) if isinstance(log, DurableLog) else None
        self._threads = threads
        self._cursors_file = anyio.Lock()

    @classmethod
    def in_memory(cls, settings: Settings, world: World) -> ServiceLog:
        """A new log, gone with the process."""
        log = MemoryLog(
            world.randomness.bytes(16),
            deltas_max=settings.log_deltas_max,
            bytes_max=settings.log_bytes_max,
            now=world.clock.now,
        )
        return cls(log, world.new_threads())

    @classmethod
    async def in_directory(cls, path: str, settings: LogSettings, world: World) -> ServiceLog:
        """The log kept below `path`, made or recovered. Raises LogBusy, LogDamaged, FormatUnknown,
        OSError.
        """
        disk, threads = world.open_disk(path), world.new_threads()
        log, recovery = await threads.run(
            lambda: DurableLog.open(disk, settings=settings, draw=world.randomness.bytes, clock=world.clock)
        )
        opened = cls(log, threads, disk, recovery)
        try:
            await threads.run(partial(_take_reserve, log))
            opened.cursors = await threads.run(lambda: read_cursors(disk, log.log_id, recovery.notes))
        except BaseException:
            await opened.close()
            raise
        return opened

    @property
    def openings(self) -> int | None:
        """How often the log was opened, which says what epochs origins may get; None beside one in memory."""
        return self.log.openings if isinstance(self.log, DurableLog) else None

    @property
    def failure(self) -> Exception | None:
        """Why the log takes nothing at present; None while it works."""
        return self.log.failure if isinstance(self.log, DurableLog) else None

    def commits(
        self,
        world: World,
        *,
        on_moved: Callable[[], None],
        on_failed: Callable[[Refused], None],
        on_recovered: Callable[[], None],
        rebuild: Callable[[], Awaitable[None]],
        turn: Turn,
    ) -> None:
        """Get ready to commit, where there is something to; `run` does it.

        `on_moved`, `on_failed`: see `Committer`; `on_recovered`, `rebuild`: see `Reopening`.
        """
        if not isinstance(self.log, DurableLog):
            return

        def recovered(report: RecoveryReport) -> None:
            self.recovery = report
            on_recovered()

        def failed(refusal: Refused, error: Exception) -> None:
            on_failed(refusal)
            self._note_moved()
            reopening.note_failed(error)

        def moved() -> None:
            reopening.note_committed()
            on_moved()
            self._note_moved()

        self.reopening = reopening = Reopening(
            self.log,
            self._threads,
            world,
            on_stopped=on_failed,
            on_recovered=recovered,
            rebuild=rebuild,
            quiet=self._without_checkpoints,
        )
        self.committer = Committer(self.log, on_moved=moved, on_failed=failed, now=world.clock.now, turn=turn)

    def _note_moved(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.note()

    @asynccontextmanager
    async def _without_checkpoints(self) -> AsyncIterator[None]:
        """Nothing of a checkpoint is written meanwhile, nor afterwards: another one goes on."""
        if self.checkpointer is None:
            yield
        else:
            async with self.checkpointer.lock:
                self.checkpointer.stop()
                yield

    async def run(self, world: World) -> None:
        """Commit, and recover what fails, until cancelled."""
        if self.committer is not None and self.reopening is not None:
            async with world.own_thread() as own, anyio.create_task_group() as tasks:
                tasks.start_soon(self.reopening.run)
                await self.committer.run(own)

    async def keep_house(
        self,
        cursors: Callable[[], Mapping[str, KeptCursor]],
        origins: Callable[[], Origins],
        world: World,
    ) -> None:
        """Once a second, until cancelled: let go of what is too old, write down how far sinks and time are,
        set epochs aside for the hellos to come.

        Where the disk fails that is told, and tried again: the cursors there lag, and deltas come again.
        """
        threads = world.new_threads()
        while self.disk is not None:
            await anyio.sleep(KEEP_HOUSE_S)
            if isinstance(self.log, DurableLog):
                if self.log.roll() or self.log.retain():
                    assert self.committer is not None
                    self.committer.ring()
                if self.log.failure is None and self.log.reserve.missing:
                    await threads.run(partial(_take_reserve, self.log))
                if self._times is not None:
                    await self._times.keep(threads)
                await self._set_epochs_aside(origins(), threads)
            try:
                await self.write_cursors(cursors, threads)
            except OSError as error:
                logger.warning("the sinks' cursors could not be written, which is tried again: %s", error)

    async def _set_epochs_aside(self, origins: Origins, threads: Threads) -> None:
        """Count openings up as far as the epochs that are wanted reach, so that none comes again."""
        log, wanted = self.log, origins.epochs_wanted
        if not wanted or not isinstance(log, DurableLog) or self.checkpointer is None:
            return
        async with self.checkpointer.lock:  # a recovery, which writes the same file, waits for it
            if log.failure is not None:
                return
            try:
                await threads.run(partial(log.raise_openings, openings_for(wanted)))
            except OSError as error:
                logger.warning("epochs could not be set aside, which is tried again: %s", error)
                return
        origins.note_reserved(epochs_until(log.openings))

    async def compress(self, world: World) -> None:
        """Compress sealed segments until cancelled, where the settings say so."""
        if self.committer is not None and isinstance(self.log, DurableLog):
            await compress_sealed(self.log, world, ring=self.committer.ring)

    async def compact(self, world: World) -> None:
        """Make what the log may let go into snapshots until cancelled, where the settings say so."""
        if self.committer is not None and isinstance(self.log, DurableLog):
            await compact(self.log, world, ring=self.committer.ring)

    async def write_cursors(self, cursors: Callable[[], Mapping[str, KeptCursor]], threads: Threads) -> None:
        """Write down how far sinks are, if that has changed. Raises OSError."""
        async with self._cursors_file:  # asked for inside, so that no older ones come behind newer ones
            disk, safe = self.disk, self.log.reached(AckLevel.DURABLE)
            # What is not synced may be gone with the next power cut, and other deltas come in its place.
            now = {
                name: cursor._replace(dealt_with=min(cursor.dealt_with, safe))
                for name, cursor in cursors().items()
            }
            if disk is not None and now != self.cursors:
                await threads.run(
                    lambda: self._use_reserve(lambda: write_cursors(disk, self.log.log_id, now))
                )
                self.cursors = now

    def _use_reserve(self, write: Callable[[], None]) -> None:
        """Write something small, on a full disk too. For a thread; raises OSError."""
        if isinstance(self.log, DurableLog):
            self.log.reserve.use(write)
        else:
            write()

    async def restore(self, chain: Chain, world: World) -> None:
        """Bring back what the chain knew: watermarks, first offsets, ids, heads, clocks.

        From the newest checkpoint that fits, and what the log has behind it.
        """
        log, now = self.log, world.clock.now()
        if not isinstance(log, DurableLog) or self.committer is None:
            return
        checkpointer = Checkpointer(log, chain, self.committer, world)
        try:
            offset = await checkpointer.restore(now)
            if self.recovery is not None:
                self.recovery.checkpoint = offset if checkpointer.restored else None
            while offset < log.visible:
                batches = log.read(offset, rows_max=_RESTORE_ROWS, bytes_max=_RESTORE_BYTES)
                for logged in batches:
                    chain.restore(logged, now)
                    checkpointer.take_in(logged)
                offset = batches[-1].next_offset
                await checkpointer.spill_ids()
                await anyio.lowlevel.checkpoint()
        except BaseException:
            chain.appender.ids.close()
            raise
        chain.appender.note_time(log.position().latest_time)
        # Only now: where the way here is cut off, half of the chain must not be saved as all of it.
        self.checkpointer = checkpointer

    async def write_checkpoints(self) -> None:
        """Write a checkpoint whenever one is due, until cancelled."""
        while self.checkpointer is not None:
            await self.checkpointer.run()  # until the log failed and another one goes on
            await anyio.sleep(KEEP_HOUSE_S)

    async def drain(self, timeout_s: float) -> None:
        """Have everything appended committed, as far as the time allows."""
        if self.committer is not None:
            with anyio.move_on_after(timeout_s):
                await self.committer.drain()

    async def close(self) -> None:
        """Let go of the directory; what was appended is committed first. Raises OSError."""
        if isinstance(self.log, DurableLog):
            with anyio.CancelScope(shield=True):
                if self.checkpointer is not None and self.log.synced == self.log.next_offset:
                    await self.checkpointer.write()
                if self.checkpointer is not None:
                    self.checkpointer.close()
                if self.log.failure is None:
                    self.log.clock.read()
                await self._threads.run(self.log.close)


def _take_reserve(log: DurableLog) -> None:
    """Hold room for the day on which the disk is full, where there is any. For a thread."""
    try:
        log.reserve.take(log.settings.free_bytes_min)
    except OSError as error:
        logger.warning("the reserve on the disk could not be taken, which is tried again: %s", error)


def check_data(data: object, log: object) -> tuple[str | None, LogSettings]:
    """The data directory, None for a log in memory, and the settings of its log. Raises UsageError."""
    if log is not None:
        check_instance("log", log, LogSettings, "delta_prop.LogSettings(…)")
        if data is None:
            raise UsageError(
                "log: LogSettings are for a log in a directory: give data=DIR too; one in memory has its "
                "bounds in Settings(log_deltas_max=…, log_bytes_max=…)"
            )
    if data is None:
        return None, LogSettings()
    path = path_of("data", data)
    if "\0" in path:
        raise UsageError(f"data {path!r:.60} names no directory: give a path, or leave data out")
    return path, log if isinstance(log, LogSettings) else LogSettings()
