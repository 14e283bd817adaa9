"""Late deltas of a call are folded once, in pieces, and whatever happens between these it is the fold.

Merges as after a cut: what several services wrote on few vectors meanwhile, in one stretch after the other.
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
)
from delta_prop_sinks import refolding as module
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
from tests.sinks.support import FakeLog, applied, check_state, oracle, states_at

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VECTORS = ("a", "b", "c")
ELSEWHERE = (0x20, 0xF000_0000_0000_0030, 0x40)
seeds = st.integers(0, 2**32 - 1)


def operation(random: Random) -> Operation:
    """Mostly sparse, as runs of these are folded at once; numbers that leave float32's range now and then."""
    number = random.choice((0.5, 1.0, -7.3, 0.1, 1e-38, 3e38, -3e38))
    place = random.randrange(4)  # 3 has no effect
    kinds = [sparse_add([place, 0], [number, 1.0]), sparse([place, place], [1.0, number])]
    if random.random() < 0.3:
        kinds = [scale(number), offset(number), create([number] * 3), dense([1, number, 3]), delete()]
        kinds += [opaque(b"bytes"), metadata_only(), create([number] * 4)]
    return random.choice(kinds)


def deltas(random: Random, count: int, *, identified: bool) -> list[Delta]:
    alike = operation(random) if random.random() < 0.5 else None
    drawn = identified and random.random() < 0.6
    ids = [bytes([number]) * 16 for number in random.sample(range(24), count)] if drawn else None
    return [
        Delta(
            random.choice(VECTORS),
            alike or operation(random),
            metadata={"n": random.choice((None, 1, count))} if random.random() < 0.1 else None,
            id=None if ids is None else ids[row],
        )
        for row in range(count)
    ]


def written(log: FakeLog, random: Random, *, ids: bool) -> None:
    """Append local rows from a cut, then rows of other services in order, mixed with new local rows."""
    start = log.lamport + 1
    log.lamport = start + 20
    for _ in range(random.randint(1, 12)):
        rows = deltas(random, random.choice((1, 1, 2, 7)), identified=ids)
        if not any(row.id in log.ids for row in rows):  # else the service makes them void
            log.append(*rows)
    clocks = {origin: start + random.randrange(20) for origin in ELSEWHERE}
    for _ in range(random.randint(1, 20)):
        if random.random() < 0.2:
            log.append(Delta(random.choice(VECTORS), operation(random)))
            continue
        origin = random.choice(ELSEWHERE)
        rows = deltas(random, random.choice((1, 1, 3, 9)), identified=ids)
        base = log.counters.get(origin, 0) + 1
        log.counters[origin] = base + len(rows) - 1
        log.forward(encode_batch(rows, origin=origin, base=base), clocks[origin])
        clocks[origin] += len(rows) + random.randrange(4)


def merges(seed: int, *, ids: bool = False, cuts: int = 2) -> FakeLog:
    log, random = FakeLog(), Random(seed)
    log.append(*(Delta(name, create([1, 2, 3])) for name in VECTORS))
    for _ in range(cuts):
        written(log, random, ids=ids)
    return log


def states(resident: ResidentVectors) -> dict[Any, VectorState]:
    return {(namespace, name): state for namespace, name, state in resident.rows()}


def check(resident: ResidentVectors, expected: dict[Any, VectorState]) -> None:
    found = states(resident)
    assert found.keys() == expected.keys()
    for ref, state in expected.items():
        check_state(found[ref], state, context=ref)


def in_calls(log: FakeLog, random: Random, start: int = 0) -> list[list[Delivery]]:
    """The log's deliveries in calls of any size, each of which may begin with what came before."""
    calls, at = [], start
    while at < len(log.batches):
        begin, at = max(start, at - random.choice((0, 0, 3))), at + random.choice((1, 2, 5, 40))
        calls.append([Delivery(logged) for logged in log.batches[begin:at]])
    return calls


def last_place(log: FakeLog, call: list[Delivery]) -> int:
    return log.batches.index(call[-1].logged) + 1


chain_bytes = st.sampled_from([0, 5_000, 20_000, 1 << 26])


