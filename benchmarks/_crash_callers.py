"""Callers of every kind that publish while the log fails, each of whom records all that it is told.

They use what the library offers to programs, in one process with the service or over the network; clients
made of frames alone are `_crash_bare.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

import anyio
import numpy as np

from delta_prop.client.errors import Unreachable
from delta_prop_wire.delta import AckLevel, Delta, Dot, create, opaque
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    from benchmarks._crash_answers import Answers, Call
    from delta_prop.client import Producer
    from delta_prop.client.blocking import SyncProducer, SyncReceipt
    from delta_prop.embedded import Propagator
    from delta_prop.producer import Producer as Handle
    from delta_prop.published import Published
    from delta_prop.receipt import Receipt

TIMEOUT_S = 60.0
"""How long a caller waits that wants the exact answer."""
DIMENSION = 2
_AGAIN_S = 0.02
_REFUSALS = (Refused, UsageError)
"""Answers that it has not happened; the second one where the service was closed meanwhile."""


class Pace(Protocol):
    """The calls of one caller: how many, and how fast."""

    def going(self) -> bool:
        """Return True while there is another call to make."""
        ...

    def next(self) -> int:
        """Return the number of the call that is made now."""
        ...

    def pause_s(self) -> float:
        """Return how long to rest before the next call."""
        ...


def made(caller: str, number: int, rows: int = 1, *, with_ids: bool = False) -> list[Delta]:
    """Return the rows of a caller's call of this number: their keys are theirs alone."""
    deltas = []
    for row in range(rows):
        key = f"{caller}/{number}.{row}"
        operation = opaque(key.encode()) if number % 2 else create([float(number), float(row)])
        own = blake2b(key.encode(), digest_size=16).digest() if with_ids else None
        deltas.append(Delta(key, operation, id=own))
    return deltas


def keys_of(deltas: Sequence[Delta]) -> list[str]:
    """Return the keys of rows."""
    return [delta.vector_id for delta in deltas]


@dataclass(slots=True)
class Caller:
    """One caller: its name, what it asks for, and where it records the answers."""

    name: str
    answers: Answers
    pace: Pace
    level: AckLevel = AckLevel.DURABLE
    rows: int = 1
    timeout_s: float = TIMEOUT_S
    with_ids: bool = False

    async def publish(self, publish: Callable[..., Awaitable[Published]]) -> None:
        """Publish one call after the other, with `publish(*deltas, timeout_s=…)`; never one twice."""
        while self.pace.going():
            deltas = made(self.name, self.pace.next(), self.rows, with_ids=self.with_ids)
            call = self.answers.call(self.name, keys_of(deltas), self.level, self.timeout_s)
            try:
                self.answers.published(call, await publish(*deltas, timeout_s=self.timeout_s))
            except _REFUSALS as refusal:
                self.answers.refused(call, refusal)
            await anyio.sleep(self.pace.pause_s())

    async def publish_embedded(self, propagator: Propagator) -> None:
        """Publish by `Propagator.publish`."""
        await self.publish(partial(propagator.publish, ack_level=self.level))

    async def publish_many(self, publish_many: Callable[..., Awaitable[Published]]) -> None:
        """Publish columns, with `publish_many(keys, matrix, timeout_s=…)`: a call is a frame of its own."""

        async def publish(*deltas: Delta, timeout_s: float) -> Published:
            matrix = np.ones((len(deltas), DIMENSION), np.float32)
            return await publish_many(keys_of(deltas), matrix, timeout_s=timeout_s)

        await self.publish(publish)

    async def publish_many_embedded(self, propagator: Propagator) -> None:
        """Publish by `Propagator.publish_many`."""
        await self.publish_many(partial(propagator.publish_many, ack_level=self.level))

    async def offer(self, offer: Callable[..., Receipt]) -> None:
        """Offer one call after the other, and wait for the receipts beside that."""
        async with anyio.create_task_group() as tasks:
            while self.pace.going():
                deltas = made(self.name, self.pace.next(), self.rows, with_ids=self.with_ids)
                call = self.answers.call(self.name, keys_of(deltas), self.level)
                try:
                    receipt = offer(*deltas)
                except _REFUSALS as refusal:
                    self.answers.refused(call, refusal)
                else:
                    tasks.start_soon(_note, self.answers, call, receipt)
                await anyio.sleep(self.pace.pause_s())

    async def offer_embedded(self, propagator: Propagator) -> None:
        """Offer by `Propagator.offer`."""
        await self.offer(partial(propagator.offer, ack_level=self.level))

    async def publish_as(self, propagator: Propagator) -> None:
        """Publish by a handle of the propagator's."""
        handle = await opened(propagator, self.name, self.level)
        if handle is not None:
            await self.publish(handle.publish)
            mine = [call for call in self.answers.calls if call.caller == self.name]
            with suppress(*_REFUSALS):  # the service was closed meanwhile
                await ask_by_dots(mine, lambda dot: handle.outcome(dot.counter))

    async def offer_as(self, propagator: Propagator) -> None:
        """Offer a few batches by a handle that is left alone afterwards: it sends nothing again."""
        while self.pace.going():
            caller = f"{self.name}-{self.pace.next()}"
            handle = await opened(propagator, caller, self.level)
            if handle is None:
                return
            for batch in range(2):
                deltas = made(caller, batch, self.rows)
                call = self.answers.call(caller, keys_of(deltas), self.level)
                try:
                    receipt = handle.offer(*deltas)
                    self.answers.published(call, await receipt.wait())
                except _REFUSALS as refusal:
                    self.answers.refused(call, refusal)
                    break
            await anyio.sleep(self.pace.pause_s())

    def publish_blocking(self, producer: SyncProducer, rest: Callable[[float], object]) -> None:
        """Publish, with time and with little of it, and offer in turn, by calls that block."""
        offered: list[tuple[Call, SyncReceipt]] = []
        while self.pace.going():
            number = self.pace.next()
            deltas = made(self.name, number, self.rows)
            timeout_s = (None, self.timeout_s, TIMEOUT_S)[number % 3]
            call = self.answers.call(self.name, keys_of(deltas), self.level, timeout_s)
            try:
                if timeout_s is None:
                    offered.append((call, producer.offer(*deltas)))
                else:
                    self.answers.published(call, producer.publish(*deltas, timeout_s=timeout_s))
            except Refused as refusal:
                self.answers.refused(call, refusal)
            rest(self.pace.pause_s())
        for call, receipt in offered:
            try:
                self.answers.published(call, receipt.result(TIMEOUT_S))
            except Refused as refusal:
                self.answers.refused(call, refusal)


