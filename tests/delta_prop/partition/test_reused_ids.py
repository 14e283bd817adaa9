"""A delta with a known id is a duplicate if its content is equal, and is refused for good otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from delta_prop import Propagator
from delta_prop.partition.ingest import duplicate_id_finder
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CacheSink
from delta_prop_wire.control_rows import read_noop
from delta_prop_wire.delta import (
    Delta,
    Dot,
    Priority,
    Source,
    create,
    dense,
    opaque,
    sparse,
    sparse_add,
    transform,
)
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Ack, AckRange, BatchFrame, DeltaFrame, Nack
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.durable.histories import NO_CHECKPOINTS
from tests.delta_prop.partition.pipeline_bench import Bench, batch_of
from tests.delta_prop.server.raw import ORIGIN, connected, serving
from tests.delta_prop.support import catch_refusal, make_delta

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.calls.receipt import Receipt


def refusal_code(receipt: Receipt) -> ErrorCode | None:
    refusal = receipt.refusal()
    return None if refusal is None else refusal.code


ONE, TWO, THREE = (bytes([number]) * 16 for number in (1, 2, 3))
FIRST = Delta("v", sparse([0, 1], [1.0, 2.0]), "n", id=ONE, metadata={"k": 1, "l": [2]}, topics=("t", "u"))
OTHERS = {
    "vector": replace(FIRST, vector_id="w"),
    "namespace": replace(FIRST, namespace="m"),
    "kind": replace(FIRST, operation=sparse_add([0, 1], [1.0, 2.0])),
    "values": replace(FIRST, operation=sparse([0, 1], [1.0, 3.0])),
    "indices": replace(FIRST, operation=sparse([1, 0], [1.0, 2.0])),
    "metadata": replace(FIRST, metadata={"k": 1}),
    "no metadata": replace(FIRST, metadata=None),
    "topics": replace(FIRST, topics=("t",)),
}
SAME = replace(
    FIRST,
    metadata={"l": [2], "k": 1},
    topics=("u", "t"),
    timestamp=99,
    source=Source.IMPORT,
    priority=Priority.LOW,
)


def bench_with_first() -> Bench:
    """Return a bench whose log has the vector, and the delta with the id at offset 2."""
    bench = Bench()
    bench.publish(Delta("v", create([0.0, 0.0]), "n"), Delta("w", create([0.0, 0.0]), "n"))
    assert bench.publish(FIRST).result().offset == 2
    bench.publish(Delta("v", create([0.0, 0.0]), "m"))
    return bench


def check_reuse_refusal(refusal: Refused | None, *, row: int = 0, offset: int | None = 2) -> None:
    assert refusal is not None, "the delta must be refused"
    assert (refusal.code, refusal.field) == (ErrorCode.ID_REUSED, "id"), refusal
    assert refusal.is_final
    assert refusal.row == row
    assert refusal.details == ({} if offset is None else {"offset": offset})
    assert ONE.hex() in refusal.message


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_id_with_other_content_is_refused_and_nothing_is_logged(other: Delta) -> None:
    bench = bench_with_first()
    check_reuse_refusal(bench.publish(make_delta("before", id=TWO), other).refusal(), row=1)
    assert bench.log.next_offset == 4
    assert bench.publish(make_delta("before", id=TWO)).result().offset == 4


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_dot_with_reused_id_becomes_noop_and_later_dots_go_on(other: Delta) -> None:
    bench = bench_with_first()
    origin = bench.hello("p")
    resent = batch_of(origin, 1, make_delta("a", id=TWO), other)
    for _ in range(2):
        refusal = bench.send(resent).refusal()
        assert refusal is not None
        assert refusal.code is ErrorCode.ID_REUSED
    check_reuse_refusal(bench.send(batch_of(origin, 3, other)).refusal())
    assert [read_noop(logged.batch).code for logged in bench.routed[-2:]] == [ErrorCode.ID_REUSED] * 2
    assert bench.send(batch_of(origin, 4, make_delta("a", id=TWO))).result().offset == 7


def test_equal_content_in_other_form_is_a_duplicate() -> None:
    bench = bench_with_first()
    origin = bench.hello("p")
    assert bench.publish(SAME).result().duplicates == {0: 2}
    under_dots = replace(
        SAME, parents=(Dot(origin, 1), Dot(bench.routed[0].batch.origin, 1)), expect=Dot(5, 5)
    )
    assert bench.send(batch_of(origin, 1, under_dots, clock=[Dot(origin, 1)])).result().duplicates == {0: 2}
    assert bench.log.next_offset == 5, "a no-op record must fill the dot"


ROWS = [make_delta("a", id=TWO), make_delta("b", id=ONE), make_delta("c", id=THREE), make_delta("d", id=ONE)]


def test_id_twice_in_a_call_with_other_content_is_refused() -> None:
    bench = Bench()
    origin = bench.hello("p")
    check_reuse_refusal(bench.publish(*ROWS).refusal(), row=3, offset=None)
    check_reuse_refusal(bench.send(batch_of(origin, 1, *ROWS)).refusal(), row=3, offset=None)
    assert bench.keys() == []


def test_id_twice_in_a_call_with_equal_content_is_a_duplicate() -> None:
    bench = Bench()
    assert bench.publish(*ROWS[:3], ROWS[1]).result().duplicates == {3: 1}
    assert bench.keys() == ["a", "b", "c"]


def test_known_id_below_the_log_start_is_outcome_unknown() -> None:
    bench = Bench(log_deltas_max=2)
    origin = bench.hello("p")
    assert bench.publish(make_delta("a", id=ONE)).acknowledged
    bench.publish(make_delta("b"), make_delta("c"))
    assert bench.log.start_offset > 0
    for resent in (make_delta("a", id=ONE), make_delta("other", id=ONE)):
        assert refusal_code(bench.publish(resent)) is ErrorCode.OUTCOME_UNKNOWN
    partly_new = bench.publish(make_delta("other", id=ONE), make_delta("new", id=TWO))
    assert refusal_code(partly_new) is ErrorCode.OUTCOME_UNKNOWN
    assert bench.keys() == ["a", "b", "c", "new"], "new rows must be accepted"
    for base, *rows in (
        (1, make_delta("other", id=ONE)),
        (2, make_delta("a", id=ONE), make_delta("newer", id=THREE)),
    ):
        for _ in range(2):
            assert refusal_code(bench.send(batch_of(origin, base, *rows))) is ErrorCode.OUTCOME_UNKNOWN
    assert bench.send(batch_of(origin, 4, make_delta("next"))).acknowledged
    assert bench.keys() == ["a", "b", "c", "new", "newer", "next"]


def test_duplicate_has_the_dot_of_its_first_copy() -> None:
    bench = Bench()
    bench.publish(make_delta("a", id=THREE), make_delta("b", id=ONE), make_delta("c", id=TWO))
    origin = bench.routed[0].batch.origin
    assert bench.publish(make_delta("b", id=ONE)).result().dot == Dot(origin, 2)
    assert bench.publish(make_delta("c", id=TWO), make_delta("b", id=ONE)).result().dot == Dot(origin, 3)


def test_reused_id_is_refused_before_other_rows_are_validated() -> None:
    bench = bench_with_first()
    refusal = bench.publish(OTHERS["vector"], replace(FIRST, id=TWO, vector_id="nobody")).refusal()
    check_reuse_refusal(refusal)


def test_known_rows_are_compared_with_the_frames_that_hold_them() -> None:
    bench = Bench()
    rows = [
        make_delta(f"v{number}", id=number.to_bytes(16, "big"), metadata={"n": number})
        for number in range(40)
    ]
    for first, last in ((0, 7), (7, 8), (8, 25)):
        bench.publish(*rows[first:last])
    bench.publish(make_delta("else"))
    for number in range(25, 40):
        bench.publish(rows[number])
    shifted = [*rows[5:30], *rows[33:], *rows[:5]]
    published = bench.publish(*shifted).result()
    assert published.duplicate
    offsets = [*range(25), *range(26, 41)]
    assert published.duplicates == {
        row: offsets[int(delta.vector_id[1:])] for row, delta in enumerate(shifted)
    }
    for changed_row in (0, 13, 24, 25, 31, len(shifted) - 1):
        resent = [*shifted]
        resent[changed_row] = replace(resent[changed_row], metadata={"n": -1})
        refusal = bench.publish(*resent).refusal()
        assert refusal is not None
        assert (refusal.code, refusal.row) == (ErrorCode.ID_REUSED, changed_row)
        assert refusal.details == {"offset": published.duplicates[changed_row]}


def test_forwarded_rows_with_reused_ids_are_accepted() -> None:
    bench = bench_with_first()
    forwarded = batch_of(77, 1, OTHERS["values"])
    published = bench.send(forwarded, source=Source.REPLICA, lamport=900).result()
    assert published.offset == 4
    assert not published.duplicates
    assert bench.publish(FIRST).result().duplicates == {0: 2}


def test_known_rows_in_falling_order_are_refused_as_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """One read costs 10, each range of rows with rising copies 1: in falling order, each row is a range."""
    monkeypatch.setattr(duplicate_id_finder, "COST_MAX", 110)
    bench = Bench()
    rows = [make_delta(f"v{number}", id=number.to_bytes(16, "big")) for number in range(200)]
    bench.publish(*rows)
    assert bench.publish(*rows).result().duplicate
    refusal = bench.publish(*rows[::-1]).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.TOO_LARGE
    assert bench.publish(*rows[:100:-1]).result().duplicate


def test_known_rows_over_too_many_frames_are_refused_as_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read costs 10, and each range of rows or further frame of it costs 1."""
    monkeypatch.setattr(duplicate_id_finder, "COST_MAX", 110)
    bench = Bench()
    scattered = [make_delta(f"w{number}", id=(1000 + number).to_bytes(16, "big")) for number in range(11)]
    for row in scattered:
        bench.publish(row)
        bench.publish(*[make_delta("between") for _ in range(duplicate_id_finder.GAP_ROWS + 1)])
    refusal = bench.publish(*scattered).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.TOO_LARGE
    assert bench.publish(*scattered[1:]).result().duplicate
    single_frames = [
        make_delta(f"x{number}", id=(2000 + number).to_bytes(16, "big")) for number in range(102)
    ]
    for row in single_frames:
        bench.publish(row)
    refusal = bench.publish(*single_frames).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.TOO_LARGE, "a frame per row must exceed COST_MAX, with a single read"
    assert bench.publish(*single_frames[:100]).result().duplicate


