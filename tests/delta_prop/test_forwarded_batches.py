"""Batches from another service's log: none is refused for good, repeated, lost or stuck."""

from __future__ import annotations

import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.receipt import OfferState, Receipt
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    KnownIds,
    Priority,
    Source,
    create,
    make_origin,
    offset,
)
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.state_rows import StateRow, encode_states
from tests.delta_prop.chains import Bench, batch_of

FAR = make_origin(9, Priority.NORMAL)
ONE, TWO, THREE = (bytes([number]) * 16 for number in (1, 2, 3))


def made(key: str, **more: object) -> Delta:
    return Delta(key, create([1.0, 2.0]), **more)  # type: ignore[arg-type]


def rows(*keys: str) -> list[Delta]:
    return [made(key) for key in keys]


class Far(Bench):
    """A service that is forwarded to."""

    def take(self, base: int, *deltas: Delta, lamport: int = 1, **more: object) -> Receipt:
        return self.bring(batch_of(FAR, base, *deltas, **more), lamport)

    def bring(self, batch: Batch, lamport: int = 1) -> Receipt:
        return self.send(batch, owner="forwarder", source=Source.REPLICA, lamport=lamport)

    @property
    def dots(self) -> list[tuple[int, int]]:
        """(counter, Lamport number) of each row in the log."""
        return [
            (logged.batch.counter(row), logged.lamport + row)
            for logged in self.routed
            for row in range(logged.count)
        ]


def test_what_is_here_already_is_acknowledged_whatever_its_bytes() -> None:
    bench = Far()
    bench.take(1, *rows("a", "b"))
    bench.take(3, *rows("c"))
    again = bench.take(1, *rows("a", "b")).result()
    assert (again.offset, again.duplicate, again.duplicates) == (0, True, {0: 0, 1: 1})
    assert (
        bench.take(2, *rows("x", "y")).result().duplicate
    )  # another cut, other bytes: of a log that lost some
    bench.chain.origins.deactivate_idle(1e9)
    bench.now = 1e9
    assert bench.take(1, *rows("a", "b")).result().duplicates == {0: 0, 1: 1}
    assert bench.dots == [(1, 1), (2, 2), (3, 1)]


def test_what_is_here_in_part_is_cut() -> None:
    bench = Far()
    bench.take(1, *rows("a", "b"), lamport=10)
    told = bench.take(1, *rows("x", "y", "c", "d"), lamport=20).result()
    assert (told.offset, told.count) == (2, 2)
    assert bench.keys() == ["a", "b", "c", "d"]
    assert bench.dots == [(1, 10), (2, 11), (3, 22), (4, 23)]
    assert bench.take(5, *rows("e")).acknowledged


