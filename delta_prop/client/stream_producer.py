"""A producer of all partitions of a stream. Each vector is in one of them, found by a hash of its name.

It assigns rows to partitions and joins their outcomes; each partition has a `Producer` of its own, with a
connection of its own, which does the rest. A partition that does not answer delays only the calls that write
to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

import anyio

from delta_prop.calls.argument_checks import (
    Dependency,
    check_columns,
    check_deltas,
    dependency_key,
    timeout_or_default,
    validate,
)
from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.receipt import Receipt
from delta_prop.client.connector import Connector
from delta_prop.client.counts import Counts
from delta_prop.client.partition_choice import (
    CallPartition,
    PartitionChoice,
    check_call_partition,
    check_messages,
    check_open_count,
)
from delta_prop.client.partitioning import (
    OTHERS_TIMEOUT_S,
    Part,
    PartitionMap,
    StreamPublished,
    join_outcomes,
    local_parents,
    none_answered,
)
from delta_prop.client.producer import Producer
from delta_prop.client.settings import ClientSettings
from delta_prop.client.sticky_partition import StickyPartition, partition_of_counter
from delta_prop.client.stream_lookup import describe_stream
from delta_prop.platform.ports import Tls, World
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import DEFAULT_NAMESPACE, AckLevel, Delta, Kind, Priority, Source
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import NAMESPACE_BYTES_MAX, VECTOR_ID_BYTES_MAX, ErrorCode

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    StreamCause: TypeAlias = "StreamReceipt | StreamPublished | Dependency"

_CLOSE_TIMEOUT_S = 0.01
"""Timeout of each producer's own close: before it, `__aexit__` has flushed all producers together."""
_FIRST_ROW = (0,)


class StreamReceipt:
    """The receipts of a call's parts, awaited as one. A cancelled wait withdraws the parts not yet appended.

    `parts`: (partition, rows, receipt) of each.
    """

    def __init__(self, parts: Sequence[tuple[int, Sequence[int], Receipt]]) -> None:
        self.parts = parts

    @property
    def done(self) -> bool:
        """True once the outcome of every part is known."""
        return all(receipt.done for _, _, receipt in self.parts)

    async def wait(self) -> StreamPublished:
        """Wait for all parts. Raises Refused, StreamRefused."""
        try:
            for _, _, receipt in self.parts:
                with suppress(Refused):
                    await receipt.wait()
        except BaseException:
            for _, _, receipt in self.parts:
                receipt.withdraw()
            raise
        return self.result()

    async def wait_done(self) -> None:
        """Wait until the outcome of every part is known. If this is cancelled, nothing is withdrawn."""
        for _, _, receipt in self.parts:
            await _wait_done(receipt)

    def result(self) -> StreamPublished:
        """Return the outcome. Raises Refused, StreamRefused; UsageError while it is not known."""
        return join_outcomes(
            [
                (partition, rows, receipt.refusal() or receipt.result())
                for partition, rows, receipt in self.parts
            ]
        )

    def __await__(self) -> Generator[object, None, StreamPublished]:
        return self.wait().__await__()


