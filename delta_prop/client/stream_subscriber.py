"""A subscriber of all partitions of a stream. It merges their deltas, and has a cursor for each partition.

Each partition's deltas come in the order of its log, each once; there is no order between partitions. Each
partition has a `Subscriber` of its own, with a connection of its own, which does the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import anyio

from delta_prop.client.closing import close_tasks
from delta_prop.client.connector import Connector
from delta_prop.client.consumer_state import CREDIT
from delta_prop.client.delivered_batch import DeliveredBatch
from delta_prop.client.partition_choice import PartitionChoice, check_open_count
from delta_prop.client.partition_readers import PartitionReaders
from delta_prop.client.partitioning import OTHERS_TIMEOUT_S, none_answered
from delta_prop.client.positions import StartPosition, time_start
from delta_prop.client.settings import ClientSettings
from delta_prop.client.stream_lookup import describe_stream
from delta_prop.client.subscriber import Subscriber
from delta_prop.platform.ports import Tls, World
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, Priority, Source
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import Start, StartAt

T = TypeVar("T")
_FEWER = "read fewer, with partitions=…"

StreamStart: TypeAlias = "str | datetime | Sequence[Cursor | None]"
"""Where to start: "earliest" or "latest" in all partitions, a time, or an earlier subscriber's cursors."""


class StreamDelivered(NamedTuple):
    """One delta, with its partition, and its offset and Lamport number in that partition's log."""

    partition: int
    offset: int
    lamport: int
    delta: Delta


