"""The log on disk of one partition, with its tasks: commits, recovery in place, checkpoints, compaction.

A thread of its own waits for the disk.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.lowlevel

from delta_prop.partition.ingest.epochs import epoch_limit, openings_for
from delta_prop.partition.ingest.origins import Origins
from delta_prop.partition.state.checkpointing import Checkpointer
from delta_prop.partition.storage.background import compact, compress_sealed
from delta_prop.partition.storage.committer import Committer
from delta_prop.partition.storage.log_reopener import LogReopener
from delta_prop.partition.storage.log_times import LogTimes
from delta_prop.platform.tick_callbacks import TickCallbacks
from delta_prop_broker.disk import Disk
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.recovery.recovery import RecoveryReport
from delta_prop_broker.subdirectory import Subdirectory
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from delta_prop.partition.pipeline import Pipeline
    from delta_prop.platform.ports import Threads, World
    from delta_prop_broker.catalogue.store import PartitionPlace
    from delta_prop_broker.log.data_directory import DataDirectory
    from delta_prop_broker.log.settings import LogSettings

logger = logging.getLogger("delta_prop")

HOUSEKEEPING_S = 1.0
_RESTORE_ROWS, _RESTORE_BYTES = 100_000, 16 * 1024 * 1024


class StorageOwner(Protocol):
    """The partition of a log on disk, which its storage notifies on the event loop."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline, once it was created."""

    def note_moved(self) -> None:
        """Note that the marks of the log have moved."""

    def note_failed(self, refusal: Refused) -> None:
        """Note that the log has failed, or that it will not be recovered any more."""

    def note_recovered(self) -> None:
        """Note that the log was recovered in place, in the tick in which it resumes."""

    async def rebuild_state(self) -> None:
        """Restore the state from the recovered log. Raises what reading the log raises."""


