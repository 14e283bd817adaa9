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

from delta_prop.client.change_signal import ChangeSignal
from delta_prop.client.connector import Connector
from delta_prop.client.consumer_state import CREDIT
from delta_prop.client.delivered_batch import DeliveredBatch
from delta_prop.client.partition_choice import PartitionChoice
from delta_prop.client.partitioning import OTHERS_TIMEOUT_S, none_answered
from delta_prop.client.service_identity import LogMismatch
from delta_prop.client.settings import ClientSettings
from delta_prop.client.stream_lookup import describe_stream
from delta_prop.client.subscriber import StartPosition, Subscriber
from delta_prop.platform.ports import Tls, World
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, Priority, Source
from delta_prop_wire.errors import UsageError

T = TypeVar("T")

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

    While a partition does not answer, the deltas of the others are delivered. With `group`, each partition
    stores the reader's cursor beside its own log.

    *Resources*: a `Subscriber` for each partition. *Errors*: an error that ends one of them ends all;
    otherwise its deltas would be missed silently. When it opens, also Refused (UNKNOWN_STREAM).
    """

    def __init__(
        self,
        addresses: str | Iterable[str],
        *topics: str,
        stream: str | int,
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
        """`addresses`: those of one service, tried in turn. `stream`: its name or id. `start`: as for
        `Subscriber`, but no offset; or the `cursors` of an earlier subscriber. `credit`: the deltas and bytes
        of each partition that may be here and not taken yet. Others: as for `Subscriber`.
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
        self._subscribers: list[Subscriber] = []
        self._paused: set[int] = set()
        self._turn = 0  # the partition that is served next
        self._last: int | None = None  # the partition of what was returned last
        self._exit = AsyncExitStack()

    # --- opening and closing

    async def __aenter__(self) -> StreamSubscriber:
        if self._subscribers:
            raise UsageError(f"subscriber {self.name!r} was opened before: create another one")
        self._connector.open()
        stream = await describe_stream(self.stream, self._connector)
        starts = _starts_of(self._start, stream.name, stream.count)
        self._changes = ChangeSignal()
        self._subscribers = [
            self._new_subscriber(
                stream=stream.stream,
                partition=partition,
                start=start,
                log_id=start.log_id if isinstance(start, Cursor) else None,
            )
            for partition, start in enumerate(starts)
        ]
        await self._exit.__aenter__()
        try:
            for subscriber in self._subscribers:
                await subscriber.begin(self._changes.notify)
                self._exit.push_async_exit(subscriber)
            await self._wait_started()
        except BaseException as error:
            await self._exit.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.__aexit__(kind, error, trace)

    async def _wait_started(self) -> None:
        """Wait until all partitions have answered, or up to `OTHERS_TIMEOUT_S` after the first answer."""
        with anyio.move_on_after(self.settings.open_timeout_s) as scope:
            while not all(subscriber.started for subscriber in self._subscribers):
                for partition in range(self.partitions):
                    self._take(partition, Subscriber.check)
                if any(subscriber.started for subscriber in self._subscribers):
                    scope.deadline = min(scope.deadline, anyio.current_time() + OTHERS_TIMEOUT_S)
                await self._changes.wait()
        if not any(subscriber.started for subscriber in self._subscribers):
            raise none_answered(self.stream, self.partitions, self.settings.open_timeout_s)

    # --- reading

    def __aiter__(self) -> StreamSubscriber:
        return self

    async def __anext__(self) -> StreamDelivered:
        while (found := self._poll(Subscriber.take_row)) is None:
            await self._changes.wait()
        partition, (batch, row) = found
        if row + 1 < batch.count:
            self._turn = partition  # the rest of its batch comes next
        return StreamDelivered(partition, *batch.row(row))

    async def next_batch(self) -> tuple[int, DeliveredBatch]:
        """Return a partition and its next batch; partitions are served in turn.

        Raises the error that ended a subscriber.
        """
        while (found := self._poll(Subscriber.take_batch)) is None:
            await self._changes.wait()
        return found

    async def batches(self) -> AsyncIterator[tuple[int, DeliveredBatch]]:
        """Yield batches as `next_batch` returns them, without end."""
        while True:
            yield await self.next_batch()

    def pause(self, *partitions: int) -> None:
        """Return no deltas of these partitions until `resume`; up to `credit` of each wait here meanwhile.

        Raises UsageError.
        """
        self._paused.update([self._check_partition(partition) for partition in partitions])

    def resume(self, *partitions: int) -> None:
        """Return deltas of these partitions again. Raises UsageError."""
        self._paused.difference_update([self._check_partition(partition) for partition in partitions])
        self._changes.notify()

    def ack(self, partition: int, offset: int) -> None:
        """Note that all deltas of a partition up to and including `offset` are processed. Never waits.

        Raises UsageError.
        """
        self._subscribers[self._check_partition(partition)].ack(offset)

    @property
    def partitions(self) -> int:
        """The number of partitions of the stream. Raises UsageError before the subscriber is open."""
        self._check_open()
        return len(self._subscribers)

    @property
    def cursors(self) -> list[Cursor | None]:
        """The cursor of each partition, for `start` of a later subscriber; None where it has not answered.

        Raises UsageError before the subscriber is open.
        """
        self._check_open()
        return [subscriber.cursor for subscriber in self._subscribers]

    # --- helpers

    def _poll(self, take: Callable[[Subscriber], T | None]) -> tuple[int, T] | None:
        """Return the next partition in turn that has something, and this; None if none has."""
        self._check_open()
        if self._last is not None:
            self._subscribers[self._last].mark_processed()
        for _ in self._subscribers:
            partition = self._turn
            self._turn = (partition + 1) % len(self._subscribers)
            if partition in self._paused:
                self._take(partition, Subscriber.check)
                continue
            taken = self._take(partition, take)
            if taken is not None:
                self._last = partition
                return partition, taken
        return None

    def _take(self, partition: int, take: Callable[[Subscriber], T]) -> T:
        """Take from a partition. Raises the error that ended its subscriber."""
        try:
            return take(self._subscribers[partition])
        except LogMismatch as mismatch:
            raise UsageError(
                f"partition {partition}: its log is {mismatch.log_id.hex()}, but its cursor is of another "
                "one: give the cursors of this stream, in the order of its partitions"
            ) from None

    def _check_open(self) -> None:
        if not self._subscribers:
            raise UsageError(f"subscriber {self.name!r} is not open yet: use it inside its `async with`")

    def _check_partition(self, partition: int) -> int:
        last = self.partitions - 1
        if not isinstance(partition, int) or isinstance(partition, bool) or not 0 <= partition <= last:
            raise UsageError(f"partition {partition!r:.60}: give one from 0 to {last}")
        return partition


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
) -> Sequence[StartPosition | None]:
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