@given(seed=seeds, ids=st.booleans(), bytes_max=chain_bytes)
def test_merges_in_calls_of_any_size_are_the_fold(seed: int, ids: bool, bytes_max: int) -> None:
    log, random = merges(seed, ids=ids), Random(seed)
    resident = ResidentVectors(chain_bytes_max=bytes_max)
    resident.enter(log)
    for call in in_calls(log, random):
        applied(resident, call, log)
        check(resident, oracle(log.batches[: last_place(log, call)]))


def above_state(states: dict[Any, VectorState], batches: Sequence[LoggedBatch]) -> dict[Any, VectorState]:
    """Return states with deltas folded in; deltas older than a state only count."""
    rows: dict[Any, dict[Any, Any]] = {}
    for logged in batches:
        for row, name in enumerate(logged.batch.keys):
            change = (logged.key(row), logged.batch.operation(row), logged.batch.metadata(row))
            rows.setdefault((logged.batch.namespaces[row], name), {})[change[0]] = change
    found = dict(states)
    for ref, changes in rows.items():
        base = states.get(ref, VectorState())
        late = [key for key in changes if base.key is not None and key < base.key]
        onto = with_ignored(base, len(late), base.key)
        found[ref] = fold([changes[key] for key in changes.keys() - set(late)], onto)
    return found


def begin_with(resident: ResidentVectors, log: FakeLog, offset: int) -> None:
    """Have vectors made of the states as of an offset."""
    resident.begin_rebuild(log)
    resident.clear()
    resident.load_states(states_at(log, offset))
    resident.end_rebuild(log, offset, log.lamport)


def states_of_log(log: FakeLog, offset: int) -> None:
    """The log tells of what lies below an offset by states alone."""
    rows, whole = states_at(log, offset), log.history
    frame, log.log_start = LoggedBatch(encode_states(rows), 0, 0, Source.LOCAL), offset

    async def history(vectors: Any) -> Any:
        for row, state in enumerate(rows):
            if state[:2] in vectors:
                yield frame, row
        async for place in whole(vectors):
            yield place

    log.history = history  # type: ignore[method-assign]


@given(seed=seeds, bytes_max=chain_bytes)
def test_merges_above_a_snapshot_are_the_fold_onto_its_states(seed: int, bytes_max: int) -> None:
    log, random = merges(seed), Random(seed)
    end = random.randrange(1, len(log.batches))
    offset = log.batches[end].offset
    base = oracle(log.batches[:end])
    states_of_log(log, offset)
    resident = ResidentVectors(chain_bytes_max=bytes_max)
    resident.enter(log)
    begin_with(resident, log, offset)
    for call in in_calls(log, random, end):
        applied(resident, call, log)
        check(resident, above_state(base, log.batches[end : last_place(log, call)]))


class Ticking(FakeLog):
    """Its clock moves whenever it is looked at, so that work is always due for a rest."""

    def __init__(self) -> None:
        super().__init__()
        self.clock.step = 0.003


