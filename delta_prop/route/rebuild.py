"""Rebuilding one sink: from the log's newest snapshot, or where the log is whole from its beginning.

The feed asks and gives its turn; deltas wait in the log, which keeps the tail behind the snapshot meanwhile.
Whatever breaks off, the sink, the process, the log that lets go of the tail, the rebuild begins again from
what is newest then; until it has ended the service remembers that the sink holds nothing whole.
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import anyio.lowlevel
import numpy as np

from delta_prop.route.reasons import cannot_be_rebuilt
from delta_prop.route.status import FeedState, RebuildProgress, text_of
from delta_prop.route.table import Nothing
from delta_prop_sinks.sink import Rebuilds, StopSink, TryAgain
from delta_prop_wire.states import StateRow, state_of
from delta_prop_wire.topics import TopicKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from delta_prop.ports import Threads
    from delta_prop.route.feed import Feed
    from delta_prop.route.table import Table, Taker
    from delta_prop_broker.log.contract import Log
    from delta_prop_sinks.sink import Sink
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.topics import Topic

logger = logging.getLogger("delta_prop")

WHOLE_VECTOR_TOPICS = frozenset({TopicKind.ALL, TopicKind.NAMESPACE, TopicKind.VECTOR_ID})
"""Topics that match all deltas of a vector or none, so that a state says what they made of it."""

_SLICE_ROWS = 100


class Snapshot(Protocol):
    """What a rebuild needs of a snapshot: every vector's state as of `offset`, in frames of state rows."""

    @property
    def offset(self) -> int:
        """The log goes on from here."""

    @property
    def begin(self) -> int:
        """The first offset that is counted in; 0 where nothing was lost before."""

    @property
    def rows(self) -> int:
        """How many states there are."""

    @property
    def lamport(self) -> int:
        """The highest Lamport number below the offset."""

    def frames(self) -> Iterator[LoggedBatch]:
        """All states. Blocks on the disk. Raises DeltaPropError where they are damaged, OSError."""

    def find(self, namespace: str, vector_id: str) -> tuple[LoggedBatch, int] | None:
        """One vector's state, as a row. Blocks on the disk. Raises DeltaPropError, OSError."""

    def close(self) -> None:
        """Let go of the file."""


