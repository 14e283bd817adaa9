"""A producer over several services side by side: each vector at one of them, found by a hash of its name.

It decides who gets what and joins what they answer; each service has a `Producer` of its own, which does the
rest. One that is down keeps nobody waiting but those who write to it.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import anyio

from delta_prop.checks import cause_of, check_columns, check_deltas, looked_over, timeout_or
from delta_prop.client.arguments import settings_of
from delta_prop.client.errors import Unreachable
from delta_prop.client.known_service import OtherLog
from delta_prop.client.producer import Producer
from delta_prop.client.spreading import (
    Part,
    Places,
    SpreadPublished,
    check_log_ids,
    check_told,
    joined,
    misplaced,
    near,
    parse_services,
)
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Delta, Kind, Priority, Source
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import NAMESPACE_BYTES_MAX, VECTOR_ID_BYTES_MAX, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import TypeAlias

    from numpy.typing import ArrayLike

    from delta_prop.checks import Cause
    from delta_prop.client.counts import Counts
    from delta_prop.client.settings import ClientSettings
    from delta_prop.ports import Tls, World
    from delta_prop.published import Published
    from delta_prop.receipt import Receipt
    from delta_prop_wire.delta import AckLevel

    SpreadCause: TypeAlias = "SpreadReceipt | SpreadPublished | Cause"

OTHERS_S_MAX = 2.0
"""How long opening waits for the others once one service has answered: they may be down, and come later."""
_CLOSE_S = 0.01
"""What is left for each service's own end when the end of all has waited."""
_FIRST_ROW = (0,)


class SpreadReceipt:
    """The receipts of a call's parts, awaited as one. A cancelled wait withdraws what still can be."""

    def __init__(self, parts: Sequence[tuple[int, Sequence[int], Receipt]]) -> None:
        self.parts = parts

    @property
    def done(self) -> bool:
        """Whether the outcome of every part is known."""
        return all(receipt.done for _, _, receipt in self.parts)

    async def wait(self) -> SpreadPublished:
        """Wait for all parts. Raises Refused, SpreadRefused."""
        try:
            for _, _, receipt in self.parts:
                with suppress(Refused):
                    await receipt.wait()
        except BaseException:
            for _, _, receipt in self.parts:
                receipt.withdraw()
            raise
        return self.result()

    def result(self) -> SpreadPublished:
        """The outcome. Raises Refused, SpreadRefused; UsageError while it is not known."""
        return joined([(place, rows, one.refusal() or one.result()) for place, rows, one in self.parts])

    def __await__(self) -> Generator[object, None, SpreadPublished]:
        return self.wait().__await__()


