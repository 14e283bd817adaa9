"""For any order of arrival, all sinks apply one causal order and reach one state."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.api.propagator import Propagator
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_sinks import CacheSink, CallbackSink, HasBackground, IndexSink, StorageSink, TryAgain
from delta_prop_wire.delta import Dot, Source
from tests.delta_prop.causal_graphs import Arrivals, SentBatch, draw_arrivals, draw_graph, fold_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from delta_prop.calls.receipt import Receipt
    from delta_prop_sinks.sink import Delivery, Sink
    from delta_prop_wire.algebra import VectorState
    from delta_prop_wire.delta import Delta

LATE_S = 20.0
Content = dict[tuple[str, str], Any]


@dataclass
class Counters:
    """Counts of events in the runs; a zero means that the case was not tested."""

    deltas: int = 0
    reordered: int = 0
    duplicates: int = 0
    late: int = 0
    pending: int = 0
    acked_as_duplicate: int = 0
    out_of_order: int = 0
    redelivered: int = 0


class SlowFailingSink:
    """A sink of random speed that sometimes fails before or after it applies rows."""

    def __init__(self, sink: Sink, random: Random, pause_s: float) -> None:
        self.name = sink.name
        self.sink = sink
        self.seen: list[Dot] = []
        self.redelivered = 0
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
                self.redelivered += 1
            else:
                self._next = logged.offset + row + 1
                self.seen.append(logged.batch.dot(row))


@dataclass
class ConvergenceRun:
    """One propagator and one order of arrival: each sink's order of rows and final contents."""

    path: Path
    random: Random
    orders: dict[str, list[Dot]] = field(default_factory=dict)
    contents: dict[str, Content] = field(default_factory=dict)

    async def run_arrivals(self, arrivals: Arrivals, sent: list[SentBatch], counters: Counters) -> None:
        callback_dots: list[Dot] = []
        storage = StorageSink(self.path, flush_s=5.0)
        index = IndexSink()
        cache = CacheSink(loader=storage.get, loader_offset=lambda: storage.statistics().applied_offset)
        slow_sinks = [
            SlowFailingSink(sink, self.random, pause_s)
            for sink, pause_s in ((storage, 0.05), (index, 0.0), (cache, 0.3))
        ]

        def record_dot(_offset: int, delta: Delta) -> None:
            assert delta.dot is not None
            callback_dots.append(delta.dot)

        async with Propagator(world=virtual_world(self.random.getrandbits(32))) as propagator:
            for sink in slow_sinks:
                await propagator.attach(sink)
            await propagator.attach(CallbackSink(record_dot))
            receipts = await self._send(propagator, arrivals)
            for receipt in receipts:
                await receipt
            await propagator.wait_visible(propagator.statistics().log.next_offset)
            statistics = propagator.statistics()
            refs = fold_all(sent)
            self.contents["storage"] = {ref: _content_of(await storage.get(*ref)) for ref in refs}
            self.contents["cache"] = {ref: _content_of(await cache.get(*ref)) for ref in refs}
            self.contents["index"] = {
                (namespace, name): _content_of(state) for namespace, name, state in index.rows()
            }
            await storage.flush()
            self.contents["file"] = {
                (namespace, name): _content_of(state) async for namespace, name, state in storage.rows()
            }
        self.orders = {sink.name: sink.seen for sink in slow_sinks} | {"callback": callback_dots}
        counters.deltas += len(callback_dots)
        counters.pending += statistics.pending.became_pending
        counters.acked_as_duplicate += statistics.duplicates
        counters.out_of_order += index.resident.statistics().out_of_order
        counters.redelivered += sum(sink.redelivered for sink in slow_sinks)

    async def _send(self, propagator: Propagator, arrivals: Arrivals) -> list[Receipt]:
        forwarders = [propagator.producer(f"forwarder {n}", source=Source.REPLICA) for n in range(4)]
        receipts = []
        for sent in (*arrivals.batches, None, *arrivals.late):
            if sent is None:
                await anyio.sleep(LATE_S)
                continue
            receipts.append(self.random.choice(forwarders).send_frame(sent.batch, sent.lamport))
            if self.random.random() < 0.3:
                await anyio.sleep(self.random.random() * 0.02)
        return receipts


def _content_of(state: VectorState | None) -> Any:
    assert state is not None
    return (*state.content, state.key)


def _check_causal_order(order: list[Dot], sent: list[SentBatch]) -> None:
    positions = {dot: position for position, dot in enumerate(order)}
    for sent_batch in sent:
        batch = sent_batch.batch
        row_positions = [positions[batch.dot(row)] for row in range(batch.count)]
        assert all(before < after for before, after in pairwise(row_positions))
        assert all(positions[cause] < row_positions[0] for cause in sent_batch.causes)


def _check_convergence(seed: int, batch_count: int, order_count: int, path: Path, counters: Counters) -> None:
    random = Random(seed)
    sent = draw_graph(random, batch_count)
    expected = {ref: _content_of(state) for ref, state in fold_all(sent).items()}
    row_count = sum(sent_batch.batch.count for sent_batch in sent)
    for number in range(order_count):
        arrivals = draw_arrivals(random, sent)
        run = ConvergenceRun(path / f"{seed}-{number}.db", random)
        run_virtual(run.run_arrivals, arrivals, sent, counters, seed=seed)
        counters.reordered += arrivals.reordered_count
        counters.duplicates += arrivals.duplicate_count
        counters.late += len(arrivals.late)
        first = run.orders["callback"]
        assert len(first) == len(set(first)) == row_count
        for name, order in run.orders.items():
            assert order == first, name
        _check_causal_order(first, sent)
        for name, content in run.contents.items():
            assert content == expected, name


def test_sinks_apply_one_order_and_reach_one_state_for_all_arrival_orders(
    tmp_path_factory: pytest.TempPathFactory, full: bool
) -> None:
    counters = Counters()

    @settings(max_examples=60 if full else 6)
    @given(seed=st.integers(0, 2**32 - 1), batch_count=st.integers(60, 300 if full else 120))
    def check(seed: int, batch_count: int) -> None:
        _check_convergence(seed, batch_count, 3, tmp_path_factory.mktemp("run"), counters)

    check()
    print(counters)
    assert all(astuple(counters)), counters
