"""After random publishes and disk failures, a service recovered in place equals a newly opened one."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority, create, delete
from tests.delta_prop.durable.test_reopening import SMALL, log_position, service

if TYPE_CHECKING:
    from delta_prop.api.producer import Producer
    from delta_prop.api.propagator import Propagator

LEVELS = [AckLevel.MEMORY, AckLevel.LOGGED, AckLevel.DURABLE]
VECTORS = 4
COUNTS: Counter[str] = Counter()
"""Totals over all examples."""
# Each step is (kind, index of a producer, level, wait or break, amount).
PRODUCE = st.tuples(st.just("produce"), st.integers(0, 3), st.integers(1, 3))
DRAFT = st.tuples(st.just("draft"), st.integers(0, 2), st.integers(1, 3))
WAIT = st.tuples(st.just("wait"), st.integers(0, 3), st.just(0))
BREAK = st.tuples(st.just("break"), st.integers(0, 3), st.integers(0, 6))
HEAL = st.tuples(st.just("heal"), st.just(0), st.just(0))
STEPS = st.lists(
    st.one_of(PRODUCE, PRODUCE, DRAFT, WAIT, BREAK, PRODUCE, WAIT, HEAL), min_size=25, max_size=50
)
WAITS_S = (0.003, 0.02, 0.2, 3.0)
BROKEN_CALLS = (("write",), ("sync", "sync_directory"), ("write", "sync"), ("read", "open"))


@dataclass
class History:
    """Acknowledged and delivered rows, and the producers of one service."""

    disk: SimDisk
    acknowledged: dict[bytes, tuple[int, AckLevel]] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)
    number: int = 0
    producers: list[Producer] = field(default_factory=list)

    async def run(self, steps: list[tuple[str, int, int]], seed: int) -> None:
        async with service(self.disk, seed, SMALL) as p:
            await p.attach(CallbackSink(lambda offset, _: self.seen.append(offset)))
            self.producers = [p.producer(f"p{index}", ack_level=LEVELS[index % 3]) for index in range(4)]
            async with anyio.create_task_group() as tasks:
                for step, index, amount in steps:
                    if step == "produce":
                        tasks.start_soon(self.produce, self.producers[index], index, amount)
                    elif step == "draft":
                        tasks.start_soon(self.draft, p, LEVELS[index], amount)
                    elif step == "wait":
                        await anyio.sleep(WAITS_S[index])
                    elif step == "break":
                        self.disk.fail(self.fails_after(BROKEN_CALLS[index], amount), errno.EIO, times=None)
                    else:
                        self.disk.heal()
                await anyio.sleep(0.1)
                self.disk.heal()
            for _ in range(100):
                reopening = p.statistics().reopening
                assert reopening is not None
                if reopening.failed:
                    await anyio.sleep(1)
            await p.wait_visible(p.statistics().log.next_offset)
            await self.check(p, seed, reopened=reopening.reopened)

    def fails_after(self, names: tuple[str, ...], call_count: int) -> object:
        after = self.disk.calls + call_count
        return lambda call: call.number > after and call.name in names

    def make_deltas(self, amount: int) -> list[Delta]:
        self.number += 1
        key = f"v{self.number % VECTORS}"
        return [
            Delta(
                key,
                create([float(self.number)]) if (self.number + row) % 5 else delete(),
                priority=Priority(self.number % 2 + 1),
            )
            for row in range(amount)
        ]

    async def produce(self, producer: Producer, index: int, amount: int) -> None:
        deltas = self.make_deltas(amount)
        published = await producer.publish(*deltas, timeout_s=500)
        self.record(published.dot, published.offset, producer._ack_level, amount)

    async def draft(self, p: Propagator, level: AckLevel, amount: int) -> None:
        published = await p.publish(*self.make_deltas(amount), ack_level=level, timeout_s=500)
        self.record(published.dot, published.offset, level, amount)

    def record(self, dot: Dot | None, offset: int | None, level: AckLevel, amount: int) -> None:
        assert dot is not None
        assert offset is not None
        for row in range(amount):
            key = f"{dot.origin:x}.{dot.counter + row}".encode()
            assert key not in self.acknowledged
            COUNTS["acknowledged"] += 1
            self.acknowledged[key] = (offset + row, level)

    async def check(self, p: Propagator, seed: int, *, reopened: int) -> None:
        image = self.disk.kill()
        stored: dict[bytes, int] = {}
        delivered: list[int] = []
        offset = p.statistics().log.start_offset
        while batches := p.internals().partition.log.read(offset, rows_max=1000, bytes_max=1 << 20):
            for logged in batches:
                offset = logged.next_offset
                for row in range(logged.count):
                    dot = logged.batch.dot(row)
                    key = f"{dot.origin:x}.{dot.counter}".encode()
                    assert key not in stored, "a dot must have one offset"
                    stored[key] = logged.offset + row
                    if not logged.batch.is_control:
                        delivered.append(logged.offset + row)
        COUNTS["reopened"] += reopened
        COUNTS["lost"] += sum(key not in stored for key in self.acknowledged)
        durable = {
            key: offset for key, (offset, level) in self.acknowledged.items() if level is AckLevel.DURABLE
        }
        assert durable.items() <= stored.items()
        if not reopened:
            assert {key: offset for key, (offset, _) in self.acknowledged.items()} == stored
        assert self.seen == delivered, "each delta must be delivered once, in order"
        async with service(image, seed + 1, SMALL) as fresh:
            assert log_position(fresh) == log_position(p)
            for number in range(VECTORS):
                assert fresh.head(f"v{number}") == p.head(f"v{number}")
            for index, producer in enumerate(self.producers):
                fresh_producer = fresh.producer(f"p{index}")
                for lane in Priority:
                    watermark = producer.watermark(lane)
                    assert fresh_producer.watermark(lane) == watermark
                    outcomes = [await producer.outcome(counter, lane) for counter in range(1, watermark + 1)]
                    assert [
                        await fresh_producer.outcome(counter, lane) for counter in range(1, watermark + 1)
                    ] == outcomes


def test_random_history_ends_like_a_freshly_opened_service() -> None:
    @settings(max_examples=settings.default.max_examples // 4)
    @given(steps=STEPS, seed=st.integers(0, 1 << 16))
    def any_history(steps: list[tuple[str, int, int]], seed: int) -> None:
        run_virtual(History(SimDisk(seed)).run, steps, seed)

    COUNTS.clear()
    any_history()
    print(dict(COUNTS))
    assert COUNTS["reopened"] > 5
    assert COUNTS["lost"] > 5, "some rows acknowledged at a lower level must be lost"
