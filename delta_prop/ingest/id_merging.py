"""Merges sorted runs of ids into one, some pages at a time. Pure except for the files of the runs."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.ingest.id_runs import IdRun, RunWriter, pack_tail, sort_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from delta_prop.ingest.id_runs import RunFacts
    from delta_prop_broker.disk import File
    from delta_prop_broker.log.files.checkpoints import CheckpointFile

FANOUT = 4
"""Number of adjacent runs that are merged into one."""
GENERATIONS_PER_RUN_MAX = 16
"""Maximum generations of a merged run: a larger one could not be forgotten for long."""
PAGES_PER_STEP = 16
"""Pages of each run that a step reads, which takes a few milliseconds."""


def choose_runs(runs: Sequence[IdRun], generation_ids: int) -> Sequence[IdRun]:
    """Choose the adjacent runs to merge next, of which none outweighs the others; return () if none fit.

    `runs`: oldest first. So each rewrite moves an id into a run at least twice as large.
    """
    for first in range(len(runs) - FANOUT + 1):
        some = runs[first : first + FANOUT]
        sizes = [run.facts.rows for run in some]
        if 2 * max(sizes) <= sum(sizes) <= GENERATIONS_PER_RUN_MAX * generation_ids:
            return some
    return ()


class RunMerge:
    """One merge: call `step` until `is_done`, then `close`; each step returns the next bytes of the new file.

    If an id is in two runs, its lower offset counts.
    """

    def __init__(self, runs: Sequence[IdRun], error_rate: float) -> None:
        self.runs = runs
        self.is_done = False
        self.facts: RunFacts | None = None
        for run in runs:
            run.hold()
        self._cursors = [_RunCursor(run) for run in runs]
        self._writer = RunWriter(sum(run.facts.rows for run in runs), error_rate)

    def close(self) -> None:
        """Release the runs."""
        for run in self.runs:
            run.release()

    def result(self, file: File, checkpoint_file: CheckpointFile, path: str) -> IdRun:
        """Return the new run, in the file that its bytes were written to."""
        assert self.facts is not None, "only what is done has a result"
        run = IdRun(self.facts, self._writer.fences, file=file, checkpoint_file=checkpoint_file, path=path)
        run.filter = self._writer.filter
        return run

    def step(self) -> Iterable[bytes]:
        """Merge for some milliseconds. Raises RunCorrupted, OSError."""
        for cursor in self._cursors:
            cursor.fill()
        bounds = [cursor.last_key for cursor in self._cursors if cursor.has_more]
        if bounds:
            rows = [cursor.take(min(bounds)) for cursor in self._cursors]
            return [b"".join(self._writer.add(sort_rows(np.concatenate(rows))))]
        pages = self._writer.add(sort_rows(np.concatenate([cursor.unread for cursor in self._cursors])))
        self.facts, last = self._writer.finish()
        self.is_done = True
        return chain(
            [b"".join([*pages, *last])], pack_tail(self.facts, self._writer.fences, self._writer.filter)
        )


class _RunCursor:
    """A position in a run; `unread` are rows that were read from the file and not taken."""

    def __init__(self, run: IdRun) -> None:
        self.unread: NDArray[np.uint64] = np.empty((0, 3), np.uint64)
        self._run = run
        self._page = 0

    @property
    def has_more(self) -> bool:
        """True while some pages have not been read."""
        return self._page < self._run.facts.pages

    @property
    def last_key(self) -> tuple[int, int]:
        """Hash and second half of the last row that was read."""
        return int(self.unread[-1, 0]), int(self.unread[-1, 1])

    def fill(self) -> None:
        """Read the next pages if no row is left."""
        if self.has_more and not len(self.unread):
            self.unread = self._run.rows(self._page, PAGES_PER_STEP)
            self._page += PAGES_PER_STEP

    def take(self, bound: tuple[int, int]) -> NDArray[np.uint64]:
        """Take the rows up to a hash and second half."""
        hashed, second = np.uint64(bound[0]), np.uint64(bound[1])
        start = int(self.unread[:, 0].searchsorted(hashed))
        end = int(self.unread[:, 0].searchsorted(hashed, side="right"))
        end = start + int(self.unread[start:end, 1].searchsorted(second, side="right"))
        taken, self.unread = self.unread[:end], self.unread[end:]
        return taken
