"""Merges the previous snapshot and later runs into the states of the next one, a range of vectors at a time.

All inputs are sorted by vector. A range ends where the first loaded frame ends, so all changes of its vectors
are known. If the last row of a vector holds its full state, it is copied; else the changes are folded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_broker.log.files.snapshot import FRAME_BYTES_MAX
from delta_prop_broker.log.retention.raw_rows import (
    AS_CREATE,
    IGNORED,
    ROW_BITS,
    ROW_MASK,
    FrameBuilder,
    RawRows,
    RowView,
)
from delta_prop_broker.log.retention.sorted_run import Change, decode_changes
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Kind, Source
from delta_prop_wire.state_rows import StateRow, encode_states, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from delta_prop_broker.log.retention.sorted_run import ChangeFolder, SortedRun

_FOLD_ROWS_MAX = 512
_SET_KINDS = 1 << Kind.DENSE | 1 << Kind.OPAQUE


class RowInput:
    """An input with one row per vector. `frame`: the loaded frame, of which rows before `at` are merged."""

    def __init__(self, frames: Iterable[LoggedBatch]) -> None:
        self.frame: RawRows | None = None
        self.at = 0
        self._frames = iter(frames)

    def load(self) -> RawRows | None:
        """Return the loaded frame, or load the next one if all its rows are merged; None at the end."""
        if self.frame is None or self.at >= len(self.frame.keys):
            found = next(self._frames, None)
            self.frame, self.at = None if found is None else RawRows(found), 0
        return self.frame

    def row_of(self, key: str) -> int | None:
        """Return the row of a vector in the loaded frame; None if it has none."""
        if self.frame is None:
            return None
        row = bisect_left(self.frame.keys, key, self.at)
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

    `keep_tombstones`: also write the vectors that were deleted before `base`.
    """

    def __init__(
        self,
        base: Iterable[LoggedBatch],
        runs: list[SortedRun],
        folder: ChangeFolder,
        out: FrameBuilder,
        *,
        keep_tombstones: bool = False,
    ) -> None:
        self._base = RowInput(base)
        self._run_rows = [RowInput(run.rows) for run in runs]
        self._changes = [ChangeInput(run.changes) for run in runs]
        self._folder = folder
        self._out = out
        self._keep_tombstones = keep_tombstones

    def run(self) -> Iterator[None]:
        """Merge, in small steps. Raises LogCorrupted, OSError, Refused if a state is too large."""
        while True:
            inputs = [rows for rows in (self._base, *self._run_rows) if rows.load() is not None]
            if not inputs and all(changes.head is None for changes in self._changes):
                break
            bound = min((rows.frame.keys[-1] for rows in inputs if rows.frame is not None), default=None)
            folded, bound = self._fold_changed_vectors(bound)
            self._merge_range(inputs, bound, folded)
            yield
        self._out.flush()

    # --- folding

    def _fold_changed_vectors(self, bound: str | None) -> tuple[list[StateRow], str | None]:
        """Fold the vectors that have changes, up to key `bound` or a maximum number of rows.

        Return their states, and the key up to which all such vectors are folded.
        """
        found: list[StateRow] = []
        size = 0
        while True:
            key = min((c.head.key for c in self._changes if c.head is not None), default=None)
            if key is None or (bound is not None and key > bound):
                return found, bound
            row = self._fold(key)
            found.append(row)
            size += _size(row.state)
            if len(found) >= _FOLD_ROWS_MAX or size >= FRAME_BYTES_MAX:
                return found, key

    def _fold(self, key: str) -> StateRow:
        """Return one vector's state, folded from all inputs."""
        state, offset = VectorState(), 0
        row = self._base.row_of(key)
        if row is not None and self._base.frame is not None:
            logged = self._base.frame.logged
            state, offset = state_of(logged.batch, row), logged.row_offset(row)
        changes = merge(
            *(_last_change(rows, key) for rows in self._run_rows),
            *(changes.take(key) for changes in self._changes),
            key=attrgetter("at"),
        )
        state, offset = self._folder.fold(changes, state, offset)
        namespace, _, vector_id = key.partition("\0")
        return StateRow(namespace, vector_id, state, offset)

    # --- copying

    def _merge_range(self, inputs: list[RowInput], bound: str | None, folded: list[StateRow]) -> None:
        """Write all vectors up to key `bound`; `folded`: the states of that range that were folded."""
        codes: dict[str, int] = {}
        frames: list[RawRows] = []
        refold: list[str] = []
        ends: list[tuple[RowInput, int]] = []
        for rows in inputs:
            frame = rows.frame
            assert frame is not None
            end = len(frame.keys) if bound is None else bisect_right(frame.keys, bound, rows.at)
            ends.append((rows, end))
            if end > rows.at:
                self._overlay(rows, end, frames, codes, refold)
        known = {f"{row.namespace}\0{row.vector_id}" for row in folded}
        folded += [self._fold(key) for key in refold if key not in known]
        if not self._keep_tombstones:
            self._drop_tombstones(frames, codes)
        ignored_counts = self._ignored_counts(ends, frames, codes)
        for frame_of_folded in _encode_frames(folded):
            first = len(frames) << ROW_BITS
            for key in frame_of_folded.keys if ignored_counts else ():
                ignored_counts.pop(key, None)  # the folded state includes the previous snapshot's count
            frames.append(frame_of_folded)
            codes.update(
                zip(frame_of_folded.keys, range(first, first + len(frame_of_folded.keys)), strict=True)
            )
        if codes:
            keys = sorted(codes)
            spans = [(rows.at, end) for rows, end in ends if end > rows.at]
            spans += [(0, len(frame_of_folded.keys)) for frame_of_folded in frames[len(spans) :]]
            self._out.add(RowView(frames, spans), keys, [codes[key] for key in keys], ignored_counts)
        for rows, end in ends:
            rows.at = end

    def _overlay(
        self, rows: RowInput, end: int, frames: list[RawRows], codes: dict[str, int], refold: list[str]
    ) -> None:
        """Replace the rows of earlier inputs by those of one input; add vectors to fold to `refold`."""
        frame = rows.frame
        assert frame is not None
        base = len(frames) << ROW_BITS
        frames.append(frame)
        keys = frame.keys[rows.at : end]
        if rows is self._base or not frame.batch.kinds_mask & _SET_KINDS:
            codes.update(zip(keys, range(base + rows.at, base + end), strict=True))
            return
        for row, key in enumerate(keys, start=rows.at):
            before = codes.get(key)
            if before is not None and frame.kinds[row] in (Kind.DENSE, Kind.OPAQUE):
                location = before & (AS_CREATE - 1)
                if frames[location >> ROW_BITS].has_metadata(location & ROW_MASK):  # which stays
                    refold.append(key)
                    continue
            codes[key] = base + row

    def _drop_tombstones(self, frames: list[RawRows], codes: dict[str, int]) -> None:
        """Drop vectors that were deleted in the previous snapshot and have not changed since.

        So a tombstone stays for one snapshot after the delta that deleted the vector.
        """
        base = self._base.frame
        if not frames or frames[0] is not base or not base.batch.kinds_mask >> Kind.DELETE & 1:
            return
        for row in np.flatnonzero(np.frombuffer(base.kinds, np.uint8) == Kind.DELETE).tolist():
            if codes.get(base.keys[row]) == row:
                del codes[base.keys[row]]

    def _ignored_counts(
        self, ends: list[tuple[RowInput, int]], frames: list[RawRows], codes: dict[str, int]
    ) -> dict[str, int]:
        """Return the previous snapshot's counts of deltas without effect, for vectors with a new row."""
        base = self._base.frame
        if not frames or frames[0] is not base or base.batch.state_ignored is None:
            return {}
        end = next(end for rows, end in ends if rows is self._base)
        counts = base.dots[self._base.at : end, IGNORED]
        found = {}
        for row in (np.flatnonzero(counts) + self._base.at).tolist():
            key = base.keys[row]
            if codes.get(key, row) != row:
                found[key] = int(base.dots[row, IGNORED])
        return found


def _last_change(rows: RowInput, key: str) -> Iterator[Change]:
    row = rows.row_of(key)
    if row is not None and rows.frame is not None:
        logged = rows.frame.logged
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
            made = encode_states(folded[first : index + 1])
            yield RawRows(LoggedBatch(made, 0, 0, Source.LOCAL))
            first, size = index + 1, 0


def _size(state: VectorState) -> int:
    """Return the approximate bytes of a state's vector or data."""
    return 64 + (0 if state.vector is None else state.vector.nbytes) + len(state.data or b"")
