"""The pipeline in rare cases: rebatched rows, out-of-range numbers, forwarders, fencing, callback errors."""

from __future__ import annotations

import pytest

from delta_prop.calls.receipt import OfferState, Receipt
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority, Source, create, delete, make_origin
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import OriginClaim
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode
from tests.delta_prop.partition.pipeline_bench import Bench, batch_of


def make_delta(key: str, **more: object) -> Delta:
    return Delta(key, create([1.0, 2.0]), **more)  # type: ignore[arg-type]


def refusal_code(receipt: Receipt) -> ErrorCode:
    refusal = receipt.refusal()
    assert refusal is not None
    return refusal.code


def test_used_dot_in_another_batch_is_dot_reused() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 1, make_delta("a"), make_delta("b")))
    assert refusal_code(bench.send(batch_of(origin, 1, make_delta("new")))) is ErrorCode.DOT_REUSED
    assert bench.send(batch_of(origin, 1, make_delta("a"), make_delta("b"))).result().duplicate


def test_counter_within_a_gap_is_never_acknowledged() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 10, make_delta("a"), counters=[10]))
    bench.send(batch_of(origin, 20, make_delta("b"), counters=[20], previous=10))
    assert refusal_code(bench.send(batch_of(origin, 15, make_delta("c"), counters=[15], previous=10))) in (
        ErrorCode.DOT_REUSED,
        ErrorCode.OVERLAP,
    )
    state = bench.pipeline.origins.get(origin)
    assert state is not None
    assert [state.first_offset(counter) for counter in (10, 15, 20, 21)] == [0, None, 1, None]


def test_forwarded_batch_is_never_refused_for_its_level() -> None:
    bench = Bench()
    batch = batch_of(make_origin(9, 2), 1, make_delta("v"), ack_level=AckLevel.DURABLE)
    assert bench.send(batch, source=Source.REPLICA, lamport=5).result().offset == 0
    assert bench.keys() == ["v"]


@pytest.mark.parametrize("lamport", [1 << 63, (1 << 62) + 1, -1])
def test_lamport_number_out_of_range_is_refused(lamport: int) -> None:
    bench = Bench()
    batch = batch_of(make_origin(9, 2), 1, make_delta("v"))
    assert refusal_code(bench.send(batch, source=Source.REPLICA, lamport=lamport)) is ErrorCode.TOO_LARGE
    assert bench.publish(make_delta("w")).result().offset == 0
    assert bench.pipeline.appender.lamport == 1


def test_counter_above_maximum_is_refused() -> None:
    bench = Bench()
    origin = bench.hello("p")
    too_large = batch_of(origin, COUNTER_MAX + 1, make_delta("v"), counters=[COUNTER_MAX + 1])
    assert refusal_code(bench.send(too_large)) is ErrorCode.TOO_LARGE
    assert bench.pipeline.orderer.watermarks.get(origin, 0) == 0


def test_draft_after_withdrawn_draft_still_waits_for_the_first() -> None:
    bench = Bench()
    root = bench.hello("root")
    first = bench.publish(make_delta("v", parents=(Dot(root, 1),)))
    second = bench.publish(make_delta("v", metadata={"n": 2}))
    assert second.withdraw()
    third = bench.publish(make_delta("v", metadata={"n": 3}))
    assert (first.state, third.state) == (OfferState.PENDING, OfferState.PENDING)
    bench.send(batch_of(root, 1, make_delta("root")))
    assert (first.result().offset, third.result().offset) == (1, 2)


@pytest.mark.parametrize("field", ["parents", "clock"])
@pytest.mark.parametrize("ending", ["arrives", "times out", "withdrawn"])
def test_second_draft_of_vector_waits_for_its_own_dependency(field: str, ending: str) -> None:
    bench = Bench()
    first_origin, other = bench.hello("one"), bench.hello("other")
    first = bench.publish(make_delta("v", **{field: (Dot(first_origin, 1),)}))
    second = bench.publish(make_delta("v", **{field: (Dot(other, 1),)}))
    third = bench.publish(make_delta("v"))
    bench.send(batch_of(first_origin, 1, make_delta("one")))
    assert first.result().offset == 1
    assert (second.state, third.state) == (OfferState.PENDING, OfferState.PENDING)
    if ending == "arrives":
        bench.send(batch_of(other, 1, make_delta("other")))
        assert (second.result().offset, third.result().offset) == (3, 4)
    elif ending == "withdrawn":
        assert second.withdraw()
        assert third.result().offset == 2
    else:
        bench.pipeline.tick(1_000.0)
        assert (refusal_code(second), refusal_code(third)) == (ErrorCode.DEP_TIMEOUT, ErrorCode.DEP_TIMEOUT)
        assert second.refusal().details["missing"] == [str(Dot(other, 1))]
    assert bench.publish(make_delta("v")).acknowledged