# --- with a log on disk


def open_propagator(disk: SimDisk) -> Propagator:
    return Propagator(
        data="x", log=NO_CHECKPOINTS, world=virtual_world(1, thread_delay_s_max=0.01, disk=disk)
    )


def test_first_copy_is_found_before_write_and_after_restart() -> None:
    disk = SimDisk(1)

    async def first_session() -> None:
        async with open_propagator(disk) as p:
            receipts = [
                p.offer(delta)
                for delta in (make_delta("v", id=ONE), make_delta("v", id=ONE), make_delta("w", id=ONE))
            ]
            assert p.internals().partition.log.high_watermark == 0
            assert (await receipts[1]).duplicates == {0: 0}
            check_reuse_refusal(await catch_refusal(receipts[2].wait()), offset=0)

    async def second_session() -> None:
        async with open_propagator(disk) as p:
            assert (await p.publish(make_delta("v", id=ONE))).duplicates == {0: 0}
            check_reuse_refusal(await catch_refusal(p.publish(make_delta("w", id=ONE))), offset=0)

    run_virtual(first_session)
    run_virtual(second_session)


def test_unreadable_first_copy_is_refused_as_log_failed() -> None:
    disk = SimDisk(1)

    async def write() -> None:
        async with open_propagator(disk) as p:
            for number in range(50):
                await p.publish(make_delta(f"v{number}", id=number.to_bytes(16, "big")))

    async def resend() -> None:
        async with open_propagator(disk) as p:
            log = p.internals().partition.log
            (path,) = [name for name in disk.list("streams/default/0") if name.endswith(".log")]
            file = disk.open(f"streams/default/0/{path}")
            file.write(file.read(0, file.size()).index(b"v2"), [b"w"])
            file.close()
            refusal = await catch_refusal(p.offer(make_delta("v2", id=(2).to_bytes(16, "big"))).wait())
            assert (refusal.code, refusal.retryable) == (ErrorCode.LOG_FAILED, True)
            assert (await p.publish(make_delta("v40", id=(40).to_bytes(16, "big")))).duplicate
            assert log.next_offset == 50

    run_virtual(write)
    run_virtual(resend)


