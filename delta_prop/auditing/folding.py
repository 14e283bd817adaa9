"""Folds a log into the states of its vectors, sorted, in bounded memory; nothing of the log is touched.

As compaction does: changes are gathered into sorted runs, which are set aside in a scratch folder where they
are large, and merged. The states behind two places of the log come of one pass over it.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delta_prop.auditing.differences import Known
from delta_prop_broker.log.beside.follow import Follower
from delta_prop_broker.log.files.snapshot import sort_keys
from delta_prop_broker.log.retention.cells import Frames
from delta_prop_broker.log.retention.merging import Merge
from delta_prop_broker.log.retention.runs import Folding, Frameset, Run, RunBuilder
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import KnownIds, Source
from delta_prop_wire.states import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.files.snapshot import Snapshot
    from delta_prop_wire.batch import Batch

RUN_BYTES_MAX = 64 * 1024 * 1024
"""About the memory that is taken for sorting; what is more is set aside."""


@dataclass(frozen=True, slots=True)
class Span:
    """The input of a fold: the snapshot, None where there is none, and the log from `begin` up to `end`.

    `come`: how far the sink has come. `ahead`: up to which offset the sink has a vector beyond that.
    """

    disk: Disk
    snapshot: Snapshot | None
    begin: int
    end: int
    come: int
    ahead: Callable[[str], int] | None = None


@dataclass(slots=True)
class Folded:
    """The runs of one pass. Iterate over the states as often as is wanted, until they are dropped."""

    snapshot: Snapshot | None
    before: list[Run] = field(default_factory=list)
    ahead: list[Run] = field(default_factory=list)
    behind: list[Run] = field(default_factory=list)

    def at_sink(self) -> Iterator[tuple[str, Known]]:
        """By key, in order, what the sink should hold. Raises LogDamaged, OSError."""
        return _merged(self.snapshot, [*self.before, *self.ahead])

    def at_end(self) -> Iterator[tuple[str, Known]]:
        """The same at the end of the log."""
        return _merged(self.snapshot, [*self.before, *self.behind])

    def drop(self) -> None:
        """Let go of all runs. Raises OSError."""
        for runs in (self.before, self.ahead, self.behind):
            while runs:
                run = runs.pop()
                run.rows.drop()
                run.changes.drop()


@contextmanager
def fold_log(span: Span, scratch: Disk, *, run_bytes_max: int = RUN_BYTES_MAX) -> Iterator[Folded]:
    """Read the log once, or twice where forwarded deltas have come out of order.

    Raises Refused (CURSOR_TOO_OLD) where a writer has let go of what comes next, LogDamaged, OSError.
    """
    folded = Folded(span.snapshot)
    try:
        try:
            _Pass(span, folded, scratch, run_bytes_max, in_order=True).run()
        except _OutOfOrder:
            folded.drop()
            _Pass(span, folded, scratch, run_bytes_max, in_order=False).run()
        yield folded
    finally:
        folded.drop()


class _OutOfOrder(Exception):
    """A batch's Lamport numbers are not above all before, or it repeats ids."""


class _Pass:
    """One pass over the log, whose runs go to `made`."""

    def __init__(
        self, span: Span, made: Folded, scratch: Disk, run_bytes_max: int, *, in_order: bool
    ) -> None:
        self._span = span
        self._in_order = in_order
        self._lamport = 0 if span.snapshot is None else span.snapshot.lamport
        kinds = (("before", made.before), ("ahead", made.ahead), ("behind", made.behind))
        self._before, self._ahead, self._behind = (
            _Runs(name, runs, scratch, run_bytes_max, in_order=in_order) for name, runs in kinds
        )

    def run(self) -> None:
        """Raises as `fold_log` does, _OutOfOrder."""
        span = self._span
        follower = Follower(span.disk, span.begin, synced=span.end)
        try:
            for place in follower.read():
                if place.logged.offset >= span.end:
                    break
                self._take(place.logged)
        finally:
            follower.close()
        for runs in (self._before, self._ahead, self._behind):
            runs.close(aside=False)

    def _take(self, logged: LoggedBatch) -> None:
        if self._in_order and not (logged.lamport > self._lamport and logged.known_ids is KnownIds.NONE):
            raise _OutOfOrder
        self._lamport = max(self._lamport, logged.lamport + logged.batch.count - 1)
        if logged.batch.is_control:
            return
        come, first = self._span.come, logged.offset
        if logged.next_offset <= come:
            self._before.add(logged)
            return
        cut = max(come - first, 0)
        self._before.add(logged, range(cut))
        self._behind.add(logged, range(cut, logged.batch.count))
        if self._span.ahead is not None:
            keys = sort_keys(logged.batch)
            rows = range(cut, len(keys))
            self._ahead.add(logged, [row for row in rows if self._span.ahead(keys[row]) >= first + row])


class _Runs:
    """Gathers batches into runs."""

    def __init__(
        self, name: str, made: list[Run], scratch: Disk, run_bytes_max: int, *, in_order: bool
    ) -> None:
        self._name = name
        self._made = made
        self._scratch = scratch
        self._run_bytes_max = run_bytes_max
        self._builder = RunBuilder(in_order)

    def add(self, logged: LoggedBatch, rows: Sequence[int] | None = None) -> None:
        if rows is not None and not len(rows):
            return
        whole = rows is None or len(rows) == logged.batch.count
        self._builder.add(logged, None if whole else rows)
        if self._builder.bytes >= self._run_bytes_max:
            self.close(aside=True)

    def close(self, *, aside: bool) -> None:
        if not self._builder.bytes:
            return
        kinds = (f"{self._name}-{len(self._made)}-{kind}.run" for kind in ("rows", "changes"))
        run = Run(*(Frameset(self._scratch, kind) if aside else Frameset() for kind in kinds))
        self._made.append(run)
        for _ in self._builder.close(run, Folding()):
            pass


def _merged(snapshot: Snapshot | None, runs: list[Run]) -> Iterator[tuple[str, Known]]:
    made: list[Batch] = []
    out = Frames(made.append, states=True)
    base = () if snapshot is None else snapshot.frames()
    for _ in Merge(base, runs, Folding(), out, keep_tombstones=True).run():
        yield from _states(made)
    yield from _states(made)


def _states(made: list[Batch]) -> Iterator[tuple[str, Known]]:
    for batch in made:
        logged = LoggedBatch(batch, 0, 0, Source.LOCAL)
        for row, key in enumerate(sort_keys(batch)):
            yield key, Known(state_of(batch, row), logged.row_offset(row))
    made.clear()
