"""Drafts that wait for dependencies and for each other: each gets an outcome, and no state remains."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from delta_prop.calls.receipt import Receipt
from delta_prop_wire.delta import Delta, Dot, create
from tests.delta_prop.partition.pipeline_bench import Bench, batch_of

NAMES = ("a", "b", "c")
COUNTERS = 3

causes = st.lists(st.tuples(st.sampled_from(range(3)), st.integers(1, COUNTERS)), max_size=2, unique=True)
steps = st.one_of(
    st.tuples(st.just("draft"), st.sampled_from("vw"), causes, st.sampled_from(["parents", "clock"])),
    st.tuples(st.just("send"), st.sampled_from(range(3))),
    st.tuples(st.just("later"), st.sampled_from([0.5, 5.0, 60.0])),
    st.tuples(st.just("withdraw"), st.integers(0, 30)),
)


@given(st.lists(steps, max_size=25))
def test_every_draft_gets_an_outcome_in_any_order_of_events(events: list[Any]) -> None:
    bench = Bench()
    origins = [bench.hello(name) for name in NAMES]
    sent_counts, receipts = [0, 0, 0], list[Receipt]()
    for kind, *arguments in events:
        if kind == "draft":
            key, dependencies, field = arguments
            dots = tuple(sorted(Dot(origins[index], counter) for index, counter in dependencies))
            if field == "clock" and len({dot.origin for dot in dots}) < len(dots):
                dots = dots[:1]  # a clock names each origin once
            receipts.append(bench.publish(Delta(key, create([1.0]), **{field: dots})))
        elif kind == "send" and sent_counts[arguments[0]] < COUNTERS:
            sent_counts[arguments[0]] += 1
            origin = origins[arguments[0]]
            assert bench.send(
                batch_of(origin, sent_counts[arguments[0]], Delta("v", create([2.0])))
            ).acknowledged
        elif kind == "later":
            bench.now += arguments[0]
            bench.pipeline.tick(bench.now)
        elif kind == "withdraw" and receipts:
            receipts[arguments[0] % len(receipts)].withdraw()
    bench.now += 1_000.0
    bench.pipeline.tick(bench.now)
    assert all(receipt.done for receipt in receipts)
    statistics = bench.pipeline.orderer.statistics()
    assert (statistics.pending_runs, statistics.awaited_origins, statistics.awaited_ids) == (0, 0, 0)
    assert bench.publish(Delta("v", create([3.0]))).acknowledged
    assert bench.publish(Delta("w", create([3.0]))).acknowledged
    assert all(origin > 0 for origin in bench.pipeline.orderer.watermarks), "no origin of a draft remains"
