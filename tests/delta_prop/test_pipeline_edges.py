"""The chain at its edges: other cuts, numbers out of bounds, forwarders, fencing, failing callbacks."""

from __future__ import annotations

import pytest

from delta_prop.ingest.work import Sender, SequencedBatch
from delta_prop.receipt import OfferState, Receipt
from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority, Source, create, delete, make_origin
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import OriginClaim
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode
from tests.delta_prop.chains import Bench, batch_of


def made(key: str, **more: object) -> Delta:
    return Delta(key, create([1.0, 2.0]), **more)  # type: ignore[arg-type]


def code_of(receipt: Receipt) -> ErrorCode:
    refusal = receipt.refusal()
    assert refusal is not None
    return refusal.code


def test_used_dots_under_another_cut_are_never_acknowledged() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 1, made("a"), made("b")))
    assert code_of(bench.send(batch_of(origin, 1, made("new")))) is ErrorCode.DOT_REUSED
    assert bench.send(batch_of(origin, 1, made("a"), made("b"))).result().duplicate


def test_a_counter_that_was_leapt_over_is_never_acknowledged() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 10, made("a"), counters=[10]))
    bench.send(batch_of(origin, 20, made("b"), counters=[20], previous=10))
    assert code_of(bench.send(batch_of(origin, 15, made("c"), counters=[15], previous=10))) in (
        ErrorCode.DOT_REUSED,
        ErrorCode.OVERLAP,
    )
    state = bench.chain.origins.get(origin)
    assert state is not None
    assert [state.first_offset(counter) for counter in (10, 15, 20, 21)] == [0, None, 1, None]


def test_a_forwarded_batch_is_never_voided_for_its_level() -> None:
    bench = Bench()
    batch = batch_of(make_origin(9, 2), 1, made("v"), ack_level=AckLevel.DURABLE)
    assert bench.send(batch, source=Source.REPLICA, lamport=5).result().offset == 0
    assert bench.keys() == ["v"]


@pytest.mark.parametrize("lamport", [1 << 63, (1 << 62) + 1, -1])
def test_a_lamport_number_that_no_store_could_keep_is_refused(lamport: int) -> None:
    bench = Bench()
    batch = batch_of(make_origin(9, 2), 1, made("v"))
    assert code_of(bench.send(batch, source=Source.REPLICA, lamport=lamport)) is ErrorCode.TOO_LARGE
    assert bench.publish(made("w")).result().offset == 0
    assert bench.chain.appender.lamport == 1


def test_a_counter_that_no_store_could_keep_is_refused() -> None:
    bench = Bench()
    origin = bench.hello("p")
    far = batch_of(origin, COUNTER_MAX + 1, made("v"), counters=[COUNTER_MAX + 1])
    assert code_of(bench.send(far)) is ErrorCode.TOO_LARGE
    assert bench.chain.orderer.watermarks.get(origin, 0) == 0


def test_what_waits_behind_a_draft_that_is_withdrawn_still_waits_for_the_one_before() -> None:
    bench = Bench()
    root = bench.hello("root")
    first = bench.publish(made("v", parents=(Dot(root, 1),)))
    second = bench.publish(made("v", metadata={"n": 2}))
    assert second.withdraw()
    third = bench.publish(made("v", metadata={"n": 3}))
    assert (first.state, third.state) == (OfferState.PENDING, OfferState.PENDING)
    bench.send(batch_of(root, 1, made("root")))
    assert (first.result().offset, third.result().offset) == (1, 2)


@pytest.mark.parametrize("named", ["parents", "clock"])
@pytest.mark.parametrize("ending", ["comes", "never", "withdrawn"])
def test_draft_behind_another_outlives_it_and_waits_for_its_own_cause(named: str, ending: str) -> None:
    bench = Bench()
    one, other = bench.hello("one"), bench.hello("other")
    first = bench.publish(made("v", **{named: (Dot(one, 1),)}))
    second = bench.publish(made("v", **{named: (Dot(other, 1),)}))
    third = bench.publish(made("v"))
    bench.send(batch_of(one, 1, made("one")))
    assert first.result().offset == 1
    assert (second.state, third.state) == (OfferState.PENDING, OfferState.PENDING)
    if ending == "comes":
        bench.send(batch_of(other, 1, made("other")))
        assert (second.result().offset, third.result().offset) == (3, 4)
    elif ending == "withdrawn":
        assert second.withdraw()
        assert third.result().offset == 2
    else:
        bench.chain.tick(1_000.0)
        assert (code_of(second), code_of(third)) == (ErrorCode.DEP_TIMEOUT, ErrorCode.DEP_TIMEOUT)
        assert second.refusal().details["missing"] == [str(Dot(other, 1))]
    assert bench.publish(made("v")).acknowledged


