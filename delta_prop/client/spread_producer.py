"""A producer over several services side by side: each vector at one of them, found by a hash of its name.

It assigns rows to services and joins their outcomes; each service has a `Producer` of its own, which does
the rest. A service that is down delays only the calls that write to it.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import anyio

from delta_prop.argument_checks import (
    check_columns,
    check_deltas,
    dependency_key,
    timeout_or_default,
    validate,
)
from delta_prop.client.arguments import settings_or_default
from delta_prop.client.errors import Unreachable
from delta_prop.client.producer import Producer
from delta_prop.client.service_identity import LogMismatch
from delta_prop.client.spreading import (
    Part,
    ServiceMap,
    SpreadPublished,
    check_distinct_logs,
    check_log_ids,
    join_outcomes,
    local_parents,
    parse_services,
    wrong_log,
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

    from delta_prop.argument_checks import Dependency
    from delta_prop.client.counts import Counts
    from delta_prop.client.settings import ClientSettings
    from delta_prop.outcomes import PublishAck
    from delta_prop.ports import Tls, World
    from delta_prop.receipt import Receipt
    from delta_prop_wire.delta import AckLevel

    SpreadCause: TypeAlias = "SpreadReceipt | SpreadPublished | Dependency"

OTHERS_TIMEOUT_S = 2.0
"""Seconds for which opening waits for other services after the first answer: they may connect later."""
_CLOSE_TIMEOUT_S = 0.01
"""Timeout of each producer's own end, after the joint end has waited."""
_FIRST_ROW = (0,)


class SpreadReceipt:
    """The receipts of a call's parts, awaited as one. A cancelled wait withdraws the parts that can be."""

    def __init__(self, parts: Sequence[tuple[int, Sequence[int], Receipt]]) -> None:
        self.parts = parts

    @property
    def done(self) -> bool:
        """True once the outcome of every part is known."""
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
        """Return the outcome. Raises Refused, SpreadRefused; UsageError while it is not known."""
        return join_outcomes(
            [(place, rows, receipt.refusal() or receipt.result()) for place, rows, receipt in self.parts]
        )

    def __await__(self) -> Generator[object, None, SpreadPublished]:
        return self.wait().__await__()


