"""Folds a log into the sorted states of its vectors, in bounded memory, without changing the log.

It works like compaction: changes are collected into sorted runs, which are spilled to a scratch folder if
they are large, and merged. One pass gives the states at two offsets of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from delta_prop.auditing.differences import LogState
from delta_prop_broker.disk import Disk
from delta_prop_broker.readonly.follow import Follower
from delta_prop_broker.retention.merging import Merge
from delta_prop_broker.retention.raw_rows import FrameBuilder
from delta_prop_broker.retention.snapshot import Snapshot, sort_keys
from delta_prop_broker.retention.sorted_run import ChangeFolder, RunBuilder, SortedRun, SpillFile
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import KnownIds, Source
from delta_prop_wire.state_rows import state_of

RUN_BYTES_MAX = 64 * 1024 * 1024
"""Approximate memory for sorting; more is spilled."""


@dataclass(frozen=True, slots=True)
class FoldInput:
    """Input of a fold: the snapshot, None if there is none, and the log from `start` up to `end`.

    `sink_offset`: the sink's progress. `row_offset_of(key)` returns the offset of the last delta in the
    sink's row with that key; the field is None if no row is beyond `sink_offset`. `directory`: of the log.
    """

    disk: Disk
    snapshot: Snapshot | None
    start: int
    end: int
    sink_offset: int
    row_offset_of: Callable[[str], int] | None = None
    directory: str = DIRECTORY


@dataclass(slots=True)
class FoldedRuns:
    """The sorted runs of one pass; the states may be read repeatedly, until the runs are dropped.

    `before`: deltas up to the sink's progress; `after`: the later ones; `ahead`: those of the later ones that
    the sink's rows include already.
    """

    snapshot: Snapshot | None
    before: list[SortedRun] = field(default_factory=list)
    ahead: list[SortedRun] = field(default_factory=list)
    after: list[SortedRun] = field(default_factory=list)

    def at_sink(self) -> Iterator[tuple[str, LogState]]:
        """Yield the states that the sink should hold, ordered by key. Raises LogCorrupted, OSError."""
        return _merge_runs(self.snapshot, [*self.before, *self.ahead])

    def at_end(self) -> Iterator[tuple[str, LogState]]:
        """Yield the states at the end of the log, ordered by key."""
        return _merge_runs(self.snapshot, [*self.before, *self.after])

    def drop(self) -> None:
        """Drop all runs. Raises OSError."""
        for runs in (self.before, self.ahead, self.after):
            while runs:
                run = runs.pop()
                run.rows.drop()
                run.changes.drop()


@contextmanager
def fold_log(
    fold_input: FoldInput, scratch: Disk, *, run_bytes_max: int = RUN_BYTES_MAX
) -> Iterator[FoldedRuns]:
    """Fold the log. It is read once, or twice if forwarded deltas are out of order or have known ids.

    Raises Refused (CURSOR_TOO_OLD) if a writer has dropped rows that are still needed, LogCorrupted, OSError.
    """
    folded = FoldedRuns(fold_input.snapshot)
    try:
        try:
            _Pass(fold_input, folded, scratch, run_bytes_max, in_order=True).run()
        except _OutOfOrder:
            folded.drop()
            _Pass(fold_input, folded, scratch, run_bytes_max, in_order=False).run()
        yield folded
    finally:
        folded.drop()


class _OutOfOrder(Exception):
    """Raised for a batch whose Lamport numbers are not above all earlier ones, or that has known ids."""


class _Pass:
    """One pass over the log, which adds its runs to `folded`.

    `in_order`: True to expect deltas in canonical order without known ids, which costs less.
    """

    def __init__(
        self, fold_input: FoldInput, folded: FoldedRuns, scratch: Disk, run_bytes_max: int, *, in_order: bool
    ) -> None:
        self._input = fold_input
        self._in_order = in_order
        self._lamport = 0 if fold_input.snapshot is None else fold_input.snapshot.lamport
        collections = (("before", folded.before), ("ahead", folded.ahead), ("after", folded.after))
        self._before, self._ahead, self._after = (
            _RunCollector(name, runs, scratch, run_bytes_max, in_order=in_order) for name, runs in collections
        )

    def run(self) -> None:
        """Read the input. Raises as `fold_log` does, _OutOfOrder."""
        source = self._input
        follower = Follower(source.disk, source.start, source.directory, synced=source.end)
        try:
            for located in follower.read():
                if located.logged.offset >= self._input.end:
                    break
                self._add(located.logged)
        finally:
            follower.close()
        for runs in (self._before, self._ahead, self._after):
            runs.close(spill=False)

    def _add(self, logged: LoggedBatch) -> None:
        if self._in_order and not (logged.lamport > self._lamport and logged.known_ids is KnownIds.NONE):
            raise _OutOfOrder
        self._lamport = max(self._lamport, logged.lamport + logged.batch.count - 1)
        if logged.batch.is_control:
            return
        sink_offset = self._input.sink_offset
        if logged.next_offset <= sink_offset:
            self._before.add(logged)
            return
        first_after = max(sink_offset - logged.offset, 0)  # the first row after the sink's progress
        self._before.add(logged, range(first_after))
        self._after.add(logged, range(first_after, logged.batch.count))
        if self._input.row_offset_of is not None:
            keys = sort_keys(logged.batch)
            rows = range(first_after, len(keys))
            self._ahead.add(
                logged, [row for row in rows if self._input.row_offset_of(keys[row]) >= logged.offset + row]
            )


class _RunCollector:
    """Collects batches into sorted runs, and spills each run that reaches `run_bytes_max`."""

    def __init__(
        self, name: str, runs: list[SortedRun], scratch: Disk, run_bytes_max: int, *, in_order: bool
    ) -> None:
        self._name = name
        self._runs = runs
        self._scratch = scratch
        self._run_bytes_max = run_bytes_max
        self._builder = RunBuilder(in_order)

    def add(self, logged: LoggedBatch, rows: Sequence[int] | None = None) -> None:
        if rows is not None and not len(rows):
            return
        is_complete = rows is None or len(rows) == logged.batch.count
        self._builder.add(logged, None if is_complete else rows)
        if self._builder.bytes >= self._run_bytes_max:
            self.close(spill=True)

    def close(self, *, spill: bool) -> None:
        if not self._builder.bytes:
            return
        names = (f"{self._name}-{len(self._runs)}-{kind}.run" for kind in ("rows", "changes"))
        run = SortedRun(*(SpillFile(self._scratch, name) if spill else SpillFile() for name in names))
        self._runs.append(run)
        for _ in self._builder.close(run, ChangeFolder()):
            pass


def _merge_runs(snapshot: Snapshot | None, runs: list[SortedRun]) -> Iterator[tuple[str, LogState]]:
    batches: list[Batch] = []
    out = FrameBuilder(batches, states=True)
    base = () if snapshot is None else snapshot.frames()
    for _ in Merge(base, runs, ChangeFolder(), out).run():
        yield from _take_states(batches)
    yield from _take_states(batches)


def _take_states(batches: list[Batch]) -> Iterator[tuple[str, LogState]]:
    for batch in batches:
        logged = LoggedBatch(batch, 0, 0, Source.LOCAL)
        for row, key in enumerate(sort_keys(batch)):
            yield key, LogState(state_of(batch, row), logged.row_offset(row))
    batches.clear()