def test_what_is_here_in_part_is_cut_also_where_it_waited_for_its_causes() -> None:
    bench = Far()
    waits = bench.take(3, *rows("c", "d"), lamport=20)
    assert waits.state is OfferState.PENDING
    bench.take(1, *rows("a", "b", "c"), lamport=10)
    assert waits.result().count == 1
    assert bench.dots == [(1, 10), (2, 11), (3, 12), (4, 21)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_void_and_a_leap_are_cut_too(count: int) -> None:
    bench = Far()
    bench.take(1, *rows("a", "b"))
    void = encode_noop(origin=FAR, base=2, count=count + 1, code=ErrorCode.CONFLICT)
    assert bench.bring(void, 5).acknowledged
    assert bench.routed[-1].batch.is_control
    assert bench.chain.orderer.watermarks[FAR] == 2 + count
    gap = encode_noop(
        origin=FAR, base=20, count=1, code=ErrorCode.DOT_REUSED, previous=1, counters=[20]
    )  # the other service lost what it had sent from 2 on
    assert bench.bring(gap, 9).acknowledged
    assert bench.chain.orderer.watermarks[FAR] == 20
    assert bench.take(21, *rows("z")).acknowledged


def test_a_pending_one_that_is_withdrawn_is_no_void_and_comes_again() -> None:
    bench = Far()
    waits = bench.take(2, *rows("b"))
    behind = bench.take(3, *rows("c"))
    assert waits.withdraw()
    refusal = behind.refusal()
    assert refusal is not None
    assert not refusal.is_final
    bench.take(1, *rows("a"))
    assert bench.take(2, *rows("b")).result().offset == 1
    assert bench.keys() == ["a", "b"]


def test_a_pending_one_stays_where_two_forwarders_brought_it() -> None:
    bench = Far()
    first = bench.take(2, *rows("b"))
    second = bench.take(2, *rows("b"))
    assert not first.withdraw()
    bench.take(1, *rows("a"))
    assert first.result().offset == second.result().offset == 1


def test_a_queued_one_that_is_withdrawn_is_no_void() -> None:
    bench = Far()
    bench.log.is_accepting = False
    assert bench.take(1, *rows("a")).withdraw()
    bench.log.is_accepting = True
    bench.chain.pump(bench.now)
    assert bench.routed == []
    assert bench.take(1, *rows("a")).acknowledged


def test_the_log_says_whose_ids_were_known() -> None:
    bench = Far()
    bench.publish(made("a", id=ONE))
    bench.take(1, made("v", id=TWO))
    bench.take(2, made("a", id=ONE))
    bench.take(3, made("a", id=ONE), made("b", id=THREE))
    bench.take(5, made("a", id=ONE), made("b", id=THREE))
    bench.take(7, made("c"))
    marks = [logged.known_ids for logged in bench.routed]
    none, some, all_ = KnownIds
    assert marks == [none, none, all_, some, all_, none]
    # Who sends it here is told that it is here.
    assert bench.publish(made("v", id=TWO)).result().duplicates == {0: 1}


def test_states_and_row_offsets_are_refused_and_nothing_is_void() -> None:
    bench = Far()
    states = encode_states([StateRow("n", "v", VectorState(key=(1, 1, 1)), 0)])
    cut = encode_batch(rows("a"), origin=FAR, base=1, row_offsets=[7])
    for batch in (states, cut):
        refusal = bench.bring(batch, 1).refusal()
        assert refusal is not None
        assert refusal.code is ErrorCode.INVALID_DELTA
    assert bench.routed == []
    assert bench.take(1, *rows("a")).acknowledged


def test_offsets_in_a_void_of_another_log_mean_nothing_here() -> None:
    void = encode_noop(
        origin=FAR, base=1, count=1, code=ErrorCode.INVALID_DELTA, refused_crc=7, first_offsets=[1_000]
    )
    bench = Far()
    bench.bring(void)
    restored = Far()
    restored.chain.restore(bench.routed[0], 0.0)
    for one in (bench, restored):
        assert one.chain.outcome(FAR, 1) == 0


def test_an_origin_that_is_forwarded_keeps_the_epoch_it_has_there() -> None:
    bench = Far()
    bench.take(1, *rows("a"), epoch=7)
    state = bench.chain.origins.get(FAR)
    assert state is not None
    assert state.epoch == 7


def test_a_forwarder_is_told_when_a_batch_is_as_safe_as_it_can_be_here() -> None:
    """Whatever its producer asked for there: the forwarder goes on behind it for good."""

    async def main() -> None:
        log = LogSettings(read_level=AckLevel.LOGGED)
        async with Propagator(
            Settings(close_timeout_s=5), data="x", log=log, world=virtual_world(1, disk=SimDisk(1))
        ) as p:
            forwarder = p.producer("forwarder", source=Source.REPLICA)
            batch = encode_batch([Delta("v", offset(1.0))], origin=FAR, base=1, ack_level=AckLevel.MEMORY)
            receipt = forwarder.send_frame(batch, 5)
            assert receipt.state is OfferState.APPENDED
            assert (await receipt).level is AckLevel.DURABLE
            assert p._log.offset_at_level(AckLevel.DURABLE) == 1
            assert (await forwarder.send_frame(batch, 5)).duplicate

    run_virtual(main)