def test_a_known_id_is_told_before_its_vector_is_looked_at() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.publish(made("v", id=b"1" * 16))
    bench.publish(Delta("v", delete()))
    again = Delta("v", made("v").operation, id=b"1" * 16)
    assert bench.send(batch_of(origin, 1, again)).result().duplicates == {0: 0}


def test_a_session_writes_under_its_own_origins_only() -> None:
    bench = Bench()
    origin = bench.hello("p")
    for foreign in (origin, bench.chain._own_origins[Priority.NORMAL]):
        refusal = bench.send(batch_of(foreign, 1, made("evil")), owner="evil")
        assert code_of(refusal) is ErrorCode.UNAUTHORIZED
    assert bench.send(batch_of(origin, 1, made("v"))).result().offset == 0


def test_rows_that_wait_are_overlapped_by_the_same_rows_in_other_bytes() -> None:
    bench = Bench()
    origin = bench.hello("p")
    first = bench.send(batch_of(origin, 2, made("b")))
    other = bench.send(batch_of(origin, 2, made("b"), ack_level=AckLevel.DURABLE))
    assert code_of(other) is ErrorCode.OVERLAP
    assert other.refusal().retry_after_ms
    assert code_of(bench.send(batch_of(origin, 2, made("c")))) is ErrorCode.DOT_REUSED
    bench.send(batch_of(origin, 1, made("a")))
    assert first.result().offset == 1


@pytest.mark.parametrize(("claimed", "code"), [(1, "DEP_TIMEOUT"), (6, "FENCED"), (0, "FENCED")])
def test_claim_refuses_what_waits_by_the_epoch_that_it_grants(claimed: int, code: str) -> None:
    bench = Bench()
    origin = make_origin(77, Priority.NORMAL)
    bench.owners[origin] = "p"
    bench.chain.claim([OriginClaim(origin)], "p", 0.0)
    waits = bench.send(batch_of(origin, 3, made("c")))
    forwarded = bench.send(batch_of(origin, 5, made("e"), epoch=3), source=Source.REPLICA, lamport=9)
    (grant,) = bench.chain.claim([OriginClaim(origin, claimed)], "p", 1.0)
    assert code_of(waits).name == code
    if code == "FENCED":
        assert waits.refusal().details == {"origin": origin, "epoch": grant.epoch}
    assert code_of(forwarded) is ErrorCode.DEP_TIMEOUT
    assert forwarded.refusal().retry_after_ms == 0


def test_repeats_of_a_pending_batch_are_bounded() -> None:
    bench = Bench()
    origin = bench.hello("p")
    parked = batch_of(origin, 2, made("b"))
    receipts = [bench.send(parked) for _ in range(500)]
    assert sum(not one.done for one in receipts) <= 101
    bench.send(batch_of(origin, 1, made("a")))
    assert all(one.done for one in receipts)
    assert bench.keys() == ["a", "b"]


def test_a_callback_that_fails_strands_nobody() -> None:
    bench = Bench()
    origin = bench.hello("p")
    receipts = [bench.send(batch_of(origin, n, made(f"v{n}"))) for n in (2, 3, 4)]

    def fail(_: Receipt) -> None:
        raise RuntimeError("the caller's own")

    receipts[0].add_done_callback(fail)
    with pytest.raises(RuntimeError):
        bench.send(batch_of(origin, 1, made("v1")))
    bench.chain.tick(bench.now)
    assert all(one.done for one in receipts)
    assert bench.keys() == ["v1", "v2", "v3", "v4"]


