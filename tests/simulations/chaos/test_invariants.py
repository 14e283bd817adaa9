"""Each check of a step sees what it is there for; a healthy service passes all of them, at little cost."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.chaos import invariants
from delta_prop_simulations.chaos.client_history import ClientHistory
from delta_prop_simulations.chaos.invariants import (
    LogOffsets,
    StepChecker,
    check_bound,
    check_credit,
    check_log_offsets,
)
from delta_prop_simulations.chaos.log_history import LogHistory
from delta_prop_simulations.chaos.oracle import Oracle
from delta_prop_simulations.chaos.sinks import ModelSink, SinkFaults
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_simulations.chaos.workload import Writer
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DURABLE, LOGGED = AckLevel.DURABLE, AckLevel.LOGGED
MARKS = LogOffsets(first=1, synced=5, written=7, next=9, high_watermark=5)


@pytest.mark.parametrize(
    ("change", "level", "right"),
    [
        ({}, DURABLE, True),
        ({"high_watermark": 7}, LOGGED, True),
        ({"high_watermark": 7}, DURABLE, False),
        ({"high_watermark": 9}, LOGGED, False),
        ({"first": 6}, DURABLE, False),
        ({"synced": 8, "high_watermark": 8}, DURABLE, False),
        ({"written": 10}, DURABLE, False),
        ({"next": 8}, DURABLE, False),
        ({"next": 8, "recovered": 1}, DURABLE, True),
        ({"synced": 4, "high_watermark": 4}, DURABLE, False),
        ({"synced": 4, "high_watermark": 4, "recovered": 1}, DURABLE, False),
        ({"written": 6}, DURABLE, False),
        ({"written": 5, "failed": True}, DURABLE, True),
        ({"first": 0}, DURABLE, False),
    ],
)
def test_marks_stand_in_order_and_do_not_go_back(
    change: dict[str, Any], level: AckLevel, right: bool
) -> None:
    before = MARKS if level is DURABLE else replace(MARKS, high_watermark=7)
    seen = catches(lambda: check_log_offsets("n", before, replace(before, **change), level))
    assert seen == (None if right else "marks")


@pytest.mark.parametrize(
    ("look", "check"),
    [
        (lambda: check_bound("n", "deltas", 5, 5), None),
        (lambda: check_bound("n", "deltas", 6, 5), "bounds"),
        (lambda: check_bound("n", "deltas", -1, 5), "bounds"),
        (lambda: check_credit("n", (2, 2, 1), 5), None),
        (lambda: check_credit("n", (-3, 8, 0), 5), None),
        (lambda: check_credit("n", (3, 2, 1), 5), "credit"),
        (lambda: check_credit("n", (5, 1, -1), 5), "credit"),
    ],
)
def test_what_waits_and_what_is_granted_stay_within_bounds(
    look: Callable[[], object], check: str | None
) -> None:
    assert catches(look) == check


def catches(look: Callable[[], object]) -> str | None:
    try:
        look()
    except Violation as violation:
        return violation.check
    return None


def with_service(story: Callable[[Propagator, Oracle, ModelSink], Awaitable[None]]) -> None:
    """A service that is well, with a sink, under a judge."""

    async def main() -> None:
        judge, sink = Oracle(), ModelSink("s", "transactional", Random(1), SinkFaults(slow=0.3))
        world = virtual_world(1, thread_delay_s_max=0.01, disk=SimDisk(1))
        settings = Settings(mailbox_deltas_max=5, queue_deltas_max=50)
        async with Propagator(settings, data="x", log=LogSettings(), world=world) as p:
            judge.note_start("n", p, None)
            await p.attach(sink.for_life(Life()))
            await story(p, judge, sink)

    run_virtual(main)


class Life:
    is_over = False


class Node:
    name = "n"
    service = None

    def __init__(self, propagator: Propagator, sink: ModelSink) -> None:
        self.propagator: Propagator | None = propagator
        self.models = {"s": sink}


def test_a_service_that_is_well_passes_at_each_step_and_at_rest() -> None:
    async def story(p: Propagator, judge: Oracle, sink: ModelSink) -> None:
        shadow, node = ClientHistory(), Node(p, sink)
        writer = Writer(
            "w", Random(2), shadow, node="n", deltas=100, burst=5, gap_s=0.01, level=None, poison=0.1
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run_embedded, p)
            for _ in range(500):
                judge.check_step([node])
                await anyio.sleep(0.01)
        assert writer.is_done
        await judge.check_at_rest([node], shadow, [])
        judge.note_end("n")
        assert judge.struck["steps looked at"] == 500
        assert judge.struck["rows of logs"] >= 90
        assert judge.struck["sinks looked at"] == 1

    with_service(story)


@pytest.mark.parametrize(
    ("break_it", "check"),
    [
        (lambda p, feed: setattr(feed, "_applied", 99), "cursor"),
        (lambda p, feed: setattr(feed, "_committed", 99), "cursor"),
        (lambda p, feed: (setattr(feed, "_in_call_end", 99), setattr(feed, "_called_at", 1.0)), "early"),
        (
            lambda p, feed: setattr(feed._mailbox, "deltas", -1) or feed._mailbox._waiting.extend([0, 0]),
            "bounds",
        ),
        (lambda p, feed: setattr(p.internals().pipeline.queue, "depth", 51), "bounds"),
        (lambda p, feed: setattr(p.internals().pipeline.orderer._pending, "deltas", 1 << 30), "bounds"),
        (lambda p, feed: setattr(p.internals().log, "synced", 7), "marks"),
    ],
)
def test_a_step_that_breaks_a_promise_is_seen(break_it: Any, check: str) -> None:
    async def story(p: Propagator, judge: Oracle, sink: ModelSink) -> None:
        inside = p.internals()
        steps = StepChecker("n", inside, LogHistory("n", inside.log.log_id, DURABLE, DURABLE))
        for _ in range(invariants.REST_EVERY):
            steps.check(None)
        feed = inside.sinks.feed("s")
        kept = {
            name: getattr(feed, name) for name in ("_applied", "_committed", "_in_call_end", "_called_at")
        }
        depths = inside.pipeline.queue.depth, inside.pipeline.orderer._pending.deltas
        break_it(p, feed)
        try:
            seen = [catches(lambda: steps.check(None)) for _ in range(invariants.REST_EVERY)]
            assert set(seen) - {None} == {check}
        finally:
            for name, value in kept.items():
                setattr(feed, name, value)
            feed._mailbox.clear()
            inside.pipeline.queue.depth, inside.pipeline.orderer._pending.deltas = depths
            inside.log.synced = inside.log.next_offset  # type: ignore[union-attr]

    with_service(story)


def test_a_log_that_says_another_thing_than_was_appended_is_seen() -> None:
    async def story(p: Propagator, judge: Oracle, sink: ModelSink) -> None:
        shadow, node = ClientHistory(), Node(p, sink)
        writer = Writer("w", Random(2), shadow, node="n", deltas=20, burst=5, gap_s=0.01, level=None)
        await writer.run_embedded(p)
        await anyio.sleep(5)
        record = judge.histories["n"]
        one, other = record.batches[3:5]
        record.batches[3:5] = [
            LoggedBatch(other.batch, one.offset, other.lamport, other.source, other.head),
            LoggedBatch(one.batch, other.offset, one.lamport, one.source, one.head),
        ]
        with pytest.raises(Violation, match="damage"):
            await judge.check_at_rest([node], shadow, [])

    with_service(story)
