"""Merges the snapshot before with the runs since into the next one's states, a range of vectors at a time.

All inputs are sorted by vector. A range reaches as far as the frames at hand: within it every change of a
vector is known. Where the last row says it all it is copied, else its changes are folded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_broker.log.files.snapshot import FRAME_BYTES_MAX
from delta_prop_broker.log.retention.cells import AS_CREATE, IGNORED, ROW_BITS, ROW_MASK, Cells, Frames, View
from delta_prop_broker.log.retention.runs import Change, decode_changes
from delta_prop_wire.algebra import State
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Kind, Source
from delta_prop_wire.states import StateRow, encode_states, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from delta_prop_broker.log.retention.runs import Folding, Run

_FOLDED_AT_ONCE = 512
_SET_KINDS = 1 << Kind.DENSE | 1 << Kind.OPAQUE


class Rows:
    """An input with one row a vector, frame by frame: `cells` is the one at hand, from row `at` on."""

    def __init__(self, frames: Iterable[LoggedBatch]) -> None:
        self.cells: Cells | None = None
        self.at = 0
        self._frames = iter(frames)

    def load(self) -> Cells | None:
        """The frame at hand, the next one where that is used up; None at the end."""
        if self.cells is None or self.at >= len(self.cells.keys):
            found = next(self._frames, None)
            self.cells, self.at = None if found is None else Cells(found), 0
        return self.cells

    def row_of(self, key: str) -> int | None:
        """Where a vector stands in the frame at hand."""
        if self.cells is None:
            return None
        row = bisect_left(self.cells.keys, key, self.at)
        return row if row < len(self.cells.keys) and self.cells.keys[row] == key else None


class Changes:
    """An input with any number of changes a vector, in canonical order; `head` is the next one."""

    def __init__(self, frames: Iterable[LoggedBatch]) -> None:
        self._changes = (change for logged in frames for change in decode_changes(logged))
        self.head: Change | None = next(self._changes, None)

    def of(self, key: str) -> Iterator[Change]:
        """Those of one vector, which are gone then."""
        while self.head is not None and self.head.key == key:
            yield self.head
            self.head = next(self._changes, None)


class Merge:
    """The states, given to `out` in order. `base` is the snapshot before, `runs` come in the log's order.

    `keep_tombstones`: what was deleted before `base` already is given too.
    """

    def __init__(
        self,
        base: Iterable[LoggedBatch],
        runs: list[Run],
        folding: Folding,
        out: Frames,
        *,
        keep_tombstones: bool = False,
    ) -> None:
        self._base = Rows(base)
        self._last = [Rows(run.rows) for run in runs]
        self._changes = [Changes(run.changes) for run in runs]
        self._folding = folding
        self._out = out
        self._keep_tombstones = keep_tombstones

    def run(self) -> Iterator[None]:
        """Do it, in small steps. Raises LogDamaged, OSError, Refused where a state is too large."""
        while True:
            inputs = [rows for rows in (self._base, *self._last) if rows.load() is not None]
            if not inputs and all(changes.head is None for changes in self._changes):
                break
            bound = min((rows.cells.keys[-1] for rows in inputs if rows.cells is not None), default=None)
            folded, bound = self._fold_changed(bound)
            self._range(inputs, bound, folded)
            yield
        self._out.flush()

    # --- folding

    def _fold_changed(self, bound: str | None) -> tuple[list[StateRow], str | None]:
        """The states of vectors that have changes, up to `bound` or as many as are folded at once; up to
        where that is all.
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
            if len(found) >= _FOLDED_AT_ONCE or size >= FRAME_BYTES_MAX:
                return found, key

    def _fold(self, key: str) -> StateRow:
        """One vector's state, from all inputs."""
        state, offset = State(), 0
        row = self._base.row_of(key)
        if row is not None and self._base.cells is not None:
            logged = self._base.cells.logged
            state, offset = state_of(logged.batch, row), logged.row_offset(row)
        changes = merge(
            *(_last_of(rows, key) for rows in self._last),
            *(changes.of(key) for changes in self._changes),
            key=attrgetter("at"),
        )
        state, offset = self._folding.fold(changes, state, offset)
        namespace, _, vector_id = key.partition("\0")
        return StateRow(namespace, vector_id, state, offset)

    # --- copying

    def _range(self, inputs: list[Rows], bound: str | None, folded: list[StateRow]) -> None:
        """Everything up to `bound`; `folded` are states of that range that are made already."""
        codes: dict[str, int] = {}
        cells: list[Cells] = []
        again: list[str] = []
        ends: list[tuple[Rows, int]] = []
        for rows in inputs:
            one = rows.cells
            assert one is not None
            end = len(one.keys) if bound is None else bisect_right(one.keys, bound, rows.at)
            ends.append((rows, end))
            if end > rows.at:
                self._overlay(rows, end, cells, codes, again)
        known = {f"{row.namespace}\0{row.vector_id}" for row in folded}
        folded += [self._fold(key) for key in again if key not in known]
        if not self._keep_tombstones:
            self._drop_tombstones(cells, codes)
        carried = self._carried(ends, cells, codes)
        for made in _encoded(folded):
            first = len(cells) << ROW_BITS
            for key in made.keys if carried else ():
                carried.pop(key, None)  # folded from the snapshot before: it is in
            cells.append(made)
            codes.update(zip(made.keys, range(first, first + len(made.keys)), strict=True))
        if codes:
            keys = sorted(codes)
            spans = [(rows.at, end) for rows, end in ends if end > rows.at]
            spans += [(0, len(made.keys)) for made in cells[len(spans) :]]
            self._out.add(View(cells, spans), keys, [codes[key] for key in keys], carried)
        for rows, end in ends:
            rows.at = end

    def _overlay(
        self, rows: Rows, end: int, cells: list[Cells], codes: dict[str, int], again: list[str]
    ) -> None:
        """Put the rows of one input over those of the inputs before; `again`: what must be folded instead."""
        one = rows.cells
        assert one is not None
        base = len(cells) << ROW_BITS
        cells.append(one)
        keys = one.keys[rows.at : end]
        if rows is self._base or not one.batch.kinds_mask & _SET_KINDS:
            codes.update(zip(keys, range(base + rows.at, base + end), strict=True))
            return
        for row, key in enumerate(keys, start=rows.at):
            before = codes.get(key)
            if before is not None and one.kinds[row] in (Kind.DENSE, Kind.OPAQUE):
                place = before & (AS_CREATE - 1)
                if cells[place >> ROW_BITS].has_metadata(place & ROW_MASK):  # which stay
                    again.append(key)
                    continue
            codes[key] = base + row

    def _drop_tombstones(self, cells: list[Cells], codes: dict[str, int]) -> None:
        """Forget what was not alive in the snapshot before and has not been touched since.

        So a tombstone stands in one snapshot, and outlives its delta by one compaction at least.
        """
        base = self._base.cells
        if not cells or cells[0] is not base or not base.batch.kinds_mask >> Kind.DELETE & 1:
            return
        for row in np.flatnonzero(np.frombuffer(base.kinds, np.uint8) == Kind.DELETE).tolist():
            if codes.get(base.keys[row]) == row:
                del codes[base.keys[row]]

    def _carried(
        self, ends: list[tuple[Rows, int]], cells: list[Cells], codes: dict[str, int]
    ) -> dict[str, int]:
        """Deltas without effect that the snapshot before counts, of vectors whose row is another one now."""
        base = self._base.cells
        if not cells or cells[0] is not base or base.batch.state_ignored is None:
            return {}
        end = next(end for rows, end in ends if rows is self._base)
        counts = base.dots[self._base.at : end, IGNORED]
        found = {}
        for row in (np.flatnonzero(counts) + self._base.at).tolist():
            key = base.keys[row]
            if codes.get(key, row) != row:
                found[key] = int(base.dots[row, IGNORED])
        return found


def _last_of(rows: Rows, key: str) -> Iterator[Change]:
    row = rows.row_of(key)
    if row is not None and rows.cells is not None:
        logged = rows.cells.logged
        batch = logged.batch
        yield Change(
            key, logged.key(row), logged.row_offset(row), 0, batch.operation(row), batch.metadata(row)
        )


def _encoded(folded: list[StateRow]) -> Iterator[Cells]:
    """States as frames, none much above the usual size."""
    folded.sort(key=lambda row: (row.namespace, row.vector_id))
    first, size = 0, 0
    for at, row in enumerate(folded):
        size += _size(row.state)
        if size >= FRAME_BYTES_MAX or at + 1 == len(folded):
            made = encode_states(folded[first : at + 1])
            yield Cells(LoggedBatch(made, 0, 0, Source.LOCAL))
            first, size = at + 1, 0


def _size(state: State) -> int:
    """About the bytes of a state's vector or bytes."""
    return 64 + (0 if state.vector is None else state.vector.nbytes) + len(state.data or b"")
