"""The pipeline: priorities, pending deltas, refusals, no-op records, duplicates, fencing."""

from __future__ import annotations

import numpy as np
import pytest

from delta_prop.calls.receipt import OfferState, Receipt
from delta_prop.partition.ingest.work import Draft
from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    Dot,
    Kind,
    Operation,
    Priority,
    Source,
    create,
    delete,
    make_origin,
    offset,
    sparse,
)
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.partition.pipeline_bench import Bench, batch_of


def make_delta(key: str, priority: Priority = Priority.NORMAL, **more: object) -> Delta:
    return Delta(key, create([1.0, 2.0]), priority=priority, **more)  # type: ignore[arg-type]


# --- priority: a critical delta overtakes only deltas that it does not depend on


def test_critical_delta_overtakes_ten_thousand_low_ones() -> None:
    bench = Bench()
    bench.log.is_accepting = False
    for n in range(10_000):
        bench.publish(make_delta(f"low-{n}", Priority.LOW))
    bench.publish(make_delta("urgent", Priority.CRITICAL))
    bench.log.is_accepting = True
    bench.pipeline.pump(bench.now)
    assert bench.keys().index("urgent") <= 1
    assert len(bench.keys()) == 10_001


def test_critical_child_does_not_overtake_its_low_parent() -> None:
    bench = Bench()
    bench.log.is_accepting = False
    for n in range(100):
        bench.publish(make_delta(f"low-{n}", Priority.LOW))
    parent = bench.publish(make_delta("parent", Priority.LOW))
    bench.publish(make_delta("child", Priority.CRITICAL), after=(parent,))
    bench.publish(Delta("low-50", offset(1.0), priority=Priority.CRITICAL))
    bench.log.is_accepting = True
    bench.pipeline.pump(bench.now)
    keys = bench.keys()
    assert keys.index("child") > keys.index("parent")
    first, second = (index for index, key in enumerate(keys) if key == "low-50")
    assert bench.routed[first].batch.kind == Kind.CREATE
    assert bench.routed[second].batch.kind == Kind.OFFSET


def test_low_deltas_progress_under_endless_critical_load() -> None:
    bench = Bench()
    bench.log.is_accepting = False
    for n in range(20):
        bench.publish(make_delta(f"low-{n}", Priority.LOW))
    for n in range(2_000):  # critical deltas arrive as fast as the queue serves them
        bench.publish(make_delta(f"urgent-{n}", Priority.CRITICAL))
        item = bench.pipeline.queue.next(bench.now)
        assert item is not None
        bench.pipeline._process(item.payload)  # type: ignore[arg-type]
        bench.now += 0.0001
    assert sum(key.startswith("low") for key in bench.keys()) == 20  # noqa: SIM118


def test_draft_waits_for_pending_draft_of_its_vector() -> None:
    bench = Bench()
    origin = bench.hello("p")
    waiting = bench.publish(make_delta("v", parents=(Dot(origin, 1),)))
    dependent = bench.publish(Delta("v", offset(1.0)))
    other = bench.publish(make_delta("w"))
    assert (waiting.state, dependent.state, other.state) == (
        OfferState.PENDING,
        OfferState.PENDING,
        OfferState.ACKNOWLEDGED,
    )
    assert bench.send(batch_of(origin, 1, make_delta("parent"))).done
    assert bench.keys() == ["w", "parent", "v", "v"]
    assert dependent.result().offset == 3
    assert bench.pipeline.orderer.statistics().pending_deltas == 0
    assert all(origin > 0 for origin in bench.pipeline.orderer.watermarks), "no origin of a draft remains"


# --- pending


@pytest.mark.parametrize("parent_arrives", [True, False])
def test_full_pending_buffer_drains_with_the_parent_and_times_out_without_it(parent_arrives: bool) -> None:
    bench = Bench(pending_deltas_max=100)
    root = bench.hello("root")
    others = [bench.hello(f"p{n}") for n in range(4)]
    sent = []
    for n in range(1, 41):
        for number, origin in enumerate(others):
            delta = make_delta(f"v{number}-{n}", parents=(Dot(root, 1),) if n == 1 else ())
            batch = batch_of(origin, n, delta)
            sent.append((batch, bench.send(batch, owner=f"p{number}")))
    refused = [batch for batch, receipt in sent if receipt.done]
    assert refused
    for _, receipt in sent:
        refusal = receipt.refusal()
        assert refusal is None or (refusal.code is ErrorCode.PENDING_FULL and refusal.retry_after_ms)
    if parent_arrives:
        assert bench.send(batch_of(root, 1, make_delta("root"))).result().offset == 0
    else:
        bench.now = 31.0
        bench.pipeline.tick(bench.now)
        expired = [receipt.refusal() for batch, receipt in sent if batch not in refused]
        assert all(refusal is not None and refusal.code is ErrorCode.DEP_TIMEOUT for refusal in expired)
        assert all(refusal is not None and str(Dot(root, 1)) in str(refusal) for refusal in expired[:4])
        refused = [batch for batch, _ in sent]
        bench.send(batch_of(root, 1, make_delta("root")))
    assert all(receipt.done for _, receipt in sent)
    resent_receipts = [bench.send(batch) for batch in refused]
    assert all(receipt.result().offset is not None for receipt in resent_receipts)
    assert sorted(bench.keys()) == sorted(["root", *(batch.keys[0] for batch, _ in sent)])
    assert bench.pipeline.orderer.statistics().pending_runs == 0


