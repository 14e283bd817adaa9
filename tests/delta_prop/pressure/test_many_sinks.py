"""Fifty sinks, ten of them stalled: the cost of a publish, the bound of mailboxes, and catching up.

Costs are numbers of calls and wakes, so they are the same on every machine.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Propagator, Settings
from delta_prop.delivery.feed import Feed
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_wire.delta import Delta, opaque
from tests.delta_prop.pressure.isolation import TimedSink, steady_sink

if TYPE_CHECKING:
    from collections.abc import Iterator

HEALTHY, STALLED = 40, 10
"""Numbers of sinks."""
MAILBOX_DELTAS, MAILBOX_BYTES, MERGE_DELTAS = 200, 1 << 20, 100
SETTINGS = Settings(
    mailbox_deltas_max=MAILBOX_DELTAS, mailbox_bytes_max=MAILBOX_BYTES, merge_deltas_max=MERGE_DELTAS
)
CALLS_PER_SINK_MAX = 40
CALLS_PER_STALLED_SINK_MAX = 6
"""Function calls that a publish may make per sink; a lagging sink is only checked."""
WAKES_PER_SINK_MAX = 6


class Barrier:
    """An event that holds back sinks until it is set."""

    def __init__(self) -> None:
        self.opened = anyio.Event()

    def sink(self, name: str) -> TimedSink:
        async def work(_: list[int]) -> None:
            await self.opened.wait()

        return TimedSink(name, work)


@dataclass(slots=True)
class CallCounts:
    """The counters of `count_calls()`."""

    calls: int = 0
    offers: int = 0
    wakes: int = 0


@contextmanager
def count_calls() -> Iterator[CallCounts]:
    """Count all function calls, the calls of `Feed.offer`, and the callbacks scheduled on the loop."""
    counts = CallCounts()
    offer = Feed.offer.__code__
    loop: Any = asyncio.get_running_loop()
    call_soon = loop.call_soon

    def note(frame: Any, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            counts.calls += 1
            counts.offers += event == "call" and frame.f_code is offer

    def wake(*arguments: Any, **options: Any) -> Any:
        counts.wakes += 1
        return call_soon(*arguments, **options)

    before = sys.getprofile()
    loop.call_soon = wake
    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(before)
        del loop.call_soon


@dataclass(slots=True)
class Service:
    """A propagator with healthy and stalled sinks."""

    p: Propagator
    barrier: Barrier
    healthy: list[TimedSink] = field(default_factory=list)
    stalled: list[TimedSink] = field(default_factory=list)

    @classmethod
    async def attach(cls, p: Propagator, healthy: int, stalled: int) -> Service:
        service = cls(p, Barrier())
        service.healthy = [steady_sink(f"healthy-{number}", call_s=0.001) for number in range(healthy)]
        service.stalled = [service.barrier.sink(f"stalled-{number}") for number in range(stalled)]
        for sink in service.healthy + service.stalled:
            await p.attach(sink)
        return service

    async def publish(self, times: int, deltas: int = 1) -> None:
        """Publish `times` times, each time after the healthy sinks are idle."""
        for number in range(times):
            await self.p.publish(*(Delta(f"v{number % 7}", opaque(bytes(100))),) * deltas)
            await anyio.sleep(0.05)

    async def cost(self) -> CallCounts:
        """Return the cost of one publish and its deliveries, in a steady state."""
        await self.publish(5)
        with count_calls() as call_counts:
            self.p.offer(Delta("v0", opaque(bytes(100))))
        await anyio.sleep(0.05)
        with count_calls() as tick_counts:
            await self.publish(1)
        call_counts.wakes = tick_counts.wakes
        return call_counts


def measure_cost(healthy: int, stalled: int) -> CallCounts:
    async def main() -> CallCounts:
        async with Propagator(SETTINGS, world=virtual_world()) as p:
            service = await Service.attach(p, healthy, stalled)
            await service.publish(25, MAILBOX_DELTAS // 20)
            assert all(p.statistics().sinks[sink.name].catching_up for sink in service.stalled)
            counts = await service.cost()
            service.barrier.opened.set()
        return counts

    return run_virtual(main)


def test_publish_cost_grows_only_with_sinks_that_keep_up() -> None:
    no_sinks, few, all_healthy, some_stalled = (
        measure_cost(0, 0),
        measure_cost(HEALTHY // 4, 0),
        measure_cost(HEALTHY, 0),
        measure_cost(HEALTHY, STALLED),
    )
    print(
        f"no sinks {no_sinks}, {HEALTHY // 4} sinks {few}, {HEALTHY} {all_healthy}, "
        f"{STALLED} more {some_stalled}"
    )
    assert (no_sinks.offers, few.offers, all_healthy.offers) == (0, HEALTHY // 4, HEALTHY)
    assert some_stalled.offers <= HEALTHY + STALLED
    assert few.calls - no_sinks.calls <= CALLS_PER_SINK_MAX * HEALTHY // 4
    assert all_healthy.calls - no_sinks.calls <= CALLS_PER_SINK_MAX * HEALTHY
    assert some_stalled.calls - all_healthy.calls <= CALLS_PER_STALLED_SINK_MAX * STALLED
    assert all_healthy.wakes - no_sinks.wakes <= WAKES_PER_SINK_MAX * HEALTHY
    assert some_stalled.wakes == all_healthy.wakes  # a stalled sink is not woken


def test_mailboxes_are_bounded_and_lagging_sinks_read_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = 0
    read_log = MemoryLog.read

    def read(log: MemoryLog, offset: int, *, rows_max: int, bytes_max: int) -> Any:
        nonlocal reads
        reads += 1
        return read_log(log, offset, rows_max=rows_max, bytes_max=bytes_max)

    monkeypatch.setattr(MemoryLog, "read", read)

    async def main() -> None:
        async with Propagator(SETTINGS, world=virtual_world()) as p:
            service = await Service.attach(p, HEALTHY, STALLED)
            worst_deltas = worst_bytes = 0
            for number in range(150):  # mostly small; now and then a third of a mailbox's bytes
                rows = 1 + number % 5
                size = MAILBOX_BYTES // 3 // rows if number % 50 == 49 else 10
                published = await p.publish(*(Delta(f"v{number}", opaque(bytes(size))),) * rows)
                for _ in range(2):
                    statistics = p.statistics().sinks.values()
                    worst_deltas = max(worst_deltas, *(sink.mailbox_deltas for sink in statistics))
                    worst_bytes = max(worst_bytes, *(sink.mailbox_bytes for sink in statistics))
                    await anyio.sleep(0.01)
            end = published.next_offset
            lagging = [p.statistics().sinks[sink.name] for sink in service.stalled]
            assert all(sink.catching_up and sink.pulled and sink.lag == end for sink in lagging)
            assert MAILBOX_DELTAS // 2 < worst_deltas <= MAILBOX_DELTAS
            assert MAILBOX_BYTES // 4 < worst_bytes <= MAILBOX_BYTES
            await p.wait_visible(end, sinks=[sink.name for sink in service.healthy])
            assert reads == 0  # a sink that keeps up gets its deltas from its mailbox
            service.barrier.opened.set()
            await p.wait_visible(end)
            assert STALLED <= reads <= STALLED * (2 * end // MERGE_DELTAS + 3)
            for sink in service.healthy + service.stalled:
                assert [offset for offset, _ in sink.applied] == list(range(end))
            print(
                f"{STALLED} of {HEALTHY + STALLED} sinks lagged by {end} deltas: mailboxes held at most "
                f"{worst_deltas} of {MAILBOX_DELTAS} deltas, {worst_bytes} of {MAILBOX_BYTES} bytes; "
                f"they caught up by {reads} reads of the log"
            )

    run_virtual(main)
