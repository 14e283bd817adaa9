"""A producer over several services side by side. Each vector is at one of them, found by a hash of its name.

It assigns rows to services and joins their outcomes; each service has a `Producer` of its own, which does
the rest. A service that is down delays only the calls that write to it.
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
from delta_prop.client.arguments import settings_or_default
from delta_prop.client.counts import Counts
from delta_prop.client.errors import Unreachable
from delta_prop.client.producer import Producer
from delta_prop.client.service_identity import LogMismatch
from delta_prop.client.settings import ClientSettings
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
from delta_prop.platform.ports import Tls, World
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import DEFAULT_NAMESPACE, AckLevel, Delta, Kind, Priority, Source
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import NAMESPACE_BYTES_MAX, VECTOR_ID_BYTES_MAX, ErrorCode

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    SpreadCause: TypeAlias = "SpreadReceipt | SpreadPublished | Dependency"

OTHERS_TIMEOUT_S = 2.0
"""Seconds for which opening waits for other services after the first answer: they may connect later."""
_CLOSE_TIMEOUT_S = 0.01
"""Timeout of each producer's own close: before it, `__aexit__` has flushed all producers together."""
_FIRST_ROW = (0,)


class SpreadReceipt:
    """The receipts of a call's parts, awaited as one. A cancelled wait withdraws the parts not yet appended.

    `parts`: (service index, rows, receipt) of each.
    """

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
            [
                (service_index, rows, receipt.refusal() or receipt.result())
                for service_index, rows, receipt in self.parts
            ]
        )

    def __await__(self) -> Generator[object, None, SpreadPublished]:
        return self.wait().__await__()


