"""Whatever the order of arrival: one order for every sink, an extension of causality, and one end state."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.embedded import Propagator
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_sinks import CacheSink, CallbackSink, HasBackground, IndexSink, StorageSink, TryAgain
from delta_prop_wire.delta import Dot, Source
from tests.delta_prop.causal_graphs import Journey, Sent, expected, graph, journey

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from delta_prop.receipt import Receipt
    from delta_prop_sinks.sink import Delivery, Sink
    from delta_prop_wire.algebra import VectorState
    from delta_prop_wire.delta import Delta

LATE_S = 20.0
Content = dict[tuple[str, str], Any]


@dataclass
class Counters:
    """Counts of events in the runs: zeros would mean that nothing was tried."""

    deltas: int = 0
    reordered: int = 0
    repeated: int = 0
    late: int = 0
    parked: int = 0
    answered_as_repeat: int = 0
    folded_late: int = 0
    delivered_again: int = 0


class Paced:
    """A sink at a pace of its own, which fails now and then, before or after it has applied."""

    def __init__(self, sink: Sink, random: Random, pause_s: float) -> None:
        self.name = sink.name
        self.sink = sink
        self.seen: list[Dot] = []
        self.again = 0
        self._random, self._pause_s = random, pause_s
        self._next = 0

    async def open(self, context: Any) -> Any:
        return await self.sink.open(context)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await anyio.sleep(self._random.random() * self._pause_s)
        if self._random.random() < 0.05:
            raise TryAgain("not now")
        await self.sink.apply(deliveries)
        for delivery in deliveries:
            self._note(delivery)
        if self._random.random() < 0.05:
            raise TryAgain("the answer was lost")

    async def background(self) -> None:
        if isinstance(self.sink, HasBackground):
            await self.sink.background()
        else:
            await anyio.sleep_forever()

    async def aclose(self) -> None:
        await self.sink.aclose()

    def statistics(self) -> object:
        return self.sink.statistics()

    def _note(self, delivery: Delivery) -> None:
        logged = delivery.logged
        for row in range(logged.count) if delivery.rows is None else delivery.rows.tolist():
            if logged.offset + row < self._next:
                self.again += 1
            else:
                self._next = logged.offset + row + 1
                self.seen.append(logged.batch.dot(row))


@dataclass
class Run:
    """One propagator, one journey: what each sink saw and what it holds in the end."""

    path: Path
    random: Random
    orders: dict[str, list[Dot]] = field(default_factory=dict)
    contents: dict[str, Content] = field(default_factory=dict)

    async def travel(self, trip: Journey, everything: list[Sent], counters: Counters) -> None:
        called: list[Dot] = []
        storage = StorageSink(self.path, flush_s=5.0)
        index = IndexSink()
        cache = CacheSink(loader=storage.get, loader_offset=lambda: storage.statistics().applied_offset)
        paced = [
            Paced(one, self.random, pause) for one, pause in ((storage, 0.05), (index, 0.0), (cache, 0.3))
        ]

        def call(_offset: int, delta: Delta) -> None:
            assert delta.dot is not None
            called.append(delta.dot)

        async with Propagator(world=virtual_world(self.random.getrandbits(32))) as propagator:
            for one in paced:
                await propagator.attach(one)
            await propagator.attach(CallbackSink(call))
            receipts = await self._send(propagator, trip)
            for receipt in receipts:
                await receipt
            await propagator.wait_visible(propagator.statistics().log.next_offset)
            statistics = propagator.statistics()
            refs = expected(everything)
            self.contents["storage"] = {ref: _told(await storage.get(*ref)) for ref in refs}
            self.contents["cache"] = {ref: _told(await cache.get(*ref)) for ref in refs}
            self.contents["index"] = {(space, name): _told(state) for space, name, state in index.rows()}
            await storage.flush()
            self.contents["file"] = {
                (space, name): _told(state) async for space, name, state in storage.rows()
            }
        self.orders = {one.name: one.seen for one in paced} | {"callback": called}
        counters.deltas += len(called)
        counters.parked += statistics.pending.parked
        counters.answered_as_repeat += statistics.duplicates
        counters.folded_late += index.resident.statistics().late
        counters.delivered_again += sum(one.again for one in paced)

    async def _send(self, propagator: Propagator, trip: Journey) -> list[Receipt]:
        forwarders = [propagator.producer(f"forwarder {n}", source=Source.REPLICA) for n in range(4)]
        receipts = []
        for sent in (*trip.batches, None, *trip.late):
            if sent is None:
                await anyio.sleep(LATE_S)
                continue
            receipts.append(self.random.choice(forwarders).send_frame(sent.batch, sent.lamport))
            if self.random.random() < 0.3:
                await anyio.sleep(self.random.random() * 0.02)
        return receipts


def _told(state: VectorState | None) -> Any:
    assert state is not None
    return (*state.content, state.key)


def _check_extends_causality(order: list[Dot], sent: list[Sent]) -> None:
    place = {dot: at for at, dot in enumerate(order)}
    for one in sent:
        rows = [place[one.batch.dot(row)] for row in range(one.batch.count)]
        assert all(before < after for before, after in pairwise(rows))
        assert all(place[cause] < rows[0] for cause in one.causes)


def _converge(seed: int, batches: int, orders: int, path: Path, counters: Counters) -> None:
    random = Random(seed)
    sent = graph(random, batches)
    truth = {ref: _told(state) for ref, state in expected(sent).items()}
    rows = sum(one.batch.count for one in sent)
    for number in range(orders):
        trip = journey(random, sent)
        run = Run(path / f"{seed}-{number}.db", random)
        run_virtual(run.travel, trip, sent, counters, seed=seed)
        counters.reordered += trip.reordered
        counters.repeated += trip.repeated
        counters.late += len(trip.late)
        first = run.orders["callback"]
        assert len(first) == len(set(first)) == rows
        for name, order in run.orders.items():
            assert order == first, name
        _check_extends_causality(first, sent)
        for name, content in run.contents.items():
            assert content == truth, name


def test_every_sink_sees_one_order_and_every_order_of_arrival_ends_alike(
    tmp_path_factory: pytest.TempPathFactory, full: bool
) -> None:
    counters = Counters()

    @settings(max_examples=60 if full else 6)
    @given(seed=st.integers(0, 2**32 - 1), batches=st.integers(60, 300 if full else 120))
    def check(seed: int, batches: int) -> None:
        _converge(seed, batches, 3, tmp_path_factory.mktemp("run"), counters)

    check()
    print(counters)
    assert all(astuple(counters)), counters
