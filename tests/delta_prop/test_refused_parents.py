"""A delta that names a parent which was refused for good: refused for good at once, never left waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Propagator
from delta_prop.ingest import refused_ids
from delta_prop.ingest.work import Sender, SequencedBatch
from delta_prop.receipt import OfferState, Receipt
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, Dot, Source, opaque, sparse_add
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.frames import BatchFrame, DeltaFrame, Nack
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.chains import Bench, batch_of
from tests.delta_prop.durable.histories import NEVER, resend_batch
from tests.delta_prop.server.raw import ORIGIN, connected, serving
from tests.delta_prop.support import made, refused

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch

ONE, TWO, THREE = (bytes([number]) * 16 for number in (1, 2, 3))
BAD = Delta("nobody", sparse_add([0], [1.0]), id=ONE)
"""Refused for good: its vector is unknown."""
CHILD = made("child", parents=(ONE,))


def orphaned(
    refusal: Refused | None, *, row: int = 0, parent: bytes = ONE, code: int = ErrorCode.INVALID_DELTA
) -> None:
    assert refusal is not None, "it was acknowledged, or waits"
    assert (refusal.code, refusal.field, refusal.row) == (ErrorCode.INVALID_DELTA, "parents", row)
    assert refusal.is_final
    assert parent.hex() in refusal.message
    assert ErrorCode(code).name in refusal.message
    assert refusal.details == {"blocked_by": parent.hex(), "code": code}


def send_batch(bench: Bench, *deltas: Delta) -> Receipt:
    """Under dots of an origin of its own, each time the next ones."""
    origin = bench.hello("p") if not bench.owners else next(iter(bench.owners))
    return bench.send(batch_of(origin, bench.chain.orderer.watermarks.get(origin, 0) + 1, *deltas))


def publish(bench: Bench, *deltas: Delta) -> Receipt:
    return bench.publish(*deltas)


WAYS = pytest.mark.parametrize("way", [publish, send_batch], ids=["draft", "batch"])
OTHER_WAY = pytest.mark.parametrize("parent_way", [publish, send_batch], ids=["parent draft", "parent batch"])
Way = "Callable[..., Receipt]"


@WAYS
@OTHER_WAY
def test_child_of_a_refused_parent_is_refused_at_once(way: Way, parent_way: Way) -> None:  # type: ignore[valid-type]
    bench = Bench()
    assert parent_way(bench, BAD).refusal().code is ErrorCode.INVALID_DELTA  # type: ignore[misc]
    orphaned(way(bench, CHILD).refusal())  # type: ignore[misc]
    orphaned(way(bench, made("a"), CHILD).refusal(), row=1)  # type: ignore[misc]
    assert way(bench, made("next")).acknowledged, "later counters go on"  # type: ignore[misc]
    assert bench.keys() == ["next"]


@WAYS
@OTHER_WAY
def test_child_that_waits_is_refused_when_its_parent_is(way: Way, parent_way: Way) -> None:  # type: ignore[valid-type]
    bench = Bench()
    child_origin = bench.hello("child")
    parent_origin = bench.hello("parent")
    if way is publish:
        child, behind = bench.publish(CHILD), bench.publish(made("child", metadata={"n": 1}))
    else:
        child = bench.send(batch_of(child_origin, 1, CHILD))
        behind = bench.send(batch_of(child_origin, 2, made("behind")))
    assert (child.state, behind.state) == (OfferState.PENDING, OfferState.PENDING)
    if parent_way is publish:
        bench.publish(BAD)
    else:
        bench.send(batch_of(parent_origin, 1, BAD))
    orphaned(child.refusal())
    assert behind.acknowledged
    assert len(bench.keys()) == 1
    assert bench.chain.orderer.statistics().pending_deltas == 0


def test_void_is_answered_again_with_its_code() -> None:
    bench = Bench()
    bench.publish(BAD)
    origin = bench.hello("p")
    batch = batch_of(origin, 1, CHILD)
    for _ in range(2):
        refusal = bench.send(batch).refusal()
        assert refusal is not None
        assert refusal.code is ErrorCode.INVALID_DELTA


def test_ids_of_the_other_rows_of_a_refused_batch_are_refused_too() -> None:
    for way in (publish, send_batch):
        bench = Bench()
        way(bench, made("fine", id=TWO), BAD)
        orphaned(bench.publish(made("child", parents=(TWO,))).refusal(), parent=TWO)


def test_children_of_children_are_refused_in_one_go() -> None:
    bench = Bench()
    origin = bench.hello("p")
    waiting = [
        bench.send(batch_of(origin, 1, replace(CHILD, id=TWO))),
        bench.publish(made("grandchild", parents=(TWO,), id=THREE)),
        bench.send(batch_of(bench.hello("q"), 1, made("last", parents=(THREE,)))),
    ]
    bench.publish(BAD)
    for one, parent in zip(waiting, (ONE, TWO, THREE), strict=True):
        orphaned(one.refusal(), parent=parent)
    assert bench.keys() == []


def test_corrected_delta_with_the_same_id_is_a_parent_again() -> None:
    bench = Bench()
    bench.publish(BAD)
    assert bench.publish(made("right", id=ONE)).acknowledged
    assert bench.publish(CHILD).acknowledged
    assert len(bench.chain.appender.refused_ids) == 0


def test_parent_in_the_same_batch_is_no_refused_one() -> None:
    for way in (publish, send_batch):
        bench = Bench()
        bench.publish(BAD)
        assert way(bench, made("right", id=ONE), replace(CHILD, id=TWO)).acknowledged


def test_id_that_was_accepted_stays_a_parent_whatever_is_refused_under_it() -> None:
    bench = Bench()
    bench.publish(made("right", id=ONE))
    assert bench.publish(made("other", id=ONE)).refusal().code is ErrorCode.ID_REUSED  # type: ignore[union-attr]
    assert bench.publish(CHILD).acknowledged


def test_refusals_that_may_pass_and_those_for_lack_of_rights_refuse_no_child() -> None:
    bench = Bench(log_deltas_max=2)
    bench.publish(made("a"), made("b"))
    bench.log.hold("sink", lambda: 0)
    assert bench.publish(made("full", id=ONE)).refusal().code is ErrorCode.LOG_FULL  # type: ignore[union-attr]
    bench.log.release("sink")
    origin = bench.hello("p")
    unauthorized = Refused(ErrorCode.UNAUTHORIZED, "no")
    batch = batch_of(origin, 1, made("forbidden", id=TWO))
    bench.chain.offer(SequencedBatch(batch, Sender("p"), Receipt(), final_refusal=unauthorized), bench.now)
    for parent in (ONE, TWO):
        assert bench.publish(made("child", parents=(parent,))).state is OfferState.PENDING


def test_delta_that_gave_up_waiting_is_no_refused_parent() -> None:
    bench = Bench()
    origin = bench.hello("p")
    waits = bench.send(batch_of(origin, 1, made("waits", id=ONE, parents=(TWO,))))
    bench.now = 31.0
    bench.chain.tick(31.0)
    assert waits.refusal().code is ErrorCode.DEP_TIMEOUT  # type: ignore[union-attr]
    assert bench.publish(CHILD).state is OfferState.PENDING


def test_forwarded_child_is_not_judged() -> None:
    bench = Bench()
    bench.publish(BAD)
    child = bench.send(batch_of(77, 1, CHILD), source=Source.REPLICA, lamport=5)
    assert child.state is OfferState.PENDING
    bench.send(batch_of(78, 1, made("parent", id=ONE)), source=Source.REPLICA, lamport=4)
    assert child.acknowledged


def test_forwarded_child_that_waits_goes_on_waiting() -> None:
    bench = Bench()
    child = bench.send(batch_of(77, 1, CHILD), source=Source.REPLICA, lamport=5)
    bench.publish(BAD)
    assert child.state is OfferState.PENDING


def test_void_that_another_service_told_releases_nobody() -> None:
    """Its ids come with it, and none of them was accepted."""
    there = Bench()
    origin = there.hello("p")
    there.send(batch_of(origin, 1, BAD))
    (void,) = there.routed
    here = Bench()
    child = here.publish(CHILD)
    assert here.send(void.batch, source=Source.REPLICA, lamport=9).acknowledged
    assert child.state is OfferState.PENDING
    assert here.publish(made("right", id=ONE)).acknowledged
    assert child.acknowledged


def test_newest_are_kept_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_ids, "IDS_MAX", 3)
    bench = Bench()
    for number in range(5):
        bench.publish(replace(BAD, id=bytes([number]) * 16))
    assert len(bench.chain.appender.refused_ids) == 3
    states = [bench.publish(made("child", parents=(bytes([number]) * 16,))).state for number in range(5)]
    assert states == [OfferState.PENDING] * 2 + [OfferState.REFUSED] * 3


# --- after a restart


def opened(disk: SimDisk) -> Propagator:
    return Propagator(data="x", log=NEVER, world=virtual_world(1, thread_delay_s_max=0.01, disk=disk))


@pytest.mark.parametrize("checkpoint", [True, False], ids=["with a checkpoint", "from the log"])
def test_refused_ids_are_known_after_a_restart(checkpoint: bool) -> None:
    disk = SimDisk(1)

    async def first_life() -> None:
        async with opened(disk) as p:
            origin = p._pipeline.hello(5, "p", p._now())[0].origin
            await resend_batch(p, batch_of(origin, 1, BAD, made("fine", id=TWO)), Sender("p"))
            await resend_batch(p, batch_of(origin, 3, replace(BAD, id=THREE)), Sender("p"))
            await p.publish(made("right", id=THREE))
            assert p._service_log.checkpointer is not None
            if checkpoint:
                await p._service_log.checkpointer.write()
            p._service_log.checkpointer = None

    async def second_life() -> None:
        async with opened(disk) as p:
            assert p.recovery is not None
            assert (p.recovery.checkpoint is not None) is checkpoint
            for parent in (ONE, TWO):
                orphaned(await refused(p.publish(made("child", parents=(parent,)))), parent=parent)
            assert (await p.publish(made("child", parents=(THREE,)))).offset is not None
            assert p._pipeline.appender.ids.find([ONE, TWO]) == [None, None]

    run_virtual(first_life)
    run_virtual(second_life)


def test_draft_that_was_refused_is_known_from_the_next_checkpoint_on() -> None:
    disk = SimDisk(1)

    async def first_life() -> None:
        async with opened(disk) as p:
            await p.publish(made("a"))
            await refused(p.publish(BAD))
            assert p._service_log.checkpointer is not None
            await p._service_log.checkpointer.write()

    async def second_life() -> None:
        async with opened(disk) as p:
            orphaned(await refused(p.publish(CHILD)))

    run_virtual(first_life)
    run_virtual(second_life)


# --- where the edge refuses


def test_delta_that_the_call_itself_refuses_is_a_refused_parent() -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world(1)) as p:
            with pytest.raises(InvalidDelta):
                p.offer(Delta("", opaque(b""), id=ONE))
            orphaned(await refused(p.publish(CHILD)))
            with pytest.raises(InvalidDelta):
                p.producer("p").offer(Delta("", opaque(b""), id=TWO))
            orphaned(await refused(p.publish(made("child", parents=(TWO,)))), parent=TWO)

    run_virtual(main)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_child_is_refused_at_once_over_a_connection() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await client.hello(ORIGIN, ORIGIN + 1)

        def batch(base: int, *deltas: Delta, origin: int = ORIGIN) -> Batch:
            return encode_batch(deltas, origin=origin, base=base)

        await client.send(
            BatchFrame(1, batch(1, CHILD, origin=ORIGIN + 1), ack_wanted=True),  # waits
            BatchFrame(2, batch(2, made("behind"), origin=ORIGIN + 1), ack_wanted=True),
            BatchFrame(3, batch(1, made("fine", id=TWO), BAD), ack_wanted=True),
            BatchFrame(5, batch(3, made("child", parents=(TWO,))), ack_wanted=True),
            DeltaFrame(6, Delta("", opaque(b""), id=THREE), ack_wanted=True),
            DeltaFrame(7, made("child", parents=(THREE,)), ack_wanted=True),
            DeltaFrame(8, Delta("", opaque(b""), id=b"4" * 16, dot=Dot(ORIGIN, 4)), ack_wanted=True),
            DeltaFrame(9, made("child", parents=(b"4" * 16,), dot=Dot(ORIGIN, 5)), ack_wanted=True),
            DeltaFrame(10, made("next", dot=Dot(ORIGIN, 6)), ack_wanted=True),
        )
        nacks: dict[int, Nack] = {}
        told = 0
        with anyio.fail_after(5):
            while told < 10:
                answer = await client.next()
                if isinstance(answer, Nack):
                    nacks[answer.sequence] = answer
                else:
                    told = max(told, getattr(answer, "sequence", 0))
        assert sorted(nacks) == [1, 3, 5, 6, 7, 8, 9]
        for sequence, parent in ((1, ONE), (5, TWO), (7, THREE), (9, b"4" * 16)):
            orphaned(nacks[sequence].refusal(), parent=parent)
