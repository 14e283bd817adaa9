"""Sorted runs: the changes of a bounded part of the log, sorted by vector, if possible one row per vector.

If all rows of a vector set its whole state, its last row is the state, and is copied without being decoded.
All other rows stay, and `merging` folds them, since their result depends on the state before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.corruption import BadFrame, LogCorrupted
from delta_prop_broker.retention.raw_rows import (
    AS_CREATE,
    ROW_BITS,
    ROW_MASK,
    FrameBuilder,
    FrameSink,
    RawRows,
    RowView,
)
from delta_prop_broker.retention.snapshot import StateFile
from delta_prop_broker.segments.frames import FrameScanner
from delta_prop_wire.algebra import Key, Patch, VectorState, apply, with_ignored
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import FULL_KINDS, PARTIAL_KINDS, Delta, Kind, KnownIds, Operation, Source
from delta_prop_wire.duplicate_ids import IdentifiedDelta, find_duplicates
from delta_prop_wire.encode import columns_of
from delta_prop_wire.layout import Column
from delta_prop_wire.state_rows import assemble_states

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk

SPILL_FRAME_BYTES = 64 * 1024
"""Maximum bytes of a frame of a run: a merge has one frame of each of many runs in memory."""
ROW_OVERHEAD_BYTES = 256
"""Memory for a row, besides its bytes, while its run is built."""
_RESETS = 1 << Kind.CREATE | 1 << Kind.DELETE
_SETS = 1 << Kind.DENSE | 1 << Kind.OPAQUE
_FOLDED_KINDS = FULL_KINDS | PARTIAL_KINDS | {Kind.DELETE}
_SORT_KEYS_MAX = 4096  # keys that are handled in one step
_FRAME_CHANGES_MAX = 256
_NIL = b"\xc0"  # in MessagePack: as a field of a patch, it removes the field
_HAS_ID, _KNOWN_SHIFT = 1 << 61, 62


class Change(NamedTuple):
    """One change of a vector.

    `key`: the sort key of the vector. `canonical_key`: Lamport number, origin and counter. `ignored`: number
    of other deltas, without effect, that it includes. `id`: set if the delta has an id, and may have
    duplicates.
    """

    key: str
    canonical_key: Key
    offset: int
    ignored: int
    operation: Operation
    patch: Patch
    id: IdentifiedDelta | None = None


@dataclass(slots=True)
class ChangeFolder:
    """Folds changes onto states, and counts those without effect.

    `out_of_order`: number of changes that sort before the state they met. `unfolded`: number of changes of
    kinds that this version does not know.
    """

    out_of_order: int = 0
    unfolded: int = 0

    def fold(self, changes: Iterable[Change], onto: VectorState, offset: int) -> tuple[VectorState, int]:
        """Return the state after `changes`, in canonical order, and the offset of its last delta.

        `offset`: of the last delta of the state `onto`.
        """
        state, changes = onto, list(changes)
        identified = [change.id for change in changes if onto.key is None or change.canonical_key > onto.key]
        duplicates = find_duplicates(identified, complete=onto.key is None) if any(identified) else ()
        for change in changes:
            if state.key is not None and change.canonical_key <= state.key:
                if change.canonical_key != state.key:
                    self.out_of_order += 1
                    state = with_ignored(state, 1, state.key)
                continue
            offset = change.offset
            if change.canonical_key in duplicates:
                state = with_ignored(state, 1, change.canonical_key)
                continue
            kind = change.operation.kind
            self.unfolded += kind not in _FOLDED_KINDS
            state = apply(state, change.operation, change.patch, change.canonical_key)
            if change.ignored:
                state = with_ignored(state, change.ignored, state.key)
        return state, offset


@dataclass(slots=True)
class SortedRun:
    """One closed run: frames of rows that are states, and frames of changes to fold; in memory or spilled."""

    rows: SpillFile
    changes: SpillFile


class SpillFile:
    """Frames in memory, or in a file that `drop` removes."""

    def __init__(self, disk: Disk | None = None, path: str = "") -> None:
        self._batches: list[Batch] = []
        self._file = None if disk is None else StateFile(disk, path, position=0, chain_crc=0)
        self._disk = disk

    def append(self, batch: Batch) -> None:
        """Add a frame. Raises OSError."""
        if self._file is None:
            self._batches.append(batch)
        else:
            self._file.add(batch)

    def __iter__(self) -> Iterator[LoggedBatch]:
        if self._file is None:
            for batch in self._batches:
                yield LoggedBatch(batch, 0, 0, Source.LOCAL)
            return
        file = self._file
        scanner = FrameScanner(
            file.file, position=0, offset=0, end=file.position, previous_crc=0, chunk_bytes=SPILL_FRAME_BYTES
        )
        try:
            for location in scanner:
                yield location.logged
        except BadFrame as bad:
            raise LogCorrupted(file.path, bad.reason, position=bad.position) from None

    def drop(self) -> None:
        """Drop the frames, and remove the file. Raises OSError."""
        self._batches.clear()
        if self._file is not None and self._disk is not None:
            file, self._file = self._file, None
            file.file.close()
            with suppress(FileNotFoundError):
                self._disk.remove(file.path)


@dataclass(slots=True)
class RunBuilder:
    """Builds a run from frames in the order of the log. `bytes` is about the memory that it uses.

    `in_order`: Lamport numbers rise from frame to frame, so the order of the log is the canonical one, and
    no frame has a duplicate id. Only then may rows be left out or folded before all changes of their vector
    are known.
    """

    in_order: bool
    bytes: int = 0
    _frames: list[RawRows] = field(default_factory=list)
    _resets: dict[str, int] = field(default_factory=dict)  # creates and deletes: no earlier row matters
    _sets: dict[str, int] = field(default_factory=dict)  # dense and opaque: only earlier metadata matters
    _changes: dict[str, list[int]] = field(default_factory=dict)  # codes of all rows to fold, by vector

    def add(self, logged: LoggedBatch, rows: Sequence[int] | None = None) -> None:
        """Add the next frame, which has no control rows. `rows`: add only these, in ascending order."""
        frame = RawRows(logged)
        batch, first = logged.batch, len(self._frames) << ROW_BITS
        self._frames.append(frame)
        self.bytes += batch.size + ROW_OVERHEAD_BYTES * batch.count
        if rows is not None:
            for row in rows:
                self._changes_of(frame.keys[row]).append(first + row)
            return
        codes = range(first, first + batch.count)
        metadata = batch.column(Column.METADATA)
        if self.in_order and not batch.kinds_mask & ~_RESETS:
            # The patch of a create equals its metadata, unless it removes a field.
            only_resets = metadata is None or (
                _NIL not in bytes(metadata) and not batch.kinds_mask >> Kind.DELETE & 1
            )
            if only_resets:
                self._add_resets(frame.keys, codes)
                return
        if self.in_order and not batch.kinds_mask & ~_SETS and metadata is None:
            self._add_sets(frame, codes)
            return
        for key, code in zip(frame.keys, codes, strict=True):
            self._changes_of(key).append(code)

    def _add_resets(self, keys: list[str], codes: range) -> None:
        self._resets.update(zip(keys, codes, strict=True))
        if self._sets:
            for key in self._sets.keys() & set(keys):
                del self._sets[key]
        if self._changes:
            for key, code in zip(keys, codes, strict=True):
                if key in self._changes:  # some may have no effect, and `fold` counts those
                    self._changes[key].append(code)
                    self._resets.pop(key, None)

    def _add_sets(self, frame: RawRows, codes: range) -> None:
        if not self._changes and not self._resets:
            self._sets.update(zip(frame.keys, codes, strict=True))
            return
        for row, (key, code) in enumerate(zip(frame.keys, codes, strict=True)):
            before = self._resets.get(key)
            if key in self._changes:
                self._changes[key].append(code)
            elif before is None:
                self._sets[key] = code
            elif frame.kinds[row] == Kind.DENSE and not self._has_metadata(before):
                self._resets[key] = code | AS_CREATE
            else:
                self._changes_of(key).append(code)

    def _has_metadata(self, code: int) -> bool:
        code &= AS_CREATE - 1
        return self._frames[code >> ROW_BITS].has_metadata(code & ROW_MASK)

    def _changes_of(self, key: str) -> list[int]:
        """Return the list of changes to fold of a vector; its row so far becomes the first change."""
        changes = self._changes.get(key)
        if changes is None:
            before = self._resets.pop(key, None)
            before = self._sets.pop(key, None) if before is None else before
            changes = self._changes[key] = [] if before is None else [before]
        return changes

    def close(self, run: SortedRun, folder: ChangeFolder) -> Iterator[None]:
        """Write all rows to `run`, in small steps, and empty the builder. Raises OSError."""
        last_rows = self._sets
        last_rows.update(self._resets)
        frames = FrameBuilder(run.rows, states=False, bytes_max=SPILL_FRAME_BYTES)
        view = RowView(self._frames)
        yield
        for keys in sorted_keys(list(last_rows)):
            if keys:
                frames.add(view, keys, [last_rows[key] for key in keys])
            yield
        frames.flush()
        changes = ChangeFrameBuilder(run.changes)
        for keys in sorted_keys(list(self._changes)):
            for key in keys:
                for change in self._fold_changes(key, folder):
                    if changes.add(change):
                        yield
            yield
        changes.flush()
        self._frames, self._resets, self._sets, self._changes, self.bytes = [], {}, {}, {}, 0

    def _fold_changes(self, key: str, folder: ChangeFolder) -> list[Change]:
        """Return a vector's changes in canonical order; folded into one if no earlier state matters."""
        changes = [self._change(key, code) for code in self._changes[key]]
        if not self.in_order:
            return sorted(changes, key=itemgetter(1))
        if changes[0].operation.kind not in (Kind.CREATE, Kind.DELETE) or len(changes) == 1:
            return changes
        trial_folder = ChangeFolder()
        state, offset = trial_folder.fold(changes, VectorState(), changes[0].offset)
        if state.data is not None:  # no single operation sets bytes and clears metadata
            return changes
        folder.unfolded += trial_folder.unfolded
        operation = Operation(Kind.CREATE, state.vector) if state.alive else Operation(Kind.DELETE)
        assert state.key is not None
        return [Change(key, state.key, offset, state.ignored, operation, state.metadata or None)]

    def _change(self, key: str, code: int) -> Change:
        as_create, code = code & AS_CREATE, code & (AS_CREATE - 1)
        frame, row = self._frames[code >> ROW_BITS], code & ROW_MASK
        operation = frame.batch.operation(row)
        if as_create:
            operation = Operation(Kind.CREATE, operation.values)
        logged = frame.logged
        identified = None if self.in_order else IdentifiedDelta.of(logged, row)
        canonical_key, offset = logged.key(row), logged.row_offset(row)
        return Change(key, canonical_key, offset, 0, operation, frame.batch.metadata(row), identified)


