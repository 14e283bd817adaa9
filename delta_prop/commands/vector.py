"""`get`: one vector, now or as it was, folded from the snapshot and the log behind it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from delta_prop.commands import edge
from delta_prop.commands.opened import opened_log, snapshot_before
from delta_prop.commands.places import LATEST, check_within, name_fault, parse_at
from delta_prop_wire.algebra import State, fold
from delta_prop_wire.delta import Delta, Kind, Operation, metadata_only, namespace_of, opaque
from delta_prop_wire.errors import UsageError
from delta_prop_wire.jsonlines import delta_to_json
from delta_prop_wire.spec import VECTOR_ID_BYTES_MAX
from delta_prop_wire.states import state_of
from delta_prop_wire.twins import Identified, without_effect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.files.snapshot import Snapshot
    from delta_prop_wire.batch import LoggedBatch

OK, FAILED = 0, 1
_FRAMES_MAX = 256
_NAMESPACES_MAX = 5
"""How much of a snapshot is looked through for other namespaces, and how many of them are told."""


def get(data: str, vector_id: str, *, namespace: str | None, at: str | None) -> int:
    """One vector as a JSON line, folded from the log; exit status 1 where it is not alive.

    `at`: as of an offset, that one counted, or as of a time. Raises UsageError, Refused (CURSOR_TOO_OLD)
    where that is before what is kept one by one, LogDamaged, OSError.
    """
    fault = name_fault("vector_id", vector_id, VECTOR_ID_BYTES_MAX)
    if fault is not None:
        raise UsageError(fault)
    namespace = namespace or namespace_of(vector_id)
    end_at = LATEST if at is None else parse_at("--at", at, edge.wall_us())
    with opened_log(data) as (_, log, _), snapshot_before(log) as snapshot:
        begin = log.first_offset if snapshot is None else snapshot.offset
        if snapshot is not None:
            check_within(end_at, snapshot)
        end = log.visible if end_at.offset is None else min(end_at.offset + 1, log.visible)
        if end_at.offset is not None and end_at.offset >= log.visible:
            edge.note(
                f"--at {at} is beyond the log, which ends before offset {log.visible}: this is the present"
            )
        if end_at.time_us is not None:
            end = log.offset_at(end_at.time_us + 1)
        state, last = _kept(snapshot, namespace, vector_id)
        span = (begin, begin if end_at.earliest else end)
        elsewhere: set[str] = set()
        places = list(_places(log, namespace, vector_id, span, elsewhere))
        offsets = [logged.offset + row for logged, row in places]
        state = _folded(places, state, whole=begin == 0)
        if not places and state.key is None:
            _note_elsewhere(snapshot, namespace, vector_id, elsewhere)
        told: dict[str, Any] = {"vector_id": vector_id, "namespace": namespace}
        if state.alive:
            told |= delta_to_json(Delta(vector_id, _whole(state), namespace, metadata=state.metadata))
            del told["op"]
        told |= {"alive": state.alive, "deltas": len(offsets), "last_offset": max(offsets, default=last)}
        if snapshot is not None:
            told["snapshot_at"] = begin  # deltas before it are in this, and not counted
            begin = snapshot.facts.begin
    if begin:
        told["log_starts_at"] = begin  # what came before is not in this
    edge.put(json.dumps(told, ensure_ascii=False))
    return OK if state.alive else FAILED


def _kept(snapshot: Snapshot | None, namespace: str, vector_id: str) -> tuple[State, int | None]:
    """A vector's state in the snapshot, and the offset of the last delta in it."""
    found = None if snapshot is None else snapshot.find(namespace, vector_id)
    return (
        (State(), None)
        if found is None
        else (state_of(found[0].batch, found[1]), found[0].row_offset(found[1]))
    )


def _folded(places: list[tuple[LoggedBatch, int]], onto: State, *, whole: bool) -> State:
    """A vector's deltas folded onto the state before them."""
    after = [(logged, row) for logged, row in places if onto.key is None or logged.key(row) > onto.key]
    late = len(places) - len(after)  # sorts before the state, so that it has no effect any more
    twins = without_effect((Identified.of(*place) for place in after), whole=whole or onto.key is None)
    rows = [
        (logged.key(row), logged.batch.operation(row), logged.batch.metadata(row)) for logged, row in after
    ]
    state = fold(rows, onto, without_effect=twins)
    return replace(state, ignored=state.ignored + late)


def _note_elsewhere(snapshot: Snapshot | None, namespace: str, vector_id: str, elsewhere: set[str]) -> None:
    """Report the other namespaces that have a vector of this id; of a large snapshot only some are found."""
    for logged in islice(() if snapshot is None else snapshot.frames(), _FRAMES_MAX):
        rows = zip(logged.batch.keys, logged.batch.namespaces, strict=True)
        elsewhere |= {name for key, name in rows if key == vector_id}
    if not elsewhere:
        return
    names = ", ".join(map(repr, sorted(elsewhere)[:_NAMESPACES_MAX]))
    more = f" and {len(elsewhere) - _NAMESPACES_MAX} more" if len(elsewhere) > _NAMESPACES_MAX else ""
    edge.note(
        f"{vector_id!r:.80} is not in namespace {namespace!r:.80}, but in {names}{more}: say which with "
        "--namespace"
    )


def _places(
    log: DurableLog, namespace: str, vector_id: str, span: tuple[int, int], elsewhere: set[str]
) -> Iterator[tuple[LoggedBatch, int]]:
    """Where the log tells of a vector, from the one offset to the other.

    `elsewhere`: gets the namespaces of other vectors with the same id.
    """
    begin, end = span
    for place in log.frames(begin):
        logged, batch = place.logged, place.logged.batch
        if logged.offset >= end:
            return
        if batch.is_control or vector_id not in batch.keys:
            continue
        for row, key in enumerate(batch.keys):
            if key != vector_id or not begin <= logged.offset + row < end:
                continue
            if batch.namespaces[row] == namespace:
                yield logged, row
            else:
                elsewhere.add(batch.namespaces[row])


def _whole(state: State) -> Operation:
    if state.data is not None:
        return opaque(state.data)
    return metadata_only() if state.vector is None else Operation(Kind.CREATE, state.vector)
