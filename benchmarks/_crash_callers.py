"""Callers of every kind that publish while the log fails; each records all answers that it gets.

They use the library's public API, in one process with the service or over the network; `_crash_clients.py`
has clients that send bare frames.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

import anyio
import numpy as np

from benchmarks._crash_answers import NOT_IN_LOG, Answers, Call
from delta_prop.api.producer import Producer as Handle
from delta_prop.api.propagator import Propagator
from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.receipt import Receipt
from delta_prop.client import Producer
from delta_prop.client.errors import Unreachable
from delta_prop_wire.delta import AckLevel, Delta, Dot, create, opaque
from delta_prop_wire.errors import DeltaPropError, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.sync_producer import SyncProducer, SyncReceipt

TIMEOUT_S = 60.0
"""Timeout of a caller that wants the exact answer."""
DIMENSION = 2
_RETRY_S = 0.02
_REFUSALS = (Refused, UsageError)
"""Errors that answer a call: a refusal or an unknown outcome, or UsageError if the service was closed."""


class Pace(Protocol):
    """Decides how many calls one caller makes, and when."""

    def has_more(self) -> bool:
        """Return True while there is another call to make."""
        ...

    def next(self) -> int:
        """Return the number of the next call."""
        ...

    def pause_s(self) -> float:
        """Return the seconds to pause before the next call."""
        ...


def make_rows(caller: str, number: int, count: int = 1, *, with_ids: bool = False) -> list[Delta]:
    """Return the rows of call `number` of a caller; no other row has their keys."""
    deltas = []
    for row in range(count):
        key = f"{caller}/{number}.{row}"
        operation = opaque(key.encode()) if number % 2 else create([float(number), float(row)])
        delta_id = blake2b(key.encode(), digest_size=16).digest() if with_ids else None
        deltas.append(Delta(key, operation, id=delta_id))
    return deltas


def keys_of(deltas: Sequence[Delta]) -> list[str]:
    """Return the keys of rows."""
    return [delta.vector_id for delta in deltas]


@dataclass(slots=True)
class Caller:
    """One caller: its name, its options, and the record of its answers."""

    name: str
    answers: Answers
    pace: Pace
    level: AckLevel = AckLevel.DURABLE
    rows_per_call: int = 1
    timeout_s: float = TIMEOUT_S
    with_ids: bool = False

    @contextmanager
    def _noting_refusals(
        self, call: Call, errors: tuple[type[DeltaPropError], ...] = _REFUSALS
    ) -> Iterator[None]:
        """Record a refusal of the call within the block."""
        try:
            yield
        except errors as refusal:
            self.answers.note_refused(call, refusal)

    async def publish(self, publish: Callable[..., Awaitable[PublishAck]]) -> None:
        """Publish call after call with `publish(*deltas, timeout_s=…)`; never send a call twice."""
        while self.pace.has_more():
            deltas = make_rows(self.name, self.pace.next(), self.rows_per_call, with_ids=self.with_ids)
            call = self.answers.call(self.name, keys_of(deltas), self.level, self.timeout_s)
            with self._noting_refusals(call):
                self.answers.note_published(call, await publish(*deltas, timeout_s=self.timeout_s))
            await anyio.sleep(self.pace.pause_s())

    async def publish_embedded(self, propagator: Propagator) -> None:
        """Publish by `Propagator.publish`."""
        await self.publish(partial(propagator.publish, ack_level=self.level))

    async def publish_many(self, publish_many: Callable[..., Awaitable[PublishAck]]) -> None:
        """Publish columns, with `publish_many(keys, matrix, timeout_s=…)`: each call is one frame."""

        async def publish(*deltas: Delta, timeout_s: float) -> PublishAck:
            matrix = np.ones((len(deltas), DIMENSION), np.float32)
            return await publish_many(keys_of(deltas), matrix, timeout_s=timeout_s)

        await self.publish(publish)

    async def publish_many_embedded(self, propagator: Propagator) -> None:
        """Publish by `Propagator.publish_many`."""
        await self.publish_many(partial(propagator.publish_many, ack_level=self.level))

    async def offer(self, offer: Callable[..., Receipt]) -> None:
        """Offer one call after another, and wait for the receipts concurrently."""
        async with anyio.create_task_group() as tasks:
            while self.pace.has_more():
                deltas = make_rows(self.name, self.pace.next(), self.rows_per_call, with_ids=self.with_ids)
                call = self.answers.call(self.name, keys_of(deltas), self.level)
                with self._noting_refusals(call):
                    tasks.start_soon(self._note_outcome, call, offer(*deltas))
                await anyio.sleep(self.pace.pause_s())

    async def _note_outcome(self, call: Call, receipt: Receipt) -> None:
        with self._noting_refusals(call, (Refused,)):
            try:
                self.answers.note_published(call, await receipt.wait())
            except Unreachable:  # the service has not answered, so the outcome is unknown
                call.is_excused = True

    async def offer_embedded(self, propagator: Propagator) -> None:
        """Offer by `Propagator.offer`."""
        await self.offer(partial(propagator.offer, ack_level=self.level))

    async def publish_through_handle(self, propagator: Propagator) -> None:
        """Publish through a producer handle of the propagator."""
        handle = await open_producer(propagator, self.name, self.level)
        if handle is not None:
            await self.publish(handle.publish)
            own_calls = [call for call in self.answers.calls if call.caller == self.name]
            with suppress(*_REFUSALS):  # the service was closed meanwhile
                await query_outcomes(own_calls, lambda dot: handle.outcome(dot.counter))

    async def offer_through_handles(self, propagator: Propagator) -> None:
        """Offer two batches through each of several handles, one handle after another; resend nothing."""
        while self.pace.has_more():
            caller = f"{self.name}-{self.pace.next()}"
            handle = await open_producer(propagator, caller, self.level)
            if handle is None:
                return
            for batch in range(2):
                deltas = make_rows(caller, batch, self.rows_per_call)
                call = self.answers.call(caller, keys_of(deltas), self.level)
                try:
                    receipt = handle.offer(*deltas)
                    self.answers.note_published(call, await receipt.wait())
                except _REFUSALS as refusal:
                    self.answers.note_refused(call, refusal)
                    break
            await anyio.sleep(self.pace.pause_s())

    def publish_blocking(self, producer: SyncProducer, sleep: Callable[[float], object]) -> None:
        """Publish with a long and with a short timeout, and offer, in turn, through blocking calls."""
        offered: list[tuple[Call, SyncReceipt]] = []
        while self.pace.has_more():
            number = self.pace.next()
            deltas = make_rows(self.name, number, self.rows_per_call)
            is_offer, timeout_s = number % 3 == 0, self.timeout_s if number % 3 == 1 else TIMEOUT_S
            call = self.answers.call(self.name, keys_of(deltas), self.level, None if is_offer else timeout_s)
            with self._noting_refusals(call, (Refused,)):
                if is_offer:
                    offered.append((call, producer.offer(*deltas)))
                else:
                    self.answers.note_published(call, producer.publish(*deltas, timeout_s=timeout_s))
            sleep(self.pace.pause_s())
        for call, receipt in offered:
            with self._noting_refusals(call, (Refused,)):
                self.answers.note_published(call, receipt.result(TIMEOUT_S))


MakeCaller = Callable[..., "Caller"]
"""Makes a caller from a name and options."""


def embedded_callers(
    make_caller: MakeCaller, short_timeout_s: float
) -> list[tuple[Caller, Callable[[Caller, Propagator], Awaitable[None]]]]:
    """Return the callers within a service's process, each with the method that it runs."""
    logged = AckLevel.LOGGED
    return [
        (make_caller("publish"), Caller.publish_embedded),
        (make_caller("publish-rows", rows_per_call=3), Caller.publish_embedded),
        (make_caller("publish-ids", with_ids=True), Caller.publish_embedded),
        (make_caller("publish-logged", level=logged), Caller.publish_embedded),
        (make_caller("publish-short", timeout_s=short_timeout_s), Caller.publish_embedded),
        (make_caller("publish-many", rows_per_call=2), Caller.publish_many_embedded),
        (make_caller("offer"), Caller.offer_embedded),
        (make_caller("offer-ids", with_ids=True, level=logged), Caller.offer_embedded),
        (make_caller("handle"), Caller.publish_through_handle),
        (make_caller("handle-short", timeout_s=short_timeout_s), Caller.publish_through_handle),
        (make_caller("handle-offer"), Caller.offer_through_handles),
    ]