def test_a_producer_fenced_within_a_callback_appends_no_more() -> None:
    bench = Bench()
    root, origin = bench.hello("root"), bench.hello("p")
    waits = made("late", parents=(Dot(root, 1),))
    late = bench.send(batch_of(origin, 1, waits))
    bench.send(batch_of(root, 2, made("x")))
    first = batch_of(root, 1, made("root"))
    receipt = Receipt()
    receipt.add_done_callback(lambda _: bench.hello("p"))
    bench.chain.offer(SequencedBatch(first, Sender("root"), receipt), bench.now)
    assert code_of(late) is ErrorCode.FENCED
    assert bench.keys() == ["root", "x"]


def test_dots_from_before_an_idle_week_are_looked_up_in_the_log_and_never_guessed() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 1, made("a")))
    bench.now = 8 * 24 * 3600.0
    bench.chain.tick(bench.now)
    bench.hello("p")
    assert bench.send(batch_of(origin, 1, made("a"))).result().duplicates == {0: 0}
    for epoch, content, code in (
        (1, "other", ErrorCode.FENCED),
        (2, "a", ErrorCode.DOT_REUSED),
        (2, "other", ErrorCode.DOT_REUSED),
    ):
        assert code_of(bench.send(batch_of(origin, 1, made(content), epoch=epoch))) is code
    assert bench.send(batch_of(origin, 2, made("b"), epoch=2)).result().offset == 1


@pytest.mark.parametrize("queued", [True, False])
def test_what_names_a_refused_delta_is_refused_too(queued: bool) -> None:
    bench = Bench()
    bench.log.is_accepting = not queued
    cause = bench.publish(Delta("v", delete(), expect=Dot(1, 1)))
    effect = bench.publish(made("w"), after=(cause,))
    bench.log.is_accepting = True
    bench.chain.pump(bench.now)
    with pytest.raises(Refused):
        cause.result()
    assert code_of(effect) is ErrorCode.DEP_TIMEOUT
    assert bench.keys() == []


def test_what_is_pending_makes_room_for_what_its_producer_sends_after_another_hello() -> None:
    """Behind counters that the log has lost, the producer sends the same dots in other bytes."""
    bench = Bench()
    origin, other = make_origin(9, Priority.NORMAL), make_origin(9, Priority.HIGH)
    bench.owners[origin] = bench.owners[other] = "p"
    grants = bench.chain.claim([OriginClaim(origin, 0), OriginClaim(other, 0)], "p", 0.0)
    assert [grant.epoch for grant in grants] == [1, 1]
    waits = bench.send(batch_of(origin, 2, made("b"), clock=[Dot(other, 1)]))
    assert waits.state is OfferState.PENDING
    bench.chain.claim([OriginClaim(origin, 1)], "p", 1.0)
    assert code_of(waits) is ErrorCode.DEP_TIMEOUT
    assert bench.send(batch_of(origin, 1, made("a"))).result().offset == 0
    assert bench.send(batch_of(origin, 2, made("b"))).result().offset == 1
    assert bench.keys() == ["a", "b"]


@pytest.mark.parametrize("batches", [1, 3])
def test_what_was_queued_before_a_hello_gives_way_to_what_is_sent_after_it(batches: int) -> None:
    bench = Bench()
    origin = make_origin(77, Priority.NORMAL)
    bench.chain.claim([OriginClaim(origin)], "p", 0.0)
    bench.owners[origin] = "p"
    bench.log.is_accepting = False
    before = [bench.send(batch_of(origin, base, made("a"))) for base in range(1, batches + 1)]
    (grant,) = bench.chain.claim([OriginClaim(origin, 1)], "p", 1.0)
    assert grant.watermark == 0
    other_bytes = [batch_of(origin, base, made("a"), hybrid_time=7) for base in range(1, batches + 1)]
    after = [bench.send(batch) for batch in other_bytes]
    bench.log.is_accepting = True
    bench.chain.pump(2.0)
    for receipt in before:
        refusal = receipt.refusal()
        assert refusal is not None
        assert refusal.code is ErrorCode.DEP_TIMEOUT
        assert refusal.retryable
    assert [receipt.result().offset for receipt in after] == list(range(batches))
    assert not any(receipt.result().duplicate for receipt in after)
