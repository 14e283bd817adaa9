"""The golden folds: the file holds what its generator makes, and whatever folds comes to its bytes.

The reference fold, state rows, the index in memory, the storage file and compaction, in several orders and
groupings.
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
from tests.golden.fold_histories import HISTORIES, NAMESPACE, Change, change, histories
from tests.golden.folds import (
    PATH,
    batch_of,
    check_canonical,
    later_copies,
    refused_field,
    text,
    told_of_state,
)
from tests.sinks.support import FakeLog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from delta_prop_sinks import Sink

GOLDEN = {entry["name"]: entry for entry in json.loads(PATH.read_text(encoding="utf-8"))["histories"]}
CHANGES = dict(histories())


def test_file_is_what_the_generator_makes() -> None:
    assert PATH.read_text(encoding="utf-8") == text()
    assert len(GOLDEN) == HISTORIES


def test_histories_have_all_operations_and_what_is_hard() -> None:
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
def test_refused_deltas_are_refused_in_either_form(name: str) -> None:
    for one, told in zip(CHANGES[name], GOLDEN[name]["deltas"], strict=True):
        if "refused" not in told:
            continue
        batch = batch_of([one])
        with pytest.raises(InvalidDelta) as caught:
            validate_batch(batch)
        frame = decode(encode(DeltaFrame(1, batch.delta(0))))
        assert isinstance(frame, DeltaFrame)
        with pytest.raises(InvalidDelta) as alone:
            validate_delta(frame.delta)
        assert caught.value.field == alone.value.field == told["refused"]["field"]


# --- the reference fold


def shown(states: dict[str, VectorState]) -> dict[str, Any]:
    return {vector_id: told_of_state(state) for vector_id, state in states.items()}


def accepted(name: str) -> list[Change]:
    return [one for one in CHANGES[name] if refused_field(one) is None]


def rows_of(changes: Sequence[Change]) -> list[Any]:
    batches = [batch_of([one]) for one in changes]
    return [
        (one.key, batch.operation(0), batch.metadata(0)) for one, batch in zip(changes, batches, strict=True)
    ]


@pytest.mark.parametrize("name", GOLDEN)
def test_fold_goes_on_from_state_rows_at_any_place(name: str) -> None:
    for vector_id, expected in GOLDEN[name]["states"].items():
        changes = sorted(
            (one for one in accepted(name) if one.vector_id == vector_id), key=lambda one: one.key
        )
        copies = later_copies({one.key: one.id for one in changes if one.id is not None})
        for cut in range(len(changes) + 1):
            before = changes[cut - 1].key if cut else None
            state = fold(rows_of(changes[:cut]), without_effect=copies)
            if before is not None:
                states = encode_states([StateRow(NAMESPACE, vector_id, state, 0)])
                state = state_of(states, 0)
            behind = [one for one in changes[cut:] if before is None or one.key > before]
            assert told_of_state(fold(rows_of(behind), state, without_effect=copies)) == expected


# --- sinks


def grouped(changes: Sequence[Change], *, alike: bool = False) -> list[list[Change]]:
    """Group neighbours that one batch can hold, whose rows have rising counters and Lamport numbers.

    `alike`: of one kind, which are folded as a block where they are enough.
    """
    groups = [[changes[0]]] if changes else []
    for before, one in pairwise(changes):
        follows = (before.lamport + 1, before.origin, before.counter + 1) == one.key
        fits = not alike or before.operation.kind == one.operation.kind
        if follows and fits and (before.id is None) == (one.id is None):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


async def brought(
    sink: Sink, log: FakeLog, groups: Sequence[Sequence[Change]], *, at_once: bool, namespace: str = NAMESPACE
) -> set[Any]:
    """Have a sink apply changes as a log brings them; the keys of those that it rejects.

    In a log all are forwarded, unless they stand in canonical order and have no ids.
    """
    every = [one for group in groups for one in group]
    local = at_once and all(a.key < b.key for a, b in pairwise(every)) and not any(one.id for one in every)
    source = Source.LOCAL if local else Source.REPLICA
    some = [
        log.append_batch(batch_of(group, namespace), lamport=group[0].lamport, source=source)
        for group in groups
    ]
    rejected, calls = set(), [some] if at_once else [[one] for one in some]
    for call in calls:
        deliveries = [Delivery(logged) for logged in call]
        while deliveries:
            try:
                await sink.apply(deliveries)
                break
            except RejectDelta as rejection:
                rejected.add(key_at(call, rejection.offset))
                deliveries = list(filter(None, (behind(one, rejection.offset) for one in deliveries)))
    return rejected


def key_at(batches: Sequence[LoggedBatch], offset: int) -> Any:
    (found,) = (logged for logged in batches if logged.offset <= offset < logged.next_offset)
    return found.key(offset - found.offset)


def behind(delivery: Delivery, offset: int) -> Delivery | None:
    """Cut off what of a delivery lies up to an offset; None where nothing is left."""
    logged = delivery.logged
    rows = np.arange(max(offset + 1 - logged.offset, 0), logged.count)
    return Delivery(logged, rows) if len(rows) else None


def check(name: str, found: dict[str, VectorState], rejected: set[Any]) -> None:
    """Hold a sink's states to the golden ones.

    A sink sets unknown kinds aside: it neither counts them nor goes by their keys.
    """
    own = {one.key for one in CHANGES[name]} & rejected
    assert own == {one.key for one in accepted(name) if one.operation.kind not in FOLDED_KINDS}
    expected = {}
    for vector_id, state in GOLDEN[name]["states"].items():
        keys = {one.key for one in accepted(name) if one.vector_id == vector_id}
        if keys - own:
            lamport, origin, counter = map(str, max(keys - own))
            ignored = state["ignored"] - len(keys & own)
            expected[vector_id] = state | {
                "lamport": lamport, "origin": origin, "counter": counter, "ignored": ignored
            }  # fmt: skip
    assert shown(found) == expected, name


ORDERS = {
    "as they come": lambda changes: [[one] for one in changes],
    "backwards": lambda changes: [[one] for one in reversed(changes)],
    "in order, grouped": lambda changes: grouped(sorted(changes, key=lambda one: one.key)),
    "in order, grouped by kind": lambda changes: grouped(
        sorted(changes, key=lambda one: one.key), alike=True
    ),
    "as they come, grouped": grouped,
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_index_comes_to_the_same_bytes(order: str, at_once: bool) -> None:
    async def main() -> None:
        for name in GOLDEN:
            index, log = IndexSink(), FakeLog()
            await index.open(log)
            rejected = await brought(index, log, ORDERS[order](accepted(name)), at_once=at_once)
            check(name, {vector_id: state for _, vector_id, state in index.rows()}, rejected)

    anyio.run(main)


@pytest.mark.parametrize("order", ["as they come", "in order, grouped by kind"])
def test_storage_comes_to_the_same_bytes_in_memory_and_in_its_file(order: str, tmp_path: Path) -> None:
    """Each history in a namespace of its own."""

    async def main() -> None:
        storage, log = StorageSink(tmp_path / "states.db"), FakeLog()
        await storage.open(log)
        rejected = {}
        for name in GOLDEN:
            groups = ORDERS[order](accepted(name))
            rejected[name] = await brought(storage, log, groups, at_once=True, namespace=name)
        check_all([row async for row in held(storage)], rejected)
        await storage.aclose()
        again = StorageSink(tmp_path / "states.db")
        await again.open(log)
        check_all([row async for row in again.rows()], rejected)
        await again.aclose()

    async def held(storage: StorageSink) -> AsyncIterator[tuple[str, str, VectorState]]:
        for name in GOLDEN:
            for vector_id in {one.vector_id for one in accepted(name)}:
                if (state := await storage.get(name, vector_id)) is not None:
                    yield name, vector_id, state

    anyio.run(main)


def check_all(rows: Sequence[tuple[str, str, VectorState]], rejected: Mapping[str, set[Any]]) -> None:
    found: dict[str, dict[str, VectorState]] = {name: {} for name in GOLDEN}
    for name, vector_id, state in rows:
        found[name][vector_id] = state
    for name, some in found.items():
        check(name, some, rejected[name])


# --- compaction


@pytest.mark.parametrize("order", ["as they come", "in order, grouped", "in order, grouped by kind"])
def test_snapshot_of_a_compacted_log_holds_the_same_bytes(order: str) -> None:
    for name in GOLDEN:
        each = list({one.key: one for one in accepted(name)}.values())  # a log has each dot once
        disk = SimDisk()
        log, _ = open_log(disk, TINY)
        memory = FakeLog()  # tells which ids are known
        for group in ORDERS[order](each):
            logged = memory.forward(batch_of(group), group[0].lamport)
            log.append(logged.batch, lamport=logged.lamport, source=logged.source, known_ids=logged.known_ids)
        if not each:
            continue
        log._segments.last.size = 1 << 20  # so that what comes next begins a segment, which is left out
        log.append(batch_of([change(delete(), counter=1)]), lamport=1 << 62, source=Source.LOCAL)
        commit(log)
        found = {
            vector_id: state
            for (_, vector_id), (state, _) in states(compact_segments(disk, sealed_segments(log))).items()
        }
        assert shown(found) == GOLDEN[name]["states"], name
