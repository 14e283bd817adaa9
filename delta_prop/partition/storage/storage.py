"""The log of one service from start to end: opened, replayed into the pipeline, committed, closed.

An in-memory log is neither opened nor committed. For a log in a directory, a thread of its own waits for the
disk.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.calls.argument_checks import check_instance, check_path
from delta_prop.delivery.cursors import read_cursors, write_cursors
from delta_prop.partition.ingest.epochs import epoch_limit, openings_for
from delta_prop.partition.state.checkpointing import Checkpointer
from delta_prop.partition.storage.committer import Committer
from delta_prop.partition.storage.compacting import compact
from delta_prop.partition.storage.compressing import compress_sealed
from delta_prop.partition.storage.log_reopener import LogReopener
from delta_prop.partition.storage.log_times import LogTimes
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from delta_prop.api.settings import Settings
    from delta_prop.delivery.status import SavedCursor
    from delta_prop.partition.ingest.origins import Origins
    from delta_prop.partition.pipeline import Pipeline
    from delta_prop.platform.ports import Threads, World
    from delta_prop.platform.tick_callbacks import TickCallbacks
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.recovery.recovery_result import RecoveryReport
    from delta_prop_wire.errors import Refused

logger = logging.getLogger("delta_prop")

HOUSEKEEPING_S = 1.0
"""Seconds between two rounds of housekeeping."""
_RESTORE_ROWS, _RESTORE_BYTES = 100_000, 16 * 1024 * 1024


class ServiceLog:
    """A log with its committer. `disk` and `recovery` are None for an in-memory log."""

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
        self.reopener: LogReopener | None = None
        self.checkpointer: Checkpointer | None = None
        self.cursors: dict[str, SavedCursor] = {}
        """The cursors that are stored."""
        self._times = LogTimes(log) if isinstance(log, DurableLog) else None
        self._threads = threads
        self._cursors_lock = anyio.Lock()

    @classmethod
    def create_in_memory(cls, settings: Settings, world: World) -> ServiceLog:
        """Return a new log that is lost with the process."""
        log = MemoryLog(
            world.randomness.bytes(16),
            deltas_max=settings.log_deltas_max,
            bytes_max=settings.log_bytes_max,
            now=world.clock.now,
        )
        return cls(log, world.new_threads())

    @classmethod
    async def open_directory(cls, path: str, settings: LogSettings, world: World) -> ServiceLog:
        """Create or recover the log below `path`. Raises LogBusy, LogCorrupted, FormatUnknown, OSError."""
        disk, threads = world.open_disk(path), world.new_threads()
        log, recovery = await threads.run(
            lambda: DurableLog.open(
                disk, settings=settings, random_bytes=world.randomness.bytes, clock=world.clock
            )
        )
        service_log = cls(log, threads, disk, recovery)
        try:
            await threads.run(partial(_take_reserve, log))
            service_log.cursors = await threads.run(lambda: read_cursors(disk, log.log_id, recovery.notes))
        except BaseException:
            await service_log.close()
            raise
        return service_log

    @property
    def openings(self) -> int | None:
        """Number of times that the log was opened, which bounds epochs; None for an in-memory log."""
        return self.log.openings if isinstance(self.log, DurableLog) else None

    @property
    def failure(self) -> Exception | None:
        """Error for which the log accepts nothing at present; None while it works."""
        return self.log.failure if isinstance(self.log, DurableLog) else None

    def prepare_commits(
        self,
        world: World,
        *,
        on_moved: Callable[[], None],
        on_failed: Callable[[Refused], None],
        on_recovered: Callable[[], None],
        rebuild: Callable[[], Awaitable[None]],
        tick_callbacks: TickCallbacks,
    ) -> None:
        """Create the committer and the reopener of a durable log; `run` runs them.

        `on_moved`, `on_failed`: see `Committer`; `on_recovered`, `rebuild`: see `LogReopener`.
        """
        if not isinstance(self.log, DurableLog):
            return

        def handle_recovery(report: RecoveryReport) -> None:
            self.recovery = report
            on_recovered()

        def handle_failure(refusal: Refused, error: Exception) -> None:
            on_failed(refusal)
            self._note_moved()
            reopener.note_failed(error)

        def handle_move() -> None:
            reopener.note_committed()
            on_moved()
            self._note_moved()

        self.reopener = reopener = LogReopener(
            self.log,
            self._threads,
            world,
            on_stopped=on_failed,
            on_recovered=handle_recovery,
            rebuild=rebuild,
            pause_writers=self._pause_checkpoints,
        )
        self.committer = Committer(
            self.log,
            on_moved=handle_move,
            on_failed=handle_failure,
            now=world.clock.now,
            tick_callbacks=tick_callbacks,
        )

    def _note_moved(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.note_progress()

    @asynccontextmanager
    async def _pause_checkpoints(self) -> AsyncIterator[None]:
        """Stop the checkpointer for good, while it writes nothing; a new one replaces it."""
        if self.checkpointer is None:
            yield
        else:
            async with self.checkpointer.lock:
                self.checkpointer.stop()
                yield

    async def run(self, world: World) -> None:
        """Commit, and recover a failed log, until cancelled."""
        if self.committer is not None and self.reopener is not None:
            async with world.own_thread() as thread, anyio.create_task_group() as tasks:
                tasks.start_soon(self.reopener.run)
                await self.committer.run(thread)

    async def run_housekeeping(
        self,
        cursors: Callable[[], Mapping[str, SavedCursor]],
        origins: Callable[[], Origins],
        world: World,
    ) -> None:
        """Run retention, store cursors and times, reserve epochs: once a second, until cancelled.

        A disk failure is logged, and retried: until then the stored cursors lag, and deltas are redelivered.
        """
        threads = world.new_threads()
        while self.disk is not None:
            await anyio.sleep(HOUSEKEEPING_S)
            if isinstance(self.log, DurableLog):
                if self.log.roll() or self.log.retain():
                    assert self.committer is not None
                    self.committer.notify()
                if self.log.failure is None and self.log.reserve.missing:
                    await threads.run(partial(_take_reserve, self.log))
                if self._times is not None:
                    await self._times.store(threads)
                await self._reserve_epochs(origins(), threads)
            try:
                await self.write_cursors(cursors, threads)
            except OSError as error:
                logger.warning("the sinks' cursors could not be written; the service retries: %s", error)

    async def _reserve_epochs(self, origins: Origins, threads: Threads) -> None:
        """Raise the number of openings to cover the requested epochs, so that no epoch recurs."""
        log, requested = self.log, origins.epoch_requested
        if not requested or not isinstance(log, DurableLog) or self.checkpointer is None:
            return
        async with self.checkpointer.lock:  # a recovery writes the same file, so it waits for this
            if log.failure is not None:
                return
            try:
                await threads.run(partial(log.raise_openings, openings_for(requested)))
            except OSError as error:
                logger.warning("epochs could not be reserved; the service retries: %s", error)
                return
        origins.note_reserved(epoch_limit(log.openings))

    async def compress(self, world: World) -> None:
        """Compress sealed segments until cancelled, if the settings ask for it."""
        if self.committer is not None and isinstance(self.log, DurableLog):
            await compress_sealed(self.log, world, notify=self.committer.notify)

    async def compact(self, world: World) -> None:
        """Compact the log's oldest part into snapshots until cancelled, if the settings ask for it."""
        if self.committer is not None and isinstance(self.log, DurableLog):
            await compact(self.log, world, notify=self.committer.notify)

    async def write_cursors(self, cursors: Callable[[], Mapping[str, SavedCursor]], threads: Threads) -> None:
        """Store the sinks' cursors, if they have changed. Raises OSError."""
        # read under the lock, so that older cursors never overwrite newer ones
        async with self._cursors_lock:
            disk, durable_offset = self.disk, self.log.offset_at_level(AckLevel.DURABLE)
            # Rows that are not synced may be lost in a power cut, and other deltas take their offsets.
            current = {
                name: cursor._replace(processed=min(cursor.processed, durable_offset))
                for name, cursor in cursors().items()
            }
            if disk is not None and current != self.cursors:
                await threads.run(
                    lambda: self._use_reserve(lambda: write_cursors(disk, self.log.log_id, current))
                )
                self.cursors = current

    def _use_reserve(self, write: Callable[[], None]) -> None:
        """Write a small file, also on a full disk. Runs on a thread. Raises OSError."""
        if isinstance(self.log, DurableLog):
            self.log.reserve.use(write)
        else:
            write()

    async def restore(self, pipeline: Pipeline, world: World) -> None:
        """Restore the pipeline's watermarks, first offsets, ids, heads and clocks.

        They come from the newest usable checkpoint, and from a replay of the log after it.
        """
        log, now = self.log, world.clock.now()
        if not isinstance(log, DurableLog) or self.committer is None:
            return
        checkpointer = Checkpointer(log, pipeline, self.committer, world)
        try:
            offset = await checkpointer.restore(now)
            if self.recovery is not None:
                self.recovery.checkpoint = offset if checkpointer.is_restored else None
            while offset < log.high_watermark:
                batches = log.read(offset, rows_max=_RESTORE_ROWS, bytes_max=_RESTORE_BYTES)
                for logged in batches:
                    pipeline.restore(logged, now)
                    checkpointer.note_replayed(logged)
                offset = batches[-1].next_offset
                await checkpointer.spill_ids()
                await anyio.lowlevel.checkpoint()
        except BaseException:
            pipeline.appender.ids.close()
            raise
        pipeline.appender.note_time(log.position().latest_time)
        # Set only now: if the restore is interrupted, a partial state must not be saved as a full one.
        self.checkpointer = checkpointer

    async def write_checkpoints(self) -> None:
        """Write a checkpoint whenever one is due, until cancelled."""
        while self.checkpointer is not None:
            await self.checkpointer.run()  # runs until the log fails and a new checkpointer replaces it
            await anyio.sleep(HOUSEKEEPING_S)

    async def drain(self, timeout_s: float) -> None:
        """Commit everything appended, as far as the time allows."""
        if self.committer is not None:
            with anyio.move_on_after(timeout_s):
                await self.committer.drain()

    async def close(self) -> None:
        """Commit what was appended, and close the directory. Raises OSError."""
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
    """Allocate the reserve for small writes on a full disk, or log that it failed. Runs on a thread."""
    try:
        log.reserve.allocate(log.settings.free_bytes_min)
    except OSError as error:
        logger.warning("the disk reserve could not be allocated; the service retries: %s", error)


def check_data(data: object, log: object) -> tuple[str | None, LogSettings]:
    """Return the data directory, None for an in-memory log, and the log's settings. Raises UsageError."""
    if log is not None:
        check_instance("log", log, LogSettings, "delta_prop.LogSettings(…)")
        if data is None:
            raise UsageError(
                "log: LogSettings are for a log in a directory: give data=DIR too; an in-memory log has its "
                "bounds in Settings(log_deltas_max=…, log_bytes_max=…)"
            )
    if data is None:
        return None, LogSettings()
    path = check_path("data", data)
    if "\0" in path:
        raise UsageError(f"data {path!r:.60} does not name a directory: give a path, or leave data out")
    return path, log if isinstance(log, LogSettings) else LogSettings()