class SpreadProducer:
    """`async with SpreadProducer(["a:7373", "b:7373"], name="orders") as p: await p.publish(delta, …)`.

    All writers must give the same services in the same order; the place of a service is its index there.
    Causal order holds within a service: a delta that `after` names at another service is acknowledged there
    before this call is sent. A call that writes to several services has a part at each, with its own outcome.

    *Resources*: a `Producer` for each service. *Errors*: those of `Producer`, for calls that write to the
    service; UsageError if a service has another log than the one that belongs to its place.
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
        """`services`: the addresses of each. `log_ids`: the property `log_ids` of an earlier producer; other
        services, or services in another order, are then refused.
        """
        addresses = parse_services(services)
        self.settings = settings_or_default(settings)
        self._expected_log_ids = check_log_ids(log_ids, len(addresses))
        self._service_map = ServiceMap(len(addresses))
        producer_settings = replace(
            self.settings, close_timeout_s=_CLOSE_TIMEOUT_S, open_timeout_s=self.settings.reconnect_timeout_s
        )
        self._producers = [
            Producer(
                [str(address) for address in service_addresses],
                name=name,
                token=token,
                tls=tls,
                ack_level=ack_level,
                source=source,
                partition=place,
                log_id=self._expected_log_ids[place],
                settings=producer_settings,
                world=world,
            )
            for place, service_addresses in enumerate(addresses)
        ]
        self._exit = AsyncExitStack()

    # --- opening and closing

    async def __aenter__(self) -> SpreadProducer:
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
                with suppress(TimeoutError, Refused, UsageError):  # each producer raises its own at its end
                    await self.flush(self.settings.close_timeout_s)
        finally:
            await self._exit.__aexit__(kind, error, trace)

    async def _wait_connected(self) -> None:
        """Wait until each service has answered; `OTHERS_TIMEOUT_S` after the first answer, stop waiting."""
        log_ids: dict[int, bytes] = {}
        failures: list[Refused | UsageError] = []
        with anyio.move_on_after(self.settings.open_timeout_s) as scope:
            async with anyio.create_task_group() as tasks:

                async def wait_for(place: int, producer: Producer) -> None:
                    try:
                        await producer.wait_welcomed()
                        log_ids[place] = producer.log_id or b""
                        check_distinct_logs(place, log_ids)
                    except LogMismatch as mismatch:
                        failures.append(wrong_log(place, mismatch.log_id, self._expected_log_ids))
                    except (Refused, UsageError) as failure:
                        failures.append(failure)
                    if failures:
                        tasks.cancel_scope.cancel()
                    scope.deadline = min(scope.deadline, anyio.current_time() + OTHERS_TIMEOUT_S)

                for place, producer in enumerate(self._producers):
                    tasks.start_soon(wait_for, place, producer)
        if failures:
            raise failures[0]
        if not log_ids:
            raise Unreachable(
                f"none of {len(self._producers)} services has answered for {self.settings.open_timeout_s:g} "
                "s: start them or correct the addresses"
            )

    # --- state

    @property
    def log_ids(self) -> list[bytes | None]:
        """The log of each service, for `log_ids` of a later producer; None where it has not answered."""
        return [producer.log_id for producer in self._producers]

    @property
    def in_flight_offers(self) -> int:
        """Parts of calls without an outcome yet."""
        return sum(producer.in_flight_offers for producer in self._producers)

    def place_of(self, vector_id: str, namespace: str = DEFAULT_NAMESPACE) -> int:
        """Return the place of the service that has a vector, from 0 on."""
        check_name("vector_id", vector_id, VECTOR_ID_BYTES_MAX)
        check_name("namespace", namespace, NAMESPACE_BYTES_MAX)
        return self._service_map.find(namespace, vector_id)

    def statistics(self) -> list[Counts]:
        """Return, for each service, the counts of sent batches, of deltas and of outcomes."""
        return [producer.statistics() for producer in self._producers]

    # --- calls

    async def publish(
        self, *deltas: Delta, after: Sequence[SpreadCause] = (), timeout_s: float | None = None
    ) -> SpreadPublished:
        """Send each delta to its service, and wait for all acknowledgements; see `Producer.publish`.

        First waits for the deltas that `after` names at other services. Raises Refused; SpreadRefused if only
        some services have acknowledged their part.
        """
        priority, opaque_only = validate(deltas)
        if opaque_only and len(deltas) == 1 and not after:  # the fast path
            delta = deltas[0]
            place = self._service_map.find(delta.namespace, delta.vector_id)
            ack = await self._producers[place].publish(delta, timeout_s=timeout_s)
            return SpreadPublished(1, (Part(place, _FIRST_ROW, ack),))
        parts = self._service_map.group_rows(deltas)
        await self._wait_remote(after, [place for place, _ in parts], timeout_s)
        calls = {
            place: partial(
                self._producers[place].publish_checked,
                priority,
                [_with_local_parents(deltas[row], place) for row in rows],
                opaque_only=opaque_only,
                after=_local_dependencies(after, place),
                timeout_s=timeout_s,
            )
            for place, rows in parts
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
    ) -> SpreadPublished:
        """Publish complete vectors as columns, each at its service; see `Producer.publish_many`."""
        vectors = check_columns(ids, matrix, namespace=namespace, kind=kind, priority=priority)
        parts = self._service_map.group_columns(namespace, ids)
        calls = {
            place: partial(
                self._producers[place].publish_many,
                [ids[row] for row in rows],
                vectors[rows],
                namespace=namespace,
                kind=kind,
                priority=priority,
                timeout_s=timeout_s,
            )
            for place, rows in parts
        }
        return await self._call_all(parts, calls)

    def offer(self, *deltas: Delta, after: Sequence[SpreadCause] = ()) -> SpreadReceipt:
        """Send each delta to its service. Never waits; see `Producer.offer`.

        Raises UsageError if `after` names a delta that another service has not acknowledged yet: `publish`
        waits for that.
        """
        check_deltas(deltas)
        parts = self._service_map.group_rows(deltas)
        if _remote_receipts(after, [place for place, _ in parts]):
            raise UsageError(
                "`after` names a delta that another service has not acknowledged yet: use publish"
            )
        local_after = {place: _local_dependencies(after, place) for place, _ in parts}
        local_deltas = {
            place: [_with_local_parents(deltas[row], place) for row in rows] for place, rows in parts
        }
        for place, _ in parts:
            self._producers[place].check()
        return SpreadReceipt(
            [
                (place, rows, self._producers[place].offer(*local_deltas[place], after=local_after[place]))
                for place, rows in parts
            ]
        )

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait for the outcomes of all offers. Raises TimeoutError, or why a producer cannot go on."""
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

    async def _wait_remote(
        self, after: Sequence[SpreadCause], places: Sequence[int], timeout_s: float | None
    ) -> None:
        limit_s = timeout_or_default(timeout_s, self.settings.publish_timeout_s)
        with anyio.move_on_after(limit_s):
            for receipt in _remote_receipts(after, places):
                await receipt.wait()
            return
        raise Refused(
            ErrorCode.DEP_TIMEOUT,
            f"a delta that must come first was not acknowledged by its service within {limit_s:g} s; this "
            "was not sent, and has not happened: send it again",
            retry_after_ms=1000,
        )

    @staticmethod
    async def _call_all(
        parts: Sequence[tuple[int, list[int]]], calls: Mapping[int, Callable[[], Awaitable[PublishAck]]]
    ) -> SpreadPublished:
        """Run the calls concurrently, and join their outcomes."""
        outcomes: dict[int, PublishAck | Refused] = {}

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
        return join_outcomes([(place, rows, outcomes[place]) for place, rows in parts])


def _remote_receipts(after: Sequence[SpreadCause], places: Sequence[int]) -> list[SpreadReceipt]:
    """Return the receipts without an outcome for which some service in `places` must wait for another one."""
    return [
        cause
        for cause in after
        if isinstance(cause, SpreadReceipt)
        and not cause.done
        and any(remote != local for remote, _, _ in cause.parts for local in places)
    ]


def _local_dependencies(after: Sequence[SpreadCause], place: int) -> list[Receipt | Dependency]:
    """Return the dependencies at one service; other services have acknowledged the rest of `after`."""
    local: list[Receipt | Dependency] = []
    for cause in after:
        if isinstance(cause, SpreadReceipt):
            local += [receipt for part_place, _, receipt in cause.parts if part_place == place]
        elif isinstance(cause, SpreadPublished):
            local += [part.published for part in cause.parts if part.place == place]
        else:
            local += local_parents([dependency_key(cause)], place)
    return local


def _with_local_parents(delta: Delta, place: int) -> Delta:
    return replace(delta, parents=tuple(local_parents(delta.parents, place))) if delta.parents else delta
