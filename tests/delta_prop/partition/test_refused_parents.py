"""A delta whose parent has a final refusal gets a final refusal at once, and never waits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Propagator
from delta_prop.calls.receipt import OfferState, Receipt
from delta_prop.partition.ingest import refused_ids
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, Dot, Source, opaque, sparse_add
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.frames import BatchFrame, DeltaFrame, Nack
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.durable.histories import NO_CHECKPOINTS, resend_batch
from tests.delta_prop.partition.pipeline_bench import Bench, batch_of
from tests.delta_prop.server.raw import ORIGIN, connected, serving
from tests.delta_prop.support import catch_refusal, claim_origins, make_delta

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch

ONE, TWO, THREE = (bytes([number]) * 16 for number in (1, 2, 3))
BAD = Delta("nobody", sparse_add([0], [1.0]), id=ONE)
"""A delta that gets a final refusal, because its vector is unknown."""
CHILD = make_delta("child", parents=(ONE,))


def assert_refused_for_its_parent(
    refusal: Refused | None, *, row: int = 0, parent: bytes = ONE, code: int = ErrorCode.INVALID_DELTA
) -> None:
    assert refusal is not None, "the delta must be refused at once"
    assert (refusal.code, refusal.field, refusal.row) == (ErrorCode.INVALID_DELTA, "parents", row)
    assert refusal.is_final
    assert parent.hex() in refusal.message
    assert ErrorCode(code).name in refusal.message
    assert refusal.details == {"blocked_by": parent.hex(), "code": code}


def send_batch(bench: Bench, *deltas: Delta) -> Receipt:
    """Send deltas under the next dots of the first origin."""
    origin = bench.hello("p") if not bench.owners else next(iter(bench.owners))
    return bench.send(batch_of(origin, bench.pipeline.orderer.watermarks.get(origin, 0) + 1, *deltas))


def publish(bench: Bench, *deltas: Delta) -> Receipt:
    return bench.publish(*deltas)


EACH_FORM = pytest.mark.parametrize("send", [publish, send_batch], ids=["draft", "batch"])
EACH_PARENT_FORM = pytest.mark.parametrize(
    "send_parent", [publish, send_batch], ids=["parent draft", "parent batch"]
)
Send = "Callable[..., Receipt]"


@EACH_FORM
@EACH_PARENT_FORM
def test_child_of_a_refused_parent_is_refused_at_once(send: Send, send_parent: Send) -> None:  # type: ignore[valid-type]
    bench = Bench()
    assert send_parent(bench, BAD).refusal().code is ErrorCode.INVALID_DELTA  # type: ignore[misc]
    assert_refused_for_its_parent(send(bench, CHILD).refusal())  # type: ignore[misc]
    assert_refused_for_its_parent(send(bench, make_delta("a"), CHILD).refusal(), row=1)  # type: ignore[misc]
    assert send(bench, make_delta("next")).acknowledged, "later counters must be accepted"  # type: ignore[misc]
    assert bench.keys() == ["next"]


@EACH_FORM
@EACH_PARENT_FORM
def test_pending_child_is_refused_when_its_parent_is_refused(send: Send, send_parent: Send) -> None:  # type: ignore[valid-type]
    bench = Bench()
    child_origin = bench.hello("child")
    parent_origin = bench.hello("parent")
    if send is publish:
        child, dependent = bench.publish(CHILD), bench.publish(make_delta("child", metadata={"n": 1}))
    else:
        child = bench.send(batch_of(child_origin, 1, CHILD))
        dependent = bench.send(batch_of(child_origin, 2, make_delta("successor")))
    assert (child.state, dependent.state) == (OfferState.PENDING, OfferState.PENDING)
    if send_parent is publish:
        bench.publish(BAD)
    else:
        bench.send(batch_of(parent_origin, 1, BAD))
    assert_refused_for_its_parent(child.refusal())
    assert dependent.acknowledged
    assert len(bench.keys()) == 1
    assert bench.pipeline.orderer.statistics().pending_deltas == 0


def test_resent_batch_gets_the_code_of_its_noop() -> None:
    bench = Bench()
    bench.publish(BAD)
    origin = bench.hello("p")
    batch = batch_of(origin, 1, CHILD)
    for _ in range(2):
        refusal = bench.send(batch).refusal()
        assert refusal is not None
        assert refusal.code is ErrorCode.INVALID_DELTA


def test_ids_of_other_rows_of_a_refused_batch_are_refused() -> None:
    for send in (publish, send_batch):
        bench = Bench()
        send(bench, make_delta("fine", id=TWO), BAD)
        assert_refused_for_its_parent(
            bench.publish(make_delta("child", parents=(TWO,))).refusal(), parent=TWO
        )


def test_descendants_of_a_refused_parent_are_refused_together() -> None:
    bench = Bench()
    origin = bench.hello("p")
    waiting = [
        bench.send(batch_of(origin, 1, replace(CHILD, id=TWO))),
        bench.publish(make_delta("grandchild", parents=(TWO,), id=THREE)),
        bench.send(batch_of(bench.hello("q"), 1, make_delta("last", parents=(THREE,)))),
    ]
    bench.publish(BAD)
    for receipt, parent in zip(waiting, (ONE, TWO, THREE), strict=True):
        assert_refused_for_its_parent(receipt.refusal(), parent=parent)
    assert bench.keys() == []


def test_corrected_delta_with_the_same_id_is_accepted_as_parent() -> None:
    bench = Bench()
    bench.publish(BAD)
    assert bench.publish(make_delta("right", id=ONE)).acknowledged
    assert bench.publish(CHILD).acknowledged
    assert len(bench.pipeline.appender.refused_ids) == 0


def test_parent_in_the_same_batch_overrides_refused_id() -> None:
    for send in (publish, send_batch):
        bench = Bench()
        bench.publish(BAD)
        assert send(bench, make_delta("right", id=ONE), replace(CHILD, id=TWO)).acknowledged


def test_accepted_id_stays_a_parent_after_reuse_is_refused() -> None:
    bench = Bench()
    bench.publish(make_delta("right", id=ONE))
    assert bench.publish(make_delta("other", id=ONE)).refusal().code is ErrorCode.ID_REUSED  # type: ignore[union-attr]
    assert bench.publish(CHILD).acknowledged


def test_retryable_and_unauthorized_refusals_refuse_no_child() -> None:
    bench = Bench(log_deltas_max=2)
    bench.publish(make_delta("a"), make_delta("b"))
    bench.log.hold("sink", lambda: 0)
    assert bench.publish(make_delta("full", id=ONE)).refusal().code is ErrorCode.LOG_FULL  # type: ignore[union-attr]
    bench.log.release("sink")
    origin = bench.hello("p")
    unauthorized = Refused(ErrorCode.UNAUTHORIZED, "no")
    batch = batch_of(origin, 1, make_delta("forbidden", id=TWO))
    bench.pipeline.offer(SequencedBatch(batch, Sender("p"), Receipt(), final_refusal=unauthorized), bench.now)
    for parent in (ONE, TWO):
        assert bench.publish(make_delta("child", parents=(parent,))).state is OfferState.PENDING


def test_timed_out_delta_does_not_refuse_its_children() -> None:
    bench = Bench()
    origin = bench.hello("p")
    pending = bench.send(batch_of(origin, 1, make_delta("waits", id=ONE, parents=(TWO,))))
    bench.now = 31.0
    bench.pipeline.tick(31.0)
    assert pending.refusal().code is ErrorCode.DEP_TIMEOUT  # type: ignore[union-attr]
    assert bench.publish(CHILD).state is OfferState.PENDING


def test_forwarded_child_of_refused_parent_waits() -> None:
    bench = Bench()
    bench.publish(BAD)
    child = bench.send(batch_of(77, 1, CHILD), source=Source.REPLICA, lamport=5)
    assert child.state is OfferState.PENDING
    bench.send(batch_of(78, 1, make_delta("parent", id=ONE)), source=Source.REPLICA, lamport=4)
    assert child.acknowledged


def test_pending_forwarded_child_waits_after_parent_refusal() -> None:
    bench = Bench()
    child = bench.send(batch_of(77, 1, CHILD), source=Source.REPLICA, lamport=5)
    bench.publish(BAD)
    assert child.state is OfferState.PENDING


def test_noop_of_another_service_releases_no_child() -> None:
    """The no-op record names the refused ids, none of which was accepted."""
    source = Bench()
    origin = source.hello("p")
    source.send(batch_of(origin, 1, BAD))
    (noop,) = source.routed
    target = Bench()
    child = target.publish(CHILD)
    assert target.send(noop.batch, source=Source.REPLICA, lamport=9).acknowledged
    assert child.state is OfferState.PENDING
    assert target.publish(make_delta("right", id=ONE)).acknowledged
    assert child.acknowledged


def test_newest_refused_ids_are_retained_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_ids, "IDS_MAX", 3)
    bench = Bench()
    for number in range(5):
        bench.publish(replace(BAD, id=bytes([number]) * 16))
    assert len(bench.pipeline.appender.refused_ids) == 3
    states = [
        bench.publish(make_delta("child", parents=(bytes([number]) * 16,))).state for number in range(5)
    ]
    assert states == [OfferState.PENDING] * 2 + [OfferState.REFUSED] * 3


# --- after a restart


def open_propagator(disk: SimDisk) -> Propagator:
    return Propagator(
        data="x", log=NO_CHECKPOINTS, world=virtual_world(1, thread_delay_s_max=0.01, disk=disk)
    )


@pytest.mark.parametrize("has_checkpoint", [True, False], ids=["with a checkpoint", "from the log"])
def test_refused_ids_are_known_after_a_restart(has_checkpoint: bool) -> None:
    disk = SimDisk(1)

    async def first_session() -> None:
        async with open_propagator(disk) as p:
            origin = claim_origins(p, 5, "p")[0].origin
            await resend_batch(p, batch_of(origin, 1, BAD, make_delta("fine", id=TWO)), Sender("p"))
            await resend_batch(p, batch_of(origin, 3, replace(BAD, id=THREE)), Sender("p"))
            await p.publish(make_delta("right", id=THREE))
            assert p.internals().partition.storage.checkpointer is not None
            if has_checkpoint:
                await p.internals().partition.storage.checkpointer.write()
            p.internals().partition.storage.checkpointer = None

    async def second_session() -> None:
        async with open_propagator(disk) as p:
            assert p.recovery is not None
            assert (p.recovery.checkpoint is not None) is has_checkpoint
            for parent in (ONE, TWO):
                assert_refused_for_its_parent(
                    await catch_refusal(p.publish(make_delta("child", parents=(parent,)))), parent=parent
                )
            assert (await p.publish(make_delta("child", parents=(THREE,)))).offset is not None
            assert p.internals().partition.pipeline.appender.ids.find([ONE, TWO]) == [None, None]

    run_virtual(first_session)
    run_virtual(second_session)


def test_refused_draft_is_known_after_the_next_checkpoint() -> None:
    disk = SimDisk(1)

    async def first_session() -> None:
        async with open_propagator(disk) as p:
            await p.publish(make_delta("a"))
            await catch_refusal(p.publish(BAD))
            assert p.internals().partition.storage.checkpointer is not None
            await p.internals().partition.storage.checkpointer.write()

    async def second_session() -> None:
        async with open_propagator(disk) as p:
            assert_refused_for_its_parent(await catch_refusal(p.publish(CHILD)))

    run_virtual(first_session)
    run_virtual(second_session)


# --- refused by the call or the connection


def test_delta_rejected_by_its_call_is_a_refused_parent() -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world(1)) as p:
            with pytest.raises(InvalidDelta):
                p.offer(Delta("", opaque(b""), id=ONE))
            assert_refused_for_its_parent(await catch_refusal(p.publish(CHILD)))
            with pytest.raises(InvalidDelta):
                p.producer("p").offer(Delta("", opaque(b""), id=TWO))
            assert_refused_for_its_parent(
                await catch_refusal(p.publish(make_delta("child", parents=(TWO,)))), parent=TWO
            )

    run_virtual(main)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_child_is_refused_at_once_over_a_connection() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await client.hello(ORIGIN, ORIGIN + 1)

        def batch(base: int, *deltas: Delta, origin: int = ORIGIN) -> Batch:
            return encode_batch(deltas, origin=origin, base=base)

        await client.send(
            BatchFrame(1, batch(1, CHILD, origin=ORIGIN + 1), ack_wanted=True),  # this batch is pending
            BatchFrame(2, batch(2, make_delta("successor"), origin=ORIGIN + 1), ack_wanted=True),
            BatchFrame(3, batch(1, make_delta("fine", id=TWO), BAD), ack_wanted=True),
            BatchFrame(5, batch(3, make_delta("child", parents=(TWO,))), ack_wanted=True),
            DeltaFrame(6, Delta("", opaque(b""), id=THREE), ack_wanted=True),
            DeltaFrame(7, make_delta("child", parents=(THREE,)), ack_wanted=True),
            DeltaFrame(8, Delta("", opaque(b""), id=b"4" * 16, dot=Dot(ORIGIN, 4)), ack_wanted=True),
            DeltaFrame(9, make_delta("child", parents=(b"4" * 16,), dot=Dot(ORIGIN, 5)), ack_wanted=True),
            DeltaFrame(10, make_delta("next", dot=Dot(ORIGIN, 6)), ack_wanted=True),
        )
        nacks: dict[int, Nack] = {}
        last_sequence = 0
        with anyio.fail_after(5):
            while last_sequence < 10:
                answer = await client.next()
                if isinstance(answer, Nack):
                    nacks[answer.sequence] = answer
                else:
                    last_sequence = max(last_sequence, getattr(answer, "sequence", 0))
        assert sorted(nacks) == [1, 3, 5, 6, 7, 8, 9]
        for sequence, parent in ((1, ONE), (5, TWO), (7, THREE), (9, b"4" * 16)):
            assert_refused_for_its_parent(nacks[sequence].refusal(), parent=parent)