def test_dependent_of_refused_delta_names_what_blocks_it() -> None:
    bench = Bench()
    root, first, second = bench.hello("root"), bench.hello("first"), bench.hello("second")
    blocked = bench.send(batch_of(first, 1, make_delta("a", parents=(Dot(root, 9),))))
    dependent = bench.send(batch_of(second, 1, make_delta("b", parents=(Dot(first, 1),))))
    bench.now = 30.0
    bench.pipeline.tick(bench.now)
    refusals = [receipt.refusal() for receipt in (blocked, dependent)]
    assert [refusal.code for refusal in refusals if refusal] == [ErrorCode.DEP_TIMEOUT, ErrorCode.DEP_TIMEOUT]
    assert str(Dot(first, 1)) in str(refusals[1])
    assert bench.log.next_offset == 0


# --- final refusals and no-op records


def test_invalid_delta_in_stream_becomes_noop_and_later_ones_are_accepted() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bad = Operation(Kind.CREATE, np.array([np.nan, 1], np.float32))
    receipts = [bench.send(batch_of(origin, n, make_delta(f"v{n}"))) for n in (1, 2)]
    receipts.append(bench.send(batch_of(origin, 3, make_delta("ok"), Delta("bad", bad))))
    receipts.append(bench.send(batch_of(origin, 5, make_delta("v5"))))
    refusal = receipts[2].refusal()
    assert refusal is not None
    assert (refusal.code, refusal.row) == (ErrorCode.INVALID_DELTA, 1)
    assert refusal.field == "vector"
    assert bench.keys() == ["v1", "v2", "v5"]
    assert receipts[3].result().offset == 4
    assert [logged.batch.is_control for logged in bench.routed] == [False, False, True, False]
    second_refusal = bench.send(batch_of(origin, 3, make_delta("ok"), Delta("bad", bad))).refusal()
    assert second_refusal is not None
    assert second_refusal.code is ErrorCode.INVALID_DELTA
    assert bench.log.next_offset == 5


def test_invalid_delta_with_a_counter_gap_is_refused_in_its_turn() -> None:
    bench = Bench()
    origin = bench.hello("p")
    early = bench.send(batch_of(origin, 2, Delta("x", sparse([0], [1.0]))))
    assert early.state is OfferState.PENDING
    bench.send(batch_of(origin, 1, make_delta("v1")))
    refusal = early.refusal()
    assert refusal is not None
    assert refusal.field == "vector_id"
    assert bench.pipeline.orderer.watermarks[origin] == 2


def test_noop_keeps_clock_entries_for_later_batches() -> None:
    bench = Bench()
    a, b = bench.hello("a"), bench.hello("b")
    bench.send(batch_of(a, 1, make_delta("v")))
    bench.send(batch_of(b, 1, Delta("gone", offset(1.0)), clock=(Dot(a, 1),)))
    assert bench.routed[1].batch.is_control
    assert bench.routed[1].batch.clock == (Dot(a, 1),)
    bench.send(batch_of(b, 2, Delta("v", offset(1.0))))
    assert bench.vectors.concurrent_updates == 0
    bench.send(batch_of(a, 2, Delta("v", offset(1.0))))
    assert bench.vectors.concurrent_updates == 1


# --- duplicates


def test_duplicates_below_watermark_get_first_offsets() -> None:
    bench = Bench()
    origin, other = bench.hello("p"), bench.hello("q")
    sent = []
    for n in range(1, 200):
        batch = batch_of(origin, 2 * n - 1, make_delta(f"a{n}"), make_delta(f"b{n}"))
        sent.append((batch, bench.send(batch).result().offset))
        bench.send(batch_of(other, n, make_delta(f"q{n}")))
    for batch, first in sent:
        published = bench.send(batch).result()
        assert published.duplicate
        assert published.duplicates == {0: first, 1: first + 1}  # type: ignore[operator]
    assert len(bench.keys()) == 3 * 199


