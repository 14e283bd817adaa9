"""Merges sorted runs of ids into one, some pages at a time. Pure except for the files of the runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.partition.ingest.id_runs import IdRun, RunFacts, RunWriter, pack_tail, sort_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop_broker.disk import File
    from delta_prop_broker.recovery.checkpoints import CheckpointFile

FANOUT = 4
"""Number of adjacent runs that are merged into one."""
GENERATIONS_PER_RUN_MAX = 16
"""Maximum generations of a merged run. A run is forgotten as a whole, so the ids of a larger one would stay
longer.
"""
PAGES_PER_STEP = 16
"""Pages of each run that a step reads, which takes a few milliseconds."""


def choose_runs(runs: Sequence[IdRun], generation_ids: int) -> Sequence[IdRun]:
    """Choose adjacent runs to merge next, none larger than the others together; return () if no runs fit.

    So each merge moves an id into a run at least twice as large as the one before. `runs`: oldest first.
    """
    for first in range(len(runs) - FANOUT + 1):
        chosen = runs[first : first + FANOUT]
        sizes = [run.facts.row_count for run in chosen]
        if 2 * max(sizes) <= sum(sizes) <= GENERATIONS_PER_RUN_MAX * generation_ids:
            return chosen
    return ()


class RunMerge:
    """One merge: call `step` until `is_done`, then `result` and `close`; each step returns bytes of the new
    file.

    If an id is in two runs, its lower offset counts.
    """

    def __init__(self, runs: Sequence[IdRun], error_rate: float) -> None:
        self.runs = runs
        self.is_done = False
        self.facts: RunFacts | None = None
        for run in runs:
            run.hold()
        self._cursors = [_RunCursor(run) for run in runs]
        self._writer = RunWriter(sum(run.facts.row_count for run in runs), error_rate)

    def close(self) -> None:
        """Release the runs."""
        for run in self.runs:
            run.release()

    def result(self, file: File, checkpoint_file: CheckpointFile, path: str) -> IdRun:
        """Return the new run, whose bytes are in `file`."""
        assert self.facts is not None, "the merge is not done: call step until is_done"
        run = IdRun(self.facts, self._writer.fences, file=file, checkpoint_file=checkpoint_file, path=path)
        run.filter = self._writer.filter
        return run

    def step(self) -> Iterable[bytes]:
        """Merge for a few milliseconds; return the next bytes of the file. Raises RunCorrupted, OSError."""
        for cursor in self._cursors:
            cursor.fill()
        bounds = [cursor.last_key for cursor in self._cursors if cursor.has_more]
        if bounds:
            rows = [cursor.take(min(bounds)) for cursor in self._cursors]
            return [b"".join(self._writer.add(sort_rows(np.concatenate(rows))))]
        pages = self._writer.add(sort_rows(np.concatenate([cursor.buffered for cursor in self._cursors])))
        self.facts, last_page = self._writer.finish()
        self.is_done = True
        return chain(
            [b"".join([*pages, *last_page])], pack_tail(self.facts, self._writer.fences, self._writer.filter)
        )


class _RunCursor:
    """A position in a run; `buffered` has the rows that were read from the file and not taken yet."""

    def __init__(self, run: IdRun) -> None:
        self.buffered: NDArray[np.uint64] = np.empty((0, 3), np.uint64)
        self._run = run
        self._page = 0

    @property
    def has_more(self) -> bool:
        """True while pages are left to read."""
        return self._page < self._run.facts.page_count

    @property
    def last_key(self) -> tuple[int, int]:
        """The hash and second half of the last row that was read."""
        return int(self.buffered[-1, 0]), int(self.buffered[-1, 1])

    def fill(self) -> None:
        """Read the next pages if no row is buffered."""
        if self.has_more and not len(self.buffered):
            self.buffered = self._run.rows(self._page, PAGES_PER_STEP)
            self._page += PAGES_PER_STEP

    def take(self, bound: tuple[int, int]) -> NDArray[np.uint64]:
        """Remove and return the rows up to a hash and second half."""
        hashed, second = np.uint64(bound[0]), np.uint64(bound[1])
        start = int(self.buffered[:, 0].searchsorted(hashed))
        end = int(self.buffered[:, 0].searchsorted(hashed, side="right"))
        end = start + int(self.buffered[start:end, 1].searchsorted(second, side="right"))
        taken, self.buffered = self.buffered[:end], self.buffered[end:]
        return taken