class Rebuilder:
    """Rebuilds one sink whenever that is asked for."""

    def __init__(
        self,
        sink: Rebuilds,
        log: Log,
        table: Table[Taker],
        threads: Callable[[], Threads],
        *,
        hold: Callable[[], None],
        let_go: Callable[[], None],
        keep: Callable[[], Awaitable[None]],
    ) -> None:
        """`threads` read the snapshot. `hold` makes the log keep what the feed needs, `let_go` ends that
        where the sink is not required; `keep` writes down durably, with all cursors, that it is rebuilt.
        """
        self.why: str | None = None
        """Why one is wanted, or under way; None: neither."""
        self.begun = False
        """Whether what the sink holds is void."""
        self.lasting = False
        """True while a rebuild that an operator asked for has not begun: the next process has to know."""
        self.rebuilds = 0
        self._sink = sink
        self._log = log
        self._table = table
        self._threads = threads
        self._hold, self._let_go, self._keep = hold, let_go, keep
        self._asked = 0
        self._offset = self._rows_done = self._rows_total = 0
        self._holds = False

    @property
    def needed(self) -> int | None:
        """From where on the log must be kept for the rebuild; None where none is under way."""
        return self._offset if self._holds and self.why is not None else None

    def ask(self, why: str, *, lasting: bool = False) -> None:
        """Begin one, or begin the one under way again. `lasting`: the next process does, if this one ends."""
        self.why = why
        self.lasting = self.lasting or lasting
        self._asked += 1

    def progress(self) -> RebuildProgress | None:
        """How far it is, None where there is nothing to do."""
        if self.why is None:
            return None
        return RebuildProgress(self.why, self._offset, self._rows_done, self._rows_total)

    def caught_up(self) -> None:
        """The sink has read the tail, or goes: the log need not wait for it on account of a rebuild."""
        if self._holds:
            self._holds = False
            self._let_go()

    async def run(self, feed: Feed) -> None:
        """Rebuild, whatever it takes; or as far as it comes before somebody has to act."""
        assert self.why is not None
        logger.warning("sink %r is rebuilt: %s", feed.name, self.why)
        asked = self._asked
        snapshot: Snapshot | None = None
        try:
            self._keep_from(self._log.first_offset)  # which no snapshot's offset lies below
            snapshot = await self._open(feed, asked)
            offset = 0 if snapshot is None else snapshot.offset
            self._keep_from(offset)
            self._rows_done, self._rows_total = 0, 0 if snapshot is None else snapshot.rows
            self.begun, self.lasting, feed.before = True, False, None
            feed.begin_at(offset)
            await self._try(feed, asked, self._keep)
            await self._try(feed, asked, partial(self._sink.begin_rebuild, offset))
            if snapshot is not None:
                await self._bring(feed, asked, snapshot)
            lamport = 0 if snapshot is None else snapshot.lamport
            await self._try(feed, asked, partial(self._sink.end_rebuild, offset, lamport))
            feed.quarantine.clear(offset)
            if not await feed.kept():  # what is forgotten of it, before the rebuild counts as ended
                return
        except _BrokenOff:
            return
        finally:
            if snapshot is not None:
                snapshot.close()
        self.why, self.begun = None, False
        self.rebuilds += 1
        logger.warning("sink %r is rebuilt as of offset %d, and goes on from there", feed.name, offset)
        feed.rebuilt()

    def _keep_from(self, offset: int) -> None:
        self._offset, self._holds = offset, True
        self._hold()

    async def _open(self, feed: Feed, asked: int) -> Snapshot | None:
        """The newest snapshot; None: the log is whole. Raises _BrokenOff where there is neither."""
        found: Snapshot | None = None

        async def find() -> None:
            nonlocal found
            found = await self._threads().run(partial(newest_snapshot, self._log))

        await self._try(feed, asked, find)
        if found is not None and found.offset < self._log.first_offset:
            found.close()  # what lies between is nowhere any more
            found = None
        if found is None and self._log.first_offset:
            self.caught_up()
            feed.stop(cannot_be_rebuilt(feed.name, self._log.first_offset), FeedState.NEEDS_SNAPSHOT)
            raise _BrokenOff
        return found

    async def _bring(self, feed: Feed, asked: int, snapshot: Snapshot) -> None:
        frames = snapshot.frames()
        while True:
            read: list[LoggedBatch] = []

            async def read_on(read: list[LoggedBatch] = read) -> None:
                try:
                    read += await self._threads().run(lambda: [one for one in (next(frames, None),) if one])
                except Exception as failure:
                    self._asked += 1  # what it had read is lost with it: the newest from its beginning
                    raise TryAgain(f"the snapshot cannot be read: {text_of(failure)}") from failure

            await self._try(feed, asked, read_on)
            if not read:
                return
            rows = self._meant(feed, read[0])  # made part by part: a frame may hold 10,000 of them
            while part := await _some_of(rows, feed.limits.merge_deltas_max):
                await self._try(feed, asked, partial(self._sink.take_states, part), len(part))
                await anyio.lowlevel.checkpoint()  # a sink that never waits must not keep others waiting
            self._rows_done += read[0].count

    def _meant(self, feed: Feed, logged: LoggedBatch) -> Iterator[StateRow]:
        batch = logged.batch
        rows = self._table.rows_for(feed, batch)
        if isinstance(rows, Nothing):
            return
        for row in (np.arange(batch.count) if rows is None else rows).tolist():
            yield StateRow(
                batch.namespaces[row], batch.keys[row], state_of(batch, row), logged.row_offset(row)
            )

    async def _try(
        self, feed: Feed, asked: int, call: Callable[[], Awaitable[None]], in_hand: int = 0
    ) -> None:
        """Call until it is done. Raises _BrokenOff where the sink stopped, or all begins again."""
        while True:
            failure = await feed.attempt(call, FeedState.REBUILDING, in_hand)
            if failure is None:
                break
            if isinstance(failure, StopSink):
                feed.stop(feed.failed(failure.reason))
            else:
                await feed.back_off(failure)
            if feed.ended or self._asked != asked:
                raise _BrokenOff
        if feed.ended or self._asked != asked:
            raise _BrokenOff


async def _some_of(rows: Iterator[StateRow], rows_max: int) -> list[StateRow]:
    """The next of these, which take some 20 µs each to make: others go on between slices."""
    some: list[StateRow] = []
    while len(some) < rows_max and (more := list(islice(rows, min(_SLICE_ROWS, rows_max - len(some))))):
        some += more
        await anyio.lowlevel.checkpoint()
    return some


class _BrokenOff(Exception):
    """This rebuild goes no further; if one is still wanted, it begins again."""


def newest_snapshot(log: Log) -> Snapshot | None:
    """The newest snapshot of a log, open; None where it has none. Raises DeltaPropError, OSError."""
    take: Callable[[], Snapshot | None] | None = getattr(log, "snapshot", None)  # a log in memory has none
    return None if take is None else take()


def has_snapshot(log: Log) -> bool:
    """Whether there is a snapshot from which the log goes on. Raises DeltaPropError, OSError."""
    found = newest_snapshot(log)
    if found is not None:
        found.close()
    return found is not None and found.offset >= log.first_offset


def may_have_snapshot(log: Log) -> bool:
    """Whether `has_snapshot` may be true, by what is known without reading; for the event loop."""
    ask: Callable[[], bool] | None = getattr(log, "may_have_snapshot", None)
    return ask is not None and ask()


def told_from(log: Log) -> int:
    """The first offset of which the log tells, in deltas or in its snapshot; 0 where it has lost nothing."""
    found = newest_snapshot(log) if log.first_offset else None
    if found is None:
        return log.first_offset
    try:
        return found.begin if found.offset >= log.first_offset else log.first_offset
    finally:
        found.close()


def can_be_rebuilt(sink: Sink, topics: Iterable[Topic]) -> bool:
    """Whether states can stand for all deltas that this sink asks for."""
    return isinstance(sink, Rebuilds) and all(topic.kind in WHOLE_VECTOR_TOPICS for topic in topics)