def test_same_dot_with_other_bytes_is_dot_reused() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 1, make_delta("v")))
    refusal = bench.send(batch_of(origin, 1, make_delta("w"))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.DOT_REUSED
    pending = bench.send(batch_of(origin, 3, make_delta("x")))
    refusal = bench.send(batch_of(origin, 3, make_delta("y"))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.DOT_REUSED
    same = bench.send(batch_of(origin, 3, make_delta("x")))
    bench.send(batch_of(origin, 2, make_delta("between")))
    assert pending.result() == same.result()
    assert bench.keys() == ["v", "between", "x"]


def test_batch_partly_below_watermark_is_refused_as_overlap() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 1, make_delta("a"), make_delta("b")))
    refusal = bench.send(batch_of(origin, 2, make_delta("b"), make_delta("c"))).refusal()
    assert refusal is not None
    assert (refusal.code, refusal.details["watermark"]) == (ErrorCode.OVERLAP, 2)
    assert bench.pipeline.orderer.watermarks[origin] == 2


def test_ids_are_known_only_after_their_deltas_are_logged() -> None:
    bench = Bench(log_deltas_max=2)
    bench.log.hold("sink", lambda: 0)
    ids = [bytes([n]) * 16 for n in range(3)]
    assert bench.publish(make_delta("a", id=ids[0]), make_delta("b", id=ids[1])).result().offset == 0
    refusal = bench.publish(make_delta("c", id=ids[2])).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.LOG_FULL
    bench.log.release("sink")
    assert bench.publish(make_delta("c", id=ids[2])).result().offset == 2
    published = bench.publish(make_delta("c", id=ids[2])).result()
    assert published.duplicate
    assert published.duplicates == {0: 2}


def test_rows_with_known_ids_are_skipped_and_reported() -> None:
    bench = Bench()
    first, second = b"1" * 16, b"2" * 16
    bench.publish(make_delta("a", id=first))
    published = bench.publish(
        make_delta("a", id=first), make_delta("b", id=second), make_delta("b", id=second)
    ).result()
    assert published.duplicates == {0: 0, 2: 1}
    assert published.offset == 1
    assert bench.keys() == ["a", "b"]


def test_dot_with_known_id_becomes_noop_with_first_offset() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.publish(make_delta("before"))
    bench.publish(make_delta("a", id=b"1" * 16))
    duplicate = batch_of(origin, 1, make_delta("a", id=b"1" * 16))
    for _ in range(2):
        published = bench.send(duplicate).result()
        assert published.duplicates == {0: 1}
    assert bench.send(batch_of(origin, 2, make_delta("b"))).result().offset == 3
    assert bench.keys() == ["before", "a", "b"]


def test_offer_within_ack_callback_is_processed() -> None:
    bench = Bench()
    nested_receipts: list[object] = []
    draft = Draft([make_delta("first")], Receipt(), Priority.NORMAL, AckLevel.MEMORY)
    draft.receipt.add_done_callback(lambda _: nested_receipts.append(bench.publish(make_delta("second"))))
    bench.pipeline.offer(draft, bench.now)
    assert bench.keys() == ["first", "second"]


# --- fencing


def test_second_producer_of_a_name_fences_the_first() -> None:
    bench = Bench()
    first = bench.producer("p")
    assert first.offer(make_delta("a")).result().offset == 0
    foreign = bench.send(batch_of(bench.pipeline._own_origins[0], 1, make_delta("z"))).refusal()
    assert foreign is not None
    assert (foreign.code, "it belongs to another producer" in foreign.message) == (
        ErrorCode.UNAUTHORIZED,
        True,
    )
    second = bench.producer("p")
    refusal = first.offer(make_delta("b")).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.FENCED
    assert second.offer(make_delta("c")).result().offset is not None
    assert second.watermark() == 2


