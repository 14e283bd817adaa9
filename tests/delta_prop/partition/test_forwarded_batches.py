"""Batches from another service's log: none is refused for good, lost, stored twice, or pending for ever."""

from __future__ import annotations

import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.calls.receipt import OfferState, Receipt
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
from tests.delta_prop.partition.pipeline_bench import Bench, batch_of

FAR_ORIGIN = make_origin(9, Priority.NORMAL)
ONE, TWO, THREE = (bytes([number]) * 16 for number in (1, 2, 3))


def make_delta(key: str, **fields: object) -> Delta:
    return Delta(key, create([1.0, 2.0]), **fields)  # type: ignore[arg-type]


def make_deltas(*keys: str) -> list[Delta]:
    return [make_delta(key) for key in keys]


class ForwardTarget(Bench):
    """A service that receives forwarded batches."""

    def forward(self, base: int, *deltas: Delta, lamport: int = 1, **fields: object) -> Receipt:
        return self.forward_batch(batch_of(FAR_ORIGIN, base, *deltas, **fields), lamport)

    def forward_batch(self, batch: Batch, lamport: int = 1) -> Receipt:
        return self.send(batch, owner="forwarder", source=Source.REPLICA, lamport=lamport)

    @property
    def dots(self) -> list[tuple[int, int]]:
        """Return counter and Lamport number of each row in the log."""
        return [
            (logged.batch.counter(row), logged.lamport + row)
            for logged in self.routed
            for row in range(logged.count)
        ]


def test_forwarded_duplicate_is_acked_whatever_its_bytes() -> None:
    bench = ForwardTarget()
    bench.forward(1, *make_deltas("a", "b"))
    bench.forward(3, *make_deltas("c"))
    second = bench.forward(1, *make_deltas("a", "b")).result()
    assert (second.offset, second.duplicate, second.duplicates) == (0, True, {0: 0, 1: 1})
    assert (
        bench.forward(2, *make_deltas("x", "y")).result().duplicate
    )  # other rows and bytes, from a log that lost its tail
    bench.pipeline.origins.deactivate_idle(1e9)
    bench.now = 1e9
    assert bench.forward(1, *make_deltas("a", "b")).result().duplicates == {0: 0, 1: 1}
    assert bench.dots == [(1, 1), (2, 2), (3, 1)]


def test_forwarded_partial_duplicate_is_sliced() -> None:
    bench = ForwardTarget()
    bench.forward(1, *make_deltas("a", "b"), lamport=10)
    ack = bench.forward(1, *make_deltas("x", "y", "c", "d"), lamport=20).result()
    assert (ack.offset, ack.count) == (2, 2)
    assert bench.keys() == ["a", "b", "c", "d"]
    assert bench.dots == [(1, 10), (2, 11), (3, 22), (4, 23)]
    assert bench.forward(5, *make_deltas("e")).acknowledged


def test_pending_forwarded_partial_duplicate_is_sliced() -> None:
    bench = ForwardTarget()
    pending = bench.forward(3, *make_deltas("c", "d"), lamport=20)
    assert pending.state is OfferState.PENDING
    bench.forward(1, *make_deltas("a", "b", "c"), lamport=10)
    assert pending.result().count == 1
    assert bench.dots == [(1, 10), (2, 11), (3, 12), (4, 21)]


@pytest.mark.parametrize("count", [1, 3])
def test_forwarded_noop_and_counter_gap_are_sliced(count: int) -> None:
    bench = ForwardTarget()
    bench.forward(1, *make_deltas("a", "b"))
    noop = encode_noop(origin=FAR_ORIGIN, base=2, count=count + 1, code=ErrorCode.CONFLICT)
    assert bench.forward_batch(noop, 5).acknowledged
    assert bench.routed[-1].batch.is_control
    assert bench.pipeline.orderer.watermarks[FAR_ORIGIN] == 2 + count
    gap = encode_noop(
        origin=FAR_ORIGIN, base=20, count=1, code=ErrorCode.DOT_REUSED, previous=1, counters=[20]
    )  # the other service lost its batches from 2 on
    assert bench.forward_batch(gap, 9).acknowledged
    assert bench.pipeline.orderer.watermarks[FAR_ORIGIN] == 20
    assert bench.forward(21, *make_deltas("z")).acknowledged


