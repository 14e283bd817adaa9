"""One partition: its log, the pipeline that fills it, its marks, and the listener that delivers its rows.

The service scales by its number of partitions. A program that embeds the service has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import anyio

from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.refusals import service_closed
from delta_prop.partition.admission_queue import AdmissionQueue
from delta_prop.partition.capacity_monitor import CapacityMonitor
from delta_prop.partition.core.make_heads import make_vector_heads
from delta_prop.partition.ingest.epochs import epoch_floor, epoch_limit
from delta_prop.partition.ingest.fair_queue import FairQueue
from delta_prop.partition.ingest.origins import Origins
from delta_prop.partition.ingest.seen_ids import WAITING_MAX, SeenIds
from delta_prop.partition.ingest.vector_heads import VectorHeads
from delta_prop.partition.order.orderer import Orderer
from delta_prop.partition.pipeline import Pipeline
from delta_prop.partition.storage.storage import Storage
from delta_prop.platform.tick_callbacks import TickCallbacks
from delta_prop_broker.disk import Disk
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import PRODUCER_ID_BITS
from delta_prop_wire.stamp import LogName

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from delta_prop.api.settings import Settings
    from delta_prop.partition.gate import Gate
    from delta_prop.partition.listener import PartitionListener
    from delta_prop.platform.ports import Clock, World
    from delta_prop_broker.catalogue.store import PartitionPlace
    from delta_prop_broker.log.data_directory import DataDirectory
    from delta_prop_broker.log.settings import LogSettings


TICK_S_MAX = 1.0
TICK_S_MIN = 0.001
"""Longest and shortest wait between two ticks."""


class Partition:
    """One log with all that belongs to it.

    `pipeline.offer` appends, `log.read` reads, `log` has the marks; `storage` has what only a log on disk
    has, None for a log in memory.

    *Resources*: `start_tasks` starts its tasks; `close` closes the log, once they have ended.
    *Errors*: a failed log refuses all work until it is recovered; the listener is notified.
    """

    def __init__(
        self,
        log: MemoryLog | DurableLog,
        settings: Settings,
        world: World,
        storage: Storage | None = None,
    ) -> None:
        """Use `create_in_memory`, `open_directory` or `open_in`."""
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

    @classmethod
    async def open_in(
        cls,
        data: DataDirectory,
        place: PartitionPlace,
        log_settings: LogSettings,
        settings: Settings,
        world: World,
    ) -> Partition:
        """Create or recover one of several partitions of an open data directory.

        Raises LogCorrupted, FormatUnknown, OSError.
        """
        storage = await Storage.open_in(data, place, log_settings, world)
        return cls(storage.log, settings, world, storage)

    @property
    def name(self) -> LogName:
        """Its stream and its number in the stream."""
        return self.log.name

    @property
    def disk(self) -> Disk | None:
        """The directory of the sinks' cursors and the like; None for a log in memory."""
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
        """Route what the log's marks have passed; acknowledge it once subscribers were sent it.

        So the time for the acknowledgements does not delay the deliveries.
        """
        with self.tick_callbacks:
            self.pipeline.ack_tracker.route_visible()
            if not self.tick_callbacks.call_at_end(self._acknowledge):
                self._acknowledge()

    def _acknowledge(self) -> None:
        self._listener.note_moved()
        self.pipeline.ack_tracker.acknowledge_stored()
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
            _create_parts(self.settings, None if storage is None else storage.log.openings),
            self._listener,
            own_producer_id=own_producer_id,
            partition=self.name.partition,
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


class Ticker:
    """Ticks a pipeline: when its next deadline is due, when the gate may admit, and when it is woken."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event = anyio.Event()
        self._is_gate_timer_set = False

    def wake(self) -> None:
        """Tick now."""
        self._event.set()

    def wake_queue(self) -> None:
        """Tick now for work that waits at the gate, unless the timer for it is set already."""
        if not self._is_gate_timer_set:
            self._event.set()

    async def run(self, pipeline: Pipeline) -> None:
        """Tick until cancelled."""
        while True:
            self._event = anyio.Event()
            now = self._clock.now()
            deadline, gate_s = pipeline.tick(now), pipeline.gate_wait_s(now)
            wait_s = TICK_S_MAX if deadline is None else min(max(deadline - now, 0), TICK_S_MAX)
            self._is_gate_timer_set = gate_s is not None
            with anyio.move_on_after(max(wait_s if gate_s is None else min(wait_s, gate_s), TICK_S_MIN)):
                await self._event.wait()


class PipelineParts(NamedTuple):
    """The parts of a pipeline that settings bound, each with an empty state."""

    queue: FairQueue
    orderer: Orderer
    ids: SeenIds
    origins: Origins
    vectors: VectorHeads


def _create_parts(settings: Settings, openings: int | None) -> PipelineParts:
    """Create the parts. `openings`: how often the log was opened, which bounds epochs; None in memory."""
    if openings is None:
        ids = SeenIds(
            generation_ids=settings.memory_ids_per_generation, retained_min=settings.ids_retained_min
        )
    else:
        ids = SeenIds(
            generation_ids=settings.ids_per_generation,
            retained_min=settings.ids_retained_min,
            waiting_max=WAITING_MAX,
            index_bytes_max=settings.id_index_bytes_max,
        )
    return PipelineParts(
        queue=FairQueue(
            capacity_deltas=settings.queue_deltas_max,
            capacity_bytes=settings.queue_bytes_max,
            high=settings.queue_high_mark,
            low=settings.queue_low_mark,
            ageing_s=settings.queue_ageing_s,
        ),
        orderer=Orderer(
            ids,
            pending_deltas_max=settings.pending_deltas_max,
            pending_bytes_max=settings.pending_bytes_max,
            pending_timeout_s=settings.pending_timeout_s,
        ),
        ids=ids,
        origins=Origins(
            origins_max=settings.origins_max,
            per_owner_max=settings.origins_per_owner_max,
            epoch_floor=epoch_floor(openings),
            epoch_limit=epoch_limit(openings),
        ),
        vectors=make_vector_heads(heads_max=settings.heads_max),
    )