def test_origin_without_hello_is_unknown() -> None:
    bench = Bench()
    refusal = bench.send(batch_of(make_origin(77, 2), 1, make_delta("a"))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.UNKNOWN_ORIGIN


def test_idle_origin_needs_new_hello_and_keeps_its_watermark() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 1, make_delta("a")))
    bench.now = 8 * 24 * 3600.0
    bench.pipeline.tick(bench.now)
    refusal = bench.send(batch_of(origin, 2, make_delta("b"))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.UNKNOWN_ORIGIN
    bench.hello("p")
    assert bench.send(batch_of(origin, 2, make_delta("b"), epoch=2)).result().offset == 1


def test_own_origins_of_the_service_never_expire() -> None:
    bench = Bench()
    for days in (8, 16):
        bench.now = days * 24 * 3600.0
        bench.pipeline.tick(bench.now)
        assert bench.publish(make_delta(f"day-{days}")).result().offset is not None


# --- expectation, unknown vectors, dimensions


def test_expect_refuses_when_the_vector_has_changed() -> None:
    bench = Bench()
    dot = bench.publish(make_delta("v")).result().dot
    assert bench.publish(Delta("v", offset(1.0), expect=dot)).result().offset == 1
    refusal = bench.publish(Delta("v", offset(1.0), expect=dot)).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.CONFLICT
    assert refusal.details["current"] == bench.vectors.head("default", "v")


def test_partial_operations_need_a_live_vector() -> None:
    bench = Bench()
    for delta in (Delta("v", offset(1.0)), Delta("v", sparse([0], [1.0]))):
        refusal = bench.publish(delta).refusal()
        assert refusal is not None
        assert refusal.field == "vector_id"
    bench.publish(make_delta("v"))
    assert bench.publish(Delta("v", offset(1.0))).result().offset == 1
    bench.publish(Delta("v", delete()))
    assert bench.publish(Delta("v", offset(1.0))).refusal() is not None
    both = bench.publish(make_delta("v"), Delta("v", offset(1.0)))
    assert both.result().offset == 3
    refusal = bench.publish(Delta("v", sparse([2], [1.0]))).refusal()
    assert refusal is not None
    assert refusal.field == "indices"
    refusal = bench.publish(Delta("w", create([1.0]))).refusal()
    assert refusal is not None
    assert refusal.field == "vector"


def test_forwarded_delta_is_not_validated_against_local_state() -> None:
    bench = Bench()
    origin = make_origin(5, 2)
    batch = batch_of(origin, 1, Delta("unknown", offset(1.0)))
    assert bench.send(batch, source=Source.REPLICA, lamport=40).result().offset == 0
    assert bench.routed[0].lamport == 40
    bench.publish(make_delta("mine"))
    assert bench.routed[1].lamport == 41


# --- the log is full


def test_full_log_refuses_with_depth_and_delta_can_be_resent() -> None:
    bench = Bench(log_deltas_max=3)
    bench.log.hold("slow", lambda: 0)
    origin = bench.hello("p")
    for n in (1, 2, 3):
        bench.send(batch_of(origin, n, make_delta(f"v{n}")))
    refusal = bench.send(batch_of(origin, 4, make_delta("v4"))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.LOG_FULL
    assert refusal.details["depth"] == refusal.details["capacity"] == 3
    assert refusal.details["blocked_by"] == "slow"
    assert refusal.retry_after_ms
    bench.log.release("slow")
    assert bench.send(batch_of(origin, 4, make_delta("v4"))).result().offset == 3


def test_unavailable_level_is_refused_with_the_fix() -> None:
    bench = Bench()
    origin = bench.hello("p")
    refusal = bench.send(batch_of(origin, 1, make_delta("v"), ack_level=2)).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.LEVEL_UNAVAILABLE
    assert "request memory" in refusal.message
    assert bench.pipeline.orderer.watermarks[origin] == 1


# --- withdrawing


def test_withdrawn_delta_never_takes_effect() -> None:
    bench = Bench()
    root, origin = bench.hello("root"), bench.hello("p")
    waiting = bench.send(batch_of(origin, 1, make_delta("never", parents=(Dot(root, 1),))))
    draft = bench.publish(make_delta("neither", parents=(Dot(root, 1),)))
    after = bench.send(batch_of(origin, 2, make_delta("successor")))
    assert waiting.withdraw()
    assert draft.withdraw()
    assert (waiting.state, draft.state) == (OfferState.WITHDRAWN, OfferState.WITHDRAWN)
    bench.send(batch_of(root, 1, make_delta("root")))
    assert after.result().offset is not None
    assert sorted(bench.keys()) == ["root", "successor"]
    assert not after.withdraw()


def test_queued_delta_can_be_withdrawn() -> None:
    bench = Bench()
    bench.log.is_accepting = False
    receipt = bench.publish(make_delta("v"))
    assert receipt.withdraw()
    bench.log.is_accepting = True
    bench.pipeline.pump(bench.now)
    assert bench.keys() == []


def test_close_refuses_pending_and_queued_deltas() -> None:
    bench = Bench()
    root = bench.hello("root")
    waiting = bench.publish(make_delta("v", parents=(Dot(root, 1),)))
    bench.log.is_accepting = False
    queued = bench.publish(make_delta("w"))
    bench.pipeline.close(bench.now)
    for receipt in (waiting, queued):
        with pytest.raises(Refused) as caught:
            receipt.result()
        assert caught.value.code is ErrorCode.SHUTTING_DOWN


def test_full_queue_refuses_next_delta_with_depth_and_capacity() -> None:
    bench = Bench(queue_deltas_max=1000)
    bench.log.is_accepting = False
    for n in range(1000):
        bench.publish(make_delta(f"v{n}"))
    refusal = bench.publish(make_delta("one more")).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.QUEUE_FULL
    assert refusal.details["depth"] == refusal.details["capacity"] == 1000
