"""A producer over the network: it sends deltas under dots of its own until each has its outcome.

This module waits and wakes; `producer_state.py` decides what to send, to resend and to report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING

import anyio

from delta_prop.calls.argument_checks import (
    Dependency,
    check_columns,
    check_deltas,
    dependency_key,
    timeout_or_default,
    validate,
)
from delta_prop.calls.outcomes import OfferState, PublishAck
from delta_prop.calls.receipt import Receipt
from delta_prop.client.arguments import parse_member
from delta_prop.client.change_signal import ChangeSignal
from delta_prop.client.closing import close_tasks
from delta_prop.client.coalesced_calls import CoalescedCalls
from delta_prop.client.connector import Connector
from delta_prop.client.counts import Counts
from delta_prop.client.offer import Columns, Offer, PendingDot, make_offer
from delta_prop.client.partition_choice import DEFAULT_STREAM, PartitionChoice
from delta_prop.client.producer_protocol import ProducerProtocol
from delta_prop.client.reconnecting_link import ReconnectingLink
from delta_prop.client.refusals import offers_unacked, timed_out
from delta_prop.client.service_identity import check_requested_level
from delta_prop.client.settings import ClientSettings
from delta_prop.client.stream_lookup import find_partition
from delta_prop.platform.one_shot import OneShot, one_shot_factory
from delta_prop.platform.ports import Tls, World
from delta_prop_wire.delta import DEFAULT_NAMESPACE, AckLevel, Delta, Dot, Kind, Priority, Source
from delta_prop_wire.errors import ProtocolError, Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.validate import is_opaque_only

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_EXPIRE_INTERVAL_S = 1.0
"""Interval between checks for timed-out offers."""
_EXPIRE_INTERVAL_MIN_S = 0.001


class Producer:
    """`async with Producer("host:port", name="orders") as p: await p.publish(delta)`.

    Deltas are identified by (name, counter), so each has one effect however often it is sent. All that one
    turn of the event loop publishes is sent as one batch per priority. A second producer with the same name
    fences this one.

    *Resources*: a connection and its tasks; they end with the `async with`, which first waits for the
    outcomes of all offers. *Errors*: Refused for a delta; once the producer cannot go on (fenced, not
    allowed, unreachable), every call raises the reason.
    """

    def __init__(
        self,
        addresses: str | Iterable[str],
        *,
        name: str,
        token: str | None = None,
        tls: Tls | None = None,
        ack_level: AckLevel | str | None = None,
        source: Source = Source.LOCAL,
        stream: str | int = DEFAULT_STREAM,
        partition: int | None = None,
        log_id: bytes | None = None,
        numbered: bool = False,
        settings: ClientSettings | None = None,
        world: World | None = None,
    ) -> None:
        """`addresses`: those of one service, tried in turn. `numbered`: all deltas are offered by
        `offer_numbered`, and so share batches. `ack_level`: the level that an acknowledgement must promise;
        `highest`: the highest that the service grants; None: the stream's default, which is that, too,
        unless its settings say otherwise. `stream` (its name or id), `partition`: what it writes to;
        the partition may be left out if the stream has only one. `log_id`: the only log that the partition
        may have.
        """
        self.name = name
        self._connector = Connector(addresses, token=token, tls=tls, settings=settings, world=world)
        self.settings = self._connector.settings
        self._choice = choice = PartitionChoice(stream, partition)
        self._protocol = ProducerProtocol(
            name,
            token=token,
            ack_level=check_requested_level(ack_level),
            source=parse_member("source", source, Source),
            log_id=log_id,
            can_split=numbered,
        )
        self._producer_state = self._protocol.state
        if choice.known is not None:
            self._producer_state.bind(choice.known)
        self._exit = AsyncExitStack()
        self._state = "not open yet"

    # --- opening and closing

    async def __aenter__(self) -> Producer:
        await self.begin()
        try:
            await self.wait_welcomed()
        except BaseException as error:
            await self._close(error)
            raise
        return self

    async def begin(self) -> None:
        """Open without waiting until the service answers; `__aexit__` ends it."""
        if self._state != "not open yet":
            raise UsageError(f"this producer is {self._state}: create another one")
        world = self._connector.open()
        self._now = world.clock.now
        self._protocol.begin(world.randomness.fork("producer"))
        self._changes = ChangeSignal()
        self._new_waker = one_shot_factory()
        self._link = ReconnectingLink(self._connector, self._protocol)
        await self._exit.__aenter__()
        tasks = await self._exit.enter_async_context(anyio.create_task_group())
        self._exit.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._run)
        tasks.start_soon(self._expire)
        self._state = "open"

    async def wait_welcomed(self) -> None:
        """Wait until the service has answered. Raises Unreachable, Refused, UsageError."""
        await self._link.welcomed.wait()
        self._producer_state.check_open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not isinstance(error, anyio.get_cancelled_exc_class()):
                with anyio.move_on_after(self.settings.close_timeout_s):
                    while self._producer_state.in_flight_offers:
                        await self._changes.wait()
        except BaseException as cancelled:
            await self._close(cancelled)
            raise
        unacked = self._producer_state.in_flight_offers
        await self._close(error)
        if unacked and error is None:
            raise offers_unacked(self.name, unacked)

    async def _close(self, error: BaseException | None) -> None:
        self._state = "closed"
        self._producer_state.close()
        await close_tasks(self._exit, error)

    async def _run(self) -> None:
        try:
            if self._choice.known is None:
                log = await find_partition(self._choice, self._connector)
                self._producer_state.bind(log)
            await self._link.run()
        except (Refused, UsageError) as failure:
            self._producer_state.fail(failure)
        except ProtocolError as failure:
            self._producer_state.fail(Refused(failure.code, failure.message))
        self._link.welcomed.set()
        self._changes.notify()

    async def _expire(self) -> None:
        """Drop offers that time out: calls of `publish` on time, other offers up to 1 s later."""
        offers_timeout_s = self.settings.delivery_timeout_s
        calls_timeout_s = min(self.settings.publish_timeout_s, offers_timeout_s)
        while True:
            oldest_at, left_s = self._producer_state.oldest_at(awaited=True), calls_timeout_s
            if oldest_at is not None:
                left_s = max(oldest_at + calls_timeout_s - self._now(), _EXPIRE_INTERVAL_MIN_S)
            await anyio.sleep(min(_EXPIRE_INTERVAL_S, offers_timeout_s / 4, left_s))
            self._producer_state.expire(self._now(), offers_timeout_s, calls_timeout_s)

    # --- state

    @property
    def in_flight_offers(self) -> int:
        """The number of calls that have no outcome yet."""
        return self._producer_state.in_flight_offers

    @property
    def log_id(self) -> bytes | None:
        """The log of the service; None before it has answered."""
        return self._producer_state.log_id

    @property
    def waits_for(self) -> Exception | None:
        """The obstacle for the offers in flight: why there is no connection, or a retryable refusal."""
        if self._state == "not open yet":
            return None
        return self._link.cause or self._producer_state.waits_for

    def check(self) -> None:
        """Raise the reason why nothing can be sent any more; Refused (QUEUE_FULL) if the queue is full."""
        self._producer_state.check_open()
        self._producer_state.check_capacity()

    @property
    def reconnects(self) -> int:
        """Number of reconnects."""
        return self._link.reconnects

    def watermark(self, priority: Priority = Priority.NORMAL) -> int:
        """Return the counter up to which the service had processed this producer's deltas at the welcome."""
        return self._producer_state.watermark(priority)

    def statistics(self) -> Counts:
        """Return the counts of sent batches, of deltas and of outcomes since this producer was made."""
        return self._producer_state.counts

    # --- calls

    def offer(self, *deltas: Delta, after: Sequence[Receipt | Dependency] = ()) -> Receipt:
        """Send deltas of one priority. Never waits; the receipt carries the outcome.

        A retryable refusal is retried, up to `delivery_timeout_s`. Raises InvalidDelta, UsageError; Refused
        (QUEUE_FULL) if too many offers are in flight, or the reason why the producer cannot go on. If it
        raises, no dot is drawn.
        """
        priority, opaque_only = validate(deltas)
        return self._offer(priority, deltas, after, opaque_only=opaque_only)

    async def publish(
        self,
        *deltas: Delta,
        after: Sequence[Receipt | Dependency] = (),
        timeout_s: float | None = None,
    ) -> PublishAck:
        """Send and wait for the acknowledgement, through full queues and lost connections.

        Raises Refused; after `timeout_s` the last refusal, whose text says if the deltas may be in the log.
        A cancelled call withdraws its deltas unless they are in flight.
        """
        state = self._producer_state
        may_coalesce = len(deltas) == 1 and not after and timeout_s is None and not state.can_split
        delta = deltas[0] if may_coalesce else None
        if type(delta) is Delta and is_opaque_only(delta) and self._state == "open":
            waker = self._new_waker()
            calls = state.offer_call(delta, waker, self._now(), self._changes)
            if calls is not None:  # the fast path
                row = calls.count - 1
                if row == 0:  # later calls join before the link polls
                    self._link.notify()
                del deltas, delta  # the batch in flight holds the delta, so this frame need not
                try:
                    outcome = await waker
                except anyio.get_cancelled_exc_class():
                    outcome = self._cancel_call(calls, row, waker)
                    if outcome is None:
                        raise
                if type(outcome) is PublishAck:
                    return outcome.of_row(row)  # made here, as the caller drops it before the next one
                raise outcome
        priority, opaque_only = validate(deltas)
        return await self.publish_checked(
            priority, deltas, opaque_only=opaque_only, after=after, timeout_s=timeout_s
        )

    async def publish_checked(
        self,
        priority: Priority,
        deltas: Sequence[Delta],
        *,
        opaque_only: bool,
        after: Sequence[Receipt | Dependency] = (),
        timeout_s: float | None = None,
    ) -> PublishAck:
        """Publish deltas that are already validated, as `publish` does."""
        return await self._publish(
            lambda: self._offer(priority, deltas, after, opaque_only=opaque_only), timeout_s
        )

    async def publish_many(
        self,
        ids: Sequence[str],
        matrix: ArrayLike,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        kind: Kind = Kind.CREATE,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> PublishAck:
        """Publish complete vectors as columns: row i of `matrix` (n × dimension) is the vector `ids[i]`.

        `kind` is CREATE or DENSE. Raises as `publish` does.
        """
        rows = check_columns(ids, matrix, namespace=namespace, kind=kind, priority=priority)
        columns = Columns(ids, rows, namespace, kind)
        return await self._publish(lambda: self._offer(priority, (), (), columns=columns), timeout_s)

    def offer_numbered(self, counter: int, delta: Delta, then: Callable[[Receipt], None]) -> None:
        """Send a delta under the caller's counter. Counters rise within a priority and may leave gaps.

        A `numbered` producer sends the deltas of one turn as one batch; any other sends each by itself.
        `then` is called once, with the receipt that has the outcome, and must not block. If the service
        processed a counter before this producer started, its outcome is queried: the delta is acknowledged
        as a duplicate, with the offset of its first copy if that is known, or refused as it was then. Never
        waits. Raises as `offer` does; if it raises, nothing is sent.
        """
        self._offer(check_deltas([delta]), [delta], (), counter=counter).add_done_callback(then)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait for the outcomes of all offers. Raises TimeoutError, or why the producer cannot go on."""
        with anyio.fail_after(timeout_or_default(timeout_s, self.settings.delivery_timeout_s)):
            while self._producer_state.in_flight_offers:
                await self._changes.wait()
        self._producer_state.check_open()

    # --- helpers

    def _cancel_call(self, calls: CoalescedCalls, row: int, waker: OneShot) -> PublishAck | Refused | None:
        """Withdraw a call; return its outcome if that came in the same turn of the loop as the cancellation.

        In this case the caller gets the outcome, and a cancelled scope raises again at its next wait.
        """
        if waker.done() and not waker.cancelled() and anyio.current_effective_deadline() == -math.inf:
            outcome: PublishAck | Refused = waker.result()
            return outcome
        self._producer_state.drop_call(calls, row)
        self._link.notify()
        self._changes.notify()
        return None

    def _offer(
        self,
        priority: Priority,
        deltas: Sequence[Delta],
        after: Sequence[Receipt | Dependency],
        *,
        columns: Columns | None = None,
        counter: int | None = None,
        opaque_only: bool = False,
    ) -> Receipt:
        if self._state != "open":
            raise UsageError(f"producer {self.name!r} is {self._state}: use it inside its `async with`")
        if self._producer_state.can_split and counter is None:
            raise UsageError(f"producer {self.name!r} is numbered: use offer_numbered")
        causes = [_find_cause(cause) for cause in after]
        receipt = _OfferReceipt(self._changes)
        offer = make_offer(
            priority, deltas, receipt, causes, columns=columns, counter=counter, opaque_only=opaque_only
        )
        self._producer_state.offer(offer, self._now())
        receipt.item = offer
        receipt.mark_waiting(OfferState.QUEUED, lambda: self._drop(offer))
        self._link.notify()
        return receipt

    def _drop(self, offer: Offer) -> bool:
        removed = self._producer_state.drop(offer)
        self._link.notify()
        self._changes.notify()
        return removed

    async def _publish(self, send: Callable[[], Receipt], timeout_s: float | None) -> PublishAck:
        limit_s = timeout_or_default(timeout_s, self.settings.publish_timeout_s)
        receipt: Receipt | None = None
        offer: object = None
        with anyio.move_on_after(limit_s):
            while receipt is None:
                try:
                    receipt = send()
                    offer = receipt.item
                except Refused as refused:
                    if refused.code is not ErrorCode.QUEUE_FULL or self._producer_state.failure is not None:
                        raise
                    await self._changes.wait()
            return await receipt.wait()
        if receipt is None:
            self._producer_state.check_capacity()
        if receipt is not None and receipt.done and receipt.state is not OfferState.WITHDRAWN:
            return receipt.result()
        raise timed_out(
            offer if isinstance(offer, Offer) else None,
            limit_s,
            withdrawn=receipt is None or receipt.state is OfferState.WITHDRAWN,
        )


class _OfferReceipt(Receipt):
    """Receipt that an offer settles."""

    __slots__ = ("_changes",)

    def __init__(self, changes: ChangeSignal) -> None:
        super().__init__()
        self._changes = changes

    def on_outcome(self, outcome: PublishAck | Refused) -> None:
        """Settle with the outcome, unless the caller has withdrawn the offer."""
        if not self.done:
            if isinstance(outcome, PublishAck):
                self.acknowledge(outcome)
            else:
                self.refuse(outcome)
        self._changes.notify()


def _find_cause(cause: Receipt | Dependency) -> PendingDot | Dot | bytes:
    """Return the name of a delta that must come first, or its pending dot. Raises UsageError."""
    if isinstance(cause, Receipt):
        if isinstance(cause.item, Offer):
            return cause.item.pending_dot
        cause = cause.result()
    return dependency_key(cause)
