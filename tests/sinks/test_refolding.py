"""Refolding: late deltas of a call are folded once, in slices; interruptions between slices change no state.

A late delta is a forwarded one that sorts before a delta of its vector that is folded already.
The logs are merges after a network cut: deltas that several services appended meanwhile to few vectors, one
service after the other.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.testing import run_virtual
from delta_prop_sinks import (
    Delivery,
    IndexSink,
    RejectDelta,
    ResidentVectors,
    StopSink,
    StorageSink,
    TryAgain,
    fold_again,
    refolding,
)
from delta_prop_sinks.conformance.steps import call_and_cancel_at
from delta_prop_sinks.delta_chain import SAVEPOINT_ENTRIES, ChainBase, DeltaChain, Entry
from delta_prop_wire.algebra import VectorState, fold, with_ignored
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import (
    Delta,
    Operation,
    Source,
    create,
    delete,
    dense,
    metadata_only,
    offset,
    opaque,
    scale,
    sparse,
    sparse_add,
)
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.state_rows import encode_states
from tests.sinks.support import FakeLog, abandon, apply_all, check_state, oracle, states_at

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VECTORS = ("a", "b", "c")
REMOTE_ORIGINS = (0x20, 0xF000_0000_0000_0030, 0x40)
seeds = st.integers(0, 2**32 - 1)


def operation(random: Random) -> Operation:
    """Return a mostly sparse operation, as sparse rows fold in runs; some numbers exceed float32."""
    number = random.choice((0.5, 1.0, -7.3, 0.1, 1e-38, 3e38, -3e38))
    index = random.randrange(4)  # index 3 has no effect
    candidates = [sparse_add([index, 0], [number, 1.0]), sparse([index, index], [1.0, number])]
    if random.random() < 0.3:
        candidates = [scale(number), offset(number), create([number] * 3), dense([1, number, 3]), delete()]
        candidates += [opaque(b"bytes"), metadata_only(), create([number] * 4)]
    return random.choice(candidates)


def deltas(random: Random, count: int, *, identified: bool) -> list[Delta]:
    shared = operation(random) if random.random() < 0.5 else None
    has_ids = identified and random.random() < 0.6
    ids = [bytes([number]) * 16 for number in random.sample(range(24), count)] if has_ids else None
    return [
        Delta(
            random.choice(VECTORS),
            shared or operation(random),
            metadata={"n": random.choice((None, 1, count))} if random.random() < 0.1 else None,
            id=None if ids is None else ids[row],
        )
        for row in range(count)
    ]


def append_concurrent_rows(log: FakeLog, random: Random, *, with_ids: bool) -> None:
    """Append local rows since a network cut, then rows of other services, mixed with new local rows."""
    start = log.lamport + 1
    log.lamport = start + 20
    for _ in range(random.randint(1, 12)):
        rows = deltas(random, random.choice((1, 1, 2, 7)), identified=with_ids)
        if not any(row.id in log.ids for row in rows):  # else the service logs them as no-ops
            log.append(*rows)
    clocks = {origin: start + random.randrange(20) for origin in REMOTE_ORIGINS}
    for _ in range(random.randint(1, 20)):
        if random.random() < 0.2:
            log.append(Delta(random.choice(VECTORS), operation(random)))
            continue
        origin = random.choice(REMOTE_ORIGINS)
        rows = deltas(random, random.choice((1, 1, 3, 9)), identified=with_ids)
        base = log.counters.get(origin, 0) + 1
        log.counters[origin] = base + len(rows) - 1
        log.forward(encode_batch(rows, origin=origin, base=base), clocks[origin])
        clocks[origin] += len(rows) + random.randrange(4)


def merged_log(seed: int, *, with_ids: bool = False, network_cuts: int = 2) -> FakeLog:
    log, random = FakeLog(), Random(seed)
    log.append(*(Delta(name, create([1, 2, 3])) for name in VECTORS))
    for _ in range(network_cuts):
        append_concurrent_rows(log, random, with_ids=with_ids)
    return log


def states(resident: ResidentVectors) -> dict[Any, VectorState]:
    return {(namespace, name): state for namespace, name, state in resident.rows()}


def check(resident: ResidentVectors, expected: dict[Any, VectorState]) -> None:
    actual = states(resident)
    assert actual.keys() == expected.keys()
    for ref, state in expected.items():
        check_state(actual[ref], state, context=ref)


def split_into_calls(log: FakeLog, random: Random, start: int = 0) -> list[list[Delivery]]:
    """Split the log's deliveries into calls of any size, some of which begin with redelivered batches."""
    calls, end = [], start
    while end < len(log.batches):
        first, end = max(start, end - random.choice((0, 0, 3))), end + random.choice((1, 2, 5, 40))
        calls.append([Delivery(logged) for logged in log.batches[first:end]])
    return calls