def check_heads(resident: ResidentVectors, log: FakeLog) -> None:
    """Each vector is at any time the fold of its deltas up to its head's offset, no more and no less."""
    for namespace, table in resident.tables.items():
        for name, slot in table.slots.items():
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
def test_sinks_at_two_paces_whose_calls_are_cancelled_see_whole_folds(
    seed: int, bytes_max: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random, log = Random(seed), Ticking()
    source = merges(seed)
    log.batches, log.next_offset, log.lamport = source.batches, source.next_offset, source.lamport
    path: Path = tmp_path_factory.mktemp("merges") / "v.db"

    async def bring(sink: StorageSink | IndexSink) -> None:
        for call in in_calls(log, random):
            await anyio.sleep(random.random() * 0.1)
            if sink.apply_now(call):
                continue
            while random.random() < 0.4:
                await call_and_cancel_at(random.randint(0, 6), lambda call=call: sink.apply(call))  # type: ignore[misc]
                check_heads(sink.resident, log)
            await sink.apply(call)
            check_heads(sink.resident, log)

    async def look(storage: StorageSink) -> None:
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
            tasks.start_soon(look, storage)
            async with anyio.create_task_group() as sinks:
                sinks.start_soon(bring, storage)
                sinks.start_soon(bring, index)
            tasks.cancel_scope.cancel()
        check(resident, oracle(log.batches))
        await index.aclose()
        await storage.aclose()
        again = StorageSink(path)
        point = await again.open(log)
        assert point.cursor.next_offset == log.next_offset
        check(again.resident, oracle(log.batches))
        await again.aclose()

    run_virtual(main)


@settings(max_examples=25)
@given(seed=seeds)
def test_a_store_that_dies_amid_a_merge_goes_on_from_its_file(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random, log = Random(seed), Ticking()
    source = merges(seed)
    log.batches, log.next_offset, log.lamport = source.batches, source.next_offset, source.lamport
    path: Path = tmp_path_factory.mktemp("merges") / "v.db"

    async def life(start: int, *, dies: bool) -> int:
        storage = StorageSink(path, flush_s=0.001)
        point = await storage.open(log)
        cursor = point.cursor.next_offset
        assert cursor >= start
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(storage.background)
            place = next((at for at, one in enumerate(log.batches) if one.next_offset > cursor), None)
            for call in in_calls(log, random, len(log.batches) if place is None else place):
                if dies and random.random() < 0.3:
                    await call_and_cancel_at(random.randint(1, 9), lambda call=call: storage.apply(call))  # type: ignore[misc]
                    break
                await storage.apply(call)
            if not dies:
                await storage.flush()
                check(storage.resident, oracle(log.batches))
            tasks.cancel_scope.cancel()
        storage._file.close()  # as a killed process does, whatever was not written
        return cursor

    async def main() -> None:
        start = 0
        for _ in range(4):
            start = await life(start, dies=True)
        await life(start, dies=False)

    run_virtual(main)


@given(seed=seeds, ids=st.booleans())
def test_the_public_fold_is_the_fold(seed: int, ids: bool) -> None:
    log = merges(seed, ids=ids)
    end = Random(seed).randrange(len(log.batches))
    told = oracle(log.batches[: end + 1])
    found = anyio.run(fold_again, log, dict.fromkeys(told, log.batches[end].next_offset - 1))
    assert found.keys() == told.keys()
    for ref, state in told.items():
        check_state(found[ref], state, context=ref)


def test_the_public_fold_of_what_the_log_does_not_tell_stops_the_sink() -> None:
    log = merges(1)
    log.log_start = log.batches[3].offset
    log.batches = [logged for logged in log.batches if not logged.batch.kinds_mask & 1 << 1]
    with pytest.raises(StopSink, match="needs snapshot: vector 'a' must be refolded, and the log lacks"):
        anyio.run(fold_again, log, {("default", "a"): log.next_offset})


# --- what comes between


def late(log: FakeLog, lamport: int, *rows: Delta) -> Delivery:
    base = log.counters.get(ELSEWHERE[0], 0) + 1
    log.counters[ELSEWHERE[0]] = base + len(rows) - 1
    return Delivery(log.forward(encode_batch(rows, origin=ELSEWHERE[0], base=base), lamport))


def own(log: FakeLog, *rows: Delta) -> Delivery:
    return Delivery(log.append(*rows))


def entered(log: FakeLog) -> ResidentVectors:
    resident = ResidentVectors()
    resident.enter(log)
    return resident


def test_what_stands_before_a_rejected_row_is_applied_though_it_comes_late() -> None:
    log = FakeLog()
    resident = entered(log)
    applied(resident, [own(log, Delta("a", create([1]))), own(log, Delta("a", scale(2)))], log)
    call = [late(log, 1, Delta("a", offset(1)), Delta("b", create([5])), Delta("a", Operation(40)))]
    expected = [*log.batches[:2]]
    call.append(late(log, 1, Delta("a", offset(1)), Delta("c", create([6]))))
    with pytest.raises(RejectDelta, match="'a': operation kind 40 is unknown here") as caught:
        applied(resident, call, log)
    assert caught.value.offset == 4
    rows = encode_batch([Delta("a", offset(1)), Delta("b", create([5]))], origin=ELSEWHERE[0], base=1)
    expected.append(LoggedBatch(rows, 2, 1, Source.REPLICA))
    check(resident, oracle(expected))
    assert resident.next_offset == 2, "the call is not done"


@pytest.mark.parametrize("wait", range(1, 5))
def test_what_a_cancelled_call_had_begun_is_in_no_later_fold(wait: int) -> None:
    log = FakeLog()
    resident = entered(log)
    applied(resident, [own(log, Delta("a", create([1]))), own(log, Delta("a", scale(2)))], log)
    lost = late(log, 1, Delta("a", offset(7)))
    log.clock.step = 0.005

    async def main() -> None:
        done = await call_and_cancel_at(wait, lambda: resident.apply([lost], log))
        if not done.returned:
            log.batches.remove(lost.logged)  # it never comes again: its sink was told to go on elsewhere

    run_virtual(main)
    log.clock.step = 0.0
    for _ in range(2 * SAVEPOINT_ENTRIES):
        applied(resident, [own(log, Delta("a", sparse_add([0], [1])))], log)
    applied(resident, [late(log, 1, Delta("a", offset(3)))], log)
    check(resident, oracle(log.batches))


def test_a_fold_ends_where_its_vectors_are_made_anew_meanwhile() -> None:
    log = FakeLog()
    resident = entered(log)
    applied(resident, [own(log, Delta("a", create([1]))), own(log, Delta("a", scale(2)))], log)
    rows, end = states_at(log, 2), log.next_offset
    call = [late(log, 1, Delta("a", offset(7)))]
    log.clock.step = 0.005

    async def rebuild() -> None:
        other = object()
        resident.begin_rebuild(other)  # type: ignore[arg-type]
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
    applied(resident, call, log)
    check(resident, oracle(log.batches))


def test_nothing_is_folded_at_once_while_a_fold_rests() -> None:
    log = FakeLog()
    resident = entered(log)
    applied(resident, [own(log, Delta("a", create([1]))), own(log, Delta("a", scale(2)))], log)
    call, behind = [late(log, 1, Delta("a", offset(7)))], own(log, Delta("b", create([1])))
    log.clock.step = 0.005
    told: list[object] = []

    async def other() -> None:
        told.append(resident.apply_now([behind], log))
        told.append(await resident.apply([behind], log))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            told.append(await resident.apply(call, log))

    run_virtual(main)
    assert told == [False, 1, 1]
    check(resident, oracle(log.batches))


def test_a_row_that_comes_late_is_not_folded_at_once() -> None:
    log = FakeLog()
    resident = entered(log)
    assert resident.apply_now([own(log, Delta("a", create([1]))), own(log, Delta("a", scale(2)))], log)
    assert resident.apply_now([late(log, 9, Delta("b", create([1])))], log), "this one does not"
    call = [late(log, 1, Delta("a", offset(7)), Delta("b", scale(2)))]
    assert not resident.apply_now(call, log)
    assert resident.next_offset == 3
    check(resident, oracle(log.batches[:3]))
    applied(resident, call, log)
    check(resident, oracle(log.batches))


def test_rows_beneath_a_state_count_in_every_mark_of_its_chain() -> None:
    log = FakeLog()
    applied(entered(log), [own(log, Delta("a", create([1])))], log)
    resident, base = entered(log), oracle(log.batches)
    states_of_log(log, 1)
    begin_with(resident, log, 1)
    log.lamport = 50
    calls = [[late(log, 40, Delta("a", offset(1)))], [late(log, 0, Delta("a", scale(7)))]]
    calls += [[own(log, Delta("a", sparse_add([0], [1])))] for _ in range(3 * SAVEPOINT_ENTRIES)]
    calls += [[late(log, 41, Delta("a", offset(1)))], [late(log, 0, Delta("a", scale(5)))]]
    calls += [[late(log, 90, Delta("a", scale(5)))], [late(log, 42, Delta("a", scale(-1)))]]
    for call in calls:
        applied(resident, call, log)
        check(resident, above_state(base, log.batches[1 : last_place(log, call)]))
    assert resident.statistics().beneath_snapshot == 2
    assert resident.statistics().log_passes == 1


# --- how much work it is


def cut_apart(count: int, vectors: int) -> FakeLog:
    """As many deltas from here as from elsewhere, one a batch, of kinds that do not commute."""
    log = FakeLog()
    names = [f"v{number}" for number in range(vectors)]
    log.append(*(Delta(name, create([1, 2, 3])) for name in names))
    start = log.lamport + 1
    changes = (sparse_add([0], [1]), sparse([1, 0], [3, 2]), scale(-1), sparse_add([2, 1], [1, 1]))
    for number in range(count):
        log.append(Delta(names[number % vectors], changes[number // vectors % 4]))
    for number in range(count):
        delta = Delta(names[number % vectors], changes[number // vectors % 4])
        log.forward(encode_batch([delta], origin=ELSEWHERE[0], base=number + 1), start + number)
    return log


@pytest.mark.parametrize("calls", [5, 20])
def test_a_merge_reads_the_log_once_and_folds_what_lies_behind_once_a_call(calls: int) -> None:
    count, vectors = 1_000, 10
    log = cut_apart(count, vectors)
    resident = ResidentVectors()
    resident.enter(log)
    applied(resident, [Delivery(logged) for logged in log.batches[: count + 1]], log)
    size = count // calls
    for begin in range(count + 1, 2 * count + 1, size):
        applied(resident, [Delivery(logged) for logged in log.batches[begin : begin + size]], log)
    check(resident, oracle(log.batches))
    told = resident.statistics()
    print(f"{told.refolded / count:.1f} deltas folded for each that came late, in {calls} calls")
    assert (told.log_passes, told.refolded_from_log, told.late) == (1, vectors, count)
    assert told.refolded <= 2 * (count + calls * count)


def test_vectors_whose_past_is_too_much_for_one_reading_are_read_one_after_the_other() -> None:
    log = cut_apart(400, 4)
    resident = ResidentVectors(chain_bytes_max=150_000)
    resident.enter(log)
    applied(resident, [Delivery(logged) for logged in log.batches[:401]], log)
    applied(resident, [Delivery(logged) for logged in log.batches[401:]], log)
    check(resident, oracle(log.batches))
    told = resident.statistics()
    assert 1 < told.log_passes <= 4
    assert told.chain_bytes <= 150_000


def test_many_vectors_are_read_at_once_though_one_batch_made_them_all() -> None:
    log = FakeLog()
    log.append(*(Delta(f"v{number}", create([number, 1])) for number in range(2_000)))
    start = log.lamport + 1
    for number in range(2_000):
        log.append(Delta(f"v{number}", scale(2)))
    for number in range(2_000):
        rows = [Delta(f"v{number}", offset(1))]
        log.forward(encode_batch(rows, origin=ELSEWHERE[0], base=number + 1), start + number)
    resident = ResidentVectors(chain_bytes_max=8 << 20)
    resident.enter(log)
    applied(resident, [Delivery(logged) for logged in log.batches[:2_001]], log)
    applied(resident, [Delivery(logged) for logged in log.batches[2_001:]], log)
    check(resident, oracle(log.batches))
    told = resident.statistics()
    assert (told.log_passes, told.refolded_from_log, told.refolded) == (1, 2_000, 6_000)


def test_a_fold_that_takes_long_lets_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    log = cut_apart(600, 1)
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
        log.clock.step = 0.005  # now everything takes long
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(count)
            await resident.apply([Delivery(logged) for logged in log.batches[601:]], log)
            tasks.cancel_scope.cancel()

    run_virtual(main)
    check(resident, oracle(log.batches))
    assert turns > 1_200 / module._STEP_ENTRIES


# --- chains


@given(count=st.integers(1, 400), data=st.data())
def test_marks_are_few_and_never_far_behind_a_change(count: int, data: st.DataObject) -> None:
    batch = encode_batch([Delta("a", scale(1))], origin=1, base=1)
    chain = DeltaChain(ChainBase())
    for number in range(count):
        chain.append(Entry((10 * number, 1, 1), LoggedBatch(batch, number, 10 * number, Source.LOCAL), 0))
        if len(chain.entries) >= chain.savepoint_at:
            chain.add_savepoint(len(chain.entries), ChainBase())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, 10 * count))
        with suppress(AssertionError):
            entry = Entry((at, 0, 1), LoggedBatch(batch, count + at, at, Source.REPLICA), 0)
            assert chain.can_insert(entry)
            chain.insert(entry)
        end, changed = len(chain.entries), chain.first_changed
        if changed is None:
            continue
        place, _ = chain.last_savepoint()
        assert place <= changed
        assert end - place <= 2 * (end - changed) + 2 * SAVEPOINT_ENTRIES
        for mark in reversed(chain.savepoint_positions()):
            chain.add_savepoint(mark, ChainBase())
        chain.first_changed = None
        assert len(chain._savepoints) <= 2 * end.bit_length()
