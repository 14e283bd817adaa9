"""A batch of known and new ids under its producer's dots: what is new is logged, what is known is told."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop import Propagator, splitting
from delta_prop.client import Producer
from delta_prop.ingest.work import Sender
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CacheSink
from delta_prop_wire.delta import AckLevel, Delta, Dot, create, delete, sparse_add
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import AckRange, BatchFrame, Nack
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.chains import Bench, batch_of
from tests.delta_prop.durable.histories import NEVER, resend_batch
from tests.delta_prop.server.raw import ORIGIN, connected, serving
from tests.delta_prop.server.test_forwarding import Node, wait_converged
from tests.delta_prop.support import made
from tests.whole_log import read_all

if TYPE_CHECKING:
    from delta_prop.receipt import Receipt
    from delta_prop_wire.batch import Batch, LoggedBatch


def row(number: int, **more: object) -> Delta:
    """A delta that has an id."""
    return made(f"v{number}", id=number.to_bytes(16, "big"), **more)


KNOWN = (0, 2, 3, 7)


def bench_with_known() -> tuple[Bench, int]:
    """Four known ids at offsets 0 to 3; an origin."""
    bench = Bench()
    bench.publish(*map(row, KNOWN))
    return bench, bench.hello("p")


def mixed(origin: int, base: int = 1, **more: object) -> Batch:
    """Rows 0 to 7: known are 0, 2, 3 and 7, new are 1, 4, 5 and 6."""
    return batch_of(origin, base, *map(row, range(8)), **more)


TOLD = {0: 0, 2: 1, 3: 2, 7: 3}


def pieces(logged: list[LoggedBatch]) -> list[tuple[str, int, int]]:
    """Return the kind, first counter and row count of each logged batch."""
    return [("known" if one.batch.is_control else "new", one.batch.base, one.count) for one in logged]


AS_LOGGED = [("known", 1, 1), ("new", 2, 1), ("known", 3, 2), ("new", 5, 3), ("known", 8, 1)]


def test_new_rows_are_logged_and_known_ones_are_told() -> None:
    bench, origin = bench_with_known()
    published = bench.send(mixed(origin)).result()
    assert published.duplicates == TOLD
    assert [(one.offset, one.duplicate) for one in published.places()] == [
        *((0, True), (5, False), (1, True), (2, True), (8, False), (9, False), (10, False), (3, True))
    ]
    assert published.next_offset == 11
    assert published.last_dot == Dot(origin, 7)
    assert pieces(bench.routed[1:]) == AS_LOGGED
    assert bench.keys() == ["v0", "v2", "v3", "v7", "v1", "v4", "v5", "v6"]
    assert bench.chain.orderer.watermarks[origin] == 8
    assert bench.send(batch_of(origin, 9, made("on"))).result().offset == 12
    counters = bench.chain.appender.counters
    assert (counters.accepted, counters.duplicates, counters.noops) == (4 + 4 + 1, 4, 4)
    assert bench.publish(*map(row, range(8))).result().duplicates == {
        row: at.offset for row, at in enumerate(published.places())
    }


def test_row_that_repeats_a_new_one_of_its_batch_is_told_where_that_stands() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.publish(made("before"))
    rows = [row(1), row(2), row(1), row(3), row(2)]
    assert bench.send(batch_of(origin, 1, *rows)).result().duplicates == {2: 1, 4: 2}
    assert bench.keys() == ["before", "v1", "v2", "v3"]


def repeated(receipt: Receipt) -> list[int | None]:
    """The offsets of a repeat, of which each row is a duplicate."""
    published = receipt.result()
    assert published.duplicate
    return [published.duplicates[number] for number in range(published.count)]


def test_very_frame_again_is_a_duplicate_right_after_and_after_many_others() -> None:
    bench, origin = bench_with_known()
    frame = mixed(origin)
    first = [one.offset for one in bench.send(frame).result().places()]
    assert repeated(bench.send(frame)) == first
    for number in range(9, 9 + 70):
        bench.send(batch_of(origin, number, made("other")))
    assert repeated(bench.send(frame)) == first


def test_other_rows_under_the_dots_of_a_split_batch_are_no_repeat() -> None:
    bench, origin = bench_with_known()
    told = bench.send(mixed(origin)).result().duplicates
    again = bench.send(mixed(origin, clock=[Dot(origin, 1)])).result().duplicates  # the same rows
    assert {row: again[row] for row in told} == told
    refusal = bench.send(batch_of(origin, 1, *map(row, range(10, 18)))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.DOT_REUSED


def test_counters_that_leap_leap_in_the_pieces_too() -> None:
    bench, origin = bench_with_known()
    counters = [3, 4, 9, 10, 11, 12, 30, 31]
    frame = mixed(origin, 3, previous=0, counters=counters)
    published = bench.send(frame).result()
    assert published.duplicates == TOLD
    logged = bench.routed[1:]
    assert [one.batch.counter(at) for one in logged for at in range(one.count)] == counters
    befores = [one.batch.previous if one.batch.has_gaps else one.batch.base - 1 for one in logged]
    assert befores == [0, 3, 4, 10, 30]
    assert [bench.chain.outcome(origin, counter) for counter in counters] == [
        one.offset for one in published.places()
    ]
    assert bench.chain.outcome(origin, 20) is ErrorCode.DOT_REUSED, "it was left out"
    assert repeated(bench.send(frame)) == [one.offset for one in published.places()]
    assert bench.send(batch_of(origin, 32, made("on"))).acknowledged


def test_first_piece_alone_carries_the_clock() -> None:
    for first in (0, 1):
        bench, origin = bench_with_known()
        other = bench.hello("other")
        bench.send(batch_of(other, 1, made("x")))
        frame = batch_of(origin, 1, *map(row, range(first, 8)), clock=[Dot(other, 1)])
        assert bench.send(frame).acknowledged
        clocks = [one.batch.clock for one in bench.routed[2:]]
        assert clocks == [(Dot(other, 1),), *[()] * (len(clocks) - 1)]
        assert bench.chain.appender._clocks.clock(origin) == {other: 1}


def test_parents_in_the_same_batch_are_there() -> None:
    bench, origin = bench_with_known()
    rows = [row(0), row(1), row(2), row(4, parents=(Dot(origin, 1), Dot(origin, 2), row(1).id, row(0).id))]
    assert bench.send(batch_of(origin, 1, *rows)).result().duplicates == {0: 0, 2: 1}
    last = bench.routed[-1].batch
    assert last.parents == tuple((0, parent) for parent in rows[3].parents)


def test_expectation_of_a_known_row_is_not_looked_at_and_that_of_a_new_one_is() -> None:
    bench, origin = bench_with_known()
    own = bench.routed[0].batch.dot(0)
    fits = [row(0, expect=Dot(9, 9)), row(1), Delta("v0", create([5.0, 5.0]), id=row(50).id, expect=own)]
    assert bench.send(batch_of(origin, 1, *fits)).result().duplicates == {0: 0}
    refusal = bench.send(
        batch_of(origin, 4, row(0), row(2), replace(row(8), vector_id="v1", expect=own))
    ).refusal()
    assert refusal is not None
    assert (refusal.code, refusal.row) == (ErrorCode.CONFLICT, 2)
    assert refusal.message.startswith("row 2: 'v1'")


def test_bad_new_row_makes_the_whole_frame_void_and_is_named_by_its_place_in_it() -> None:
    bench, origin = bench_with_known()
    end = bench.log.next_offset
    bad = Delta("nobody", sparse_add([0], [1.0]), id=row(70).id)
    refusal = bench.send(batch_of(origin, 1, row(0), row(1), row(2), bad)).refusal()
    assert refusal is not None
    assert (refusal.code, refusal.row, refusal.field) == (ErrorCode.INVALID_DELTA, 3, "vector_id")
    assert refusal.message.startswith("row 3: vector_id: 'nobody'")
    (control,) = bench.routed[1:]
    assert (control.offset, control.count, control.batch.is_control) == (end, 4, True)
    refusal = bench.publish(row(0), row(1), bad).refusal()
    assert refusal is not None
    assert refusal.row == 2


def test_new_rows_build_on_each_other_and_on_what_the_known_ones_left() -> None:
    bench, origin = bench_with_known()
    rows = [row(1), row(0), Delta("v1", sparse_add([0], [1.0]), id=row(60).id), row(2)]
    rows += [Delta("v0", delete(), id=row(61).id), row(3), Delta("v0", sparse_add([0], [1.0]), id=row(62).id)]
    refusal = bench.send(batch_of(origin, 1, *rows)).refusal()
    assert refusal is not None
    assert refusal.row == 6
    assert bench.send(batch_of(origin, 8, *rows[:6])).result().duplicates == {1: 0, 3: 1, 5: 2}


def test_split_batch_finds_room_for_all_or_nothing_happens() -> None:
    bench = Bench(log_deltas_max=11)
    bench.publish(*map(row, KNOWN))
    origin = bench.hello("p")
    bench.log.hold("sink", lambda: 0)
    refusal = bench.send(mixed(origin)).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.LOG_FULL
    assert refusal.retryable
    assert bench.log.next_offset == 4
    assert bench.chain.orderer.watermarks.get(origin, 0) == 0
    assert bench.publish(row(1)).acknowledged, "it was not noted"
    bench.log.release("sink")
    assert bench.send(mixed(origin)).result().duplicates == {**TOLD, 1: 4}


def test_level_that_the_log_does_not_have_makes_a_split_batch_void() -> None:
    bench, origin = bench_with_known()
    refusal = bench.send(mixed(origin, ack_level=2)).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.LEVEL_UNAVAILABLE
    assert pieces(bench.routed[1:]) == [("known", 1, 8)]


def test_batch_of_too_many_pieces_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "PIECES_MAX", 4)
    bench, origin = bench_with_known()
    refusal = bench.send(mixed(origin)).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.TOO_LARGE
    assert bench.send(batch_of(origin, 9, *map(row, range(7)))).acknowledged


@given(
    known=st.lists(st.integers(0, 12), max_size=8),
    frames=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=8), max_size=5),
    leap=st.integers(0, 3),
)
def test_each_id_has_one_effect_and_each_row_its_place(
    known: list[int], frames: list[list[int]], leap: int
) -> None:
    bench = Bench()
    origin = bench.hello("p")
    places: dict[int, int] = {}
    for number in known:
        places.setdefault(number, bench.publish(row(number)).result().places()[0].offset or 0)
    told: list[tuple[Batch, list[int | None]]] = []
    last = 0
    for numbers in frames:
        counters = [last + 1 + leap + at for at in range(len(numbers))]
        leaps = {"previous": last, "counters": counters} if leap else {}
        frame = batch_of(origin, counters[0], *map(row, numbers), **leaps)
        start = bench.log.next_offset
        published = bench.send(frame).result()
        last = counters[-1]
        expected = []
        for at, number in enumerate(numbers):
            duplicate = number in places
            expected.append((places.setdefault(number, start + at), duplicate))
        assert [(one.offset, one.duplicate) for one in published.places()] == expected
        assert bench.log.next_offset == start + len(numbers)
        told.append((frame, [offset for offset, _ in expected]))
    for frame, offsets in told:
        assert repeated(bench.send(frame)) == offsets
    keys = {
        one.offset + at: key
        for one in bench.routed
        if not one.batch.is_control
        for at, key in enumerate(one.batch.keys)
    }
    assert keys == {offset: f"v{number}" for number, offset in places.items()}


# --- beside a log on disk, and in sinks


def in_directory(disk: SimDisk, seed: int = 1) -> Propagator:
    return Propagator(data="x", log=NEVER, world=virtual_world(seed, thread_delay_s_max=0.01, disk=disk))


@pytest.mark.parametrize("checkpoint", [True, False], ids=["with a checkpoint", "from the log"])
def test_very_frame_again_is_a_duplicate_after_a_restart(checkpoint: bool) -> None:
    disk = SimDisk(1)

    async def first_life() -> tuple[Batch, list[int | None]]:
        async with in_directory(disk) as p:
            cache = await p.attach(CacheSink())
            await p.publish(*map(row, KNOWN))
            origin = p.producer("p").watermark() or p._pipeline.hello(5, "p", p._now())[0].origin
            frame = mixed(origin)
            published = (await resend_batch(p, frame, Sender("p"))).result()
            assert published.duplicates == TOLD
            await p.wait_visible(published)
            assert {
                number: cache.peek("default", f"v{number}") is not None for number in range(8)
            } == dict.fromkeys(range(8), True)
            assert p.statistics().sinks["cache"].applied_deltas == 8
            if checkpoint:
                assert p._service_log.checkpointer is not None
                await p._service_log.checkpointer.write()
            offsets = [one.offset for one in published.places()]
            p._service_log.checkpointer = None  # none is written at the end
            return frame, offsets

    async def second_life(frame: Batch, offsets: list[int | None]) -> None:
        async with in_directory(disk) as p:
            assert p.recovery is not None
            assert (p.recovery.checkpoint is not None) is checkpoint
            (grant, *_) = p._pipeline.hello(5, "p", p._now())
            assert repeated(await resend_batch(p, frame, Sender("p"))) == offsets
            rows = [row(number) for number in range(8)]
            other = encode_batch(rows, origin=frame.origin, base=1, epoch=grant.epoch, hybrid_time=3)
            refusal = (await resend_batch(p, other, Sender("p"))).refusal()
            assert refusal is not None
            assert refusal.code is ErrorCode.DOT_REUSED

    run_virtual(second_life, *run_virtual(first_life))


def test_crash_between_the_pieces_leaves_what_the_producer_can_go_on_from() -> None:
    seen: set[int] = set()

    def opened(disk: SimDisk) -> Propagator:
        logged = replace(NEVER, read_level=AckLevel.LOGGED)
        return Propagator(data="x", log=logged, world=virtual_world(1, disk=disk))

    async def first_life(disk: SimDisk, seed: int) -> tuple[Batch, SimDisk]:
        async with opened(disk) as p:
            await p.publish(*map(row, KNOWN), ack_level=AckLevel.DURABLE)
            frame = mixed(p._pipeline.hello(5, "p", p._now())[0].origin)
            await resend_batch(p, frame, Sender("p"))
            await anyio.sleep(0.1)
            return frame, disk.crash(seed)

    async def second_life(frame: Batch, disk: SimDisk) -> None:
        async with opened(disk) as p:
            (grant, *_) = p._pipeline.hello(5, "p", p._now())
            seen.add(grant.watermark)
            rest = frame
            if 0 < grant.watermark < 8:
                again = mixed(frame.origin, epoch=grant.epoch)
                refusal = (await resend_batch(p, again, Sender("p"))).refusal()
                assert refusal is not None
                assert (refusal.code, refusal.details) == (ErrorCode.OVERLAP, {"watermark": grant.watermark})
            if grant.watermark < 8:
                rest = batch_of(
                    frame.origin, grant.watermark + 1, *map(row, range(grant.watermark, 8)), epoch=grant.epoch
                )
            published = (await resend_batch(p, rest, Sender("p"))).result()
            offsets = [one.offset for one in published.places()]
            assert offsets == [0, 5, 1, 2, 8, 9, 10, 3][-rest.count :]
            await anyio.sleep(0.1)
            logged = [one for one in read_all(p.internals().log) if not one.batch.is_control]
            assert sorted(key for one in logged for key in one.batch.keys) == [f"v{at}" for at in range(8)]

    for seed in range(30):
        run_virtual(second_life, *run_virtual(first_life, SimDisk(seed), seed))
    assert len(seen) >= 3, seen


def test_pieces_are_forwarded_and_the_frame_is_a_repeat_there_too() -> None:
    async def main() -> None:
        network = VirtualNetwork(3)
        async with AsyncExitStack() as exits:
            nodes = [Node(name, network) for name in ("1", "2")]
            for node in nodes:
                await node.open(exits)
            here, there = nodes
            await here.forward_to(there)
            await here.p.publish(*map(row, KNOWN))
            (grant, *_) = here.p._pipeline.hello(5, "p", here.p._now())
            frame = mixed(grant.origin)
            published = (await resend_batch(here.p, frame, Sender("p"))).result()
            assert published.duplicates == TOLD
            await wait_converged(nodes)
            assert here.deltas() == there.deltas()
            for node in nodes:
                logged = [one for one in read_all(node.p.internals().log) if one.batch.origin == grant.origin]
                assert pieces(logged) == AS_LOGGED
                assert [node.resident.state("default", f"v{number}") is not None for number in range(8)] == [
                    True
                ] * 8
            (other, *_) = there.p._pipeline.hello(5, "p", there.p._now())
            repeated(await resend_batch(there.p, frame, Sender("p")))
            refusal = (
                await resend_batch(
                    there.p,
                    batch_of(grant.origin, 1, *map(row, range(10, 18)), epoch=other.epoch),
                    Sender("p"),
                )
            ).refusal()
            assert refusal is not None
            assert refusal.code is ErrorCode.DOT_REUSED
            assert (await there.p.publish(row(1), row(0))).duplicate

    run_virtual(main)


# --- over a connection


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_ranges_tell_each_row_its_place() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await p.publish(*map(row, KNOWN))
        await client.hello(ORIGIN)
        frame = BatchFrame(1, mixed(ORIGIN), ack_wanted=True)
        await client.send(frame, BatchFrame(9, batch_of(ORIGIN, 9, made("on")), ack_wanted=True))
        ranges: list[AckRange] = []
        while not ranges or ranges[-1].last < 9:
            answer = await client.next()
            assert not isinstance(answer, Nack), answer
            ranges += getattr(answer, "ranges", ())
        assert ranges == [
            AckRange(1, 1, 0, duplicate=True),
            AckRange(2, 2, 5),
            AckRange(3, 4, 1, duplicate=True),
            AckRange(5, 7, 8),
            AckRange(8, 8, 3, duplicate=True),
            AckRange(9, 9, 12),
        ]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_client_is_told_of_each_row_and_goes_on() -> None:
    async with (
        Propagator() as p,
        serving(p) as (_, address),
        Producer(f"{address.host}:{address.port}", name="c") as c,
    ):
        await p.publish(*map(row, KNOWN))
        published = await c.publish(*map(row, range(8)))
        assert [(one.offset, one.duplicate) for one in published.places()] == [
            *((0, True), (5, False), (1, True), (2, True), (8, False), (9, False), (10, False), (3, True))
        ]
        assert published.duplicates == TOLD
        assert (await c.publish(made("on"))).offset == 12
        with pytest.raises(Refused) as caught:
            await c.publish(row(20), made("w", id=row(1).id), row(21))
        assert (caught.value.code, caught.value.row) == (ErrorCode.ID_REUSED, 1)
        assert (await c.publish(row(20), row(21))).duplicates == {}
