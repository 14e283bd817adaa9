"""A batch of known and new ids: new rows are logged, known rows are reported as duplicates."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop import Propagator
from delta_prop.client import Producer
from delta_prop.partition.core import splitting
from delta_prop.partition.ingest.work import Sender
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CacheSink
from delta_prop_wire.delta import AckLevel, Delta, Dot, create, delete, sparse_add
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import AckRange, BatchFrame, Nack
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.durable.histories import NO_CHECKPOINTS, resend_batch
from tests.delta_prop.partition.pipeline_bench import Bench, batch_of
from tests.delta_prop.server.raw import ORIGIN, connected, serving
from tests.delta_prop.server.test_forwarding import Node, wait_converged
from tests.delta_prop.support import claim_origins, make_delta
from tests.full_log import read_all

if TYPE_CHECKING:
    from delta_prop.calls.receipt import Receipt
    from delta_prop_wire.batch import Batch, LoggedBatch


def delta_with_id(number: int, **more: object) -> Delta:
    """Return a delta whose id is made of a number."""
    return make_delta(f"v{number}", id=number.to_bytes(16, "big"), **more)


KNOWN_NUMBERS = (0, 2, 3, 7)


def bench_with_known() -> tuple[Bench, int]:
    """Return a bench with four known ids at offsets 0 to 3, and an origin."""
    bench = Bench()
    bench.publish(*map(delta_with_id, KNOWN_NUMBERS))
    return bench, bench.hello("p")


def mixed_batch(origin: int, base: int = 1, **more: object) -> Batch:
    """Return a batch of rows 0 to 7, of which 0, 2, 3 and 7 have known ids."""
    return batch_of(origin, base, *map(delta_with_id, range(8)), **more)


DUPLICATES = {0: 0, 2: 1, 3: 2, 7: 3}


def summarize_batches(batches: list[LoggedBatch]) -> list[tuple[str, int, int]]:
    """Return the kind, first counter and row count of each logged batch."""
    return [
        ("known" if logged.batch.is_control else "new", logged.batch.base, logged.count) for logged in batches
    ]


LOGGED_BATCHES = [("known", 1, 1), ("new", 2, 1), ("known", 3, 2), ("new", 5, 3), ("known", 8, 1)]


def test_mixed_batch_logs_new_rows_and_reports_duplicates() -> None:
    bench, origin = bench_with_known()
    published = bench.send(mixed_batch(origin)).result()
    assert published.duplicates == DUPLICATES
    assert [(row_ack.offset, row_ack.duplicate) for row_ack in published.row_acks()] == [
        *((0, True), (5, False), (1, True), (2, True), (8, False), (9, False), (10, False), (3, True))
    ]
    assert published.next_offset == 11
    assert published.last_dot == Dot(origin, 7)
    assert summarize_batches(bench.routed[1:]) == LOGGED_BATCHES
    assert bench.keys() == ["v0", "v2", "v3", "v7", "v1", "v4", "v5", "v6"]
    assert bench.pipeline.orderer.watermarks[origin] == 8
    assert bench.send(batch_of(origin, 9, make_delta("on"))).result().offset == 12
    counters = bench.pipeline.appender.counters
    assert (counters.accepted, counters.duplicates, counters.noops) == (4 + 4 + 1, 4, 4)
    assert bench.publish(*map(delta_with_id, range(8))).result().duplicates == {
        row: row_ack.offset for row, row_ack in enumerate(published.row_acks())
    }


def test_id_twice_in_a_batch_gets_offset_of_its_first_row() -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.publish(make_delta("before"))
    rows = [delta_with_id(1), delta_with_id(2), delta_with_id(1), delta_with_id(3), delta_with_id(2)]
    assert bench.send(batch_of(origin, 1, *rows)).result().duplicates == {2: 1, 4: 2}
    assert bench.keys() == ["before", "v1", "v2", "v3"]


def duplicate_offsets(receipt: Receipt) -> list[int | None]:
    """Return the offsets of a batch whose rows are all duplicates."""
    published = receipt.result()
    assert published.duplicate
    return [published.duplicates[number] for number in range(published.count)]


def test_resent_batch_is_duplicate_at_once_and_after_many_others() -> None:
    bench, origin = bench_with_known()
    frame = mixed_batch(origin)
    first = [row_ack.offset for row_ack in bench.send(frame).result().row_acks()]
    assert duplicate_offsets(bench.send(frame)) == first
    for number in range(9, 9 + 70):
        bench.send(batch_of(origin, number, make_delta("other")))
    assert duplicate_offsets(bench.send(frame)) == first


def test_other_rows_under_dots_of_split_batch_are_dot_reused() -> None:
    bench, origin = bench_with_known()
    duplicates = bench.send(mixed_batch(origin)).result().duplicates
    second = bench.send(mixed_batch(origin, clock=[Dot(origin, 1)])).result().duplicates  # the same rows
    assert {row: second[row] for row in duplicates} == duplicates
    refusal = bench.send(batch_of(origin, 1, *map(delta_with_id, range(10, 18)))).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.DOT_REUSED


def test_split_batches_keep_counter_gaps() -> None:
    bench, origin = bench_with_known()
    counters = [3, 4, 9, 10, 11, 12, 30, 31]
    frame = mixed_batch(origin, 3, previous=0, counters=counters)
    published = bench.send(frame).result()
    assert published.duplicates == DUPLICATES
    logged = bench.routed[1:]
    assert [batch.batch.counter(index) for batch in logged for index in range(batch.count)] == counters
    previous_counters = [
        batch.batch.previous if batch.batch.has_gaps else batch.batch.base - 1 for batch in logged
    ]
    assert previous_counters == [0, 3, 4, 10, 30]
    assert [bench.pipeline.outcome(origin, counter) for counter in counters] == [
        row_ack.offset for row_ack in published.row_acks()
    ]
    assert bench.pipeline.outcome(origin, 20) is ErrorCode.DOT_REUSED, (
        "the skipped counter must have no outcome"
    )
    assert duplicate_offsets(bench.send(frame)) == [row_ack.offset for row_ack in published.row_acks()]
    assert bench.send(batch_of(origin, 32, make_delta("on"))).acknowledged


def test_only_first_split_batch_carries_the_clock() -> None:
    for first in (0, 1):
        bench, origin = bench_with_known()
        other = bench.hello("other")
        bench.send(batch_of(other, 1, make_delta("x")))
        frame = batch_of(origin, 1, *map(delta_with_id, range(first, 8)), clock=[Dot(other, 1)])
        assert bench.send(frame).acknowledged
        clocks = [logged.batch.clock for logged in bench.routed[2:]]
        assert clocks == [(Dot(other, 1),), *[()] * (len(clocks) - 1)]
        assert bench.pipeline.appender._clocks.clock(origin) == {other: 1}


def test_parents_within_a_split_batch_are_satisfied() -> None:
    bench, origin = bench_with_known()
    rows = [
        delta_with_id(0),
        delta_with_id(1),
        delta_with_id(2),
        delta_with_id(4, parents=(Dot(origin, 1), Dot(origin, 2), delta_with_id(1).id, delta_with_id(0).id)),
    ]
    assert bench.send(batch_of(origin, 1, *rows)).result().duplicates == {0: 0, 2: 1}
    last = bench.routed[-1].batch
    assert last.parents == tuple((0, parent) for parent in rows[3].parents)


def test_expect_is_checked_for_new_rows_only() -> None:
    bench, origin = bench_with_known()
    head = bench.routed[0].batch.dot(0)
    fits = [
        delta_with_id(0, expect=Dot(9, 9)),
        delta_with_id(1),
        Delta("v0", create([5.0, 5.0]), id=delta_with_id(50).id, expect=head),
    ]
    assert bench.send(batch_of(origin, 1, *fits)).result().duplicates == {0: 0}
    refusal = bench.send(
        batch_of(
            origin,
            4,
            delta_with_id(0),
            delta_with_id(2),
            replace(delta_with_id(8), vector_id="v1", expect=head),
        )
    ).refusal()
    assert refusal is not None
    assert (refusal.code, refusal.row) == (ErrorCode.CONFLICT, 2)
    assert refusal.message.startswith("row 2: 'v1'")


def test_invalid_new_row_refuses_all_rows_of_its_batch_and_is_named() -> None:
    bench, origin = bench_with_known()
    end = bench.log.next_offset
    bad = Delta("nobody", sparse_add([0], [1.0]), id=delta_with_id(70).id)
    refusal = bench.send(
        batch_of(origin, 1, delta_with_id(0), delta_with_id(1), delta_with_id(2), bad)
    ).refusal()
    assert refusal is not None
    assert (refusal.code, refusal.row, refusal.field) == (ErrorCode.INVALID_DELTA, 3, "vector_id")
    assert refusal.message.startswith("row 3: vector_id: 'nobody'")
    (control,) = bench.routed[1:]
    assert (control.offset, control.count, control.batch.is_control) == (end, 4, True)
    refusal = bench.publish(delta_with_id(0), delta_with_id(1), bad).refusal()
    assert refusal is not None
    assert refusal.row == 2


def test_new_rows_are_validated_after_preceding_rows() -> None:
    bench, origin = bench_with_known()
    rows = [
        delta_with_id(1),
        delta_with_id(0),
        Delta("v1", sparse_add([0], [1.0]), id=delta_with_id(60).id),
        delta_with_id(2),
    ]
    rows += [
        Delta("v0", delete(), id=delta_with_id(61).id),
        delta_with_id(3),
        Delta("v0", sparse_add([0], [1.0]), id=delta_with_id(62).id),
    ]
    refusal = bench.send(batch_of(origin, 1, *rows)).refusal()
    assert refusal is not None
    assert refusal.row == 6
    assert bench.send(batch_of(origin, 8, *rows[:6])).result().duplicates == {1: 0, 3: 1, 5: 2}


def test_split_batch_on_full_log_appends_all_or_nothing() -> None:
    bench = Bench(log_deltas_max=11)
    bench.publish(*map(delta_with_id, KNOWN_NUMBERS))
    origin = bench.hello("p")
    bench.log.hold("sink", lambda: 0)
    refusal = bench.send(mixed_batch(origin)).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.LOG_FULL
    assert refusal.retryable
    assert bench.log.next_offset == 4
    assert bench.pipeline.orderer.watermarks.get(origin, 0) == 0
    assert bench.publish(delta_with_id(1)).acknowledged, (
        "the row of the refused batch must not be a duplicate"
    )
    bench.log.release("sink")
    assert bench.send(mixed_batch(origin)).result().duplicates == {**DUPLICATES, 1: 4}


def test_unavailable_level_makes_a_split_batch_a_noop() -> None:
    bench, origin = bench_with_known()
    refusal = bench.send(mixed_batch(origin, ack_level=2)).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.LEVEL_UNAVAILABLE
    assert summarize_batches(bench.routed[1:]) == [("known", 1, 8)]


def test_batch_split_into_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "PIECES_MAX", 4)
    bench, origin = bench_with_known()
    refusal = bench.send(mixed_batch(origin)).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.TOO_LARGE
    assert bench.send(batch_of(origin, 9, *map(delta_with_id, range(7)))).acknowledged


@given(
    known=st.lists(st.integers(0, 12), max_size=8),
    frames=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=8), max_size=5),
    gap=st.integers(0, 3),
)
def test_any_batches_apply_each_id_once_with_exact_offsets(
    known: list[int], frames: list[list[int]], gap: int
) -> None:
    bench = Bench()
    origin = bench.hello("p")
    offset_by_number: dict[int, int] = {}
    for number in known:
        offset_by_number.setdefault(
            number, bench.publish(delta_with_id(number)).result().row_acks()[0].offset or 0
        )
    sent: list[tuple[Batch, list[int | None]]] = []
    last = 0
    for numbers in frames:
        counters = [last + 1 + gap + index for index in range(len(numbers))]
        gap_fields = {"previous": last, "counters": counters} if gap else {}
        frame = batch_of(origin, counters[0], *map(delta_with_id, numbers), **gap_fields)
        start = bench.log.next_offset
        published = bench.send(frame).result()
        last = counters[-1]
        expected = []
        for index, number in enumerate(numbers):
            is_duplicate = number in offset_by_number
            expected.append((offset_by_number.setdefault(number, start + index), is_duplicate))
        assert [(row_ack.offset, row_ack.duplicate) for row_ack in published.row_acks()] == expected
        assert bench.log.next_offset == start + len(numbers)
        sent.append((frame, [offset for offset, _ in expected]))
    for frame, offsets in sent:
        assert duplicate_offsets(bench.send(frame)) == offsets
    keys = {
        logged.offset + index: key
        for logged in bench.routed
        if not logged.batch.is_control
        for index, key in enumerate(logged.batch.keys)
    }
    assert keys == {offset: f"v{number}" for number, offset in offset_by_number.items()}


# --- with a log on disk, and in sinks


def open_propagator(disk: SimDisk, seed: int = 1) -> Propagator:
    return Propagator(
        data="x", log=NO_CHECKPOINTS, world=virtual_world(seed, thread_delay_s_max=0.01, disk=disk)
    )


@pytest.mark.parametrize("has_checkpoint", [True, False], ids=["with a checkpoint", "from the log"])
def test_resent_batch_is_duplicate_after_restart(has_checkpoint: bool) -> None:
    disk = SimDisk(1)

    async def first_session() -> tuple[Batch, list[int | None]]:
        async with open_propagator(disk) as p:
            cache = await p.attach(CacheSink())
            await p.publish(*map(delta_with_id, KNOWN_NUMBERS))
            origin = p.producer("p").watermark() or claim_origins(p, 5, "p")[0].origin
            frame = mixed_batch(origin)
            published = (await resend_batch(p, frame, Sender("p"))).result()
            assert published.duplicates == DUPLICATES
            await p.wait_visible(published)
            assert {
                number: cache.peek("default", f"v{number}") is not None for number in range(8)
            } == dict.fromkeys(range(8), True)
            assert p.statistics().sinks["cache"].applied_deltas == 8
            if has_checkpoint:
                assert p.internals().partition.storage.checkpointer is not None
                await p.internals().partition.storage.checkpointer.write()
            offsets = [row_ack.offset for row_ack in published.row_acks()]
            p.internals().partition.storage.checkpointer = None  # no checkpoint is written at close
            return frame, offsets

    async def second_session(frame: Batch, offsets: list[int | None]) -> None:
        async with open_propagator(disk) as p:
            assert p.recovery is not None
            assert (p.recovery.checkpoint is not None) is has_checkpoint
            (grant, *_) = claim_origins(p, 5, "p")
            assert duplicate_offsets(await resend_batch(p, frame, Sender("p"))) == offsets
            rows = [delta_with_id(number) for number in range(8)]
            other = encode_batch(rows, origin=frame.origin, base=1, epoch=grant.epoch, hybrid_time=3)
            refusal = (await resend_batch(p, other, Sender("p"))).refusal()
            assert refusal is not None
            assert refusal.code is ErrorCode.DOT_REUSED

    run_virtual(second_session, *run_virtual(first_session))


def test_crash_within_split_batch_lets_producer_resume() -> None:
    watermarks_found: set[int] = set()

    def open_logged(disk: SimDisk) -> Propagator:
        logged = replace(NO_CHECKPOINTS, read_level=AckLevel.LOGGED)
        return Propagator(data="x", log=logged, world=virtual_world(1, disk=disk))

    async def first_session(disk: SimDisk, seed: int) -> tuple[Batch, SimDisk]:
        async with open_logged(disk) as p:
            await p.publish(*map(delta_with_id, KNOWN_NUMBERS), ack_level=AckLevel.DURABLE)
            frame = mixed_batch(claim_origins(p, 5, "p")[0].origin)
            await resend_batch(p, frame, Sender("p"))
            await anyio.sleep(0.1)
            return frame, disk.crash(seed)

    async def second_session(frame: Batch, disk: SimDisk) -> None:
        async with open_logged(disk) as p:
            (grant, *_) = claim_origins(p, 5, "p")
            watermarks_found.add(grant.watermark)
            rest = frame
            if 0 < grant.watermark < 8:
                second = mixed_batch(frame.origin, epoch=grant.epoch)
                refusal = (await resend_batch(p, second, Sender("p"))).refusal()
                assert refusal is not None
                assert (refusal.code, refusal.details) == (ErrorCode.OVERLAP, {"watermark": grant.watermark})
            if grant.watermark < 8:
                rest = batch_of(
                    frame.origin,
                    grant.watermark + 1,
                    *map(delta_with_id, range(grant.watermark, 8)),
                    epoch=grant.epoch,
                )
            published = (await resend_batch(p, rest, Sender("p"))).result()
            offsets = [row_ack.offset for row_ack in published.row_acks()]
            assert offsets == [0, 5, 1, 2, 8, 9, 10, 3][-rest.count :]
            await anyio.sleep(0.1)
            batches = [
                logged for logged in read_all(p.internals().partition.log) if not logged.batch.is_control
            ]
            assert sorted(key for logged in batches for key in logged.batch.keys) == [
                f"v{index}" for index in range(8)
            ]

    for seed in range(30):
        run_virtual(second_session, *run_virtual(first_session, SimDisk(seed), seed))
    assert len(watermarks_found) >= 3, watermarks_found


def test_forwarded_split_batch_is_duplicate_at_target() -> None:
    async def main() -> None:
        network = VirtualNetwork(3)
        async with AsyncExitStack() as exits:
            nodes = [Node(name, network) for name in ("1", "2")]
            for node in nodes:
                await node.open(exits)
            source, target = nodes
            await source.forward_to(target)
            await source.p.publish(*map(delta_with_id, KNOWN_NUMBERS))
            (grant, *_) = claim_origins(source.p, 5, "p")
            frame = mixed_batch(grant.origin)
            published = (await resend_batch(source.p, frame, Sender("p"))).result()
            assert published.duplicates == DUPLICATES
            await wait_converged(nodes)
            assert source.logged_dots() == target.logged_dots()
            for node in nodes:
                batches = read_all(node.p.internals().partition.log)
                split = [logged for logged in batches if logged.batch.origin == grant.origin]
                assert summarize_batches(split) == LOGGED_BATCHES
                assert [node.resident.state("default", f"v{number}") is not None for number in range(8)] == [
                    True
                ] * 8
            (grant_at_target, *_) = claim_origins(target.p, 5, "p")
            duplicate_offsets(await resend_batch(target.p, frame, Sender("p")))
            refusal = (
                await resend_batch(
                    target.p,
                    batch_of(
                        grant.origin, 1, *map(delta_with_id, range(10, 18)), epoch=grant_at_target.epoch
                    ),
                    Sender("p"),
                )
            ).refusal()
            assert refusal is not None
            assert refusal.code is ErrorCode.DOT_REUSED
            assert (await target.p.publish(delta_with_id(1), delta_with_id(0))).duplicate

    run_virtual(main)


# --- over a connection


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_ack_ranges_give_each_row_its_offset() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await p.publish(*map(delta_with_id, KNOWN_NUMBERS))
        await client.hello(ORIGIN)
        frame = BatchFrame(1, mixed_batch(ORIGIN), ack_wanted=True)
        await client.send(frame, BatchFrame(9, batch_of(ORIGIN, 9, make_delta("on")), ack_wanted=True))
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
async def test_client_gets_each_row_outcome_and_continues() -> None:
    async with (
        Propagator() as p,
        serving(p) as (_, address),
        Producer(f"{address.host}:{address.port}", name="c") as c,
    ):
        await p.publish(*map(delta_with_id, KNOWN_NUMBERS))
        published = await c.publish(*map(delta_with_id, range(8)))
        assert [(row_ack.offset, row_ack.duplicate) for row_ack in published.row_acks()] == [
            *((0, True), (5, False), (1, True), (2, True), (8, False), (9, False), (10, False), (3, True))
        ]
        assert published.duplicates == DUPLICATES
        assert (await c.publish(make_delta("on"))).offset == 12
        with pytest.raises(Refused) as caught:
            await c.publish(delta_with_id(20), make_delta("w", id=delta_with_id(1).id), delta_with_id(21))
        assert (caught.value.code, caught.value.row) == (ErrorCode.ID_REUSED, 1)
        assert (await c.publish(delta_with_id(20), delta_with_id(21))).duplicates == {}
