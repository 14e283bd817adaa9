"""One partition: its log, the pipeline that fills it, its marks, and the listener that delivers its rows.

The service scales by its number of partitions. A program that embeds the service has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.calls.refusals import service_closed
from delta_prop.partition.admission_queue import AdmissionQueue
from delta_prop.partition.capacity_monitor import CapacityMonitor
from delta_prop.partition.pipeline import Pipeline
from delta_prop.partition.pipeline_parts import create_parts
from delta_prop.partition.storage.storage import Storage
from delta_prop.partition.ticker import Ticker
from delta_prop.platform.tick_callbacks import TickCallbacks
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.spec import PRODUCER_ID_BITS

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from delta_prop.api.settings import Settings
    from delta_prop.calls.outcomes import PublishAck
    from delta_prop.partition.gate import Gate
    from delta_prop.partition.listener import PartitionListener
    from delta_prop.platform.ports import World
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_wire.errors import Refused


class Partition:
    """One log with all that belongs to it.

    `pipeline.offer` appends, `log.read` reads, `log` has the marks; `storage` has what only a log on disk
    has, None for a log in memory.

    *Resources*: `start_tasks` starts its tasks; `close` closes the log, once they have ended.
    *Errors*: a failed log refuses all work until it is recovered; the listener is notified.
    """

    def __init__(
        self, log: MemoryLog | DurableLog, settings: Settings, world: World, storage: Storage | None = None
    ) -> None:
        """Use `create_in_memory` or `open_directory`."""
        self.log = log
        self.storage = storage
        self.settings = settings
        self.world = world
        self.pipeline: Pipeline
        self.tick_callbacks = TickCallbacks(world.clock.now, world.call_soon)
        self.admission_queue = AdmissionQueue()
        self.capacity_monitor = CapacityMonitor(log, world.clock)
        self._ticker = Ticker(world.clock)
        self._gate: Gate
        self._listener: PartitionListener
        if storage is not None:
            storage.connect(self, self.tick_callbacks)
        self._own_producer_id = self._draw_producer_id()

    @classmethod
    def create_in_memory(cls, settings: Settings, world: World) -> Partition:
        """Return a partition that is lost with the process."""
        log = MemoryLog(
            world.randomness.bytes(16),
            deltas_max=settings.log_deltas_max,
            bytes_max=settings.log_bytes_max,
            clock=world.clock,
        )
        return cls(log, settings, world)

    @classmethod
    async def open_directory(
        cls, path: str, log_settings: LogSettings, settings: Settings, world: World
    ) -> Partition:
        """Create or recover the partition below `path`.

        Raises LogBusy, LogCorrupted, FormatUnknown, OSError.
        """
        storage = await Storage.open(path, log_settings, world)
        return cls(storage.log, settings, world, storage)

    @property
    def disk(self) -> Disk | None:
        """The data directory; None for a log in memory."""
        return None if self.storage is None else self.storage.disk

    async def start(self, listener: PartitionListener, gate: Gate) -> None:
        """Restore the state from the log. Raises OSError, LogCorrupted."""
        self._listener, self._gate = listener, gate
        self.pipeline = await self._restore_pipeline(self._own_producer_id)

    def start_tasks(self, tasks: TaskGroup) -> None:
        """Start the partition's tasks; they run until cancelled."""
        tasks.start_soon(self._ticker.run, self.pipeline)
        tasks.start_soon(self.tick_callbacks.run)
        if self.storage is not None:
            self.storage.start_tasks(tasks)

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is queued and pending, and commit what is appended, as far as the time allows."""
        self.pipeline.close(self.world.clock.now())
        if self.storage is not None:
            await self.storage.drain(timeout_s)

    async def close(self) -> None:
        """Commit what is left, and notify the callers that still wait of their outcome. Raises OSError."""
        try:
            if self.storage is not None:
                await self.storage.close()
        finally:
            self.pipeline.ack_tracker.advance()
            self.pipeline.ack_tracker.fail(service_closed())

    async def abandon(self) -> None:
        """Close what is open after a start that failed. Raises OSError."""
        if self.storage is not None:
            await self.storage.close()

    # --- questions

    def is_durable(self, offset: int) -> bool:
        """True if all rows below `offset` are synced, or, in a log in memory, appended."""
        return offset <= self.log.offset_at_level(AckLevel.DURABLE)

    def has_stored(self, ack: PublishAck) -> bool:
        """False if a recovery after the acknowledgement lost these deltas."""
        return ack.dot is None or self.pipeline.has_delta(ack.dot.origin, ack.dot.counter)

    # --- events of the tasks and the listener

    def note_progress(self) -> None:
        """Wake callers that wait for capacity: a sink has made progress."""
        self.admission_queue.notify()
        if self.pipeline.queue.depth:
            self._ticker.wake_queue()

    def step(self) -> None:
        """Check for capacity, and note the time; called ten times a second."""
        self.capacity_monitor.poll(self.pipeline)
        self.log.mark_time()
        if self.pipeline.queue.depth:
            self._ticker.wake()

    def note_moved(self) -> None:
        """Route and acknowledge what the log's marks have passed."""
        with self.tick_callbacks:
            self.pipeline.ack_tracker.advance()
            self._listener.note_moved()
        self.admission_queue.notify()
        if self.pipeline.queue.depth:
            self._ticker.wake()

    def note_failed(self, refusal: Refused) -> None:
        """Refuse what is not durable by now, since the log has stopped and may lose it."""
        self.pipeline.stop(refusal, self.world.clock.now())
        self.admission_queue.notify()

    def note_recovered(self) -> None:
        """Notify the listener in the tick of the recovery: new rows may get the offsets of lost rows."""
        assert self.pipeline.stop_refusal is not None
        self._listener.note_recovered()

    async def rebuild_state(self) -> None:
        """Restore the pipeline's state from a recovered log, as at a start; then continue."""
        restored = await self._restore_pipeline(self._draw_producer_id())
        self.pipeline.adopt_state(restored)
        self._listener.note_restored()
        self.admission_queue.notify()
        self._ticker.wake()

    # --- helpers

    def _draw_producer_id(self) -> int:
        return int.from_bytes(self.world.randomness.bytes(6), "big") >> (48 - PRODUCER_ID_BITS)

    async def _restore_pipeline(self, own_producer_id: int) -> Pipeline:
        storage = self.storage
        pipeline = Pipeline(
            self.log,
            create_parts(self.settings, None if storage is None else storage.log.openings),
            self._listener,
            own_producer_id=own_producer_id,
            clock=self.world.clock,
            gate=self._gate,
            ticker=self._ticker,
            committer=None if storage is None else storage.committer,
        )
        if storage is not None:
            await storage.restore(pipeline)
            if storage.log.failure is not None:  # the log failed while it was read
                raise storage.log.failure
        return pipeline
