"""The `SinkContext` of one sink of a partition: what a sink may ask and tell the service.

The history of single vectors is what the log, or its snapshot, still holds of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager

from delta_prop.delivery.feed import Feed
from delta_prop.delivery.quarantine import Quarantine
from delta_prop.delivery.rebuild import oldest_known_offset
from delta_prop.delivery.redelivery import ReplayRequest
from delta_prop.partition.ingest.expectations import is_alive_after
from delta_prop.partition.partition import Partition
from delta_prop.platform.ports import Clock, Threads
from delta_prop_broker.log.contract import Log
from delta_prop_sinks.pace import Pace
from delta_prop_sinks.sink import TryAgain
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import AckLevel, Head
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode


class PartitionSinkContext:
    """The context of a sink with these topics. `feed` is None until the sink is open."""

    def __init__(
        self, partition: Partition, topics: frozenset[str], quarantine: Quarantine | None = None
    ) -> None:
        self.topics = topics
        self.feed: Feed | None = None
        self._quarantine = quarantine  # that of the feed
        self._partition = partition
        self._log = partition.log
        self._world = partition.world
        self._threads: Threads | None = None

    @property
    def log_id(self) -> bytes:
        """Id of the log that deliveries come from."""
        return self._log.log_id

    @property
    def epoch(self) -> int:
        """Epoch of that log."""
        return self._log.epoch

    @property
    def log_start(self) -> int:
        """Oldest offset that the log still holds, or that its snapshot includes; 0 if nothing was removed."""
        return oldest_known_offset(self._log)

    @property
    def clock(self) -> Clock:
        """Clock of elapsed and wall time."""
        return self._world.clock

    @property
    def threads(self) -> Threads:
        """Worker thread of this sink, created at the first use."""
        if self._threads is None:
            self._threads = self._world.new_threads()
        return self._threads

    def own_thread(self) -> AbstractAsyncContextManager[Threads]:
        """Return a new thread that lasts as long as the scope."""
        return self._world.own_thread()

    def background_thread(self) -> AbstractAsyncContextManager[Threads]:
        """Return a new thread of low priority that lasts as long as the scope."""
        return self._world.background_thread()

    def committed(self, next_offset: int) -> None:
        """Note that the sink is durable up to this offset."""
        if self.feed is not None:
            self.feed.cursor.note_committed(next_offset)

    def dimension(self, namespace: str) -> int | None:
        """Return the dimension of a namespace's vectors; None while it has none."""
        # With a log in memory, a sink that opens may hold vectors of an earlier log, and reports their
        # dimensions.
        if self.feed is None and self._log.ack_level is AckLevel.MEMORY:
            return None
        return self._partition.pipeline.appender.vectors.dimension(namespace) or None

    def first_missing(self, watermarks: Mapping[int, int]) -> int | None:
        """Return the offset of the first delta that a log with these watermarks lacks; None if unknown."""
        return self._partition.pipeline.appender.first_missing(watermarks)

    def rewind(self, offset: int) -> None:
        """Redeliver from an offset. Raises Refused."""
        if offset < self._log.start_offset:
            raise Refused(ErrorCode.CURSOR_TOO_OLD, f"the log starts at offset {self._log.start_offset}")
        assert self.feed is not None
        self.feed.add_request(ReplayRequest(None, drop=False, reset_to=offset))

    async def history(self, vectors: Collection[tuple[str, str]]) -> AsyncIterator[tuple[LoggedBatch, int]]:
        """Yield the deltas that the log still holds of some vectors, in log order, as (batch, row).

        Leaves out those in this sink's quarantine, and those dropped from it. The time of reading a long log
        does not count towards the time limit of a sink's call. Raises TryAgain.
        """
        quarantine = self._quarantine
        clock = self._world.clock
        pace, read_since = Pace(clock), clock.now()
        try:
            for batch_and_row in read_history(self._log, vectors):
                if pace.is_due:
                    await pace.rest()
                    if self.feed is not None:
                        self.feed.invoker.note_read(clock.now() - read_since)
                    read_since = clock.now()
                if batch_and_row is None:
                    continue
                logged, row = batch_and_row
                if (
                    logged.batch.is_state
                    or quarantine is None
                    or not quarantine.is_withheld(logged.offset + row)
                ):
                    yield logged, row
        except Refused as refused:
            raise TryAgain(f"the log cannot be read: {refused.message}") from None


_READ_ROWS_MAX = 500
_READ_BYTES_MAX = 1024 * 1024
"""Maximum bytes of one read of the log for a vector's history: some milliseconds of the event loop."""


def find_head(history: Iterable[tuple[LoggedBatch, int] | None]) -> Head | None:
    """Return the head of the vector with these deltas, given in log order; None if there are none."""
    rows = [batch_and_row for batch_and_row in history if batch_and_row is not None]
    alive: bool | None = None
    for logged, row in sorted(rows, key=lambda pair: pair[0].key(pair[1])):
        alive = is_alive_after(logged.batch.kinds[row], alive)
    if alive is None:
        return None
    last_batch, last_row = rows[-1]
    return Head(last_batch.batch.dot(last_row), alive)


def read_history(log: Log, vectors: Collection[tuple[str, str]]) -> Iterator[tuple[LoggedBatch, int] | None]:
    """Yield the deltas that a log still holds of some vectors, in log order. Reads the complete log.

    If the log does not start at 0, its snapshot's rows of the vectors come first. Yields None now and then,
    so that the caller can do other work before the next delta. Raises Refused, LogCorrupted, OSError.
    """
    offset = log.start_offset
    snapshot = log.snapshot() if offset else None
    if snapshot is not None:
        offset = snapshot.offset
        try:
            for namespace, vector_id in sorted(vectors):
                yield snapshot.find(namespace, vector_id)
        finally:
            snapshot.close()
    ids_by_namespace: dict[str, set[str]] = {}
    for namespace, vector_id in vectors:
        ids_by_namespace.setdefault(namespace, set()).add(vector_id)
    while batches := log.read(offset, rows_max=_READ_ROWS_MAX, bytes_max=_READ_BYTES_MAX):
        for logged in batches:
            yield from _matching_rows(logged, ids_by_namespace)
        yield None
        offset = batches[-1].next_offset


def _matching_rows(
    logged: LoggedBatch, ids_by_namespace: Mapping[str, set[str]]
) -> Iterator[tuple[LoggedBatch, int]]:
    batch = logged.batch
    if batch.is_control:
        return
    if batch.namespace is not None:
        ids = ids_by_namespace.get(batch.namespace)
        if ids is not None and not ids.isdisjoint(batch.keys):
            yield from ((logged, row) for row, key in enumerate(batch.keys) if key in ids)
    elif not ids_by_namespace.keys().isdisjoint(batch.namespace_names):
        for row, (namespace, key) in enumerate(zip(batch.namespaces, batch.keys, strict=True)):
            if key in ids_by_namespace.get(namespace, ()):
                yield logged, row
