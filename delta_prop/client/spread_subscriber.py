"""A subscriber over several services side by side. It merges their streams, and has a cursor for each.

Each service's deltas come in the order of its log, each once; there is no order between services. Each
service has a `Subscriber` of its own, which does the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Literal, NamedTuple, TypeAlias

import anyio

from delta_prop.client.arguments import settings_or_default
from delta_prop.client.change_signal import ChangeSignal
from delta_prop.client.consumer_state import CREDIT
from delta_prop.client.delivered_batch import DeliveredBatch
from delta_prop.client.errors import Unreachable
from delta_prop.client.service_identity import LogMismatch
from delta_prop.client.settings import ClientSettings
from delta_prop.client.spreading import check_distinct_logs, check_log_ids, parse_services, wrong_log
from delta_prop.client.subscriber import StartPosition, Subscriber
from delta_prop.platform.ports import Tls, World
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, Priority, Source
from delta_prop_wire.errors import UsageError

SpreadStart: TypeAlias = "str | datetime | Sequence[Cursor | None]"
"""Where to start: "earliest" or "latest" in all logs, a time, or the cursors of an earlier subscriber."""

OTHERS_TIMEOUT_S = 2.0
"""Seconds for which opening waits for other services after the first answer: they may connect later."""


class SpreadDelivered(NamedTuple):
    """One delta, with the index of its service, and its offset and Lamport number in that service's log."""

    service_index: int
    offset: int
    lamport: int
    delta: Delta