def test_withdrawn_pending_forward_leaves_no_noop() -> None:
    bench = ForwardTarget()
    pending = bench.forward(2, *make_deltas("b"))
    dependent = bench.forward(3, *make_deltas("c"))
    assert pending.withdraw()
    refusal = dependent.refusal()
    assert refusal is not None
    assert not refusal.is_final
    bench.forward(1, *make_deltas("a"))
    assert bench.forward(2, *make_deltas("b")).result().offset == 1
    assert bench.keys() == ["a", "b"]


def test_pending_batch_of_two_forwarders_is_not_withdrawn() -> None:
    bench = ForwardTarget()
    first = bench.forward(2, *make_deltas("b"))
    second = bench.forward(2, *make_deltas("b"))
    assert not first.withdraw()
    bench.forward(1, *make_deltas("a"))
    assert first.result().offset == second.result().offset == 1


def test_withdrawn_queued_forward_leaves_no_noop() -> None:
    bench = ForwardTarget()
    bench.log.is_accepting = False
    assert bench.forward(1, *make_deltas("a")).withdraw()
    bench.log.is_accepting = True
    bench.pipeline.pump(bench.now)
    assert bench.routed == []
    assert bench.forward(1, *make_deltas("a")).acknowledged


def test_log_marks_batches_with_known_ids() -> None:
    bench = ForwardTarget()
    bench.publish(make_delta("a", id=ONE))
    bench.forward(1, make_delta("v", id=TWO))
    bench.forward(2, make_delta("a", id=ONE))
    bench.forward(3, make_delta("a", id=ONE), make_delta("b", id=THREE))
    bench.forward(5, make_delta("a", id=ONE), make_delta("b", id=THREE))
    bench.forward(7, make_delta("c"))
    flags = [logged.known_ids for logged in bench.routed]
    none, some, all_ = KnownIds
    assert flags == [none, none, all_, some, all_, none]
    # A local publish of a forwarded id is acknowledged as a duplicate, with the first offset.
    assert bench.publish(make_delta("v", id=TWO)).result().duplicates == {0: 1}


def test_forwarded_states_and_row_offsets_leave_no_noop() -> None:
    bench = ForwardTarget()
    states = encode_states([StateRow("n", "v", VectorState(key=(1, 1, 1)), 0)])
    with_row_offsets = encode_batch(make_deltas("a"), origin=FAR_ORIGIN, base=1, row_offsets=[7])
    for batch in (states, with_row_offsets):
        refusal = bench.forward_batch(batch, 1).refusal()
        assert refusal is not None
        assert refusal.code is ErrorCode.INVALID_DELTA
    assert bench.routed == []
    assert bench.forward(1, *make_deltas("a")).acknowledged


def test_first_offsets_in_noop_of_another_log_are_ignored() -> None:
    noop = encode_noop(
        origin=FAR_ORIGIN, base=1, count=1, code=ErrorCode.INVALID_DELTA, refused_crc=7, first_offsets=[1_000]
    )
    bench = ForwardTarget()
    bench.forward_batch(noop)
    restored = ForwardTarget()
    restored.pipeline.restore(bench.routed[0], 0.0)
    for target in (bench, restored):
        assert target.pipeline.outcome(FAR_ORIGIN, 1) == 0


def test_forwarded_origin_keeps_its_epoch() -> None:
    bench = ForwardTarget()
    bench.forward(1, *make_deltas("a"), epoch=7)
    state = bench.pipeline.origins.get(FAR_ORIGIN)
    assert state is not None
    assert state.epoch == 7


def test_forwarder_is_acked_at_highest_local_level() -> None:
    """The forwarder never resends the batch, so the producer's ack level does not count."""

    async def main() -> None:
        log = LogSettings(read_level=AckLevel.LOGGED)
        async with Propagator(
            Settings(close_timeout_s=5), data="x", log=log, world=virtual_world(1, disk=SimDisk(1))
        ) as p:
            forwarder = p.producer("forwarder", source=Source.REPLICA)
            batch = encode_batch(
                [Delta("v", offset(1.0))], origin=FAR_ORIGIN, base=1, ack_level=AckLevel.MEMORY
            )
            receipt = forwarder.send_frame(batch, 5)
            assert receipt.state is OfferState.APPENDED
            assert (await receipt).level is AckLevel.DURABLE
            assert p.internals().partition.log.offset_at_level(AckLevel.DURABLE) == 1
            assert (await forwarder.send_frame(batch, 5)).duplicate

    run_virtual(main)