async def produce(producer: Producer, make_caller: MakeCaller, short_timeout_s: float) -> None:
    """Run several callers concurrently on one client."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(make_caller("client-publish").publish, producer.publish)
        tasks.start_soon(make_caller("client-short", timeout_s=short_timeout_s).publish, producer.publish)
        tasks.start_soon(make_caller("client-rows", rows_per_call=2).publish, producer.publish)
        tasks.start_soon(make_caller("client-offer").offer, producer.offer)
        for number in range(2):
            caller = make_caller(f"client-many-{number}", rows_per_call=2)
            tasks.start_soon(caller.publish_many, producer.publish_many)


async def open_producer(propagator: Propagator, name: str, level: AckLevel) -> Handle | None:
    """Open a producer's handle; retry while the log has failed. Return None once the service is closed."""
    while True:
        try:
            return propagator.producer(name, ack_level=level)
        except Refused:
            await anyio.sleep(_RETRY_S)
        except UsageError:
            return None


async def query_outcomes(
    calls: Iterable[Call], outcome: Callable[[Dot], Awaitable[int | ErrorCode | None]]
) -> None:
    """Query the outcome of each call whose outcome is unknown; no call may be in flight."""
    for call in calls:
        for answer in call.answers:
            if answer.kind == "unknown" and answer.dot is not None:
                offset = await outcome(Dot(*answer.dot))
                call.queried_offsets.append(
                    NOT_IN_LOG if offset is None or isinstance(offset, ErrorCode) else offset
                )