def test_resent_transform_is_a_duplicate_after_its_vector_changed() -> None:
    async def run() -> None:
        async with Propagator(world=virtual_world(1)) as p:
            await p.attach(CacheSink())
            p.register_transform("double", lambda vector: vector * 2, reads="cache")
            await p.publish(Delta("v", create([1.0, 2.0])))
            twice = Delta("v", transform("double"), id=ONE)
            assert (await p.publish(twice)).offset == 1
            assert (await p.publish(twice)).duplicates == {0: 1}
            check_reuse_refusal(
                await catch_refusal(p.publish(Delta("v", dense([2.0, 4.0, 6.0]), id=ONE))), offset=1
            )

    run_virtual(run)


# --- over a connection


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_reused_id_is_refused_over_a_connection() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await client.hello(ORIGIN)
        first = Delta("v", opaque(b"one"), id=ONE)
        other = Delta("v", opaque(b"other"), id=ONE)
        frames: list[Callable[[int], DeltaFrame | BatchFrame]] = [
            lambda sequence: DeltaFrame(sequence, first, ack_wanted=True),
            lambda sequence: DeltaFrame(sequence, other, ack_wanted=True),
            lambda sequence: BatchFrame(
                sequence,
                encode_batch([make_delta("w", id=TWO), other], origin=ORIGIN, base=1),
                ack_wanted=True,
            ),
            lambda sequence: DeltaFrame(sequence, replace(other, dot=Dot(ORIGIN, 3)), ack_wanted=True),
            lambda sequence: DeltaFrame(sequence, first, ack_wanted=True),
        ]
        nacks: list[Nack] = []
        ranges: list[AckRange] = []
        sequence = 1
        for make_frame in frames:
            frame = make_frame(sequence)
            await client.send(frame)
            sequence += frame.batch.count if isinstance(frame, BatchFrame) else 1
        last_sequence = 0
        while last_sequence < 6:
            answer = await client.next()
            if isinstance(answer, Nack):
                nacks.append(answer)
            elif isinstance(answer, Ack):
                ranges += answer.ranges
                last_sequence = max(last_sequence, answer.sequence)
        assert [(nack.sequence, nack.code, nack.row, nack.details) for nack in nacks] == [
            (2, ErrorCode.ID_REUSED, 0, {"offset": 0}),
            (3, ErrorCode.ID_REUSED, 1, {"offset": 0}),
            (5, ErrorCode.ID_REUSED, 0, {"offset": 0}),
        ]
        assert ranges == [AckRange(1, 1, 0), AckRange(6, 6, 0, duplicate=True)]
        assert p.statistics().duplicates == 1
