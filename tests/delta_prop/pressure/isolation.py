"""Shared code of the isolation tests: random traffic, and sinks that are steady, failing or stalled."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from delta_prop_sinks.sink import TryAgain
from delta_prop_wire.delta import Delta, opaque

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from delta_prop import Propagator
    from delta_prop_sinks.sink import Delivery, SinkContext

NAMESPACES = ("a", "b", "c")
SIZES = (1, 1, 1, 2, 5, 20, 60)
"""Deltas in one call of `publish`: mostly one, now and then many."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One call of `publish`: its time, its deltas, and the ids of the parents that it waits for."""

    at_s: float
    deltas: tuple[Delta, ...]
    after: tuple[bytes, ...]


def traffic(seed: int, *, calls: int, calls_per_s: float) -> list[Arrival]:
    """Return calls at random times, as independent callers make them: the gaps are exponential.

    One call in ten names a parent that is published later, so its acknowledgement has to wait.
    """
    rng = random.Random(f"traffic {seed}")
    arrivals, at_s = [], 0.0
    for number in range(calls):
        at_s += rng.expovariate(calls_per_s)
        deltas = tuple(
            Delta(
                f"v{number}-{row}",
                opaque(bytes(rng.choice((0, 10, 500)))),
                rng.choice(NAMESPACES),
                id=_id(number, row),
            )
            for row in range(rng.choice(SIZES))
        )
        has_parent = rng.random() < 0.1 and number + 3 < calls
        arrivals.append(Arrival(at_s, deltas, (_id(number + 3, 0),) if has_parent else ()))
    return arrivals


def _id(call: int, row: int) -> bytes:
    return call.to_bytes(8, "big") + row.to_bytes(8, "big")


def rows_of(deliveries: Sequence[Delivery]) -> Iterator[int]:
    """Yield the offsets of the delivered rows."""
    for delivery in deliveries:
        rows = range(delivery.logged.count) if delivery.rows is None else delivery.rows.tolist()
        yield from (delivery.logged.offset + row for row in rows)


@dataclass(slots=True)
class TimedSink:
    """A sink that records when each row was applied. It first awaits `work`, which may take time or fail."""

    name: str
    work: Callable[[list[int]], Awaitable[int | None]]
    """Gets the offsets of a call; returns None for success, else the offset below which rows were done."""
    applied: list[tuple[int, float]] = field(default_factory=list)
    """The offset and the time of each row."""
    calls: int = 0
    failures: int = 0

    async def open(self, context: SinkContext) -> None:
        """Do nothing: the service keeps the cursor."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Do the work, then record the rows that are done."""
        self.calls += 1
        offsets = list(rows_of(deliveries))
        done_offset = await self.work(offsets)
        now = anyio.current_time()
        self.applied += [(offset, now) for offset in offsets if done_offset is None or offset < done_offset]
        if done_offset is not None:
            self.failures += 1
            raise TryAgain(
                "it fails now and then", done_offset=done_offset if done_offset > offsets[0] else None
            )

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""

    def statistics(self) -> int:
        """Return the number of rows applied."""
        return len(self.applied)


def steady_sink(name: str, *, call_s: float, row_s: float = 0.0) -> TimedSink:
    """Return a sink that takes the same time for each call and for each row."""

    async def work(offsets: list[int]) -> None:
        await anyio.sleep(call_s + row_s * len(offsets))

    return TimedSink(name, work)


def failing_sink(name: str, seed: int, *, share: float, call_s: float = 0.0) -> TimedSink:
    """Return a sink that fails this share of its calls, half of these after some of the rows are done."""
    rng = random.Random(f"{name} {seed}")

    async def work(offsets: list[int]) -> int | None:
        if call_s:
            await anyio.sleep(call_s)
        if rng.random() >= share:
            return None
        return rng.choice(offsets) if rng.random() < 0.5 else offsets[0]

    return TimedSink(name, work)


def stalled_sink(name: str, *, from_offset: int, stall_s: float) -> TimedSink:
    """Return a sink that stalls once, in the call that delivers this offset."""
    has_stalled = False

    async def work(offsets: list[int]) -> None:
        nonlocal has_stalled
        if offsets[-1] >= from_offset and not has_stalled:
            has_stalled = True
            await anyio.sleep(stall_s)

    return TimedSink(name, work)


async def publish_all(p: Propagator, arrivals: Sequence[Arrival]) -> list[tuple[int, float]]:
    """Make each call at its time, in its own task; return the offset and the time of each acknowledgement."""
    acknowledged: list[Any] = [None] * len(arrivals)

    async def publish(number: int, arrival: Arrival) -> None:
        await anyio.sleep_until(arrival.at_s)
        published = await p.publish(*arrival.deltas, after=arrival.after)
        acknowledged[number] = (published.offset, anyio.current_time())

    async with anyio.create_task_group() as callers:
        for number, arrival in enumerate(arrivals):
            callers.start_soon(publish, number, arrival)
    return acknowledged
