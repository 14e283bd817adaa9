"""`get`: prints one vector, now or as of a past position, folded from the snapshot and the log after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from delta_prop.commands.connect_options import read_position
from delta_prop.directory.log_positions import LATEST, check_name_argument, check_not_before
from delta_prop.directory.readonly_log import open_prefix_snapshot, open_readonly_log, partition_of_vector
from delta_prop.platform import system
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.retention.snapshot import Snapshot
from delta_prop_wire.algebra import VectorState, fold
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Kind, Operation, metadata_only, namespace_of, opaque
from delta_prop_wire.duplicate_ids import IdentifiedDelta, find_duplicates
from delta_prop_wire.jsonlines import delta_to_json
from delta_prop_wire.spec import VECTOR_ID_BYTES_MAX
from delta_prop_wire.state_rows import state_of

if TYPE_CHECKING:
    from argparse import Namespace

OK, FAILED = 0, 1
_FRAMES_MAX = 256
"""Maximum number of a snapshot's frames in which other namespaces are searched for."""
_NAMESPACES_MAX = 5
"""Maximum number of other namespaces that are named."""


def show_vector(options: Namespace) -> int:
    """Print one vector as a JSON line, folded from the log; return exit status 1 if it is not alive.

    Raises UsageError, Refused (CURSOR_TOO_OLD) for a position before the log's uncompacted deltas,
    LogCorrupted, OSError.
    """
    vector_id: str = options.vector_id
    check_name_argument("vector_id", vector_id, VECTOR_ID_BYTES_MAX)
    namespace = options.namespace or namespace_of(vector_id)
    position = read_position("--at", options.at, LATEST)
    name = partition_of_vector(options.data, options.stream, namespace, vector_id)
    with open_readonly_log(options.data, name) as (_, log, _), open_prefix_snapshot(log) as snapshot:
        start = log.start_offset if snapshot is None else snapshot.offset
        if snapshot is not None:
            check_not_before(position, snapshot)
        end = log.high_watermark if position.offset is None else min(position.offset + 1, log.high_watermark)
        if position.offset is not None and position.offset >= log.high_watermark:
            end_text = f"the log ends before offset {log.high_watermark}"
            system.note(f"--at {options.at}: {end_text}: this is the present state")
        if position.time_us is not None:
            end = log.offset_at(position.time_us + 1)
        state, snapshot_last_offset = _snapshot_state(snapshot, namespace, vector_id)
        offset_range = (start, start if position.earliest else end)
        other_namespaces: set[str] = set()
        entries = list(_read_rows(log, namespace, vector_id, offset_range, other_namespaces))
        offsets = [logged.offset + row for logged, row in entries]
        state = _fold_rows(entries, state, is_complete=start == 0)
        if not entries and state.key is None:
            _note_other_namespaces(snapshot, namespace, vector_id, other_namespaces)
        fields: dict[str, Any] = {"vector_id": vector_id, "namespace": namespace}
        if state.alive:
            fields |= delta_to_json(
                Delta(vector_id, _full_operation(state), namespace, metadata=state.metadata)
            )
            del fields["op"]
        last_offset = max(offsets, default=snapshot_last_offset)
        fields |= {"alive": state.alive, "deltas": len(offsets), "last_offset": last_offset}
        if snapshot is not None:
            fields["snapshot_at"] = start  # "deltas" counts only those after the snapshot
            start = snapshot.facts.begin
    if start:
        fields["log_starts_at"] = start  # earlier deltas are not included
    system.put(json.dumps(fields, ensure_ascii=False))
    return OK if state.alive else FAILED


def _snapshot_state(
    snapshot: Snapshot | None, namespace: str, vector_id: str
) -> tuple[VectorState, int | None]:
    """Return a vector's state in the snapshot, and the offset of the last delta in that state."""
    entry = None if snapshot is None else snapshot.find(namespace, vector_id)
    if entry is None:
        return VectorState(), None
    logged, row = entry
    return state_of(logged.batch, row), logged.row_offset(row)


def _fold_rows(
    entries: list[tuple[LoggedBatch, int]], base: VectorState, *, is_complete: bool
) -> VectorState:
    newer = [(logged, row) for logged, row in entries if base.key is None or logged.key(row) > base.key]
    ignored = len(entries) - len(newer)  # these sort before the state's last delta and have no effect
    duplicates = find_duplicates(
        (IdentifiedDelta.of(*entry) for entry in newer), complete=is_complete or base.key is None
    )
    rows = [
        (logged.key(row), logged.batch.operation(row), logged.batch.metadata(row)) for logged, row in newer
    ]
    state = fold(rows, base, without_effect=duplicates)
    return replace(state, ignored=state.ignored + ignored)


def _note_other_namespaces(
    snapshot: Snapshot | None, namespace: str, vector_id: str, other_namespaces: set[str]
) -> None:
    """Report other namespaces that have a vector of this id; a large snapshot is searched only in part."""
    for logged in islice(() if snapshot is None else snapshot.frames(), _FRAMES_MAX):
        rows = zip(logged.batch.keys, logged.batch.namespaces, strict=True)
        other_namespaces |= {name for key, name in rows if key == vector_id}
    if not other_namespaces:
        return
    names = ", ".join(map(repr, sorted(other_namespaces)[:_NAMESPACES_MAX]))
    unnamed = len(other_namespaces) - _NAMESPACES_MAX
    more = f" and {unnamed} more" if unnamed > 0 else ""
    system.note(
        f"{vector_id!r:.80} is not in namespace {namespace!r:.80}, but in {names}{more}: choose one with "
        "--namespace"
    )


def _read_rows(
    log: DurableLog, namespace: str, vector_id: str, offset_range: tuple[int, int], other_namespaces: set[str]
) -> Iterator[tuple[LoggedBatch, int]]:
    """Yield a vector's rows in the log within `offset_range`, whose end is exclusive.

    `other_namespaces`: collects the namespaces of other vectors with the same id.
    """
    start, end = offset_range
    for location in log.frames(start):
        logged, batch = location.logged, location.logged.batch
        if logged.offset >= end:
            return
        if batch.is_control or vector_id not in batch.keys:
            continue
        for row, key in enumerate(batch.keys):
            if key != vector_id or not start <= logged.offset + row < end:
                continue
            if batch.namespaces[row] == namespace:
                yield logged, row
            else:
                other_namespaces.add(batch.namespaces[row])


def _full_operation(state: VectorState) -> Operation:
    if state.data is not None:
        return opaque(state.data)
    return metadata_only() if state.vector is None else Operation(Kind.CREATE, state.vector)
