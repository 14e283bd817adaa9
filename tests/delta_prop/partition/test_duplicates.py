"""A batch under stored dots is a duplicate only if its content equals the log's, whatever its age."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delta_prop import LogSettings, Propagator
from delta_prop.calls.receipt import Receipt
from delta_prop.partition.ingest import origins
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    Dot,
    Priority,
    Source,
    create,
    dense,
    make_origin,
    opaque,
    scale,
)
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Nack, OriginClaim
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.partition.pipeline_bench import Bench, batch_of
from tests.delta_prop.server.raw import ORIGIN, connected, opaque_batch, serving

BATCHES = 300
SMALL = LogSettings(segment_bytes_max=4_096, tail_bytes_max=1, free_bytes_min=0, reserve_bytes=0)


def make_delta(key: str, number: float = 1.0) -> Delta:
    return Delta(key, create([number]), "n")


def refusal_code(receipt: Receipt) -> ErrorCode | None:
    refusal = receipt.refusal()
    return None if refusal is None else refusal.code


def test_other_bytes_under_an_old_dot_are_dot_reused() -> None:
    async def main() -> None:
        async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
            await client.hello(ORIGIN)
            for base in range(1, BATCHES + 1):
                await client.send(opaque_batch(base))
            await client.until_acked(BATCHES)
            for counter in (1, 236, 300):
                other = replace(opaque_batch(1), sequence=1000 * counter)
                changed = encode_batch(
                    [Delta("v", opaque(b"changed"), "rows")], origin=ORIGIN, base=counter, epoch=1
                )
                await client.send(replace(other, batch=changed))
                nack = await client.until(Nack)
                assert nack.code is ErrorCode.DOT_REUSED
                assert nack.details["offset"] == counter - 1
                await client.send(replace(opaque_batch(counter), sequence=1000 * counter + 1))
                (ack_range,) = (await client.until_acked(1000 * counter + 1)).ranges
                assert (ack_range.offset, ack_range.duplicate) == (counter - 1, True)

    anyio.run(main)


def rows_with_one_change() -> list[tuple[Delta, Delta]]:
    """Return pairs of rows, each an original and a row that differs from it in one field."""
    original = Delta("v", dense([1.0, 2.0]), "n", metadata={"a": 1}, topics=("t",), id=bytes(16), timestamp=5)
    return [
        (original, changed)
        for changed in (
            replace(original, vector_id="w"),
            replace(original, namespace="m"),
            replace(original, operation=dense([1.0, 3.0])),
            replace(original, operation=create([1.0, 2.0])),
            replace(original, metadata={"a": 2}),
            replace(original, topics=("u",)),
            replace(original, id=bytes(15) + b"1"),
            replace(original, timestamp=6),
            replace(original, parents=(Dot(9, 1),)),
            replace(original, expect=Dot(9, 1)),
        )
    ]


@pytest.mark.parametrize(("original", "changed"), rows_with_one_change())
def test_rebatched_row_is_duplicate_only_if_all_fields_are_equal(original: Delta, changed: Delta) -> None:
    bench = Bench()
    origin = bench.hello("p")
    bench.send(batch_of(origin, 1, original))
    second = replace(original, vector_id="x", id=bytes(15) + b"x")
    bench.send(batch_of(origin, 2, second))
    both = bench.send(batch_of(origin, 1, original, second))
    assert both.result().duplicates == {0: 0, 1: 1}
    assert refusal_code(bench.send(batch_of(origin, 1, changed, second))) is ErrorCode.DOT_REUSED


def test_outcome_query_is_answered_by_content_and_not_appended() -> None:
    bench = Bench()
    origin = bench.hello("p")
    first = [make_delta(f"v{number}", number) for number in range(4)]
    bench.send(batch_of(origin, 1, *first))
    bench.hello("p")
    query_rows = [replace(delta, timestamp=9) for delta in first]
    assert bench.send(batch_of(origin, 1, *query_rows, epoch=0)).result().duplicates == {
        0: 0,
        1: 1,
        2: 2,
        3: 3,
    }
    assert bench.send(batch_of(origin, 3, *query_rows[2:], epoch=0)).result().duplicates == {0: 2, 1: 3}
    other = bench.send(batch_of(origin, 2, make_delta("v1", 77), epoch=0))
    assert (refusal_code(other), other.refusal().details["offset"]) == (ErrorCode.DOT_REUSED, 1)
    for base, rows in ((5, 1), (4, 2)):
        new = bench.send(batch_of(origin, base, *[make_delta("new")] * rows, epoch=0))
        assert refusal_code(new) is ErrorCode.FENCED
    assert bench.log.next_offset == 4


@pytest.mark.parametrize("first", [[1, 3], [1, 2, 3]], ids=["with a gap", "without a gap"])
def test_batch_with_same_ends_but_other_counters_than_noop_is_dot_reused(first: list[int]) -> None:
    bench = Bench()
    origin = bench.hello("p")

    def send(*counters: int) -> ErrorCode | None:
        rows = [Delta("v", scale(2.0), "n")] * len(counters)
        has_gap = len(counters) <= counters[-1] - counters[0]
        gap_fields = {"counters": counters} if has_gap else {}
        return refusal_code(bench.send(batch_of(origin, counters[0], *rows, **gap_fields)))

    assert send(*first) is ErrorCode.INVALID_DELTA
    assert send(*first) is ErrorCode.INVALID_DELTA
    assert send(*([1, 2, 3] if first == [1, 3] else [1, 3])) is ErrorCode.DOT_REUSED
    for another in ([1, 2], [2, 3], [3]):
        assert send(*another) is ErrorCode.INVALID_DELTA


def test_noop_evicted_from_memory_is_refused_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "NOOPS_MAX", 4)
    bench = Bench()
    origin = bench.hello("p")
    for counter in range(1, 11):
        refused = bench.send(batch_of(origin, counter, Delta("v", scale(2.0), "n")))
        assert refusal_code(refused) is ErrorCode.INVALID_DELTA
    for counter in range(1, 11):
        second = bench.send(batch_of(origin, counter, Delta("v", scale(2.0), "n")))
        assert refusal_code(second) is ErrorCode.INVALID_DELTA
        assert bench.pipeline.outcome(origin, counter) is ErrorCode.INVALID_DELTA


def test_first_offsets_evicted_from_memory_are_read_from_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "OFFSET_RANGES_MAX", 20)
    bench = Bench()
    one, two = bench.hello("one"), bench.hello("two")
    for counter in range(1, 101):  # batches alternate, so that each has an offset range of its own
        bench.send(batch_of(one, counter, make_delta(f"a{counter}")))
        bench.send(batch_of(two, counter, make_delta(f"b{counter}")))
    for counter in range(1, 101):
        assert bench.pipeline.outcome(one, counter) == 2 * counter - 2
        second = bench.send(batch_of(two, counter, make_delta(f"b{counter}")))
        assert second.result().duplicates == {0: 2 * counter - 1}
        other = bench.send(batch_of(two, counter, make_delta("other")))
        assert refusal_code(other) is ErrorCode.DOT_REUSED


def test_forwarder_gets_first_offsets_evicted_from_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(origins, "OFFSET_RANGES_MAX", 4)
    bench = Bench()
    one, two = bench.hello("one"), bench.hello("two")
    for counter in range(1, 21):
        bench.send(batch_of(one, counter, make_delta(f"a{counter}")))
        bench.send(batch_of(two, counter, make_delta(f"b{counter}")))
    replica = Sender("replica", source=Source.REPLICA)
    for base, count in ((1, 3), (15, 6)):
        receipt = Receipt()
        rows = [make_delta("whatever")] * count
        bench.pipeline.offer(SequencedBatch(batch_of(one, base, *rows), replica, receipt, 5), 0.0)
        assert receipt.result().duplicates == {row: 2 * (base + row) - 2 for row in range(count)}


ROW_COUNTS = st.lists(st.integers(1, 6), min_size=1, max_size=12)


@given(first=ROW_COUNTS, second=ROW_COUNTS, changed_number=st.integers(0, 100), is_changed=st.booleans())
def test_any_rebatched_rows_get_their_exact_first_offsets(
    first: list[int], second: list[int], changed_number: int, is_changed: bool
) -> None:
    bench = Bench()
    origin = bench.hello("p")
    rows = [make_delta(f"v{number}", float(number)) for number in range(sum(first))]
    base = 0
    for count in first:
        bench.send(batch_of(origin, base + 1, *rows[base : base + count]))
        base += count
    changed_row = changed_number % len(rows) if is_changed else None
    base = 0
    for count in second:
        resent_rows = rows[base : base + count]
        if len(resent_rows) < count:
            break
        if changed_row is not None and base <= changed_row < base + count:
            resent_rows[changed_row - base] = make_delta("wrong")
        receipt = bench.send(batch_of(origin, base + 1, *resent_rows))
        if changed_row is not None and base <= changed_row < base + count:
            assert refusal_code(receipt) is ErrorCode.DOT_REUSED
        else:
            assert receipt.result().duplicates == {row: base + row for row in range(count)}
        base += count


FEW_COUNTS = st.lists(st.integers(1, 3), min_size=6, max_size=6)


@given(first=FEW_COUNTS, second=FEW_COUNTS, names=st.lists(st.integers(0, 5), min_size=18, max_size=18))
@example(first=[3], second=[2, 1], names=[0, 1, 0])
def test_resent_rows_with_known_ids_get_offsets_of_first_copies_in_any_batching(
    first: list[int], second: list[int], names: list[int]
) -> None:
    bench = Bench()
    origin = bench.hello("p")
    rows = [replace(make_delta(f"v{name}", float(name)), id=bytes(15) + bytes([name])) for name in names]
    for base, count in zip(accumulate(first, initial=0), first, strict=False):
        bench.send(batch_of(origin, base + 1, *rows[base : base + count]))
    first_offsets = [bench.pipeline.outcome(origin, 1 + names.index(name)) for name in names]
    for base, count in zip(accumulate(second, initial=0), second, strict=False):
        if base + count <= sum(first):
            receipt = bench.send(batch_of(origin, base + 1, *rows[base : base + count]))
            assert receipt.result().duplicates == {row: first_offsets[base + row] for row in range(count)}
            other = replace(rows[base], vector_id="wrong")
            receipt = bench.send(batch_of(origin, base + 1, other, *rows[base + 1 : base + count]))
            assert refusal_code(receipt) is ErrorCode.DOT_REUSED


@pytest.mark.parametrize("fault", ["read", "flip"])
def test_unreadable_log_leaves_the_outcome_unknown(fault: str) -> None:
    async def main() -> None:
        disk = SimDisk(1)
        world = virtual_world(1, disk=disk)
        async with Propagator(data="x", log=SMALL, world=world) as p:
            producer = p.producer("me")
            for number in range(100):
                await producer.publish(make_delta(f"v{number}"))
            batch = p.internals().partition.log.read(3, rows_max=1, bytes_max=1)[0].batch
            assert (await producer.send_frame(batch)).duplicates == {0: 3}
            if fault == "read":
                disk.fail(lambda call: call.name == "read", times=None)
            else:
                disk.flip("streams/default/0/00000000000000000000.log", 3 * batch.size + 140)
            with pytest.raises(Refused) as caught:
                await producer.send_frame(batch)
            assert caught.value.code is ErrorCode.OUTCOME_UNKNOWN
            assert caught.value.retry_after_ms
            disk.heal()

    run_virtual(main)


def test_batch_over_too_many_frames_gets_outcome_unknown() -> None:
    bench = Bench()
    origin = make_origin(77, Priority.NORMAL)
    bench.pipeline.claim([OriginClaim(origin)], "p", 0.0)
    rows = 5_000
    for counter in range(1, rows + 1):
        batch = encode_batch([make_delta("v")], origin=origin, base=counter, epoch=1)
        bench.pipeline.offer(SequencedBatch(batch, Sender("p"), Receipt()), 0.0)
    large_batch = encode_batch(
        [make_delta("v")] * rows, origin=origin, base=1, epoch=1, ack_level=AckLevel.MEMORY
    )
    receipt = Receipt()
    bench.pipeline.offer(SequencedBatch(large_batch, Sender("p"), receipt), 0.0)
    assert refusal_code(receipt) is ErrorCode.OUTCOME_UNKNOWN