def end_position(log: FakeLog, call: list[Delivery]) -> int:
    return log.batches.index(call[-1].logged) + 1


chain_bytes = st.sampled_from([0, 5_000, 20_000, 1 << 26])


@given(seed=seeds, with_ids=st.booleans(), bytes_max=chain_bytes)
def test_merges_in_calls_of_any_size_equal_the_fold(seed: int, with_ids: bool, bytes_max: int) -> None:
    log, random = merged_log(seed, with_ids=with_ids), Random(seed)
    resident = ResidentVectors(chain_bytes_max=bytes_max)
    resident.enter(log)
    for call in split_into_calls(log, random):
        apply_all(resident, call, log)
        check(resident, oracle(log.batches[: end_position(log, call)]))


def fold_onto_states(
    states: dict[Any, VectorState], batches: Sequence[LoggedBatch]
) -> dict[Any, VectorState]:
    """Return states with deltas folded in; deltas older than a state are only counted."""
    rows: dict[Any, dict[Any, Any]] = {}
    for logged in batches:
        for row, name in enumerate(logged.batch.keys):
            change = (logged.key(row), logged.batch.operation(row), logged.batch.metadata(row))
            rows.setdefault((logged.batch.namespaces[row], name), {})[change[0]] = change
    states_after = dict(states)
    for ref, changes in rows.items():
        base = states.get(ref, VectorState())
        older = [key for key in changes if base.key is not None and key < base.key]
        folded_base = with_ignored(base, len(older), base.key)
        states_after[ref] = fold([changes[key] for key in changes.keys() - set(older)], folded_base)
    return states_after


def load_snapshot(resident: ResidentVectors, log: FakeLog, offset: int) -> None:
    """Rebuild vectors from the states as of an offset."""
    resident.begin_rebuild(log)
    resident.clear()
    resident.load_states(states_at(log, offset))
    resident.end_rebuild(log, offset, log.lamport)


def replace_prefix_by_states(log: FakeLog, offset: int) -> None:
    """Replace the log's history below an offset by the states as of that offset."""
    rows, full_history = states_at(log, offset), log.history
    frame, log.log_start = LoggedBatch(encode_states(rows), 0, 0, Source.LOCAL), offset

    async def history(vectors: Any) -> Any:
        for row, state in enumerate(rows):
            if state[:2] in vectors:
                yield frame, row
        async for item in full_history(vectors):
            yield item

    log.history = history  # type: ignore[method-assign]


@given(seed=seeds, bytes_max=chain_bytes)
def test_merges_above_snapshot_equal_fold_onto_its_states(seed: int, bytes_max: int) -> None:
    log, random = merged_log(seed), Random(seed)
    end = random.randrange(1, len(log.batches))
    offset = log.batches[end].offset
    base = oracle(log.batches[:end])
    replace_prefix_by_states(log, offset)
    resident = ResidentVectors(chain_bytes_max=bytes_max)
    resident.enter(log)
    load_snapshot(resident, log, offset)
    for call in split_into_calls(log, random, end):
        apply_all(resident, call, log)
        check(resident, fold_onto_states(base, log.batches[end : end_position(log, call)]))


class TickingLog(FakeLog):
    """A log whose clock advances at each reading, so that work always has to yield."""

    def __init__(self) -> None:
        super().__init__()
        self.clock.step = 0.003


