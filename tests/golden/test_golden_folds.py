"""The golden folds: the file equals its generator's output, and every implementation of the fold agrees.

The implementations: reference fold, state rows, index in memory, storage file, compaction; in several orders
and groupings.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import Delivery, IndexSink, RejectDelta, StorageSink
from delta_prop_sinks.vector_table import FOLDED_KINDS
from delta_prop_wire.algebra import VectorState, fold
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.codec import decode, encode
from delta_prop_wire.delta import Kind, Source, delete
from delta_prop_wire.errors import InvalidDelta
from delta_prop_wire.frames import DeltaFrame
from delta_prop_wire.state_rows import StateRow, encode_states, state_of
from delta_prop_wire.validate import validate_batch, validate_delta
from tests.broker.durable import commit, open_log
from tests.broker.test_compaction import TINY, compact_segments, sealed_segments, states
from tests.golden.fold_histories import HISTORY_COUNT, NAMESPACE, Change, change, histories
from tests.golden.folds import (
    PATH,
    batch_of,
    check_canonical,
    format_file,
    format_state,
    later_copies,
    refused_field,
)
from tests.sinks.support import FakeLog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from delta_prop_sinks import Sink

GOLDEN = {entry["name"]: entry for entry in json.loads(PATH.read_text(encoding="utf-8"))["histories"]}
CHANGES = dict(histories())


def test_golden_file_equals_generated_file() -> None:
    assert PATH.read_text(encoding="utf-8") == format_file()
    assert len(GOLDEN) == HISTORY_COUNT


def test_histories_cover_all_operations_and_edge_numbers() -> None:
    deltas = [delta for entry in GOLDEN.values() for delta in entry["deltas"]]
    assert {*map(int, Kind), 10, 63} <= {delta["op"] for delta in deltas}
    states = [state for entry in GOLDEN.values() for state in entry["states"].values()]
    for state in states:
        check_canonical(bytes.fromhex(state["metadata"]))
    numbers = np.frombuffer(bytes.fromhex("".join(state.get("values", "") for state in states)), "<u4")
    for word in (0x80000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00000001, 0x807FFFFF):
        assert word in numbers, hex(word)
    assert ((numbers >> 23 & 0xFF) < 0xFF).all(), "a number that is not finite"
    assert {state["op"] for state in states} == {Kind.CREATE, Kind.OPAQUE, Kind.DELETE}


@pytest.mark.parametrize(
    "name", [name for name, entry in GOLDEN.items() if "refused" in str(entry["deltas"])]
)
def test_refused_deltas_are_refused_as_batch_and_as_delta_frame(name: str) -> None:
    for entry, golden in zip(CHANGES[name], GOLDEN[name]["deltas"], strict=True):
        if "refused" not in golden:
            continue
        batch = batch_of([entry])
        with pytest.raises(InvalidDelta) as caught:
            validate_batch(batch)
        frame = decode(encode(DeltaFrame(1, batch.delta(0))))
        assert isinstance(frame, DeltaFrame)
        with pytest.raises(InvalidDelta) as caught_in_frame:
            validate_delta(frame.delta)
        assert caught.value.field == caught_in_frame.value.field == golden["refused"]["field"]


# --- the reference fold


def format_states(states: dict[str, VectorState]) -> dict[str, Any]:
    return {vector_id: format_state(state) for vector_id, state in states.items()}


def accepted_changes(name: str) -> list[Change]:
    return [entry for entry in CHANGES[name] if refused_field(entry) is None]


def rows_of(changes: Sequence[Change]) -> list[Any]:
    batches = [batch_of([entry]) for entry in changes]
    return [
        (entry.key, batch.operation(0), batch.metadata(0))
        for entry, batch in zip(changes, batches, strict=True)
    ]


@pytest.mark.parametrize("name", GOLDEN)
def test_fold_resumes_from_state_row_at_any_cut(name: str) -> None:
    for vector_id, expected in GOLDEN[name]["states"].items():
        changes = sorted(
            (entry for entry in accepted_changes(name) if entry.vector_id == vector_id),
            key=lambda entry: entry.key,
        )
        copies = later_copies({entry.key: entry.id for entry in changes if entry.id is not None})
        for cut in range(len(changes) + 1):
            last_key = changes[cut - 1].key if cut else None
            state = fold(rows_of(changes[:cut]), without_effect=copies)
            if last_key is not None:
                states = encode_states([StateRow(NAMESPACE, vector_id, state, 0)])
                state = state_of(states, 0)
            rest = [entry for entry in changes[cut:] if last_key is None or entry.key > last_key]
            assert format_state(fold(rows_of(rest), state, without_effect=copies)) == expected


# --- sinks


def group_changes(changes: Sequence[Change], *, uniform: bool = False) -> list[list[Change]]:
    """Group neighbours that one batch can hold, whose rows have rising counters and Lamport numbers.

    `uniform`: each group has one kind, so that sinks fold a large one as a block.
    """
    groups = [[changes[0]]] if changes else []
    for previous, entry in pairwise(changes):
        is_next = (previous.lamport + 1, previous.origin, previous.counter + 1) == entry.key
        kind_fits = not uniform or previous.operation.kind == entry.operation.kind
        if is_next and kind_fits and (previous.id is None) == (entry.id is None):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


async def apply_changes(
    sink: Sink, log: FakeLog, groups: Sequence[Sequence[Change]], *, at_once: bool, namespace: str = NAMESPACE
) -> set[Any]:
    """Have a sink apply changes as a log delivers them; return the keys that it rejects.

    `at_once`: all groups in one call. The batches are forwarded ones, unless they are applied at once, in
    canonical order and without ids.
    """
    all_changes = [entry for group in groups for entry in group]
    is_local = (
        at_once
        and all(a.key < b.key for a, b in pairwise(all_changes))
        and not any(entry.id for entry in all_changes)
    )
    source = Source.LOCAL if is_local else Source.REPLICA
    batches = [
        log.append_batch(batch_of(group, namespace), lamport=group[0].lamport, source=source)
        for group in groups
    ]
    rejected, calls = set(), [batches] if at_once else [[entry] for entry in batches]
    for call in calls:
        deliveries = [Delivery(logged) for logged in call]
        while deliveries:
            try:
                await sink.apply(deliveries)
                break
            except RejectDelta as rejection:
                rejected.add(key_at(call, rejection.offset))
                deliveries = list(filter(None, (rows_after(entry, rejection.offset) for entry in deliveries)))
    return rejected


def key_at(batches: Sequence[LoggedBatch], offset: int) -> Any:
    (batch,) = (logged for logged in batches if logged.offset <= offset < logged.next_offset)
    return batch.key(offset - batch.offset)


def rows_after(delivery: Delivery, offset: int) -> Delivery | None:
    """Return the rows of a delivery after an offset, or None."""
    logged = delivery.logged
    rows = np.arange(max(offset + 1 - logged.offset, 0), logged.count)
    return Delivery(logged, rows) if len(rows) else None


def check_states(name: str, sink_states: dict[str, VectorState], rejected: set[Any]) -> None:
    """Compare a sink's states with the golden ones.

    A sink rejects unknown kinds, so their keys and counts are left out of the expected states.
    """
    rejected_keys = {entry.key for entry in CHANGES[name]} & rejected
    assert rejected_keys == {
        entry.key for entry in accepted_changes(name) if entry.operation.kind not in FOLDED_KINDS
    }
    expected = {}
    for vector_id, state in GOLDEN[name]["states"].items():
        keys = {entry.key for entry in accepted_changes(name) if entry.vector_id == vector_id}
        if keys - rejected_keys:
            lamport, origin, counter = map(str, max(keys - rejected_keys))
            ignored = state["ignored"] - len(keys & rejected_keys)
            expected[vector_id] = state | {
                "lamport": lamport, "origin": origin, "counter": counter, "ignored": ignored
            }  # fmt: skip
    assert format_states(sink_states) == expected, name


ORDERS = {
    "as they come": lambda changes: [[entry] for entry in changes],
    "backwards": lambda changes: [[entry] for entry in reversed(changes)],
    "in order, grouped": lambda changes: group_changes(sorted(changes, key=lambda entry: entry.key)),
    "in order, grouped by kind": lambda changes: group_changes(
        sorted(changes, key=lambda entry: entry.key), uniform=True
    ),
    "as they come, grouped": group_changes,
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_index_folds_to_golden_states(order: str, at_once: bool) -> None:
    async def main() -> None:
        for name in GOLDEN:
            index, log = IndexSink(), FakeLog()
            await index.open(log)
            rejected = await apply_changes(index, log, ORDERS[order](accepted_changes(name)), at_once=at_once)
            check_states(name, {vector_id: state for _, vector_id, state in index.rows()}, rejected)

    anyio.run(main)


@pytest.mark.parametrize("order", ["as they come", "in order, grouped by kind"])
def test_storage_folds_to_golden_states_in_memory_and_file(order: str, tmp_path: Path) -> None:
    """Each history has its own namespace."""

    async def main() -> None:
        storage, log = StorageSink(tmp_path / "states.db"), FakeLog()
        await storage.open(log)
        rejected = {}
        for name in GOLDEN:
            groups = ORDERS[order](accepted_changes(name))
            rejected[name] = await apply_changes(storage, log, groups, at_once=True, namespace=name)
        check_all_states([row async for row in read_from_memory(storage)], rejected)
        await storage.aclose()
        reopened = StorageSink(tmp_path / "states.db")
        await reopened.open(log)
        check_all_states([row async for row in reopened.rows()], rejected)
        await reopened.aclose()

    async def read_from_memory(storage: StorageSink) -> AsyncIterator[tuple[str, str, VectorState]]:
        for name in GOLDEN:
            for vector_id in {entry.vector_id for entry in accepted_changes(name)}:
                if (state := await storage.get(name, vector_id)) is not None:
                    yield name, vector_id, state

    anyio.run(main)


def check_all_states(rows: Sequence[tuple[str, str, VectorState]], rejected: Mapping[str, set[Any]]) -> None:
    states_by_history: dict[str, dict[str, VectorState]] = {name: {} for name in GOLDEN}
    for name, vector_id, state in rows:
        states_by_history[name][vector_id] = state
    for name, vector_states in states_by_history.items():
        check_states(name, vector_states, rejected[name])


# --- compaction


@pytest.mark.parametrize("order", ["as they come", "in order, grouped", "in order, grouped by kind"])
def test_snapshot_of_compacted_log_equals_golden_states(order: str) -> None:
    for name in GOLDEN:
        # A log holds each dot once.
        changes = list({entry.key: entry for entry in accepted_changes(name)}.values())
        disk = SimDisk()
        log, _ = open_log(disk, TINY)
        id_log = FakeLog()  # knows which ids are duplicates
        for group in ORDERS[order](changes):
            logged = id_log.forward(batch_of(group), group[0].lamport)
            log.append(logged.batch, lamport=logged.lamport, source=logged.source, known_ids=logged.known_ids)
        if not changes:
            continue
        log.segments.last.size = 1 << 20  # the next append begins a segment, which is not compacted
        log.append(batch_of([change(delete(), counter=1)]), lamport=1 << 62, source=Source.LOCAL)
        commit(log)
        snapshot_states = {
            vector_id: state
            for (_, vector_id), (state, _) in states(compact_segments(disk, sealed_segments(log))).items()
        }
        assert format_states(snapshot_states) == GOLDEN[name]["states"], name
