"""Runs: a bounded stretch of the log, its changes sorted by vector, as far as possible one row a vector.

Where a vector was only set as a whole, the last row says it all, and is copied without being decoded. All
else keeps its rows, for `merging` to fold: what comes of them depends on the state before.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.log.damage import BadFrame, LogDamaged
from delta_prop_broker.log.files.frames import Walk
from delta_prop_broker.log.files.snapshot import StateFile
from delta_prop_broker.log.retention.cells import AS_CREATE, ROW_BITS, ROW_MASK, Cells, Frames, View
from delta_prop_wire.algebra import State, apply, ignoring
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import PARTIAL_KINDS, WHOLE_KINDS, Delta, Kind, KnownIds, Operation, Source
from delta_prop_wire.encode import columns_of
from delta_prop_wire.layout import Column
from delta_prop_wire.states import assemble_states
from delta_prop_wire.twins import Identified, without_effect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from delta_prop_broker.disk import Disk
    from delta_prop_wire.algebra import Key, Patch

SET_ASIDE_BYTES = 64 * 1024
"""Where a frame of a run ends: a merge has one of each run in memory, and there may be many."""
ROW_OVERHEAD_BYTES = 256
"""What a row costs in memory beside its bytes, while its run is made."""
_RESETS = 1 << Kind.CREATE | 1 << Kind.DELETE
_SETS = 1 << Kind.DENSE | 1 << Kind.OPAQUE
_FOLDED_KINDS = WHOLE_KINDS | PARTIAL_KINDS | {Kind.DELETE}
_SORTED_AT_ONCE = 4096
_CHANGES_A_FRAME = 256
_NIL = b"\xc0"
_HAS_ID, _KNOWN_SHIFT = 1 << 61, 62


class Change(NamedTuple):
    """One change of a vector. `ignored`: deltas without effect that it stands for beside its own; `id`: where
    it may have twins.
    """

    key: str
    at: Key
    offset: int
    ignored: int
    operation: Operation
    patch: Patch
    id: Identified | None = None


@dataclass(slots=True)
class Folding:
    """Folds changes onto states, and counts what had no effect for want of more.

    `late`: sorts before the state it came to. `unfolded`: of a kind that this version does not know.
    """

    late: int = 0
    unfolded: int = 0

    def fold(self, changes: Iterable[Change], onto: State, offset: int) -> tuple[State, int]:
        """The state behind changes that come in canonical order, and the offset of its last delta."""
        state, changes = onto, list(changes)
        known = [change.id for change in changes if onto.key is None or change.at > onto.key]
        twins = without_effect(known, whole=onto.key is None) if any(known) else ()
        for change in changes:
            if state.key is not None and change.at <= state.key:
                if change.at != state.key:
                    self.late += 1
                    state = ignoring(state, 1, state.key)
                continue
            offset = change.offset
            if change.at in twins:
                state = ignoring(state, 1, change.at)
                continue
            kind = change.operation.kind
            self.unfolded += kind not in _FOLDED_KINDS
            state = apply(state, change.operation, change.patch, change.at)
            if change.ignored:
                state = ignoring(state, change.ignored, state.key)
        return state, offset


@dataclass(slots=True)
class Run:
    """One run, closed: frames of last rows, and frames of changes to be folded; in memory or set aside."""

    rows: Frameset
    changes: Frameset


class Frameset:
    """Frames in memory, or in a file that `drop` removes."""

    def __init__(self, disk: Disk | None = None, path: str = "") -> None:
        self._batches: list[Batch] = []
        self._file = None if disk is None else StateFile(disk, path, begin_at=0, chain=0)
        self._disk = disk

    def add(self, batch: Batch) -> None:
        """One more frame. Raises OSError."""
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
        walk = Walk(
            file.file, position=0, offset=0, end=file.position, previous_crc=0, chunk_bytes=SET_ASIDE_BYTES
        )
        try:
            for place in walk:
                yield place.logged
        except BadFrame as bad:
            raise LogDamaged(file.path, bad.reason, position=bad.position) from None

    def drop(self) -> None:
        """Let go of it. Raises OSError."""
        self._batches.clear()
        if self._file is not None and self._disk is not None:
            file, self._file = self._file, None
            file.file.close()
            with suppress(FileNotFoundError):
                self._disk.remove(file.path)


@dataclass(slots=True)
class RunBuilder:
    """Takes the frames of a stretch in the order of the log. `bytes` is about what it holds in memory.

    `in_order`: Lamport numbers rise from frame to frame, so the order of the log is the canonical one, and no
    frame repeats an id. Only then may a row be left out, or rows be folded, before all changes of its vector
    are known.
    """

    in_order: bool
    bytes: int = 0
    _cells: list[Cells] = field(default_factory=list)
    _resets: dict[str, int] = field(default_factory=dict)  # a create or delete: nothing before it counts
    _sets: dict[str, int] = field(default_factory=dict)  # a dense or opaque: metadata before it count
    _changes: dict[str, list[int]] = field(default_factory=dict)

    def add(self, logged: LoggedBatch, rows: Sequence[int] | None = None) -> None:
        """The next frame; no control frame. `rows`: these of it alone, which rise."""
        one = Cells(logged)
        batch, first = logged.batch, len(self._cells) << ROW_BITS
        self._cells.append(one)
        self.bytes += batch.size + ROW_OVERHEAD_BYTES * batch.count
        if rows is not None:
            for row in rows:
                self._changes_of(one.keys[row]).append(first + row)
            return
        codes = range(first, first + batch.count)
        metadata = batch.column(Column.METADATA)
        if self.in_order and not batch.kinds_mask & ~_RESETS:
            # A create's patch is its metadata, where it says nothing of removing.
            plain = metadata is None or (
                _NIL not in bytes(metadata) and not batch.kinds_mask >> Kind.DELETE & 1
            )
            if plain:
                self._add_resets(one.keys, codes)
                return
        if self.in_order and not batch.kinds_mask & ~_SETS and metadata is None:
            self._add_sets(one, codes)
            return
        for key, code in zip(one.keys, codes, strict=True):
            self._changes_of(key).append(code)

    def _add_resets(self, keys: list[str], codes: range) -> None:
        self._resets.update(zip(keys, codes, strict=True))
        if self._sets:
            for key in self._sets.keys() & set(keys):
                del self._sets[key]
        if self._changes:
            for key, code in zip(keys, codes, strict=True):
                if key in self._changes:  # some of them may have had no effect, which is counted
                    self._changes[key].append(code)
                    self._resets.pop(key, None)

    def _add_sets(self, one: Cells, codes: range) -> None:
        if not self._changes and not self._resets:
            self._sets.update(zip(one.keys, codes, strict=True))
            return
        for row, (key, code) in enumerate(zip(one.keys, codes, strict=True)):
            before = self._resets.get(key)
            if key in self._changes:
                self._changes[key].append(code)
            elif before is None:
                self._sets[key] = code
            elif one.kinds[row] == Kind.DENSE and not self._has_metadata(before):
                self._resets[key] = code | AS_CREATE
            else:
                self._changes_of(key).append(code)

    def _has_metadata(self, code: int) -> bool:
        code &= AS_CREATE - 1
        return self._cells[code >> ROW_BITS].has_metadata(code & ROW_MASK)

    def _changes_of(self, key: str) -> list[int]:
        """The changes of a vector that is from now on folded; what stood for all so far is the first."""
        changes = self._changes.get(key)
        if changes is None:
            before = self._resets.pop(key, None)
            before = self._sets.pop(key, None) if before is None else before
            changes = self._changes[key] = [] if before is None else [before]
        return changes

    def close(self, run: Run, folding: Folding) -> Iterator[None]:
        """Give all to `run`, in small steps; the builder is empty then. Raises OSError."""
        last = self._sets
        last.update(self._resets)
        frames = Frames(run.rows.add, states=False, bytes_max=SET_ASIDE_BYTES)
        view = View(self._cells)
        yield
        for keys in sorted_keys(list(last)):
            if keys:
                frames.add(view, keys, [last[key] for key in keys])
            yield
        frames.flush()
        changes = ChangeFrames(run.changes.add)
        for keys in sorted_keys(list(self._changes)):
            for key in keys:
                for change in self._folded(key, folding):
                    if changes.add(change):
                        yield
            yield
        changes.flush()
        self._cells, self._resets, self._sets, self._changes, self.bytes = [], {}, {}, {}, 0

    def _folded(self, key: str, folding: Folding) -> list[Change]:
        """A vector's changes in canonical order; as one, where they do not depend on the state before."""
        changes = [self._change(key, code) for code in self._changes[key]]
        if not self.in_order:
            return sorted(changes, key=itemgetter(1))
        if changes[0].operation.kind not in (Kind.CREATE, Kind.DELETE) or len(changes) == 1:
            return changes
        counted = Folding()
        state, offset = counted.fold(changes, State(), changes[0].offset)
        if state.data is not None:  # no single operation sets bytes and clears metadata
            return changes
        folding.unfolded += counted.unfolded
        operation = Operation(Kind.CREATE, state.vector) if state.alive else Operation(Kind.DELETE)
        assert state.key is not None
        return [Change(key, state.key, offset, state.ignored, operation, state.metadata or None)]

    def _change(self, key: str, code: int) -> Change:
        as_create, code = code & AS_CREATE, code & (AS_CREATE - 1)
        one, row = self._cells[code >> ROW_BITS], code & ROW_MASK
        operation = one.batch.operation(row)
        if as_create:
            operation = Operation(Kind.CREATE, operation.values)
        logged = one.logged
        known = None if self.in_order else Identified.of(logged, row)
        at, offset = logged.key(row), logged.row_offset(row)
        return Change(key, at, offset, 0, operation, one.batch.metadata(row), known)