class SpreadProducer:
    """`async with SpreadProducer(["a:7373", "b:7373"], name="orders") as p: await p.publish(delta, …)`.

    All who write must give the same services in the same order. Causal order holds within a service: what
    `after` names at another one is acknowledged there before this is sent. A call that touches several
    services has a part at each, and each part its own fate.

    *Resources*: a `Producer` for each service. *Errors*: as `Producer`, told for the services they concern;
    UsageError where a service is not the one whose place it has.
    """

    def __init__(
        self,
        services: Iterable[str | Iterable[str]],
        *,
        name: str,
        log_ids: Sequence[bytes] | None = None,
        token: str | None = None,
        tls: Tls | None = None,
        ack_level: AckLevel | str | None = None,
        source: Source = Source.LOCAL,
        settings: ClientSettings | None = None,
        world: World | None = None,
    ) -> None:
        """`services`: the addresses of each. `log_ids`: what `log_ids` told another time; services in another
        order, or others, are refused then.
        """
        addresses = parse_services(services)
        self.settings = settings_of(settings)
        self._wanted = check_log_ids(log_ids, len(addresses))
        self._places = Places(len(addresses))
        each = replace(self.settings, close_s_max=_CLOSE_S, open_s_max=self.settings.offline_s_max)
        self._producers = [
            Producer(
                [str(one) for one in some],
                name=name,
                token=token,
                tls=tls,
                ack_level=ack_level,
                source=source,
                partition=place,
                log_id=self._wanted[place],
                settings=each,
                world=world,
            )
            for place, some in enumerate(addresses)
        ]
        self._exit = AsyncExitStack()

    # --- life

    async def __aenter__(self) -> SpreadProducer:
        await self._exit.__aenter__()
        try:
            for producer in self._producers:
                await producer.begin()
                self._exit.push_async_exit(producer)
            await self._answered()
        except BaseException as error:
            await self._exit.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                with suppress(TimeoutError, Refused, UsageError):  # each producer tells in the end
                    await self.flush(self.settings.close_s_max)
        finally:
            await self._exit.__aexit__(kind, error, trace)

    async def _answered(self) -> None:
        """Wait until each service has answered; for some no longer than `OTHERS_S_MAX` behind the first."""
        told: dict[int, bytes] = {}
        failures: list[Refused | UsageError] = []
        with anyio.move_on_after(self.settings.open_s_max) as scope:
            async with anyio.create_task_group() as tasks:

                async def ask(place: int, producer: Producer) -> None:
                    try:
                        await producer.answered()
                        told[place] = producer.log_id or b""
                        check_told(place, told)
                    except OtherLog as other:
                        failures.append(misplaced(place, other.log_id, self._wanted))
                    except (Refused, UsageError) as failure:
                        failures.append(failure)
                    if failures:
                        tasks.cancel_scope.cancel()
                    scope.deadline = min(scope.deadline, anyio.current_time() + OTHERS_S_MAX)

                for place, producer in enumerate(self._producers):
                    tasks.start_soon(ask, place, producer)
        if failures:
            raise failures[0]
        if not told:
            raise Unreachable(
                f"none of {len(self._producers)} services has answered for {self.settings.open_s_max:g} s: "
                "start them or correct the addresses"
            )

    # --- what is asked

    @property
    def log_ids(self) -> list[bytes | None]:
        """The log of each service, to be given as `log_ids` another time; None where it has not answered."""
        return [producer.log_id for producer in self._producers]

    @property
    def open_offers(self) -> int:
        """Parts of calls whose outcome is not known yet."""
        return sum(producer.open_offers for producer in self._producers)

    def place_of(self, vector_id: str, namespace: str = DEFAULT_NAMESPACE) -> int:
        """Which service a vector is at, from 0 on."""
        check_name("vector_id", vector_id, VECTOR_ID_BYTES_MAX)
        check_name("namespace", namespace, NAMESPACE_BYTES_MAX)
        return self._places.of(namespace, vector_id)

    def statistics(self) -> list[Counts]:
        """What was sent to each service and what became of it."""
        return [producer.statistics() for producer in self._producers]

    # --- what programs call

    async def publish(
        self, *deltas: Delta, after: Sequence[SpreadCause] = (), timeout_s: float | None = None
    ) -> SpreadPublished:
        """Send each delta to its service, and wait for all acknowledgements; see `Producer.publish`.

        What `after` names at other services is waited for first. Raises Refused; SpreadRefused where some
        services have acknowledged their part.
        """
        priority, simple = looked_over(deltas)
        if simple and len(deltas) == 1 and not after:  # the short way
            delta = deltas[0]
            place = self._places.of(delta.namespace, delta.vector_id)
            published = await self._producers[place].publish(delta, timeout_s=timeout_s)
            return SpreadPublished(1, (Part(place, _FIRST_ROW, published),))
        parts = self._places.cut(deltas)
        await self._wait_for(after, [place for place, _ in parts], timeout_s)
        calls = {
            place: partial(
                self._producers[place].publish_checked,
                priority,
                [_near_only(deltas[row], place) for row in rows],
                simple=simple,
                after=_causes(after, place),
                timeout_s=timeout_s,
            )
            for place, rows in parts
        }
        return await self._together(parts, calls)

    async def publish_many(
        self,
        ids: Sequence[str],
        matrix: ArrayLike,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        kind: Kind = Kind.CREATE,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> SpreadPublished:
        """Publish whole vectors as columns, each at its service; see `Producer.publish_many`."""
        rows_of = check_columns(ids, matrix, namespace=namespace, kind=kind, priority=priority)
        parts = self._places.cut_columns(namespace, ids)
        calls = {
            place: partial(
                self._producers[place].publish_many,
                [ids[row] for row in rows],
                rows_of[rows],
                namespace=namespace,
                kind=kind,
                priority=priority,
                timeout_s=timeout_s,
            )
            for place, rows in parts
        }
        return await self._together(parts, calls)

    def offer(self, *deltas: Delta, after: Sequence[SpreadCause] = ()) -> SpreadReceipt:
        """Send each delta to its service. Never waits; see `Producer.offer`.

        Raises UsageError where `after` names what another service has not acknowledged yet: `publish` waits
        for that.
        """
        check_deltas(deltas)
        parts = self._places.cut(deltas)
        if _far(after, [place for place, _ in parts]):
            raise UsageError("`after` names what another service has not acknowledged yet: use publish")
        causes = {place: _causes(after, place) for place, _ in parts}
        rows_of = {place: [_near_only(deltas[row], place) for row in rows] for place, rows in parts}
        for place, _ in parts:
            self._producers[place].check()
        return SpreadReceipt(
            [
                (place, rows, self._producers[place].offer(*rows_of[place], after=causes[place]))
                for place, rows in parts
            ]
        )

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything offered so far has its outcome. Raises TimeoutError, or why nothing goes."""
        failures: list[Exception] = []

        async def one(producer: Producer) -> None:
            try:
                await producer.flush(timeout_s)
            except (TimeoutError, Refused, UsageError) as failure:
                failures.append(failure)

        async with anyio.create_task_group() as tasks:
            for producer in self._producers:
                tasks.start_soon(one, producer)
        if failures:
            raise failures[0]

    # --- helpers

    async def _wait_for(
        self, after: Sequence[SpreadCause], places: Sequence[int], timeout_s: float | None
    ) -> None:
        limit_s = timeout_or(timeout_s, self.settings.publish_s_max)
        with anyio.move_on_after(limit_s):
            for receipt in _far(after, places):
                await receipt.wait()
            return
        raise Refused(
            ErrorCode.DEP_TIMEOUT,
            f"what must come first was not acknowledged by its service within {limit_s:g} s; this was not "
            "sent, and has not happened",
            retry_after_ms=1000,
        )

    @staticmethod
    async def _together(
        parts: Sequence[tuple[int, list[int]]], calls: Mapping[int, Callable[[], Awaitable[Published]]]
    ) -> SpreadPublished:
        """Call all at once, and join what they say."""
        outcomes: dict[int, Published | Refused] = {}

        async def call(place: int) -> None:
            try:
                outcomes[place] = await calls[place]()
            except Refused as refused:
                outcomes[place] = refused

        if len(parts) == 1:
            await call(parts[0][0])
        else:
            async with anyio.create_task_group() as tasks:
                for place, _ in parts:
                    tasks.start_soon(call, place)
        return joined([(place, rows, outcomes[place]) for place, rows in parts])


def _far(after: Sequence[SpreadCause], places: Sequence[int]) -> list[SpreadReceipt]:
    """What is not acknowledged yet and must be, as some of it is at another place than some of these."""
    return [
        one
        for one in after
        if isinstance(one, SpreadReceipt)
        and not one.done
        and any(there != here for there, _, _ in one.parts for here in places)
    ]


def _causes(after: Sequence[SpreadCause], place: int) -> list[Receipt | Cause]:
    """What of these is at this place; the rest is acknowledged by another service."""
    found: list[Receipt | Cause] = []
    for one in after:
        if isinstance(one, SpreadReceipt):
            found += [receipt for there, _, receipt in one.parts if there == place]
        elif isinstance(one, SpreadPublished):
            found += [part.published for part in one.parts if part.place == place]
        else:
            found += near([cause_of(one)], place)
    return found


def _near_only(delta: Delta, place: int) -> Delta:
    return replace(delta, parents=tuple(near(delta.parents, place))) if delta.parents else delta