Makes = Callable[..., "Caller"]
"""Makes a caller of a name, with what else it is to be."""


def embedded_callers(
    make: Makes, short_s: float
) -> list[tuple[Caller, Callable[[Caller, Propagator], Awaitable[None]]]]:
    """Return the callers within a service's process, each with the way it goes."""
    logged = AckLevel.LOGGED
    return [
        (make("publish"), Caller.publish_embedded),
        (make("publish-rows", rows=3), Caller.publish_embedded),
        (make("publish-ids", with_ids=True), Caller.publish_embedded),
        (make("publish-logged", level=logged), Caller.publish_embedded),
        (make("publish-short", timeout_s=short_s), Caller.publish_embedded),
        (make("publish-many", rows=2), Caller.publish_many_embedded),
        (make("offer"), Caller.offer_embedded),
        (make("offer-ids", with_ids=True, level=logged), Caller.offer_embedded),
        (make("handle"), Caller.publish_as),
        (make("handle-short", timeout_s=short_s), Caller.publish_as),
        (make("handle-offer"), Caller.offer_as),
    ]


async def produce(producer: Producer, make: Makes, short_s: float) -> None:
    """Have several callers use one client at once."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(make("client-publish").publish, producer.publish)
        tasks.start_soon(make("client-short", timeout_s=short_s).publish, producer.publish)
        tasks.start_soon(make("client-rows", rows=2).publish, producer.publish)
        tasks.start_soon(make("client-offer").offer, producer.offer)
        for number in range(2):
            many = make(f"client-many-{number}", rows=2)
            tasks.start_soon(many.publish_many, producer.publish_many)


async def _note(answers: Answers, call: Call, receipt: Receipt) -> None:
    try:
        answers.published(call, await receipt.wait())
    except Unreachable:  # nothing was refused, and nobody says whether it happened
        call.excused = True
    except Refused as refusal:
        answers.refused(call, refusal)


async def opened(propagator: Propagator, name: str, level: AckLevel) -> Handle | None:
    """Open a producer's handle, again and again where the log has failed; None once the service is closed."""
    while True:
        try:
            return propagator.producer(name, ack_level=level)
        except Refused:
            await anyio.sleep(_AGAIN_S)
        except UsageError:
            return None


async def ask_by_dots(
    answers: Iterable[Call], outcome: Callable[[Dot], Awaitable[int | ErrorCode | None]]
) -> None:
    """Ask for the outcome of all that may have happened, of a service that is at rest."""
    for call in answers:
        for answer in call.answers:
            if answer.kind == "unknown" and answer.dot is not None:
                told = await outcome(Dot(*answer.dot))
                call.asked.append(told if isinstance(told, int) and not isinstance(told, ErrorCode) else -1)