def test_known_id_is_duplicate_even_if_its_vector_is_deleted() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.publish(make_delta("v", id=b"1" * 16))
    bench.publish(Delta("v", delete()))
    duplicate = Delta("v", make_delta("v").operation, id=b"1" * 16)
    assert bench.send(batch_of(origin, 1, duplicate)).result().duplicates == {0: 0}


def test_sender_can_write_only_under_its_own_origins() -> None:
    bench = Bench()
    origin = bench.hello("p")
    for foreign in (origin, bench.pipeline._own_origins[Priority.NORMAL]):
        receipt = bench.send(batch_of(foreign, 1, make_delta("evil")), owner="evil")
        assert refusal_code(receipt) is ErrorCode.UNAUTHORIZED
    assert bench.send(batch_of(origin, 1, make_delta("v"))).result().offset == 0


def test_pending_rows_resent_in_other_bytes_are_overlap() -> None:
    bench = Bench()
    origin = bench.hello("p")
    first = bench.send(batch_of(origin, 2, make_delta("b")))
    other = bench.send(batch_of(origin, 2, make_delta("b"), ack_level=AckLevel.DURABLE))
    assert refusal_code(other) is ErrorCode.OVERLAP
    assert other.refusal().retry_after_ms
    assert refusal_code(bench.send(batch_of(origin, 2, make_delta("c")))) is ErrorCode.DOT_REUSED
    bench.send(batch_of(origin, 1, make_delta("a")))
    assert first.result().offset == 1


@pytest.mark.parametrize(("claimed_epoch", "code"), [(1, "DEP_TIMEOUT"), (6, "FENCED"), (0, "FENCED")])
def test_claim_refuses_pending_batches_by_granted_epoch(claimed_epoch: int, code: str) -> None:
    bench = Bench()
    origin = make_origin(77, Priority.NORMAL)
    bench.owners[origin] = "p"
    bench.pipeline.claim([OriginClaim(origin)], "p", 0.0)
    pending = bench.send(batch_of(origin, 3, make_delta("c")))
    forwarded = bench.send(batch_of(origin, 5, make_delta("e"), epoch=3), source=Source.REPLICA, lamport=9)
    (grant,) = bench.pipeline.claim([OriginClaim(origin, claimed_epoch)], "p", 1.0)
    assert refusal_code(pending).name == code
    if code == "FENCED":
        assert pending.refusal().details == {"origin": origin, "epoch": grant.epoch}
    assert refusal_code(forwarded) is ErrorCode.DEP_TIMEOUT
    assert forwarded.refusal().retry_after_ms == 0


def test_duplicates_of_a_pending_batch_are_limited() -> None:
    bench = Bench()
    origin = bench.hello("p")
    pending_batch = batch_of(origin, 2, make_delta("b"))
    receipts = [bench.send(pending_batch) for _ in range(500)]
    assert sum(not receipt.done for receipt in receipts) <= 101
    bench.send(batch_of(origin, 1, make_delta("a")))
    assert all(receipt.done for receipt in receipts)
    assert bench.keys() == ["a", "b"]


def test_failing_callback_does_not_block_other_receipts() -> None:
    bench = Bench()
    origin = bench.hello("p")
    receipts = [bench.send(batch_of(origin, n, make_delta(f"v{n}"))) for n in (2, 3, 4)]

    def fail(_: Receipt) -> None:
        raise RuntimeError("the caller's own")

    receipts[0].add_done_callback(fail)
    with pytest.raises(RuntimeError):
        bench.send(batch_of(origin, 1, make_delta("v1")))
    bench.pipeline.tick(bench.now)
    assert all(receipt.done for receipt in receipts)
    assert bench.keys() == ["v1", "v2", "v3", "v4"]


