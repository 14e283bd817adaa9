"""Each check of a step finds its violation; a healthy service passes all checks, at little cost."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.chaos import invariants
from delta_prop_simulations.chaos.histories import ClientHistory, LogHistory
from delta_prop_simulations.chaos.invariants import (
    LogOffsets,
    StepChecker,
    check_bound,
    check_credit,
    check_log_offsets,
)
from delta_prop_simulations.chaos.oracle import Oracle
from delta_prop_simulations.chaos.plan import WriterPlan
from delta_prop_simulations.chaos.sinks import ModelSink, SinkFaults
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_simulations.chaos.workload import Writer
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DURABLE, LOGGED = AckLevel.DURABLE, AckLevel.LOGGED
OFFSETS = LogOffsets(first=1, synced=5, written=7, next=9, high_watermark=5)


@pytest.mark.parametrize(
    ("change", "level", "is_valid"),
    [
        ({}, DURABLE, True),
        ({"high_watermark": 7}, LOGGED, True),
        ({"high_watermark": 7}, DURABLE, False),
        ({"high_watermark": 9}, LOGGED, False),
        ({"first": 6}, DURABLE, False),
        ({"synced": 8, "high_watermark": 8}, DURABLE, False),
        ({"written": 10}, DURABLE, False),
        ({"next": 8}, DURABLE, False),
        ({"next": 8, "recoveries": 1}, DURABLE, True),
        ({"synced": 4, "high_watermark": 4}, DURABLE, False),
        ({"synced": 4, "high_watermark": 4, "recoveries": 1}, DURABLE, False),
        ({"written": 6}, DURABLE, False),
        ({"written": 5, "failed": True}, DURABLE, True),
        ({"first": 0}, DURABLE, False),
    ],
)
def test_offsets_out_of_order_or_lower_than_before_violate_marks(
    change: dict[str, Any], level: AckLevel, is_valid: bool
) -> None:
    before = OFFSETS if level is DURABLE else replace(OFFSETS, high_watermark=7)
    check = check_violated(lambda: check_log_offsets("n", before, replace(before, **change), level))
    assert check == (None if is_valid else "marks")


@pytest.mark.parametrize(
    ("call", "check"),
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
def test_amount_or_credit_out_of_bounds_is_a_violation(call: Callable[[], object], check: str | None) -> None:
    assert check_violated(call) == check


def check_violated(call: Callable[[], object]) -> str | None:
    """Return the check that a call reports as violated; None if it reports none."""
    try:
        call()
    except Violation as violation:
        return violation.check
    return None


def run_with_service(scenario: Callable[[Propagator, Oracle, ModelSink], Awaitable[None]]) -> None:
    """Run a scenario with a healthy service, a sink and an oracle."""

    async def main() -> None:
        oracle, sink = Oracle(), ModelSink("s", "transactional", Random(1), SinkFaults(slow=0.3))
        world = virtual_world(1, thread_delay_s_max=0.01, disk=SimDisk(1))
        settings = Settings(mailbox_deltas_max=5, queue_deltas_max=50)
        async with Propagator(settings, data="x", log=LogSettings(), world=world) as p:
            oracle.note_start("n", p, None)
            await p.attach(sink.for_process(Process()))
            await scenario(p, oracle, sink)

    run_virtual(main)


class Process:
    has_ended = False


class Node:
    name = "n"
    service = None

    def __init__(self, propagator: Propagator, sink: ModelSink) -> None:
        self.propagator: Propagator | None = propagator
        self.models = {"s": sink}


def test_healthy_service_passes_at_each_step_and_at_rest() -> None:
    async def scenario(p: Propagator, oracle: Oracle, sink: ModelSink) -> None:
        history, node = ClientHistory(), Node(p, sink)
        plan = WriterPlan("w", "n", embedded=True, deltas=100, burst=5, gap_s=0.01, poison=0.1)
        writer = Writer(plan, Random(2), history)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run_embedded, p)
            for _ in range(500):
                oracle.check_step([node])
                await anyio.sleep(0.01)
        assert writer.is_done
        await oracle.check_at_rest([node], history, [])
        oracle.note_end("n")
        assert oracle.check_counts["steps looked at"] == 500
        assert oracle.check_counts["rows of logs"] >= 90
        assert oracle.check_counts["sinks looked at"] == 1

    run_with_service(scenario)


@pytest.mark.parametrize(
    ("break_invariant", "check"),
    [
        (lambda p, feed: setattr(feed.cursor, "noted_applied", 99), "cursor"),
        (lambda p, feed: setattr(feed.cursor, "noted_committed", 99), "cursor"),
        (
            lambda p, feed: (
                setattr(feed.inbox, "in_call_end", 99),
                setattr(feed.invoker, "called_at", 1.0),
            ),
            "early",
        ),
        (
            lambda p, feed: (
                setattr(feed.inbox.mailbox, "delta_count", -1) or feed.inbox.mailbox._waiting.extend([0, 0])
            ),
            "bounds",
        ),
        (lambda p, feed: setattr(p.internals().partition.pipeline.queue, "depth", 51), "bounds"),
        (
            lambda p, feed: setattr(
                p.internals().partition.pipeline.orderer._pending, "delta_count", 1 << 30
            ),
            "bounds",
        ),
        (lambda p, feed: setattr(p.internals().partition.log._marks, "synced", 7), "marks"),
    ],
)
def test_step_that_violates_an_invariant_is_found(break_invariant: Any, check: str) -> None:
    async def scenario(p: Propagator, oracle: Oracle, sink: ModelSink) -> None:
        internals = p.internals()
        checker = StepChecker(
            "n", internals, LogHistory("n", internals.partition.log.log_id, DURABLE, DURABLE)
        )
        for _ in range(invariants.BOUNDS_EVERY):
            checker.check(None)
        feed = internals.sinks.feed("s")
        saved = [
            (part, name, getattr(part, name))
            for part, name in (
                (feed.cursor, "noted_applied"),
                (feed.cursor, "noted_committed"),
                (feed.inbox, "in_call_end"),
                (feed.invoker, "called_at"),
            )
        ]
        depths = (
            internals.partition.pipeline.queue.depth,
            internals.partition.pipeline.orderer._pending.delta_count,
        )
        break_invariant(p, feed)
        try:
            checks = [check_violated(lambda: checker.check(None)) for _ in range(invariants.BOUNDS_EVERY)]
            assert set(checks) - {None} == {check}
        finally:
            for part, name, value in saved:
                setattr(part, name, value)
            feed.inbox.mailbox.clear()
            (
                internals.partition.pipeline.queue.depth,
                internals.partition.pipeline.orderer._pending.delta_count,
            ) = depths
            internals.partition.log._marks.synced = internals.partition.log.next_offset  # type: ignore[union-attr]

    run_with_service(scenario)


def test_log_differing_from_appended_batches_is_found() -> None:
    async def scenario(p: Propagator, oracle: Oracle, sink: ModelSink) -> None:
        history, node = ClientHistory(), Node(p, sink)
        plan = WriterPlan("w", "n", embedded=True, deltas=20, burst=5, gap_s=0.01)
        writer = Writer(plan, Random(2), history)
        await writer.run_embedded(p)
        await anyio.sleep(5)
        log_history = oracle.histories["n"]
        first, second = log_history.batches[3:5]
        log_history.batches[3:5] = [
            LoggedBatch(second.batch, first.offset, second.lamport, second.source, second.head),
            LoggedBatch(first.batch, second.offset, first.lamport, first.source, first.head),
        ]
        with pytest.raises(Violation, match="corruption"):
            await oracle.check_at_rest([node], history, [])

    run_with_service(scenario)
