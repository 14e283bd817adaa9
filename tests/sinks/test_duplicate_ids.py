"""If several deltas have one id under different dots, exactly one has an effect, in any order of arrival.

Tests that write files are slow, so they draw fewer histories.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop_sinks import CacheSink, Delivery, IndexSink, ResidentVectors, StorageSink
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Source, create, delete, offset, scale, sparse_add
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.state_rows import encode_states
from tests.sinks.support import FakeLog, apply_all, check_state, oracle, states_at

if TYPE_CHECKING:
    from pathlib import Path


IDS = [bytes([number]) * 16 for number in range(4)]
CHANGES = [create([1, 2]), scale(2), offset(1), sparse_add([0], [5]), delete(), create([7, 7, 7]), scale(-3)]
ORIGINS = (0x20, 0x30, 0x40)


def forward_deltas(log: FakeLog, lamport: int, *deltas: Delta, origin: int = ORIGINS[0]) -> LoggedBatch:
    base = log.counters.get(origin, 0) + 1
    log.counters[origin] = base + len(deltas) - 1
    return log.forward(encode_batch(deltas, origin=origin, base=base), lamport)


def change(number: int, id_: int | None, vector_id: str = "v") -> Delta:
    return Delta(vector_id, CHANGES[number], id=None if id_ is None else IDS[id_])


@st.composite
def histories(draw: st.DrawFn) -> FakeLog:
    """Draw a log of two vectors and few ids, whose rows are mostly forwarded, in any canonical order."""
    log = FakeLog()
    numbers = st.integers(0, len(CHANGES) - 1)
    log.append(Delta("v", create([1, 1])), Delta("w", create([1, 1])))
    for _ in range(draw(st.integers(2, 12))):
        lamport = draw(st.sampled_from([None, *range(1, 40)]))  # None: a local batch
        count = draw(st.sampled_from([1, 1, 1, 2, 6]))
        ids = draw(st.permutations(range(4)))[:count] if count <= 2 and draw(st.booleans()) else None
        names = [draw(st.sampled_from("vvvw")) for _ in range(count)]
        kind = draw(numbers) if count > 2 else None  # one kind: folded as a block
        rows = [
            change(draw(numbers) if kind is None else kind, None if ids is None else ids[row], name)
            for row, name in enumerate(names)
        ]
        if lamport is None:
            if not any(row.id in log.ids for row in rows):
                log.append(*rows)
        else:
            forward_deltas(log, lamport, *rows, origin=draw(st.sampled_from(ORIGINS)))
    return log


def check(actual: dict[Any, Any], batches: list[LoggedBatch]) -> None:
    expected = oracle(batches)
    assert actual.keys() == expected.keys()
    for ref, state in expected.items():
        check_state(actual[ref], state, context=ref)


def states(resident: ResidentVectors) -> dict[Any, Any]:
    return {(namespace, vector_id): state for namespace, vector_id, state in resident.rows()}


@given(log=histories(), bytes_max=st.sampled_from([0, 3_000, 1 << 20]), data=st.data())
def test_any_order_with_duplicates_equals_the_fold(log: FakeLog, bytes_max: int, data: st.DataObject) -> None:
    resident = ResidentVectors(chain_bytes_max=bytes_max)
    resident.enter(log)
    end = 0
    while end < len(log.batches):
        start = data.draw(st.integers(0, end))
        end = data.draw(st.integers(end + 1, len(log.batches)))
        apply_all(resident, [Delivery(logged) for logged in log.batches[start:end]], log)
        check(states(resident), log.batches[:end])


@given(log=histories(), order=st.randoms(use_true_random=False))
def test_services_with_same_deltas_have_same_state(log: FakeLog, order: Any) -> None:
    other = FakeLog(b"other".ljust(16))
    shuffled = list(log.batches)
    order.shuffle(shuffled)
    for logged in shuffled:
        other.forward(logged.batch, logged.lamport)
    other_resident = ResidentVectors(chain_bytes_max=order.choice([0, 1 << 20]))
    other_resident.enter(other)
    apply_all(other_resident, other.deliveries(), other)
    check(states(other_resident), log.batches)


@settings(max_examples=20)
@given(log=histories(), data=st.data())
def test_cache_loading_from_storage_equals_the_fold(log: FakeLog, data: st.DataObject) -> None:
    async def main() -> None:
        resident = ResidentVectors()
        resident.enter(log)

        async def load(namespace: str, vector_id: str) -> Any:
            await anyio.lowlevel.checkpoint()
            return resident.state(namespace, vector_id)

        cache = CacheSink(loader=load, loader_offset=lambda: resident.next_offset)
        await cache.open(log)
        for position, logged in enumerate(log.batches):
            await resident.apply([Delivery(logged)], log)
            await cache.apply([Delivery(logged)])
            expected = oracle(log.batches[: position + 1])
            if data.draw(st.booleans()):
                for ref in expected:
                    check_state(await cache.get(*ref), expected[ref], compare_ignored=False, context=ref)

    anyio.run(main)


def test_row_that_sorts_first_takes_over_the_effect_of_its_id() -> None:
    log = FakeLog()
    forward_deltas(log, 1, Delta("v", create([1, 1])))
    forward_deltas(log, 8, Delta("v", offset(1)))
    forward_deltas(log, 10, change(1, 0))
    log.log_start = 1  # the chain has every row, so the log is not read
    forward_deltas(log, 5, change(1, 0), origin=ORIGINS[1])
    forward_deltas(log, 20, change(1, 0), origin=ORIGINS[2])
    resident = ResidentVectors()
    resident.enter(log)
    apply_all(resident, log.deliveries(), log)
    check(states(resident), log.batches)
    state = resident.state("default", "v")
    assert state is not None
    assert state.vector is not None
    assert (state.vector.tolist(), state.ignored) == ([3, 3], 2)


def test_block_of_duplicate_ids_equals_the_fold() -> None:
    log = FakeLog()
    ids = [bytes([number]) * 16 for number in range(8)]
    rows = [Delta(f"v{number}", scale(2), id=ids[number]) for number in range(8)]
    log.append(*(Delta(f"v{number}", create([1, number])) for number in range(8)))
    log.append(*rows[:6])
    forward_deltas(log, 50, *rows)
    forward_deltas(log, 60, *rows[:6], origin=ORIGINS[1])
    resident = ResidentVectors()
    resident.enter(log)
    apply_all(resident, log.deliveries(), log)
    check(states(resident), log.batches)


@pytest.mark.parametrize("only_known", [True, False])
def test_row_with_compacted_original_has_no_effect_in_frame_of_only_known_ids(only_known: bool) -> None:
    """In any other frame such a row has an effect, since the frame does not show which ids were known."""
    log = FakeLog()
    log.append(Delta("v", create([1, 1]), id=IDS[2]), change(1, 0))
    rows = states_at(log, 2)
    forward_deltas(log, 40, *([] if only_known else [change(2, 1)]), change(1, 0))
    resident = ResidentVectors()
    resident.enter(log)
    resident.begin_rebuild(log)
    resident.clear()
    resident.load_states(rows)
    resident.end_rebuild(log, 2, log.lamport)
    history = log.history

    async def from_state(vectors: Any) -> Any:
        yield LoggedBatch(encode_states(rows), 0, 0, Source.LOCAL), 0
        async for item in history(vectors):
            if item[0].offset >= 2:
                yield item

    log.history = from_state  # type: ignore[method-assign]
    apply_all(resident, log.deliveries(2), log)
    state = resident.state("default", "v")
    assert state is not None
    assert state.vector is not None
    assert state.vector.tolist() == ([2, 2] if only_known else [6, 6])


def test_same_id_on_another_vector_is_not_duplicate() -> None:
    log = FakeLog()
    log.append(Delta("v", create([1, 1]), id=IDS[0]), Delta("w", create([1, 1]), id=IDS[1]))
    forward_deltas(log, 50, Delta("w", scale(2), id=IDS[0]))
    resident = ResidentVectors()
    resident.enter(log)
    apply_all(resident, log.deliveries(), log)
    check(states(resident), log.batches)
    state = resident.state("default", "w")
    assert state is not None
    assert state.ignored == 0


@settings(max_examples=10)
@given(log=histories())
def test_storage_and_index_equal_the_fold_after_restart(
    log: FakeLog, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path: Path = tmp_path_factory.mktemp("duplicates") / "v.db"

    async def main() -> None:
        middle = len(log.batches) // 2
        for batches in (log.batches[:middle], log.batches[middle:]):
            storage = StorageSink(path, mode="through")
            index = IndexSink(resident=storage.resident)
            await storage.open(log)
            await index.open(log)
            for logged in batches:
                await storage.apply([Delivery(logged)])
                await index.apply([Delivery(logged)])
            await index.aclose()
            await storage.aclose()
        storage = StorageSink(path)
        await storage.open(log)
        check({(space, name): state async for space, name, state in storage.rows()}, log.batches)
        check(states(storage.resident), log.batches)
        await storage.aclose()

    anyio.run(main)