class SpreadSubscriber:
    """`async with SpreadSubscriber(["a:7373", "b:7373"], "ns:docs") as s: async for delivered in s: …`

    While a service is down, the deltas of the other services are delivered. With `group`, each service
    stores the reader's cursor beside its own log.

    *Resources*: a `Subscriber` for each service. *Errors*: an error that ends one of them ends all; otherwise
    its deltas would be missed silently. UsageError if a service's log is not the one expected at its index.
    """

    def __init__(
        self,
        services: Iterable[str | Iterable[str]],
        *topics: str,
        start: SpreadStart | None = None,
        group: str | None = None,
        ack: Literal["auto", "manual"] = "auto",
        sources: Sequence[Source] = (),
        priorities: Sequence[Priority] = (),
        credit: tuple[int, int] = CREDIT,
        log_ids: Sequence[bytes] | None = None,
        name: str = "subscriber",
        token: str | None = None,
        tls: Tls | None = None,
        settings: ClientSettings | None = None,
        world: World | None = None,
    ) -> None:
        """`start`: as for `Subscriber`, or the `cursors` of an earlier subscriber. `credit`: the deltas and
        bytes of each service that may be here and not taken yet. `log_ids`: the property `log_ids` of an
        earlier subscriber. With `log_ids` or cursors, other services, or services in another order, are
        refused.
        """
        addresses = parse_services(services)
        self.settings = settings_or_default(settings)
        starts, known = _parse_starts(start, len(addresses))
        self._expected_log_ids = check_log_ids(log_ids, len(addresses)) if log_ids is not None else known
        subscriber_settings = replace(self.settings, open_timeout_s=self.settings.reconnect_timeout_s)
        self._subscribers = [
            Subscriber(
                [str(address) for address in service_addresses],
                *topics,
                start=starts[service_index],
                group=group,
                ack=ack,
                sources=sources,
                priorities=priorities,
                credit=credit,
                name=name,
                token=token,
                tls=tls,
                log_id=self._expected_log_ids[service_index],
                settings=subscriber_settings,
                world=world,
            )
            for service_index, service_addresses in enumerate(addresses)
        ]
        self._next_index = 0
        # (service index, batch, next row) of the batch whose rows `__anext__` returns; None between batches
        self._current: tuple[int, DeliveredBatch, int] | None = None
        self._exit = AsyncExitStack()

    # --- opening and closing

    async def __aenter__(self) -> SpreadSubscriber:
        self._changes = ChangeSignal()
        await self._exit.__aenter__()
        try:
            for subscriber in self._subscribers:
                await subscriber.begin(self._notify)
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
        """Wait until all services have answered, or up to `OTHERS_TIMEOUT_S` after the first answer."""
        with anyio.move_on_after(self.settings.open_timeout_s) as scope:
            while not all(subscriber.started for subscriber in self._subscribers):
                self._check()
                if any(subscriber.started for subscriber in self._subscribers):
                    scope.deadline = min(scope.deadline, anyio.current_time() + OTHERS_TIMEOUT_S)
                await self._changes.wait()
        log_ids = {
            service_index: log_id for service_index, log_id in enumerate(self.log_ids) if log_id is not None
        }
        for service_index in log_ids:
            check_distinct_logs(service_index, log_ids)
        if not log_ids:
            raise Unreachable(
                f"none of {len(self._subscribers)} services has answered for "
                f"{self.settings.open_timeout_s:g} s: start them or correct the addresses"
            )

    # --- reading

    def __aiter__(self) -> SpreadSubscriber:
        return self

    async def __anext__(self) -> SpreadDelivered:
        if self._current is None:
            service_index, batch = await self.next_batch()
            self._current = (service_index, batch, 0)
        service_index, batch, row = self._current
        self._current = (service_index, batch, row + 1) if row + 1 < batch.count else None
        return SpreadDelivered(service_index, *batch.row(row))

    async def next_batch(self) -> tuple[int, DeliveredBatch]:
        """Return the index of a service and its next batch; services are served in turn.

        Raises the error that ended a subscriber.
        """
        while True:
            for _ in self._subscribers:
                service_index = self._next_index
                self._next_index = (service_index + 1) % len(self._subscribers)
                batch = self._take(service_index)
                if batch is not None:
                    return service_index, batch
            await self._changes.wait()

    async def batches(self) -> AsyncIterator[tuple[int, DeliveredBatch]]:
        """Yield batches as `next_batch` returns them, without end."""
        while True:
            yield await self.next_batch()

    def ack(self, service_index: int, offset: int) -> None:
        """Note that all deltas of a service up to and including `offset` are processed. Never waits.

        Raises UsageError.
        """
        if not 0 <= service_index < len(self._subscribers):
            raise UsageError(f"service {service_index}: give one from 0 to {len(self._subscribers) - 1}")
        self._subscribers[service_index].ack(offset)

    @property
    def cursors(self) -> list[Cursor | None]:
        """The cursor of each service, for `start` of a later subscriber; None where it has not answered."""
        return [subscriber.cursor for subscriber in self._subscribers]

    @property
    def log_ids(self) -> list[bytes | None]:
        """The log of each service, for `log_ids` of a later subscriber; None where it has not answered."""
        return [subscriber.log_id for subscriber in self._subscribers]

    # --- helpers

    def _take(self, service_index: int) -> DeliveredBatch | None:
        try:
            return self._subscribers[service_index].take_batch()
        except LogMismatch as mismatch:
            raise wrong_log(service_index, mismatch.log_id, self._expected_log_ids) from None

    def _check(self) -> None:
        for service_index, subscriber in enumerate(self._subscribers):
            try:
                subscriber.check()
            except LogMismatch as mismatch:
                raise wrong_log(service_index, mismatch.log_id, self._expected_log_ids) from None

    def _notify(self) -> None:
        self._changes.notify()


def _parse_starts(
    start: SpreadStart | None, count: int
) -> tuple[list[StartPosition | None], list[bytes | None]]:
    """Return the start position at each service, and the log id that the start requires there (None: any).

    Raises UsageError.
    """
    if start is None or isinstance(start, str | datetime):
        return [start] * count, [None] * count
    if len(start) != count:
        raise UsageError(f"{len(start)} cursors for {count} services: give one for each, in their order")
    for cursor in start:
        if not isinstance(cursor, Cursor | None):
            raise UsageError(
                f"start {cursor!r:.60}: give earliest, latest, a datetime, or a cursor per service"
            )
    return (
        ["earliest" if cursor is None else cursor for cursor in start],
        [cursor and cursor.log_id for cursor in start],
    )
