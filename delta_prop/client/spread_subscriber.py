"""A subscriber over several services side by side: their streams merged, with a cursor for each.

Each service's deltas come in the order of its log, each once; between services there is no order. Each has a
`Subscriber` of its own, which does the rest.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import anyio

from delta_prop.client.arguments import settings_of
from delta_prop.client.errors import Unreachable
from delta_prop.client.incoming import CREDIT
from delta_prop.client.known_service import OtherLog
from delta_prop.client.spreading import check_log_ids, check_told, misplaced, parse_services
from delta_prop.client.subscriber import Subscriber
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from types import TracebackType

    from delta_prop.client.delivered import DeliveredBatch
    from delta_prop.client.settings import ClientSettings
    from delta_prop.client.subscriber import Place
    from delta_prop.ports import Tls, World
    from delta_prop_wire.delta import Delta, Priority, Source

SpreadStart: TypeAlias = "str | datetime | Sequence[Cursor | None]"
"""Where to start: at an end of all logs, a time, or where the cursors of another time stopped."""

OTHERS_S_MAX = 2.0
"""How long opening waits for the others once one service has answered: they may be down, and come later."""


class SpreadDelivered(NamedTuple):
    """One delta: which service it comes from, its place in that log, its Lamport number there."""

    place: int
    offset: int
    lamport: int
    delta: Delta


class SpreadSubscriber:
    """`async with SpreadSubscriber(["a:7373", "b:7373"], "ns:docs") as s: async for delivered in s: …`

    A service that is down is waited for while the others' deltas come. With `group` each service remembers
    how far the reader has come in its own log.

    *Resources*: a `Subscriber` for each service. *Errors*: what ends one of them ends all, since its deltas
    would be missed in silence; UsageError where a service is not the one whose place it has.
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
        """`start`: as `Subscriber`, or `cursors` of another time. `credit`: deltas and bytes of each service
        that may lie here unread. `log_ids`: what `log_ids` told another time; services in another order, or
        others, are refused then, as they are where cursors are given.
        """
        addresses = parse_services(services)
        self.settings = settings_of(settings)
        starts, known = _starts(start, len(addresses))
        self._wanted = check_log_ids(log_ids, len(addresses)) if log_ids is not None else known
        each = replace(self.settings, open_s_max=self.settings.offline_s_max)
        self._subscribers = [
            Subscriber(
                [str(one) for one in some],
                *topics,
                start=starts[place],
                group=group,
                ack=ack,
                sources=sources,
                priorities=priorities,
                credit=credit,
                name=name,
                token=token,
                tls=tls,
                log_id=self._wanted[place],
                settings=each,
                world=world,
            )
            for place, some in enumerate(addresses)
        ]
        self._turn = 0
        self._taken: tuple[int, DeliveredBatch, int] | None = (
            None  # that rows are handed out of, and the next
        )
        self._exit = AsyncExitStack()

    # --- life

    async def __aenter__(self) -> SpreadSubscriber:
        self._changed = anyio.Event()
        await self._exit.__aenter__()
        try:
            for subscriber in self._subscribers:
                await subscriber.begin(self._ring)
                self._exit.push_async_exit(subscriber)
            await self._started()
        except BaseException as error:
            await self._exit.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.__aexit__(kind, error, trace)

    async def _started(self) -> None:
        """Wait until each service has answered; for some no longer than `OTHERS_S_MAX` behind the first."""
        with anyio.move_on_after(self.settings.open_s_max) as scope:
            while not all(one.started for one in self._subscribers):
                self._check()
                if any(one.started for one in self._subscribers):
                    scope.deadline = min(scope.deadline, anyio.current_time() + OTHERS_S_MAX)
                await self._change()
        told = {place: log_id for place, log_id in enumerate(self.log_ids) if log_id is not None}
        for place in told:
            check_told(place, told)
        if not told:
            raise Unreachable(
                f"none of {len(self._subscribers)} services has answered for {self.settings.open_s_max:g} s: "
                "start them or correct the addresses"
            )

    # --- reading

    def __aiter__(self) -> SpreadSubscriber:
        return self

    async def __anext__(self) -> SpreadDelivered:
        if self._taken is None:
            place, batch = await self.next_batch()
            self._taken = (place, batch, 0)
        place, batch, row = self._taken
        self._taken = (place, batch, row + 1) if row + 1 < batch.count else None
        return SpreadDelivered(place, *batch.row(row))

    async def next_batch(self) -> tuple[int, DeliveredBatch]:
        """The next batch and its service; services in turn. Raises why nothing comes any more."""
        while True:
            for _ in self._subscribers:
                place, self._turn = self._turn, (self._turn + 1) % len(self._subscribers)
                batch = self._take(place)
                if batch is not None:
                    return place, batch
            await self._change()

    async def batches(self) -> AsyncIterator[tuple[int, DeliveredBatch]]:
        """The same, one after the other."""
        while True:
            yield await self.next_batch()

    def ack(self, place: int, offset: int) -> None:
        """Everything of a service up to this offset is done with. Never waits. Raises UsageError."""
        if not 0 <= place < len(self._subscribers):
            raise UsageError(f"service {place}: there are {len(self._subscribers)}, from 0 on")
        self._subscribers[place].ack(offset)

    @property
    def cursors(self) -> list[Cursor | None]:
        """Where to start another time: of each service, None where it has not answered."""
        return [one.cursor for one in self._subscribers]

    @property
    def log_ids(self) -> list[bytes | None]:
        """The log of each service, to be given as `log_ids` another time; None where it has not answered."""
        return [one.log_id for one in self._subscribers]

    # --- helpers

    def _take(self, place: int) -> DeliveredBatch | None:
        try:
            return self._subscribers[place].take_batch()
        except OtherLog as other:
            raise misplaced(place, other.log_id, self._wanted) from None

    def _check(self) -> None:
        for place, one in enumerate(self._subscribers):
            try:
                one.check()
            except OtherLog as other:
                raise misplaced(place, other.log_id, self._wanted) from None

    def _ring(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        if self._changed.is_set():
            self._changed = anyio.Event()
        await self._changed.wait()


def _starts(start: SpreadStart | None, count: int) -> tuple[list[Place | None], list[bytes | None]]:
    """Where each service starts, and the log that it must have for that. Raises UsageError."""
    if start is None or isinstance(start, str | datetime):
        return [start] * count, [None] * count
    if len(start) != count:
        raise UsageError(f"{len(start)} cursors for {count} services: give one for each, in their order")
    for one in start:
        if not isinstance(one, Cursor | None):
            raise UsageError(f"start {one!r:.60}: give earliest, latest, a datetime, or a cursor a service")
    return ["earliest" if one is None else one for one in start], [one and one.log_id for one in start]