class ChangeFrameBuilder:
    """Collects changes into frames and appends each to `frames`."""

    def __init__(self, frames: FrameSink) -> None:
        self._frames = frames
        self._changes: list[Change] = []
        self._bytes = 0

    def add(self, change: Change) -> bool:
        """Add a change; return True if this completed a frame."""
        operation = change.operation
        self._changes.append(change)
        self._bytes += len(operation.data) + (0 if operation.values is None else 8 * len(operation.values))
        if len(self._changes) < _FRAME_CHANGES_MAX and self._bytes < SPILL_FRAME_BYTES:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Append the collected changes as a frame, if there are any."""
        if self._changes:
            self._frames.append(encode_changes(self._changes))
            self._changes, self._bytes = [], 0


def encode_changes(changes: list[Change]) -> Batch:
    """Encode changes as rows like those of states, with their own kinds; they never leave a compaction.

    If some changes have ids, the high bits of the count of ignored deltas hold flags of the id.
    """
    deltas = []
    for change in changes:
        namespace, _, vector_id = change.key.partition("\0")
        deltas.append(Delta(vector_id, change.operation, namespace, metadata=change.patch))
    columns, mask, dimension = columns_of(deltas)
    numbers = [
        (*change.canonical_key, change.offset, change.ignored | _id_bits(change.id)) for change in changes
    ]
    if any(change.id for change in changes):
        columns[Column.IDS] = b"".join(bytes(16) if change.id is None else change.id.id for change in changes)
    lamports, origins, counters, offsets, ignored = zip(*numbers, strict=True)
    for column, words in (
        (Column.STATE_LAMPORTS, lamports),
        (Column.STATE_ORIGINS, origins),
        (Column.STATE_COUNTERS, counters),
        (Column.ROW_OFFSETS, offsets),
        (Column.STATE_IGNORED, ignored),
    ):
        columns[column] = b"".join(word.to_bytes(8, "little") for word in words)
    return assemble_states(columns, len(changes), mask, dimension)


def decode_changes(logged: LoggedBatch) -> Iterator[Change]:
    """Yield the changes of a frame that `encode_changes` made."""
    frame = RawRows(logged)
    batch, ignored, ids = logged.batch, logged.batch.state_ignored, logged.batch.ids
    assert ignored is not None
    for row, key in enumerate(frame.keys):
        canonical_key, offset, count = logged.key(row), logged.row_offset(row), int(ignored[row])
        identified = None
        if ids is not None and count & _HAS_ID:
            identified = IdentifiedDelta(ids[row], canonical_key, offset, KnownIds(count >> _KNOWN_SHIFT))
        count &= _HAS_ID - 1
        operation, patch = batch.operation(row), batch.metadata(row)
        yield Change(key, canonical_key, offset, count, operation, patch, identified)


def _id_bits(delta: IdentifiedDelta | None) -> int:
    return 0 if delta is None else _HAS_ID | delta.known_ids << _KNOWN_SHIFT


def sorted_keys(keys: list[str]) -> Iterator[list[str]]:
    """Yield the keys in order, a part at a time; some parts are empty, so that no step takes long.

    Empties `keys` if they are many, to free memory.
    """
    if len(keys) <= _SORT_KEYS_MAX:
        yield sorted(keys)
        return
    step = max(_SORT_KEYS_MAX // 32, len(keys) // 8192)
    bounds = sorted(keys[::step])[16::16]
    parts: list[list[str]] = [[] for _ in range(len(bounds) + 1)]
    for first in range(0, len(keys), _SORT_KEYS_MAX):
        for key in keys[first : first + _SORT_KEYS_MAX]:
            parts[bisect_right(bounds, key)].append(key)
        yield []
    keys.clear()
    for part in parts:
        part.sort()
        yield part
        part.clear()