def test_producer_fenced_within_callback_appends_no_more() -> None:
    bench = Bench()
    root, origin = bench.hello("root"), bench.hello("p")
    child = make_delta("late", parents=(Dot(root, 1),))
    pending = bench.send(batch_of(origin, 1, child))
    bench.send(batch_of(root, 2, make_delta("x")))
    first = batch_of(root, 1, make_delta("root"))
    receipt = Receipt()
    receipt.add_done_callback(lambda _: bench.hello("p"))
    bench.pipeline.offer(SequencedBatch(first, Sender("root"), receipt), bench.now)
    assert refusal_code(pending) is ErrorCode.FENCED
    assert bench.keys() == ["root", "x"]


def test_dots_older_than_an_idle_week_are_read_from_the_log() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 1, make_delta("a")))
    bench.now = 8 * 24 * 3600.0
    bench.pipeline.tick(bench.now)
    bench.hello("p")
    assert bench.send(batch_of(origin, 1, make_delta("a"))).result().duplicates == {0: 0}
    for epoch, content, code in (
        (1, "other", ErrorCode.FENCED),
        (2, "a", ErrorCode.DOT_REUSED),
        (2, "other", ErrorCode.DOT_REUSED),
    ):
        assert refusal_code(bench.send(batch_of(origin, 1, make_delta(content), epoch=epoch))) is code
    assert bench.send(batch_of(origin, 2, make_delta("b"), epoch=2)).result().offset == 1


@pytest.mark.parametrize("is_queued", [True, False])
def test_dependent_of_refused_draft_is_refused(is_queued: bool) -> None:
    bench = Bench()
    bench.log.is_accepting = not is_queued
    cause = bench.publish(Delta("v", delete(), expect=Dot(1, 1)))
    effect = bench.publish(make_delta("w"), after=(cause,))
    bench.log.is_accepting = True
    bench.pipeline.pump(bench.now)
    with pytest.raises(Refused):
        cause.result()
    assert refusal_code(effect) is ErrorCode.DEP_TIMEOUT
    assert bench.keys() == []


def test_new_claim_refuses_pending_batch_so_dots_are_reusable() -> None:
    """After the log lost some counters, the producer sends the same dots with other bytes."""
    bench = Bench()
    origin, other = make_origin(9, Priority.NORMAL), make_origin(9, Priority.HIGH)
    bench.owners[origin] = bench.owners[other] = "p"
    grants = bench.pipeline.claim([OriginClaim(origin, 0), OriginClaim(other, 0)], "p", 0.0)
    assert [grant.epoch for grant in grants] == [1, 1]
    pending = bench.send(batch_of(origin, 2, make_delta("b"), clock=[Dot(other, 1)]))
    assert pending.state is OfferState.PENDING
    bench.pipeline.claim([OriginClaim(origin, 1)], "p", 1.0)
    assert refusal_code(pending) is ErrorCode.DEP_TIMEOUT
    assert bench.send(batch_of(origin, 1, make_delta("a"))).result().offset == 0
    assert bench.send(batch_of(origin, 2, make_delta("b"))).result().offset == 1
    assert bench.keys() == ["a", "b"]


@pytest.mark.parametrize("batch_count", [1, 3])
def test_new_claim_refuses_queued_batches_and_admits_later_ones(batch_count: int) -> None:
    bench = Bench()
    origin = make_origin(77, Priority.NORMAL)
    bench.pipeline.claim([OriginClaim(origin)], "p", 0.0)
    bench.owners[origin] = "p"
    bench.log.is_accepting = False
    before = [bench.send(batch_of(origin, base, make_delta("a"))) for base in range(1, batch_count + 1)]
    (grant,) = bench.pipeline.claim([OriginClaim(origin, 1)], "p", 1.0)
    assert grant.watermark == 0
    other_bytes = [
        batch_of(origin, base, make_delta("a"), hybrid_time=7) for base in range(1, batch_count + 1)
    ]
    after = [bench.send(batch) for batch in other_bytes]
    bench.log.is_accepting = True
    bench.pipeline.pump(2.0)
    for receipt in before:
        refusal = receipt.refusal()
        assert refusal is not None
        assert refusal.code is ErrorCode.DEP_TIMEOUT
        assert refusal.retryable
    assert [receipt.result().offset for receipt in after] == list(range(batch_count))
    assert not any(receipt.result().duplicate for receipt in after)