def check_heads(resident: ResidentVectors, log: FakeLog) -> None:
    """Assert that each vector is exactly the fold of its deltas up to its head's offset."""
    for namespace, table in resident.tables.items():
        for name, slot in table.vectors():
            end = table.head(slot)[3]
            batches = [logged for logged in log.batches if logged.offset <= end]
            rows = [
                (logged.key(row), logged.batch.operation(row), logged.batch.metadata(row))
                for logged in batches
                for row, key in enumerate(logged.batch.keys)
                if key == name and logged.batch.namespaces[row] == namespace and logged.offset + row <= end
            ]
            state = resident.state(namespace, name)
            if rows or state is not None:
                check_state(state, fold(rows), context=(namespace, name, end))


@settings(max_examples=25)
@given(seed=seeds, bytes_max=chain_bytes)
def test_cancelled_calls_of_two_sinks_leave_complete_folds(
    seed: int, bytes_max: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random, log = Random(seed), TickingLog()
    source = merged_log(seed)
    log.batches, log.next_offset, log.lamport = source.batches, source.next_offset, source.lamport
    path: Path = tmp_path_factory.mktemp("merges") / "v.db"

    async def deliver(sink: StorageSink | IndexSink) -> None:
        for call in split_into_calls(log, random):
            await anyio.sleep(random.random() * 0.1)
            if sink.apply_now(call):
                continue
            while random.random() < 0.4:
                await call_and_cancel_at(random.randint(0, 6), lambda call=call: sink.apply(call))  # type: ignore[misc]
                check_heads(sink.resident, log)
            await sink.apply(call)
            check_heads(sink.resident, log)

    async def check_continuously(storage: StorageSink) -> None:
        while True:
            await anyio.sleep(random.random() * 0.01)
            check_heads(storage.resident, log)
            await storage.flush()

    async def main() -> None:
        resident = ResidentVectors(chain_bytes_max=bytes_max)
        storage, index = StorageSink(path, resident=resident), IndexSink(resident=resident)
        await storage.open(log)
        await index.open(log)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(check_continuously, storage)
            async with anyio.create_task_group() as sinks:
                sinks.start_soon(deliver, storage)
                sinks.start_soon(deliver, index)
            tasks.cancel_scope.cancel()
        check(resident, oracle(log.batches))
        await index.aclose()
        await storage.aclose()
        reopened = StorageSink(path)
        point = await reopened.open(log)
        assert point.cursor.next_offset == log.next_offset
        check(reopened.resident, oracle(log.batches))
        await reopened.aclose()

    run_virtual(main)


@settings(max_examples=25)
@given(seed=seeds)
def test_storage_killed_during_merge_resumes_from_its_file(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random, log = Random(seed), TickingLog()
    source = merged_log(seed)
    log.batches, log.next_offset, log.lamport = source.batches, source.next_offset, source.lamport
    path: Path = tmp_path_factory.mktemp("merges") / "v.db"

    async def run_process(start: int, *, is_killed: bool) -> int:
        storage = StorageSink(path, flush_s=0.001)
        point = await storage.open(log)
        cursor = point.cursor.next_offset
        assert cursor >= start
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(storage.background)
            position = next(
                (number for number, logged in enumerate(log.batches) if logged.next_offset > cursor), None
            )
            for call in split_into_calls(log, random, len(log.batches) if position is None else position):
                if is_killed and random.random() < 0.3:
                    await call_and_cancel_at(random.randint(1, 9), lambda call=call: storage.apply(call))  # type: ignore[misc]
                    break
                await storage.apply(call)
            if not is_killed:
                await storage.flush()
                check(storage.resident, oracle(log.batches))
            tasks.cancel_scope.cancel()
        abandon(storage)
        return cursor

    async def main() -> None:
        start = 0
        for _ in range(4):
            start = await run_process(start, is_killed=True)
        await run_process(start, is_killed=False)

    run_virtual(main)


@given(seed=seeds, with_ids=st.booleans())
def test_public_refold_equals_the_fold(seed: int, with_ids: bool) -> None:
    log = merged_log(seed, with_ids=with_ids)
    end = Random(seed).randrange(len(log.batches))
    expected = oracle(log.batches[: end + 1])
    actual = anyio.run(fold_again, log, dict.fromkeys(expected, log.batches[end].next_offset - 1))
    assert actual.keys() == expected.keys()
    for ref, state in expected.items():
        check_state(actual[ref], state, context=ref)


def test_public_refold_stops_the_sink_if_log_lacks_rows() -> None:
    log = merged_log(1)
    log.log_start = log.batches[3].offset
    log.batches = [logged for logged in log.batches if not logged.batch.kinds_mask & 1 << 1]
    with pytest.raises(StopSink, match="needs snapshot: vector 'a' must be refolded, and the log lacks"):
        anyio.run(fold_again, log, {("default", "a"): log.next_offset})


# --- interruptions between the slices of a fold


def late_delivery(log: FakeLog, lamport: int, *rows: Delta) -> Delivery:
    base = log.counters.get(REMOTE_ORIGINS[0], 0) + 1
    log.counters[REMOTE_ORIGINS[0]] = base + len(rows) - 1
    return Delivery(log.forward(encode_batch(rows, origin=REMOTE_ORIGINS[0], base=base), lamport))


def local_delivery(log: FakeLog, *rows: Delta) -> Delivery:
    return Delivery(log.append(*rows))


def make_resident(log: FakeLog) -> ResidentVectors:
    resident = ResidentVectors()
    resident.enter(log)
    return resident


def test_late_rows_before_a_rejected_row_are_applied() -> None:
    log = FakeLog()
    resident = make_resident(log)
    apply_all(
        resident,
        [local_delivery(log, Delta("a", create([1]))), local_delivery(log, Delta("a", scale(2)))],
        log,
    )
    call = [late_delivery(log, 1, Delta("a", offset(1)), Delta("b", create([5])), Delta("a", Operation(40)))]
    expected = [*log.batches[:2]]
    call.append(late_delivery(log, 1, Delta("a", offset(1)), Delta("c", create([6]))))
    with pytest.raises(RejectDelta, match="'a': operation kind 40 is unknown here") as caught:
        apply_all(resident, call, log)
    assert caught.value.offset == 4
    rows = encode_batch([Delta("a", offset(1)), Delta("b", create([5]))], origin=REMOTE_ORIGINS[0], base=1)
    expected.append(LoggedBatch(rows, 2, 1, Source.REPLICA))
    check(resident, oracle(expected))
    assert resident.next_offset == 2, "the failed call has moved the offset"


@pytest.mark.parametrize("await_number", range(1, 5))
def test_rows_of_cancelled_call_are_in_no_later_fold(await_number: int) -> None:
    log = FakeLog()
    resident = make_resident(log)
    apply_all(
        resident,
        [local_delivery(log, Delta("a", create([1]))), local_delivery(log, Delta("a", scale(2)))],
        log,
    )
    lost = late_delivery(log, 1, Delta("a", offset(7)))
    log.clock.step = 0.005

    async def main() -> None:
        done = await call_and_cancel_at(await_number, lambda: resident.apply([lost], log))
        if not done.returned:
            log.batches.remove(lost.logged)  # it is not redelivered: its sink resumes elsewhere

    run_virtual(main)
    log.clock.step = 0.0
    for _ in range(2 * SAVEPOINT_ENTRIES):
        apply_all(resident, [local_delivery(log, Delta("a", sparse_add([0], [1])))], log)
    apply_all(resident, [late_delivery(log, 1, Delta("a", offset(3)))], log)
    check(resident, oracle(log.batches))


def test_fold_stops_when_its_vectors_are_rebuilt() -> None:
    log = FakeLog()
    resident = make_resident(log)
    apply_all(
        resident,
        [local_delivery(log, Delta("a", create([1]))), local_delivery(log, Delta("a", scale(2)))],
        log,
    )
    rows, end = states_at(log, 2), log.next_offset
    call = [late_delivery(log, 1, Delta("a", offset(7)))]
    log.clock.step = 0.005

    async def rebuild() -> None:
        other_sink = object()
        resident.begin_rebuild(other_sink)  # type: ignore[arg-type]
        resident.clear()
        resident.load_states(rows)
        resident.end_rebuild(log, end, log.lamport)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rebuild)
            with pytest.raises(TryAgain, match="the vectors were rebuilt while deltas were folded"):
                await resident.apply(call, log)

    run_virtual(main)
    assert resident.next_offset == end
    check(resident, oracle(log.batches[:2]))
    apply_all(resident, call, log)
    check(resident, oracle(log.batches))


def test_apply_now_declines_while_a_fold_is_suspended() -> None:
    log = FakeLog()
    resident = make_resident(log)
    apply_all(
        resident,
        [local_delivery(log, Delta("a", create([1]))), local_delivery(log, Delta("a", scale(2)))],
        log,
    )
    call, following = (
        [late_delivery(log, 1, Delta("a", offset(7)))],
        local_delivery(log, Delta("b", create([1]))),
    )
    log.clock.step = 0.005
    results: list[object] = []

    async def deliver_following() -> None:
        results.append(resident.apply_now([following], log))
        results.append(await resident.apply([following], log))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deliver_following)
            results.append(await resident.apply(call, log))

    run_virtual(main)
    assert results == [False, 1, 1]
    check(resident, oracle(log.batches))


