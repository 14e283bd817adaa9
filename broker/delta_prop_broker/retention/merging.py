"""Merges the previous snapshot and later runs into the states of the next one, a range of vectors at a time.

All inputs are sorted by vector. A range ends at the lowest last key of the loaded frames, so all changes of
its vectors are known. If the last row of a vector holds its full state, it is copied; else the changes are
folded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from heapq import merge
from operator import attrgetter

import numpy as np

from delta_prop_broker.retention.raw_rows import (
    AS_CREATE,
    IGNORED,
    OFFSET,
    ROW_BITS,
    ROW_MASK,
    FrameBuilder,
    RawRows,
    RowView,
)
from delta_prop_broker.retention.snapshot import FRAME_BYTES_MAX
from delta_prop_broker.retention.sorted_run import Change, ChangeFolder, SortedRun, decode_changes
from delta_prop_broker.retention.tombstones import KEEP_ALL, Forgotten
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Kind, Source
from delta_prop_wire.state_rows import StateRow, encode_states, state_of

_FOLD_ROWS_MAX = 512  # vectors that are folded in one step
_SET_KINDS = 1 << Kind.DENSE | 1 << Kind.OPAQUE


class RowInput:
    """An input with one row per vector. `frame`: the loaded frame; its rows before `next_row` are merged."""

    def __init__(self, frames: Iterable[LoggedBatch]) -> None:
        self.frame: RawRows | None = None
        self.next_row = 0
        self._frames = iter(frames)

    def load(self) -> RawRows | None:
        """Return the loaded frame, or load the next one if all its rows are merged; None at the end."""
        if self.frame is None or self.next_row >= len(self.frame.keys):
            logged = next(self._frames, None)
            self.frame, self.next_row = None if logged is None else RawRows(logged), 0
        return self.frame

    def row_of(self, key: str) -> int | None:
        """Return the row of a vector in the loaded frame; None if it has none."""
        if self.frame is None:
            return None
        row = bisect_left(self.frame.keys, key, self.next_row)
        return row if row < len(self.frame.keys) and self.frame.keys[row] == key else None


class ChangeInput:
    """An input with any number of changes per vector, in canonical order; `head` is the next change."""

    def __init__(self, frames: Iterable[LoggedBatch]) -> None:
        self._changes = (change for logged in frames for change in decode_changes(logged))
        self.head: Change | None = next(self._changes, None)

    def take(self, key: str) -> Iterator[Change]:
        """Yield and remove the changes of one vector."""
        while self.head is not None and self.head.key == key:
            yield self.head
            self.head = next(self._changes, None)


class Merge:
    """Merges states into `out`, in order, from the previous snapshot (`base`) and `runs`, in the log's order.

    `forgotten`: the tombstones to leave out, of those that `base` has, and of erased vectors.
    """

    def __init__(
        self,
        base: Iterable[LoggedBatch],
        runs: list[SortedRun],
        folder: ChangeFolder,
        out: FrameBuilder,
        *,
        forgotten: Forgotten = KEEP_ALL,
    ) -> None:
        self._base = RowInput(base)
        self._run_rows = [RowInput(run.rows) for run in runs]
        self._changes = [ChangeInput(run.changes) for run in runs]
        self._folder = folder
        self._out = out
        self._forgotten = forgotten

    def run(self) -> Iterator[None]:
        """Merge, in small steps. Raises LogCorrupted, OSError, Refused if a state is too large."""
        while True:
            inputs = [source for source in (self._base, *self._run_rows) if source.load() is not None]
            if not inputs and all(changes.head is None for changes in self._changes):
                break
            bound = min(
                (source.frame.keys[-1] for source in inputs if source.frame is not None), default=None
            )
            folded, bound = self._fold_changed_vectors(bound)
            self._merge_range(inputs, bound, folded)
            yield
        self._out.flush()

    # --- folding

    def _fold_changed_vectors(self, bound: str | None) -> tuple[list[StateRow], str | None]:
        """Fold the vectors that have changes, up to key `bound` or a maximum number of rows.

        Return their states, and the key up to which all such vectors are folded.
        """
        states: list[StateRow] = []
        size = 0
        while True:
            key = min(
                (changes.head.key for changes in self._changes if changes.head is not None), default=None
            )
            if key is None or (bound is not None and key > bound):
                return states, bound
            row = self._fold(key)
            states.append(row)
            size += _size(row.state)
            if len(states) >= _FOLD_ROWS_MAX or size >= FRAME_BYTES_MAX:
                return states, key

    def _fold(self, key: str) -> StateRow:
        """Return one vector's state, folded from all inputs."""
        state, offset = VectorState(), 0
        row = self._base.row_of(key)
        if row is not None and self._base.frame is not None:
            logged = self._base.frame.logged
            state, offset = state_of(logged.batch, row), logged.row_offset(row)
        changes = merge(
            *(_row_as_change(source, key) for source in self._run_rows),
            *(changes.take(key) for changes in self._changes),
            key=attrgetter("canonical_key"),
        )
        state, offset = self._folder.fold(changes, state, offset)
        namespace, _, vector_id = key.partition("\0")
        return StateRow(namespace, vector_id, state, offset)

    # --- copying

    def _merge_range(self, inputs: list[RowInput], bound: str | None, folded: list[StateRow]) -> None:
        """Write all vectors up to key `bound`; `folded`: the states of that range that were folded."""
        codes: dict[str, int] = {}
        frames: list[RawRows] = []
        refold_keys: list[str] = []
        ends: list[tuple[RowInput, int]] = []
        for source in inputs:
            frame = source.frame
            assert frame is not None
            end = len(frame.keys) if bound is None else bisect_right(frame.keys, bound, source.next_row)
            ends.append((source, end))
            if end > source.next_row:
                self._overlay(source, end, frames, codes, refold_keys)
        folded_keys = {f"{row.namespace}\0{row.vector_id}" for row in folded}
        folded += [self._fold(key) for key in refold_keys if key not in folded_keys]
        ignored_counts = self._ignored_counts(ends, frames, codes)
        for frame_of_folded in _encode_frames(folded):
            first = len(frames) << ROW_BITS
            for key in frame_of_folded.keys if ignored_counts else ():
                ignored_counts.pop(key, None)  # the folded state includes the previous snapshot's count
            frames.append(frame_of_folded)
            codes.update(
                zip(frame_of_folded.keys, range(first, first + len(frame_of_folded.keys)), strict=True)
            )
        self._drop_tombstones(frames, codes)
        if codes:
            keys = sorted(codes)
            spans = [(source.next_row, end) for source, end in ends if end > source.next_row]
            spans += [(0, len(frame_of_folded.keys)) for frame_of_folded in frames[len(spans) :]]
            self._out.add(RowView(frames, spans), keys, [codes[key] for key in keys], ignored_counts)
        for source, end in ends:
            source.next_row = end

    def _overlay(
        self, source: RowInput, end: int, frames: list[RawRows], codes: dict[str, int], refold_keys: list[str]
    ) -> None:
        """Replace the rows of earlier inputs by those of `source`, before row `end`, in `codes`.

        Adds the keys of vectors that need a fold instead to `refold_keys`.
        """
        frame = source.frame
        assert frame is not None
        frame_code = len(frames) << ROW_BITS
        frames.append(frame)
        keys = frame.keys[source.next_row : end]
        if source is self._base or not frame.batch.kinds_mask & _SET_KINDS:
            codes.update(zip(keys, range(frame_code + source.next_row, frame_code + end), strict=True))
            return
        for row, key in enumerate(keys, start=source.next_row):
            earlier_code = codes.get(key)
            if earlier_code is not None and frame.kinds[row] in (Kind.DENSE, Kind.OPAQUE):
                location = earlier_code & (AS_CREATE - 1)
                # Such a row does not change the metadata, so it is not the whole state.
                if frames[location >> ROW_BITS].has_metadata(location & ROW_MASK):
                    refold_keys.append(key)
                    continue
            codes[key] = frame_code + row

    def _drop_tombstones(self, frames: list[RawRows], codes: dict[str, int]) -> None:
        """Drop the forgotten vectors that are deleted: of the previous snapshot, or erased."""
        forgotten, base = self._forgotten, self._base.frame
        for key in forgotten.erased.intersection(codes):
            location = codes[key] & (AS_CREATE - 1)
            if frames[location >> ROW_BITS].kinds[location & ROW_MASK] == Kind.DELETE:
                del codes[key]
        if not frames or frames[0] is not base or not base.batch.kinds_mask >> Kind.DELETE & 1:
            return
        is_deleted = np.frombuffer(base.kinds, np.uint8) == Kind.DELETE
        for row in np.flatnonzero(is_deleted & (base.dots[:, OFFSET] < forgotten.below)).tolist():
            if codes.get(base.keys[row]) == row:
                del codes[base.keys[row]]

    def _ignored_counts(
        self, ends: list[tuple[RowInput, int]], frames: list[RawRows], codes: dict[str, int]
    ) -> dict[str, int]:
        """Return the previous snapshot's counts of deltas without effect, for vectors with a new row."""
        base = self._base.frame
        if not frames or frames[0] is not base or base.batch.state_ignored is None:
            return {}
        end = next(end for source, end in ends if source is self._base)
        counts = base.dots[self._base.next_row : end, IGNORED]
        ignored_counts = {}
        for row in (np.flatnonzero(counts) + self._base.next_row).tolist():
            key = base.keys[row]
            if codes.get(key, row) != row:
                ignored_counts[key] = int(base.dots[row, IGNORED])
        return ignored_counts


def _row_as_change(source: RowInput, key: str) -> Iterator[Change]:
    row = source.row_of(key)
    if row is not None and source.frame is not None:
        logged = source.frame.logged
        batch = logged.batch
        yield Change(
            key, logged.key(row), logged.row_offset(row), 0, batch.operation(row), batch.metadata(row)
        )


def _encode_frames(folded: list[StateRow]) -> Iterator[RawRows]:
    """Encode states as frames of about the usual size."""
    folded.sort(key=lambda row: (row.namespace, row.vector_id))
    first, size = 0, 0
    for index, row in enumerate(folded):
        size += _size(row.state)
        if size >= FRAME_BYTES_MAX or index + 1 == len(folded):
            batch = encode_states(folded[first : index + 1])
            yield RawRows(LoggedBatch(batch, 0, 0, Source.LOCAL))
            first, size = index + 1, 0


def _size(state: VectorState) -> int:
    """Return the approximate bytes of a state's vector or data."""
    return 64 + (0 if state.vector is None else state.vector.nbytes) + len(state.data or b"")
