"""The chain: priorities, pending, refusals, voids, repeats, fencing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from delta_prop.ingest.work import Draft
from delta_prop.receipt import OfferState, Receipt
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
from tests.delta_prop.chains import Bench, batch_of


def made(key: str, priority: Priority = Priority.NORMAL, **more: object) -> Delta:
    return Delta(key, create([1.0, 2.0]), priority=priority, **more)  # type: ignore[arg-type]


# --- priority (a critical delta overtakes what it does not depend on, and nothing else)


def test_critical_overtakes_ten_thousand_low_ones_of_the_same_process() -> None:
    bench = Bench()
    bench.log.is_accepting = False
    for n in range(10_000):
        bench.publish(made(f"low-{n}", Priority.LOW))
    bench.publish(made("urgent", Priority.CRITICAL))
    bench.log.is_accepting = True
    bench.chain.pump(bench.now)
    assert bench.keys().index("urgent") <= 1
    assert len(bench.keys()) == 10_001


def test_critical_child_of_a_low_parent_never_overtakes_it() -> None:
    bench = Bench()
    bench.log.is_accepting = False
    for n in range(100):
        bench.publish(made(f"low-{n}", Priority.LOW))
    parent = bench.publish(made("parent", Priority.LOW))
    bench.publish(made("child", Priority.CRITICAL), after=(parent,))
    bench.publish(Delta("low-50", offset(1.0), priority=Priority.CRITICAL))
    bench.log.is_accepting = True
    bench.chain.pump(bench.now)
    keys = bench.keys()
    assert keys.index("child") > keys.index("parent")
    first, second = (at for at, key in enumerate(keys) if key == "low-50")
    assert bench.routed[first].batch.kind == Kind.CREATE
    assert bench.routed[second].batch.kind == Kind.OFFSET


def test_low_ones_move_under_endless_critical_load() -> None:
    bench = Bench()
    bench.log.is_accepting = False
    for n in range(20):
        bench.publish(made(f"low-{n}", Priority.LOW))
    for n in range(2_000):  # as many critical ones come as are served
        bench.publish(made(f"urgent-{n}", Priority.CRITICAL))
        item = bench.chain.queue.next(bench.now)
        assert item is not None
        bench.chain._process(item.payload)  # type: ignore[arg-type]
        bench.now += 0.0001
    assert sum(key.startswith("low") for key in bench.keys()) == 20  # noqa: SIM118


def test_a_delta_put_behind_a_parked_draft_of_its_vector_stays_behind_it() -> None:
    bench = Bench()
    origin = bench.hello("p")
    waiting = bench.publish(made("v", parents=(Dot(origin, 1),)))
    behind = bench.publish(Delta("v", offset(1.0)))
    other = bench.publish(made("w"))
    assert (waiting.state, behind.state, other.state) == (
        OfferState.PENDING,
        OfferState.PENDING,
        OfferState.ACKNOWLEDGED,
    )
    assert bench.send(batch_of(origin, 1, made("parent"))).done
    assert bench.keys() == ["w", "parent", "v", "v"]
    assert behind.result().offset == 3
    assert bench.chain.orderer.statistics().pending_deltas == 0
    assert all(one > 0 for one in bench.chain.orderer.watermarks)


# --- pending


@pytest.mark.parametrize("arrives", [True, False])
def test_full_pending_empties_when_the_parent_comes_and_refuses_when_it_does_not(arrives: bool) -> None:
    bench = Bench(pending_deltas_max=100)
    root = bench.hello("root")
    others = [bench.hello(f"p{n}") for n in range(4)]
    sent = []
    for n in range(1, 41):
        for number, origin in enumerate(others):
            delta = made(f"v{number}-{n}", parents=(Dot(root, 1),) if n == 1 else ())
            batch = batch_of(origin, n, delta)
            sent.append((batch, bench.send(batch, owner=f"p{number}")))
    refused = [batch for batch, receipt in sent if receipt.done]
    assert refused
    for _, receipt in sent:
        refusal = receipt.refusal()
        assert refusal is None or (refusal.code is ErrorCode.PENDING_FULL and refusal.retry_after_ms)
    if arrives:
        assert bench.send(batch_of(root, 1, made("root"))).result().offset == 0
    else:
        bench.now = 31.0
        bench.chain.tick(bench.now)
        expired = [receipt.refusal() for batch, receipt in sent if batch not in refused]
        assert all(one is not None and one.code is ErrorCode.DEP_TIMEOUT for one in expired)
        assert all(one is not None and str(Dot(root, 1)) in str(one) for one in expired[:4])
        refused = [batch for batch, _ in sent]
        bench.send(batch_of(root, 1, made("root")))
    assert all(receipt.done for _, receipt in sent)
    again = [bench.send(batch) for batch in refused]
    assert all(receipt.result().offset is not None for receipt in again)
    assert sorted(bench.keys()) == sorted(["root", *(b.keys[0] for b, _ in sent)])
    assert bench.chain.orderer.statistics().pending_runs == 0


def test_what_stands_behind_a_refused_delta_is_told_which_one_holds_it() -> None:
    bench = Bench()
    root, first, second = bench.hello("root"), bench.hello("first"), bench.hello("second")
    held = bench.send(batch_of(first, 1, made("a", parents=(Dot(root, 9),))))
    behind = bench.send(batch_of(second, 1, made("b", parents=(Dot(first, 1),))))
    bench.now = 30.0
    bench.chain.tick(bench.now)
    refusals = [receipt.refusal() for receipt in (held, behind)]
    assert [one.code for one in refusals if one] == [ErrorCode.DEP_TIMEOUT, ErrorCode.DEP_TIMEOUT]
    assert str(Dot(first, 1)) in str(refusals[1])
    assert bench.log.next_offset == 0


# --- refusals for good, and voids


def test_one_invalid_delta_amid_a_stream_is_voided_and_the_rest_goes_on() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bad = Operation(Kind.CREATE, np.array([np.nan, 1], np.float32))
    receipts = [bench.send(batch_of(origin, n, made(f"v{n}"))) for n in (1, 2)]
    receipts.append(bench.send(batch_of(origin, 3, made("ok"), Delta("bad", bad))))
    receipts.append(bench.send(batch_of(origin, 5, made("v5"))))
    refusal = receipts[2].refusal()
    assert refusal is not None
    assert (refusal.code, refusal.row) == (ErrorCode.INVALID_DELTA, 1)
    assert refusal.field == "vector"
    assert bench.keys() == ["v1", "v2", "v5"]
    assert receipts[3].result().offset == 4
    assert [logged.batch.is_control for logged in bench.routed] == [False, False, True, False]
    repeated = bench.send(batch_of(origin, 3, made("ok"), Delta("bad", bad))).refusal()
    assert repeated is not None
    assert repeated.code is ErrorCode.INVALID_DELTA
    assert bench.log.next_offset == 5


def test_an_invalid_delta_that_comes_early_is_voided_in_its_turn() -> None:
    bench = Bench()
    origin = bench.hello("p")
    early = bench.send(batch_of(origin, 2, Delta("x", sparse([0], [1.0]))))
    assert early.state is OfferState.PENDING
    bench.send(batch_of(origin, 1, made("v1")))
    refusal = early.refusal()
    assert refusal is not None
    assert refusal.field == "vector_id"
    assert bench.chain.orderer.watermarks[origin] == 2


def test_void_keeps_the_clock_entries_that_later_frames_build_upon() -> None:
    bench = Bench()
    a, b = bench.hello("a"), bench.hello("b")
    bench.send(batch_of(a, 1, made("v")))
    bench.send(batch_of(b, 1, Delta("gone", offset(1.0)), clock=(Dot(a, 1),)))
    assert bench.routed[1].batch.is_control
    assert bench.routed[1].batch.clock == (Dot(a, 1),)
    bench.send(batch_of(b, 2, Delta("v", offset(1.0))))
    assert bench.vectors.concurrent_updates == 0
    bench.send(batch_of(a, 2, Delta("v", offset(1.0))))
    assert bench.vectors.concurrent_updates == 1


# --- repeats


def test_repeats_are_told_by_the_watermark_and_answered_with_first_offsets() -> None:
    bench = Bench()
    origin, other = bench.hello("p"), bench.hello("q")
    sent = []
    for n in range(1, 200):
        batch = batch_of(origin, 2 * n - 1, made(f"a{n}"), made(f"b{n}"))
        sent.append((batch, bench.send(batch).result().offset))
        bench.send(batch_of(other, n, made(f"q{n}")))
    for batch, first in sent:
        published = bench.send(batch).result()
        assert published.duplicate
        assert published.duplicates == {0: first, 1: first + 1}  # type: ignore[operator]
    assert len(bench.keys()) == 3 * 199


def test_the_same_dot_with_other_bytes_is_refused() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 1, made("v")))
    refusal = bench.send(batch_of(origin, 1, made("w"))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.DOT_REUSED
    parked = bench.send(batch_of(origin, 3, made("x")))
    refusal = bench.send(batch_of(origin, 3, made("y"))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.DOT_REUSED
    same = bench.send(batch_of(origin, 3, made("x")))
    bench.send(batch_of(origin, 2, made("between")))
    assert parked.result() == same.result()
    assert bench.keys() == ["v", "between", "x"]


def test_a_batch_partly_below_the_watermark_is_refused_with_it() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 1, made("a"), made("b")))
    refusal = bench.send(batch_of(origin, 2, made("b"), made("c"))).refusal()
    assert refusal is not None
    assert (refusal.code, refusal.details["watermark"]) == (ErrorCode.OVERLAP, 2)
    assert bench.chain.orderer.watermarks[origin] == 2


def test_ids_are_seen_only_once_they_are_in_the_log() -> None:
    bench = Bench(log_deltas_max=2)
    bench.log.hold("sink", lambda: 0)
    ids = [bytes([n]) * 16 for n in range(3)]
    assert bench.publish(made("a", id=ids[0]), made("b", id=ids[1])).result().offset == 0
    refusal = bench.publish(made("c", id=ids[2])).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.LOG_FULL
    bench.log.release("sink")
    assert bench.publish(made("c", id=ids[2])).result().offset == 2
    published = bench.publish(made("c", id=ids[2])).result()
    assert published.duplicate
    assert published.duplicates == {0: 2}


def test_rows_with_known_ids_are_left_out_and_told() -> None:
    bench = Bench()
    first, second = b"1" * 16, b"2" * 16
    bench.publish(made("a", id=first))
    published = bench.publish(made("a", id=first), made("b", id=second), made("b", id=second)).result()
    assert published.duplicates == {0: 0, 2: 1}
    assert published.offset == 1
    assert bench.keys() == ["a", "b"]


def test_a_dot_whose_id_was_known_is_void_and_answered_with_the_first_offset() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.publish(made("before"))
    bench.publish(made("a", id=b"1" * 16))
    again = batch_of(origin, 1, made("a", id=b"1" * 16))
    for _ in range(2):
        published = bench.send(again).result()
        assert published.duplicates == {0: 1}
    assert bench.send(batch_of(origin, 2, made("b"))).result().offset == 3
    assert bench.keys() == ["before", "a", "b"]


def test_what_is_offered_from_within_an_acknowledgement_runs_too() -> None:
    bench = Bench()
    again: list[object] = []
    draft = Draft([made("first")], Receipt(), Priority.NORMAL, AckLevel.MEMORY)
    draft.receipt.add_done_callback(lambda _: again.append(bench.publish(made("second"))))
    bench.chain.offer(draft, bench.now)
    assert bench.keys() == ["first", "second"]


# --- fencing


def test_a_cloned_producer_is_fenced() -> None:
    bench = Bench()
    first = bench.producer("p")
    assert first.offer(made("a")).result().offset == 0
    parked = bench.send(batch_of(bench.chain._own_origins[0], 1, made("z")))
    assert parked.done or parked.state is OfferState.PENDING
    second = bench.producer("p")
    refusal = first.offer(made("b")).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.FENCED
    assert second.offer(made("c")).result().offset is not None
    assert second.watermark() == 2


def test_an_origin_that_never_said_hello_is_unknown() -> None:
    bench = Bench()
    refusal = bench.send(batch_of(make_origin(77, 2), 1, made("a"))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.UNKNOWN_ORIGIN


def test_an_idle_origin_must_say_hello_again_and_keeps_its_watermark() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 1, made("a")))
    bench.now = 8 * 24 * 3600.0
    bench.chain.tick(bench.now)
    refusal = bench.send(batch_of(origin, 2, made("b"))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.UNKNOWN_ORIGIN
    bench.hello("p")
    assert bench.send(batch_of(origin, 2, made("b"), epoch=2)).result().offset == 1


def test_the_services_own_origins_are_never_idle() -> None:
    bench = Bench()
    for days in (8, 16):
        bench.now = days * 24 * 3600.0
        bench.chain.tick(bench.now)
        assert bench.publish(made(f"day-{days}")).result().offset is not None


# --- expectation, unknown vectors, dimensions


def test_expect_refuses_when_the_vector_has_moved_on() -> None:
    bench = Bench()
    dot = bench.publish(made("v")).result().dot
    assert bench.publish(Delta("v", offset(1.0), expect=dot)).result().offset == 1
    refusal = bench.publish(Delta("v", offset(1.0), expect=dot)).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.CONFLICT
    assert refusal.details["current"] == bench.vectors.head("default", "v")


def test_partial_operations_need_a_living_vector() -> None:
    bench = Bench()
    for delta in (Delta("v", offset(1.0)), Delta("v", sparse([0], [1.0]))):
        refusal = bench.publish(delta).refusal()
        assert refusal is not None
        assert refusal.field == "vector_id"
    bench.publish(made("v"))
    assert bench.publish(Delta("v", offset(1.0))).result().offset == 1
    bench.publish(Delta("v", delete()))
    assert bench.publish(Delta("v", offset(1.0))).refusal() is not None
    both = bench.publish(made("v"), Delta("v", offset(1.0)))
    assert both.result().offset == 3
    refusal = bench.publish(Delta("v", sparse([2], [1.0]))).refusal()
    assert refusal is not None
    assert refusal.field == "indices"
    refusal = bench.publish(Delta("w", create([1.0]))).refusal()
    assert refusal is not None
    assert refusal.field == "vector"


def test_forwarded_deltas_are_never_refused_for_what_this_service_knows() -> None:
    bench = Bench()
    origin = make_origin(5, 2)
    batch = batch_of(origin, 1, Delta("unknown", offset(1.0)))
    assert bench.send(batch, source=Source.REPLICA, lamport=40).result().offset == 0
    assert bench.routed[0].lamport == 40
    bench.publish(made("mine"))
    assert bench.routed[1].lamport == 41


# --- the log is full


def test_a_full_log_refuses_with_numbers_and_everything_stays_open() -> None:
    bench = Bench(log_deltas_max=3)
    bench.log.hold("slow", lambda: 0)
    origin = bench.hello("p")
    for n in (1, 2, 3):
        bench.send(batch_of(origin, n, made(f"v{n}")))
    refusal = bench.send(batch_of(origin, 4, made("v4"))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.LOG_FULL
    assert refusal.details["depth"] == refusal.details["capacity"] == 3
    assert refusal.details["blocked_by"] == "slow"
    assert refusal.retry_after_ms
    bench.log.release("slow")
    assert bench.send(batch_of(origin, 4, made("v4"))).result().offset == 3


def test_a_level_that_the_log_cannot_grant_is_refused_with_the_cure() -> None:
    bench = Bench()
    origin = bench.hello("p")
    refusal = bench.send(batch_of(origin, 1, made("v"), ack_level=2)).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.LEVEL_UNAVAILABLE
    assert "ask for memory" in refusal.message
    assert bench.chain.orderer.watermarks[origin] == 1


# --- withdrawing


def test_a_withdrawn_delta_never_takes_effect() -> None:
    bench = Bench()
    root, origin = bench.hello("root"), bench.hello("p")
    waiting = bench.send(batch_of(origin, 1, made("never", parents=(Dot(root, 1),))))
    draft = bench.publish(made("neither", parents=(Dot(root, 1),)))
    after = bench.send(batch_of(origin, 2, made("behind")))
    assert waiting.withdraw()
    assert draft.withdraw()
    assert (waiting.state, draft.state) == (OfferState.WITHDRAWN, OfferState.WITHDRAWN)
    bench.send(batch_of(root, 1, made("root")))
    assert after.result().offset is not None
    assert sorted(bench.keys()) == ["behind", "root"]
    assert not after.withdraw()


def test_a_queued_delta_can_be_withdrawn() -> None:
    bench = Bench()
    bench.log.is_accepting = False
    receipt = bench.publish(made("v"))
    assert receipt.withdraw()
    bench.log.is_accepting = True
    bench.chain.pump(bench.now)
    assert bench.keys() == []


def test_closing_refuses_what_waits() -> None:
    bench = Bench()
    root = bench.hello("root")
    waiting = bench.publish(made("v", parents=(Dot(root, 1),)))
    bench.log.is_accepting = False
    queued = bench.publish(made("w"))
    bench.chain.close(bench.now)
    for receipt in (waiting, queued):
        with pytest.raises(Refused) as caught:
            receipt.result()
        assert caught.value.code is ErrorCode.SHUTTING_DOWN


def test_the_queue_refuses_the_one_too_many_with_its_numbers() -> None:
    bench = Bench(queue_deltas_max=1000)
    bench.log.is_accepting = False
    for n in range(1000):
        bench.publish(made(f"v{n}"))
    refusal = bench.publish(replace(made("one more"))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.QUEUE_FULL
    assert refusal.details["depth"] == refusal.details["capacity"] == 1000