class Storage:
    """A log on disk with the tasks that it needs. `recovery`: the result of its last recovery."""

    def __init__(
        self, log: DurableLog, recovery: RecoveryReport, disk: Disk, world: World, threads: Threads
    ) -> None:
        self.log = log
        self.disk = disk
        self.recovery = recovery
        self.checkpointer: Checkpointer | None = None
        self.reopener: LogReopener
        self.committer: Committer
        self._owner: StorageOwner
        self._tick_callbacks: TickCallbacks
        self._world = world
        self._threads = threads
        self._times = LogTimes(log)

    @classmethod
    async def open(cls, path: str, settings: LogSettings, world: World) -> Storage:
        """Create or recover the log below `path`. Raises LogBusy, LogCorrupted, FormatUnknown, OSError."""
        disk = world.open_disk(path)
        open_log = partial(
            DurableLog.open, disk, settings=settings, randomness=world.randomness, clock=world.clock
        )
        return await cls._open(open_log, disk, world)

    @classmethod
    async def open_in(
        cls, data: DataDirectory, place: PartitionPlace, settings: LogSettings, world: World
    ) -> Storage:
        """Create or recover one of several logs in an open data directory, which the caller closes later.

        `disk` is then the directory of what belongs to the log's readers. Raises as `open`, but for LogBusy.
        """
        state = Subdirectory(data.disk, place.state_path) if place.state_path else data.disk

        def open_log() -> tuple[DurableLog, RecoveryReport]:
            opened = DurableLog.open_in(
                data, place.log_path, place.name,
                settings=settings, randomness=world.randomness, clock=world.clock,
            )  # fmt: skip
            if place.state_path:
                state.make_directory("")
                data.disk.sync_directory(place.state_path.rpartition("/")[0])
            return opened

        return await cls._open(open_log, state, world)

    @classmethod
    async def _open(
        cls, open_log: Callable[[], tuple[DurableLog, RecoveryReport]], disk: Disk, world: World
    ) -> Storage:
        threads = world.new_threads()
        log, recovery = await threads.run(open_log)
        storage = cls(log, recovery, disk, world, threads)
        try:
            await threads.run(partial(_take_reserve, log))
        except BaseException:
            await storage.close()
            raise
        return storage

    def connect(self, owner: StorageOwner, tick_callbacks: TickCallbacks) -> None:
        """Create what notifies the owner; `start_tasks` starts it. Call it once, before anything is read."""
        self._owner = owner
        self._tick_callbacks = tick_callbacks
        self.reopener = LogReopener(self, self._threads, self._world)
        self.committer = Committer(self.log, self, clock=self._world.clock, tick_callbacks=tick_callbacks)

    # --- events

    def note_moved(self) -> None:
        """Pass on that a commit has moved the marks."""
        self.reopener.note_committed()
        self._owner.note_moved()
        if not self._tick_callbacks.call_at_end(self._note_progress):
            self._note_progress()

    def note_failed(self, refusal: Refused, error: Exception) -> None:
        """Pass on that a commit has failed, and start the recovery."""
        self._owner.note_failed(refusal)
        self._note_progress()
        self.reopener.note_failed(error)

    def note_stopped(self, refusal: Refused) -> None:
        """Pass on that the log will not be recovered any more."""
        self._owner.note_failed(refusal)

    def note_recovered(self, report: RecoveryReport) -> None:
        """Pass on that the log was recovered, in the same tick."""
        self.recovery = report
        self._owner.note_recovered()

    async def rebuild_state(self) -> None:
        """Have the owner restore its state from the recovered log."""
        await self._owner.rebuild_state()

    def _note_progress(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.note_progress()

    @asynccontextmanager
    async def pause_checkpoints(self) -> AsyncIterator[None]:
        """Stop the checkpointer for good, once it writes nothing; `restore` creates its successor."""
        if self.checkpointer is None:
            yield
        else:
            async with self.checkpointer.lock:
                self.checkpointer.stop()
                yield

    # --- tasks

    def start_tasks(self, tasks: TaskGroup) -> None:
        """Start the tasks; they run until cancelled."""
        tasks.start_soon(self._commit)
        tasks.start_soon(self._write_checkpoints)
        tasks.start_soon(self._run_housekeeping)
        tasks.start_soon(partial(compress_sealed, self.log, self._world, self.committer))
        tasks.start_soon(partial(compact, self.log, self._world, self.committer))

    async def _commit(self) -> None:
        async with self._world.own_thread() as thread, anyio.create_task_group() as tasks:
            tasks.start_soon(self.reopener.run)
            await self.committer.run(thread)

    async def _write_checkpoints(self) -> None:
        while self.checkpointer is not None:
            await self.checkpointer.run()  # runs until the log fails and a new checkpointer replaces it
            await anyio.sleep(HOUSEKEEPING_S)

    async def _run_housekeeping(self) -> None:
        """Run retention, store times, reserve epochs: once a second. A disk failure is retried."""
        threads, log = self._world.new_threads(), self.log
        while True:
            await anyio.sleep(HOUSEKEEPING_S)
            if log.roll() or log.retain():
                self.committer.notify()
            if log.failure is None and log.reserve.missing:
                await threads.run(partial(_take_reserve, log))
            await self._times.store(threads)
            await self._reserve_epochs(self._owner.pipeline.origins, threads)

    async def _reserve_epochs(self, origins: Origins, threads: Threads) -> None:
        """Store openings that cover the requested epochs, so that no later start grants them again."""
        log, requested = self.log, origins.epoch_requested
        if not requested or self.checkpointer is None:
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

    # --- what others use

    async def restore(self, pipeline: Pipeline) -> None:
        """Restore the pipeline's watermarks, first offsets, ids, heads and clocks.

        From the newest usable checkpoint, and a replay of the log after it.
        """
        log, now = self.log, self._world.clock.now()
        checkpointer = Checkpointer(log, pipeline, self.committer, self._world)
        try:
            offset = await checkpointer.restore(now)
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

    def truncate(self, before: int) -> None:
        """Remove the rows below an offset, in the background. Raises UsageError."""
        self.log.truncate(before)
        if self.checkpointer is not None:
            self.checkpointer.request()  # a start must need none of them
        self.remove_replaced()

    def replace_rows(self) -> int:
        """Have a snapshot replace all rows that there are now, in the background; return their end."""
        end = self.log.replace_rows()
        self.remove_replaced()
        return end

    def remove_replaced(self) -> None:
        """Have a commit remove the files of rows that a snapshot has replaced."""
        self.log.retain()
        self.committer.notify()

    async def drain(self, timeout_s: float) -> None:
        """Commit everything appended, as far as the time allows."""
        with anyio.move_on_after(timeout_s):
            await self.committer.drain()

    async def close(self) -> None:
        """Commit what was appended, and close the directory. Raises OSError."""
        log = self.log
        with anyio.CancelScope(shield=True):
            if self.checkpointer is not None and log.synced == log.next_offset:
                await self.checkpointer.write()
            if self.checkpointer is not None:
                self.checkpointer.close()
            if log.failure is None:
                log.clock.read()
            await self._threads.run(log.close)


def _take_reserve(log: DurableLog) -> None:
    """Reserve disk space for small writes on a full disk, if there is any. For a thread."""
    try:
        log.reserve.allocate(log.settings.free_bytes_min)
    except OSError as error:
        logger.warning("the disk reserve could not be allocated; the service retries: %s", error)