class SpreadProducer:
    """`async with SpreadProducer(["a:7373", "b:7373"], name="orders") as p: await p.publish(delta, …)`.

    All writers must give the same services in the same order; a service's index is its position there.
    Causal order holds within a service: a delta that `after` names at another service is acknowledged there
    before this call is sent. A call that writes to several services has a part at each, with its own outcome.

    *Resources*: a `Producer` for each service. *Errors*: those of `Producer`, for calls that write to the
    service; UsageError if a service's log is not the one expected at its index.
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
        """`services`: the addresses of each. `log_ids`: the property `log_ids` of an earlier producer; then
        other services, or services in another order, are refused.
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
                partition=service_index,
                log_id=self._expected_log_ids[service_index],
                settings=producer_settings,
                world=world,
            )
            for service_index, service_addresses in enumerate(addresses)
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
                # Each producer raises its own error when it closes.
                with suppress(TimeoutError, Refused, UsageError):
                    await self.flush(self.settings.close_timeout_s)
        finally:
            await self._exit.__aexit__(kind, error, trace)

    async def _wait_connected(self) -> None:
        """Wait until all services have answered, or up to `OTHERS_TIMEOUT_S` after the first answer."""
        log_ids: dict[int, bytes] = {}
        failures: list[Refused | UsageError] = []
        with anyio.move_on_after(self.settings.open_timeout_s) as scope:
            async with anyio.create_task_group() as tasks:

                async def wait_for(service_index: int, producer: Producer) -> None:
                    try:
                        await producer.wait_welcomed()
                        log_ids[service_index] = producer.log_id or b""
                        check_distinct_logs(service_index, log_ids)
                    except LogMismatch as mismatch:
                        failures.append(wrong_log(service_index, mismatch.log_id, self._expected_log_ids))
                    except (Refused, UsageError) as failure:
                        failures.append(failure)
                    if failures:
                        tasks.cancel_scope.cancel()
                    scope.deadline = min(scope.deadline, anyio.current_time() + OTHERS_TIMEOUT_S)

                for service_index, producer in enumerate(self._producers):
                    tasks.start_soon(wait_for, service_index, producer)
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
        """The number of parts of calls that have no outcome yet."""
        return sum(producer.in_flight_offers for producer in self._producers)

    def service_index_of(self, vector_id: str, namespace: str = DEFAULT_NAMESPACE) -> int:
        """Return the index of the service that has a vector, from 0 on."""
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
            service_index = self._service_map.find(delta.namespace, delta.vector_id)
            ack = await self._producers[service_index].publish(delta, timeout_s=timeout_s)
            return SpreadPublished(1, (Part(service_index, _FIRST_ROW, ack),))
        parts = self._service_map.group_rows(deltas)
        await self._wait_remote(after, [service_index for service_index, _ in parts], timeout_s)
        calls = {
            service_index: partial(
                self._producers[service_index].publish_checked,
                priority,
                [_with_local_parents(deltas[row], service_index) for row in rows],
                opaque_only=opaque_only,
                after=_local_dependencies(after, service_index),
                timeout_s=timeout_s,
            )
            for service_index, rows in parts
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
            service_index: partial(
                self._producers[service_index].publish_many,
                [ids[row] for row in rows],
                vectors[rows],
                namespace=namespace,
                kind=kind,
                priority=priority,
                timeout_s=timeout_s,
            )
            for service_index, rows in parts
        }
        return await self._call_all(parts, calls)

    def offer(self, *deltas: Delta, after: Sequence[SpreadCause] = ()) -> SpreadReceipt:
        """Send each delta to its service. Never waits; see `Producer.offer`.

        Raises UsageError if `after` names a delta that another service has not acknowledged yet; use
        `publish` then, which waits for the acknowledgement.
        """
        check_deltas(deltas)
        parts = self._service_map.group_rows(deltas)
        if _remote_receipts(after, [service_index for service_index, _ in parts]):
            raise UsageError(
                "`after` names a delta that another service has not acknowledged yet: use publish"
            )
        local_after = {service_index: _local_dependencies(after, service_index) for service_index, _ in parts}
        local_deltas = {
            service_index: [_with_local_parents(deltas[row], service_index) for row in rows]
            for service_index, rows in parts
        }
        for service_index, _ in parts:
            self._producers[service_index].check()
        return SpreadReceipt(
            [
                (
                    service_index,
                    rows,
                    self._producers[service_index].offer(
                        *local_deltas[service_index], after=local_after[service_index]
                    ),
                )
                for service_index, rows in parts
            ]
        )

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait for the outcomes of all offers. Raises TimeoutError, or the error that ended a producer."""
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
        self, after: Sequence[SpreadCause], service_indices: Sequence[int], timeout_s: float | None
    ) -> None:
        limit_s = timeout_or_default(timeout_s, self.settings.publish_timeout_s)
        with anyio.move_on_after(limit_s):
            for receipt in _remote_receipts(after, service_indices):
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

        async def call(service_index: int) -> None:
            try:
                outcomes[service_index] = await calls[service_index]()
            except Refused as refused:
                outcomes[service_index] = refused

        if len(parts) == 1:
            await call(parts[0][0])
        else:
            async with anyio.create_task_group() as tasks:
                for service_index, _ in parts:
                    tasks.start_soon(call, service_index)
        return join_outcomes(
            [(service_index, rows, outcomes[service_index]) for service_index, rows in parts]
        )


def _remote_receipts(after: Sequence[SpreadCause], service_indices: Sequence[int]) -> list[SpreadReceipt]:
    """Return the receipts without an outcome that make one of these services wait for another one."""
    return [
        cause
        for cause in after
        if isinstance(cause, SpreadReceipt)
        and not cause.done
        and any(remote != local for remote, _, _ in cause.parts for local in service_indices)
    ]


def _local_dependencies(after: Sequence[SpreadCause], service_index: int) -> list[Receipt | Dependency]:
    """Return the dependencies at one service; other services have acknowledged the rest of `after`."""
    local: list[Receipt | Dependency] = []
    for cause in after:
        if isinstance(cause, SpreadReceipt):
            local += [receipt for index, _, receipt in cause.parts if index == service_index]
        elif isinstance(cause, SpreadPublished):
            local += [part.ack for part in cause.parts if part.service_index == service_index]
        else:
            local += local_parents([dependency_key(cause)], service_index)
    return local


def _with_local_parents(delta: Delta, service_index: int) -> Delta:
    if not delta.parents:
        return delta
    return replace(delta, parents=tuple(local_parents(delta.parents, service_index)))