class StreamSubscriber:
    """`async with StreamSubscriber("host:7373", "ns:docs", stream="orders") as s: async for one in s: …`

    It reads all partitions, or those that `assign` names. While a partition does not answer, the deltas of
    the others are delivered. With `group`, each partition stores the reader's cursor beside its own log.

    *Resources*: a `Subscriber` for each partition that it reads, up to 1,000. *Errors*: an error that ends
    one of them ends all; otherwise its deltas would be missed silently. When it opens, also Refused
    (UNKNOWN_STREAM).
    """

    def __init__(
        self,
        addresses: str | Iterable[str],
        *topics: str,
        stream: str | int,
        partitions: Iterable[int] = (),
        start: StreamStart | None = None,
        group: str | None = None,
        ack: Literal["auto", "manual"] = "auto",
        sources: Sequence[Source] = (),
        priorities: Sequence[Priority] = (),
        credit: tuple[int, int] = CREDIT,
        name: str = "subscriber",
        token: str | None = None,
        tls: Tls | None = None,
        settings: ClientSettings | None = None,
        world: World | None = None,
    ) -> None:
        """`addresses`: those of one service, tried in turn. `stream`: its name or id. `partitions`: read only
        these, as `assign` says; none: all. `start`: as for `Subscriber`, but no offset; or the `cursors` of
        an earlier subscriber. `credit`: the deltas and bytes of each partition that may be here and not taken
        yet. Others: as for `Subscriber`.
        """
        self.name, self.stream = name, PartitionChoice(stream).stream
        self._connector = Connector(addresses, token=token, tls=tls, settings=settings, world=world)
        self.settings = self._connector.settings
        self._start = _check_start(start)
        self._new_subscriber = partial(
            Subscriber,
            [str(address) for address in self._connector.addresses],
            *topics,
            group=group,
            ack=ack,
            sources=sources,
            priorities=priorities,
            credit=credit,
            name=name,
            token=token,
            tls=tls,
            settings=replace(self.settings, open_timeout_s=self.settings.reconnect_timeout_s),
            world=world,
        )
        self._new_subscriber(start=None if isinstance(self._start, list) else self._start)  # checks all
        self._first_partitions = tuple(partitions)
        self._readers: PartitionReaders | None = None
        self._paused: set[int] = set()
        self._last: int | None = None  # the partition of what was returned last
        self._exit = AsyncExitStack()

    # --- opening and closing

    async def __aenter__(self) -> StreamSubscriber:
        if self._readers is not None:
            raise UsageError(f"subscriber {self.name!r} was opened before: create another one")
        self._connector.open()
        stream = await describe_stream(self.stream, self._connector)
        check_open_count(self.stream, len(self._first_partitions) or stream.count, _FEWER)
        starts = _starts_of(self._start, stream.name, stream.count)
        await self._exit.__aenter__()
        readers = self._readers = PartitionReaders(
            partial(self._new_subscriber, stream=stream.stream),
            starts,
            is_grouped=self._new_subscriber.keywords["group"] is not None,
            tasks=await self._exit.enter_async_context(anyio.create_task_group()),
        )
        try:
            readers.assign(self._first_partitions)
            await self._wait_started(readers)
        except BaseException as error:
            await self._close(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(error)

    async def _close(self, error: BaseException | None) -> None:
        if self._readers is not None:
            self._readers.close()
        await close_tasks(self._exit, error)

    async def _wait_started(self, readers: PartitionReaders) -> None:
        """Wait until all partitions have answered, or up to `OTHERS_TIMEOUT_S` after the first answer."""
        with anyio.move_on_after(self.settings.open_timeout_s) as scope:
            while not all(subscriber.started for subscriber in readers.all()):
                for partition in readers.turns:
                    readers.take(partition, Subscriber.check)
                if any(subscriber.started for subscriber in readers.all()):
                    scope.deadline = min(scope.deadline, anyio.current_time() + OTHERS_TIMEOUT_S)
                await readers.changes.wait()
        if not any(subscriber.started for subscriber in readers.all()):
            raise none_answered(self.stream, readers.count, self.settings.open_timeout_s)

    # --- reading

    def __aiter__(self) -> StreamSubscriber:
        return self

    async def __anext__(self) -> StreamDelivered:
        readers = self._check_open()
        while (found := self._poll(readers, Subscriber.take_row)) is None:
            await readers.changes.wait()
        partition, (batch, row) = found
        if row + 1 < batch.count:
            readers.turns.rotate(1)  # the rest of its batch comes next
        return StreamDelivered(partition, *batch.row(row))

    async def next_batch(self) -> tuple[int, DeliveredBatch]:
        """Return a partition and its next batch; partitions are served in turn.

        Raises the error that ended a subscriber.
        """
        readers = self._check_open()
        while (found := self._poll(readers, Subscriber.take_batch)) is None:
            await readers.changes.wait()
        return found

    async def batches(self) -> AsyncIterator[tuple[int, DeliveredBatch]]:
        """Yield batches as `next_batch` returns them, without end."""
        while True:
            yield await self.next_batch()

    def pause(self, *partitions: int) -> None:
        """Return no deltas of these partitions until `resume`; up to `credit` of each wait here meanwhile.

        Raises UsageError.
        """
        self._paused.update(list(map(self._check_open().check, partitions)))

    def resume(self, *partitions: int) -> None:
        """Return deltas of these partitions again. Raises UsageError."""
        readers = self._check_open()
        self._paused.difference_update(list(map(readers.check, partitions)))
        readers.changes.notify()

    def ack(self, partition: int, offset: int) -> None:
        """Note that all deltas of a partition up to and including `offset` are processed. Never waits.

        Raises UsageError.
        """
        self._check_open().get(partition).ack(offset)

    # --- positions

    def assign(self, *partitions: int) -> None:
        """Read only these partitions from now on; without any: all.

        The unread deltas of the others are dropped. A partition that is assigned again continues at its
        cursor. Raises UsageError.
        """
        readers = self._check_open()
        check_open_count(self.stream, len(partitions) or readers.count, _FEWER)
        readers.assign(partitions)

    def seek(self, partition: int, position: StartPosition) -> None:
        """Return the deltas of a partition from `position` on next; see `Subscriber.seek`.

        Raises UsageError, also if the partition is not assigned.
        """
        self._check_open().get(partition).seek(position)

    async def end_offsets(self) -> list[int]:
        """Ask for the end of each partition; see `Subscriber.end_offset`. Raises Refused, UsageError."""
        return await self._check_open().find_offsets(Start(StartAt.LATEST))

    async def offsets_for_time(self, time: datetime) -> list[int]:
        """Ask for the offset of a time in each partition; see `Subscriber.offset_for_time`.

        Raises Refused, UsageError.
        """
        return await self._check_open().find_offsets(time_start("time", time))

    @property
    def partitions(self) -> int:
        """The number of partitions of the stream. Raises UsageError before the subscriber is open."""
        return self._check_open().count

    @property
    def assigned(self) -> list[int]:
        """The partitions that it reads. Raises UsageError before the subscriber is open."""
        return sorted(self._check_open().turns)

    @property
    def cursors(self) -> list[Cursor | None]:
        """The cursor of each partition, for `start` of a later subscriber; None where nothing was read.

        Raises UsageError before the subscriber is open.
        """
        readers = self._check_open()
        return [readers.cursor(partition) for partition in range(readers.count)]

    @property
    def started(self) -> bool:
        """True if all partitions that it reads have answered."""
        return self._readers is not None and all(one.started for one in self._readers.all())

    @property
    def unconnected(self) -> list[int]:
        """The partitions that it reads that have no connection."""
        readers = self._check_open()
        return [number for number in self.assigned if _is_unconnected(readers.get(number))]

    @property
    def standing_by(self) -> list[int]:
        """The partitions whose deltas another reader of the group gets, until it leaves."""
        readers = self._check_open()
        return [partition for partition in self.assigned if readers.get(partition).standing_by]

    @property
    def waits_for(self) -> Exception | None:
        """The reason why a partition that it reads has no connection, if known; the first such reason."""
        causes = () if self._readers is None else (one.waits_for for one in self._readers.all())
        return next((cause for cause in causes if cause is not None), None)

    # --- helpers

    def _poll(
        self, readers: PartitionReaders, take: Callable[[Subscriber], T | None]
    ) -> tuple[int, T] | None:
        """Return the next partition in turn that has something, and this; None if none has."""
        readers.note_processed(self._last)
        turns = readers.turns
        for _ in range(len(turns)):
            partition = turns[0]
            turns.rotate(-1)
            if partition in self._paused:
                readers.take(partition, Subscriber.check)
                continue
            taken = readers.take(partition, take)
            if taken is not None:
                self._last = partition
                return partition, taken
        return None

    def _check_open(self) -> PartitionReaders:
        if self._readers is None:
            raise UsageError(f"subscriber {self.name!r} is not open yet: use it inside its `async with`")
        return self._readers


def _is_unconnected(subscriber: Subscriber) -> bool:
    return not subscriber.started or subscriber.waits_for is not None


def _check_start(start: object) -> str | datetime | list[Cursor | None] | None:
    """Return the start as given, or as a list of cursors. Raises UsageError."""
    if start is None or isinstance(start, str | datetime):
        return start
    if isinstance(start, list | tuple) and not isinstance(start, Cursor):
        cursors = list(start)
        if all(isinstance(cursor, Cursor | None) for cursor in cursors):
            return cursors
    raise UsageError(f"start {start!r:.60}: give earliest, latest, a time, or a cursor for each partition")


def _starts_of(
    start: str | datetime | list[Cursor | None] | None, stream: str, count: int
) -> list[StartPosition | None]:
    """Return the start in each partition; a partition without a cursor starts at its beginning.

    Raises UsageError.
    """
    if not isinstance(start, list):
        return [start] * count
    if len(start) != count:
        raise UsageError(
            f"{len(start)} cursors for {count} partitions of stream {stream!r}: give one for each, in order"
        )
    return ["earliest" if cursor is None else cursor for cursor in start]