class ChangeFrames:
    """Gathers changes into frames and gives each to `emit`."""

    def __init__(self, emit: Callable[[Batch], None]) -> None:
        self._emit = emit
        self._changes: list[Change] = []
        self._bytes = 0

    def add(self, change: Change) -> bool:
        """One more; whether that made a frame full."""
        operation = change.operation
        self._changes.append(change)
        self._bytes += len(operation.data) + (0 if operation.values is None else 8 * len(operation.values))
        if len(self._changes) < _CHANGES_A_FRAME and self._bytes < SET_ASIDE_BYTES:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Give what is gathered, where there is something."""
        if self._changes:
            self._emit(encode_changes(self._changes))
            self._changes, self._bytes = [], 0


def encode_changes(changes: list[Change]) -> Batch:
    """Changes as rows that look like states but for their kinds; they never leave a compaction.

    Where some have ids, the count of ignored deltas has two marks above it.
    """
    deltas = []
    for change in changes:
        namespace, _, vector_id = change.key.partition("\0")
        deltas.append(Delta(vector_id, change.operation, namespace, metadata=change.patch))
    columns, mask, dimension = columns_of(deltas)
    numbers = [(*change.at, change.offset, change.ignored | _id_marks(change.id)) for change in changes]
    if any(change.id for change in changes):
        columns[Column.IDS] = b"".join(bytes(16) if one.id is None else one.id.id for one in changes)
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
    """The changes of such a frame."""
    one = Cells(logged)
    batch, ignored, ids = logged.batch, logged.batch.state_ignored, logged.batch.ids
    assert ignored is not None
    for row, key in enumerate(one.keys):
        at, offset, count = logged.key(row), logged.row_offset(row), int(ignored[row])
        found = None
        if ids is not None and count & _HAS_ID:
            found = Identified(ids[row], at, offset, KnownIds(count >> _KNOWN_SHIFT))
        count &= _HAS_ID - 1
        yield Change(key, at, offset, count, batch.operation(row), batch.metadata(row), found)


def _id_marks(known: Identified | None) -> int:
    return 0 if known is None else _HAS_ID | known.known << _KNOWN_SHIFT


def sorted_keys(keys: list[str]) -> Iterator[list[str]]:
    """The keys in order, a part at a time; some parts are empty, so that no step takes long."""
    if len(keys) <= _SORTED_AT_ONCE:
        yield sorted(keys)
        return
    step = max(_SORTED_AT_ONCE // 32, len(keys) // 8192)
    bounds = sorted(keys[::step])[16::16]
    parts: list[list[str]] = [[] for _ in range(len(bounds) + 1)]
    for first in range(0, len(keys), _SORTED_AT_ONCE):
        for key in keys[first : first + _SORTED_AT_ONCE]:
            parts[bisect_right(bounds, key)].append(key)
        yield []
    keys.clear()
    for part in parts:
        part.sort()
        yield part
        part.clear()