class StreamProducer:
    """`async with StreamProducer("host:7373", name="shop", stream="orders") as p: await p.publish(delta, …)`.

    Causal order holds within a partition: a delta that `after` names in another partition is acknowledged
    there before this call is sent. A call that writes to several partitions has a part in each, with its own
    outcome.

    *Resources*: a `Producer` for each partition, of up to 1,000. *Errors*: those of `Producer`, for calls
    that write to the partition; when it opens, also Refused (UNKNOWN_STREAM).
    """

    def __init__(
        self,
        addresses: str | Iterable[str],
        *,
        name: str,
        stream: str | int,
        token: str | None = None,
        tls: Tls | None = None,
        ack_level: AckLevel | str | None = None,
        source: Source = Source.LOCAL,
        numbered: bool = False,
        settings: ClientSettings | None = None,
        world: World | None = None,
    ) -> None:
        """`addresses`: those of one service, tried in turn. `stream`: its name or id. Else as `Producer`."""
        self.name, self.stream = name, PartitionChoice(stream).stream
        self._connector = Connector(addresses, token=token, tls=tls, settings=settings, world=world)
        self.settings = self._connector.settings
        self._new_producer = partial(
            Producer,
            [str(address) for address in self._connector.addresses],
            name=name,
            token=token,
            tls=tls,
            ack_level=ack_level,
            source=source,
            numbered=numbered,
            settings=replace(
                self.settings,
                close_timeout_s=_CLOSE_TIMEOUT_S,
                open_timeout_s=self.settings.reconnect_timeout_s,
            ),
            world=world,
        )
        self._new_producer()  # checks the arguments
        self._opened_map: PartitionMap | None = None
        self._producers: list[Producer] = []
        self._sticky: StickyPartition
        self._exit = AsyncExitStack()

    # --- opening and closing

    async def __aenter__(self) -> StreamProducer:
        if self._opened_map is not None:
            raise UsageError(f"producer {self.name!r} was opened before: create another one")
        world = self._connector.open()
        stream = await describe_stream(self.stream, self._connector)
        check_open_count(self.stream, stream.count, "use Producer, with partition=…")
        self._opened_map = PartitionMap(stream.count)
        self._sticky = StickyPartition(stream.count, world.randomness.fork("sticky partition"))
        self._producers = [
            self._new_producer(stream=stream.stream, partition=partition) for partition in range(stream.count)
        ]
        await self._exit.__aenter__()
        try:
            for producer in self._producers:
                await producer.begin()
                self._exit.push_async_exit(producer)
            await self._wait_connected()
        except BaseException as error:
            await self._exit.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                # Each producer raises its own error when it closes.
                with suppress(TimeoutError, Refused, UsageError):
                    await self.flush(self.settings.close_timeout_s)
        finally:
            await self._exit.__aexit__(kind, error, trace)

    async def _wait_connected(self) -> None:
        """Wait until all partitions have answered, or up to `OTHERS_TIMEOUT_S` after the first answer."""
        answered = 0
        failures: list[Refused | UsageError] = []
        with anyio.move_on_after(self.settings.open_timeout_s) as scope:
            async with anyio.create_task_group() as tasks:

                async def wait_for(producer: Producer) -> None:
                    nonlocal answered
                    try:
                        await producer.wait_welcomed()
                        answered += 1
                    except (Refused, UsageError) as failure:
                        failures.append(failure)
                        tasks.cancel_scope.cancel()
                    scope.deadline = min(scope.deadline, anyio.current_time() + OTHERS_TIMEOUT_S)

                for producer in self._producers:
                    tasks.start_soon(wait_for, producer)
        if failures:
            raise failures[0]
        if not answered:
            raise none_answered(self.stream, self.partitions, self.settings.open_timeout_s)

    # --- state

    @property
    def partitions(self) -> int:
        """The number of partitions of the stream. Raises UsageError before the producer is open."""
        return self._map().count

    @property
    def in_flight_offers(self) -> int:
        """The number of parts of calls that have no outcome yet."""
        return sum(producer.in_flight_offers for producer in self._producers)

    def partition_of(self, vector_id: str, namespace: str = DEFAULT_NAMESPACE) -> int:
        """Return the partition of a vector, from 0 on."""
        check_name("vector_id", vector_id, VECTOR_ID_BYTES_MAX)
        check_name("namespace", namespace, NAMESPACE_BYTES_MAX)
        return self._map().find(namespace, vector_id)

    def statistics(self) -> list[Counts]:
        """Return, for each partition, the counts of sent batches, of deltas and of outcomes."""
        return [producer.statistics() for producer in self._producers]

    # --- calls

    async def publish(
        self,
        *deltas: Delta,
        partition: CallPartition = None,
        after: Sequence[StreamCause] = (),
        timeout_s: float | None = None,
    ) -> StreamPublished:
        """Send each delta to its partition, and wait for all acknowledgements; see `Producer.publish`.

        First waits for the deltas that `after` names in other partitions. `partition`: sends all to one
        partition instead, by its number; "sticky", for opaque messages: to the present one, which changes
        from time to time. Raises Refused; StreamRefused if only some partitions have acknowledged their part.
        """
        priority, opaque_only = validate(deltas)
        if opaque_only and len(deltas) == 1 and not after:  # the fast path
            delta = deltas[0]
            if partition is None:
                number = self._map().find(delta.namespace, delta.vector_id)
            else:
                number = self._choose(deltas, partition)
            ack = await self._producers[number].publish(delta, timeout_s=timeout_s)
            return StreamPublished(1, (Part(number, _FIRST_ROW, ack),))
        parts = self._group_rows(deltas, partition)
        await self._wait_remote(after, [number for number, _ in parts], timeout_s)
        calls = {
            number: partial(
                self._producers[number].publish_checked,
                priority,
                [_with_local_parents(deltas[row], number) for row in rows],
                opaque_only=opaque_only,
                after=_local_dependencies(after, number),
                timeout_s=timeout_s,
            )
            for number, rows in parts
        }
        return await self._call_all(parts, calls)

    async def publish_many(
        self,
        ids: Sequence[str],
        matrix: ArrayLike,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        kind: Kind = Kind.CREATE,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> StreamPublished:
        """Publish complete vectors as columns, each in its partition; see `Producer.publish_many`."""
        vectors = check_columns(ids, matrix, namespace=namespace, kind=kind, priority=priority)
        parts = self._map().group_columns(namespace, ids)
        calls = {
            partition: partial(
                self._producers[partition].publish_many,
                [ids[row] for row in rows],
                vectors[rows],
                namespace=namespace,
                kind=kind,
                priority=priority,
                timeout_s=timeout_s,
            )
            for partition, rows in parts
        }
        return await self._call_all(parts, calls)

    def offer(
        self, *deltas: Delta, partition: CallPartition = None, after: Sequence[StreamCause] = ()
    ) -> StreamReceipt:
        """Send each delta to its partition. Never waits; see `Producer.offer`. `partition`: as of `publish`.

        Raises UsageError if `after` names a delta that another partition has not acknowledged yet; use
        `publish` then, which waits for the acknowledgement.
        """
        check_deltas(deltas)
        parts = self._group_rows(deltas, partition)
        for cause in _remote_receipts(after, [number for number, _ in parts]):
            if not cause.done:
                raise UsageError(
                    "`after` names a delta that another partition has not acknowledged yet: use publish"
                )
            cause.result()
        local_after = {number: _local_dependencies(after, number) for number, _ in parts}
        local_deltas = {
            number: [_with_local_parents(deltas[row], number) for row in rows] for number, rows in parts
        }
        for number, _ in parts:
            self._producers[number].check()
        return StreamReceipt(
            [
                (
                    number,
                    rows,
                    self._producers[number].offer(*local_deltas[number], after=local_after[number]),
                )
                for number, rows in parts
            ]
        )

    def offer_numbered(
        self,
        counter: int,
        delta: Delta,
        then: Callable[[Receipt], None],
        *,
        partition: CallPartition = None,
    ) -> int:
        """Send a delta under the caller's counter; return its partition. See `Producer.offer_numbered`.

        `partition`: as of `publish`, but the sticky one follows from the counter, so that a repeated import
        sends each message where it was sent before.
        """
        check_deltas([delta])
        if partition == "sticky":
            check_messages([delta])
            number = partition_of_counter(counter, self._map().count)
        else:
            ((number, _),) = self._group_rows([delta], partition)
        self._producers[number].offer_numbered(counter, _with_local_parents(delta, number), then)
        return number

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait for the outcomes of all offers. Raises TimeoutError, or the error that ended a producer."""
        self._map()
        failures: list[Exception] = []

        async def flush_one(producer: Producer) -> None:
            try:
                await producer.flush(timeout_s)
            except (TimeoutError, Refused, UsageError) as failure:
                failures.append(failure)

        async with anyio.create_task_group() as tasks:
            for producer in self._producers:
                tasks.start_soon(flush_one, producer)
        if failures:
            raise failures[0]

    # --- helpers

    def _map(self) -> PartitionMap:
        if self._opened_map is None:
            raise UsageError(f"producer {self.name!r} is not open yet: use it inside its `async with`")
        return self._opened_map

    def _group_rows(
        self, deltas: Sequence[Delta], partition: CallPartition
    ) -> Sequence[tuple[int, Sequence[int]]]:
        """Return (partition, rows) for each partition that gets some of the deltas. Raises UsageError."""
        if partition is None:
            return self._map().group_rows(deltas)
        return [(self._choose(deltas, partition), range(len(deltas)))]

    def _choose(self, deltas: Sequence[Delta], partition: CallPartition) -> int:
        """Return the partition that a call names for its deltas. Raises UsageError."""
        number = check_call_partition(partition, self._map().count)
        if number is not None:
            return number
        check_messages(deltas)
        now = self._connector.world.clock.now()
        if self._sticky.has_ended(now):
            self._sticky.move(now, self._blocked_partitions())
        return self._sticky.take(len(deltas))

    def _blocked_partitions(self) -> list[int]:
        """Return the partitions that delay what was sent to them. Without offers, one may work again."""
        return [
            number
            for number, producer in enumerate(self._producers)
            if producer.in_flight_offers > 0 and producer.waits_for is not None
        ]

    async def _wait_remote(
        self, after: Sequence[StreamCause], partitions: Sequence[int], timeout_s: float | None
    ) -> None:
        limit_s = timeout_or_default(timeout_s, self.settings.publish_timeout_s)
        with anyio.move_on_after(limit_s):
            for cause in _remote_receipts(after, partitions):
                await cause.wait_done()
                cause.result()
            return
        raise Refused(
            ErrorCode.DEP_TIMEOUT,
            f"a delta that must come first was not acknowledged by its partition within {limit_s:g} s; this "
            "was not sent, and has not happened: send it again",
            retry_after_ms=1000,
        )

    @staticmethod
    async def _call_all(
        parts: Sequence[tuple[int, Sequence[int]]], calls: Mapping[int, Callable[[], Awaitable[PublishAck]]]
    ) -> StreamPublished:
        """Run the calls concurrently, and join their outcomes."""
        outcomes: dict[int, PublishAck | Refused] = {}

        async def call(partition: int) -> None:
            try:
                outcomes[partition] = await calls[partition]()
            except Refused as refused:
                outcomes[partition] = refused

        if len(parts) == 1:
            await call(parts[0][0])
        else:
            async with anyio.create_task_group() as tasks:
                for partition, _ in parts:
                    tasks.start_soon(call, partition)
        return join_outcomes([(partition, rows, outcomes[partition]) for partition, rows in parts])


async def _wait_done(receipt: Receipt) -> None:
    done = anyio.Event()
    receipt.add_done_callback(lambda _: done.set())
    await done.wait()


def _remote_receipts(after: Sequence[StreamCause], partitions: Sequence[int]) -> list[StreamReceipt]:
    """Return the receipts with a part that one of these partitions has to wait for, since another has it."""
    return [
        cause
        for cause in after
        if isinstance(cause, StreamReceipt)
        and any(remote != local for remote, _, _ in cause.parts for local in partitions)
    ]


def _local_dependencies(after: Sequence[StreamCause], partition: int) -> list[Receipt | Dependency]:
    """Return the dependencies in one partition; other partitions have acknowledged the rest of `after`."""
    local: list[Receipt | Dependency] = []
    for cause in after:
        if isinstance(cause, StreamReceipt):
            local += [receipt for index, _, receipt in cause.parts if index == partition]
        elif isinstance(cause, StreamPublished):
            local += [part.ack for part in cause.parts if part.partition == partition]
        else:
            local += local_parents([dependency_key(cause)], partition)
    return local


def _with_local_parents(delta: Delta, partition: int) -> Delta:
    if not delta.parents:
        return delta
    return replace(delta, parents=tuple(local_parents(delta.parents, partition)))