def test_apply_now_declines_late_rows() -> None:
    log = FakeLog()
    resident = make_resident(log)
    assert resident.apply_now(
        [local_delivery(log, Delta("a", create([1]))), local_delivery(log, Delta("a", scale(2)))], log
    )
    assert resident.apply_now([late_delivery(log, 9, Delta("b", create([1])))], log), (
        "a call without late rows was declined"
    )
    call = [late_delivery(log, 1, Delta("a", offset(7)), Delta("b", scale(2)))]
    assert not resident.apply_now(call, log)
    assert resident.next_offset == 3
    check(resident, oracle(log.batches[:3]))
    apply_all(resident, call, log)
    check(resident, oracle(log.batches))


def test_rows_below_a_state_are_counted_in_every_savepoint() -> None:
    log = FakeLog()
    apply_all(make_resident(log), [local_delivery(log, Delta("a", create([1])))], log)
    resident, base = make_resident(log), oracle(log.batches)
    replace_prefix_by_states(log, 1)
    load_snapshot(resident, log, 1)
    log.lamport = 50
    calls = [[late_delivery(log, 40, Delta("a", offset(1)))], [late_delivery(log, 0, Delta("a", scale(7)))]]
    calls += [[local_delivery(log, Delta("a", sparse_add([0], [1])))] for _ in range(3 * SAVEPOINT_ENTRIES)]
    calls += [[late_delivery(log, 41, Delta("a", offset(1)))], [late_delivery(log, 0, Delta("a", scale(5)))]]
    calls += [[late_delivery(log, 90, Delta("a", scale(5)))], [late_delivery(log, 42, Delta("a", scale(-1)))]]
    for call in calls:
        apply_all(resident, call, log)
        check(resident, fold_onto_states(base, log.batches[1 : end_position(log, call)]))
    assert resident.statistics().below_snapshot == 2
    assert resident.statistics().log_passes == 1


# --- amount of work


def partitioned_log(count: int, vector_count: int) -> FakeLog:
    """Return a log of as many local as forwarded deltas, one per batch, of kinds that do not commute."""
    log = FakeLog()
    names = [f"v{number}" for number in range(vector_count)]
    log.append(*(Delta(name, create([1, 2, 3])) for name in names))
    start = log.lamport + 1
    changes = (sparse_add([0], [1]), sparse([1, 0], [3, 2]), scale(-1), sparse_add([2, 1], [1, 1]))
    for number in range(count):
        log.append(Delta(names[number % vector_count], changes[number // vector_count % 4]))
    for number in range(count):
        delta = Delta(names[number % vector_count], changes[number // vector_count % 4])
        log.forward(encode_batch([delta], origin=REMOTE_ORIGINS[0], base=number + 1), start + number)
    return log


@pytest.mark.parametrize("call_count", [5, 20])
def test_merge_reads_log_once_and_refolds_once_per_call(call_count: int) -> None:
    count, vector_count = 1_000, 10
    log = partitioned_log(count, vector_count)
    resident = ResidentVectors()
    resident.enter(log)
    apply_all(resident, [Delivery(logged) for logged in log.batches[: count + 1]], log)
    size = count // call_count
    for start in range(count + 1, 2 * count + 1, size):
        apply_all(resident, [Delivery(logged) for logged in log.batches[start : start + size]], log)
    check(resident, oracle(log.batches))
    statistics = resident.statistics()
    print(f"{statistics.refolded / count:.1f} deltas folded per late delta, in {call_count} calls")
    assert (statistics.log_passes, statistics.refolded_from_log, statistics.out_of_order) == (
        1,
        vector_count,
        count,
    )
    assert statistics.refolded <= 2 * (count + call_count * count)


def test_large_histories_are_read_in_several_passes() -> None:
    log = partitioned_log(400, 4)
    resident = ResidentVectors(chain_bytes_max=150_000)
    resident.enter(log)
    apply_all(resident, [Delivery(logged) for logged in log.batches[:401]], log)
    apply_all(resident, [Delivery(logged) for logged in log.batches[401:]], log)
    check(resident, oracle(log.batches))
    statistics = resident.statistics()
    assert 1 < statistics.log_passes <= 4
    assert statistics.chain_bytes <= 150_000


def test_many_vectors_of_one_batch_are_read_in_one_pass() -> None:
    log = FakeLog()
    log.append(*(Delta(f"v{number}", create([number, 1])) for number in range(2_000)))
    start = log.lamport + 1
    for number in range(2_000):
        log.append(Delta(f"v{number}", scale(2)))
    for number in range(2_000):
        rows = [Delta(f"v{number}", offset(1))]
        log.forward(encode_batch(rows, origin=REMOTE_ORIGINS[0], base=number + 1), start + number)
    resident = ResidentVectors(chain_bytes_max=8 << 20)
    resident.enter(log)
    apply_all(resident, [Delivery(logged) for logged in log.batches[:2_001]], log)
    apply_all(resident, [Delivery(logged) for logged in log.batches[2_001:]], log)
    check(resident, oracle(log.batches))
    statistics = resident.statistics()
    assert (statistics.log_passes, statistics.refolded_from_log, statistics.refolded) == (1, 2_000, 6_000)


def test_long_fold_yields_to_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    log = partitioned_log(600, 1)
    resident = ResidentVectors()
    resident.enter(log)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await anyio.sleep(0.001)
            turns += 1

    async def main() -> None:
        await resident.apply([Delivery(logged) for logged in log.batches[:601]], log)
        log.clock.step = 0.005  # from now on every step is slow
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(count)
            await resident.apply([Delivery(logged) for logged in log.batches[601:]], log)
            tasks.cancel_scope.cancel()

    run_virtual(main)
    check(resident, oracle(log.batches))
    assert turns > 1_200 / refolding._STEP_ENTRIES


# --- chains


@given(count=st.integers(1, 400), data=st.data())
def test_savepoints_are_few_and_close_to_a_change(count: int, data: st.DataObject) -> None:
    batch = encode_batch([Delta("a", scale(1))], origin=1, base=1)
    chain = DeltaChain(ChainBase())
    for number in range(count):
        chain.append(Entry((10 * number, 1, 1), LoggedBatch(batch, number, 10 * number, Source.LOCAL), 0))
        if len(chain.entries) >= chain.savepoint_at:
            chain.add_savepoint(len(chain.entries), ChainBase())
    for _ in range(data.draw(st.integers(1, 5))):
        lamport = data.draw(st.integers(0, 10 * count))
        with suppress(AssertionError):
            entry = Entry((lamport, 0, 1), LoggedBatch(batch, count + lamport, lamport, Source.REPLICA), 0)
            assert chain.can_insert(entry)
            chain.insert(entry)
        end, changed = len(chain.entries), chain.first_changed
        if changed is None:
            continue
        savepoint, _ = chain.last_savepoint()
        assert savepoint <= changed
        assert end - savepoint <= 2 * (end - changed) + 2 * SAVEPOINT_ENTRIES
        for position in reversed(chain.savepoint_positions()):
            chain.add_savepoint(position, ChainBase())
        chain.first_changed = None
        assert len(chain._savepoints) <= 2 * end.bit_length()
