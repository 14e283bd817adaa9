"""Merges sorted runs of ids into one, some pages at a time. Pure but for the files that the runs lie in."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.ingest.id_runs import IdRun, RunWriter, in_order, tail_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from delta_prop.ingest.id_runs import RunFacts
    from delta_prop_broker.disk import File
    from delta_prop_broker.log.files.checkpoints import PartName

FANOUT = 4
"""So many neighbours are merged into one."""
GENERATIONS_A_RUN_MAX = 16
"""A run of so many generations is merged no more, so that it can be forgotten before long."""
PAGES_A_STEP = 16
"""Pages of each run that a step takes in: a few milliseconds."""


def choose(runs: Sequence[IdRun], generation_ids: int) -> Sequence[IdRun]:
    """Choose the runs to merge next: neighbours of which none outweighs the others; or none.

    `runs`: the oldest first. So an id comes into a run at least twice as large whenever it is written again.
    """
    for first in range(len(runs) - FANOUT + 1):
        some = runs[first : first + FANOUT]
        sizes = [run.facts.rows for run in some]
        if 2 * max(sizes) <= sum(sizes) <= GENERATIONS_A_RUN_MAX * generation_ids:
            return some
    return ()


class Merge:
    """One merge: `step` until `done`, then `close`; each step gives the next pieces of the new run's file.

    Of an id that stands in two runs the first place counts.
    """

    def __init__(self, runs: Sequence[IdRun], error_rate: float) -> None:
        self.runs = runs
        self.done = False
        self.facts: RunFacts | None = None
        for run in runs:
            run.hold()
        self._cursors = [_Cursor(run) for run in runs]
        self._writer = RunWriter(sum(run.facts.rows for run in runs), error_rate)

    def close(self) -> None:
        """Release the runs."""
        for run in self.runs:
            run.release()

    def result(self, file: File, part: PartName, path: str) -> IdRun:
        """Return the new run, in the file that all its bytes were written to."""
        assert self.facts is not None, "only what is done has a result"
        run = IdRun(self.facts, self._writer.fences, file=file, part=part, path=path)
        run.filter = self._writer.filter
        return run

    def step(self) -> Iterable[bytes]:
        """Merge for some milliseconds. Raises RunDamaged, OSError."""
        for cursor in self._cursors:
            cursor.fill()
        bounds = [cursor.last for cursor in self._cursors if cursor.more]
        if bounds:
            rows = [cursor.take(min(bounds)) for cursor in self._cursors]
            return [b"".join(self._writer.add(in_order(np.concatenate(rows))))]
        pages = self._writer.add(in_order(np.concatenate([cursor.left for cursor in self._cursors])))
        self.facts, last = self._writer.finish()
        self.done = True
        return chain(
            [b"".join([*pages, *last])], tail_of(self.facts, self._writer.fences, self._writer.filter)
        )


class _Cursor:
    """How far a run has been read; `left` are rows that were read and not taken."""

    def __init__(self, run: IdRun) -> None:
        self.left: NDArray[np.uint64] = np.empty((0, 3), np.uint64)
        self._run = run
        self._page = 0

    @property
    def more(self) -> bool:
        """True while some pages have not been read."""
        return self._page < self._run.facts.pages

    @property
    def last(self) -> tuple[int, int]:
        """Hash and second half of the last row that was read."""
        return int(self.left[-1, 0]), int(self.left[-1, 1])

    def fill(self) -> None:
        """Read the next pages if no row is left."""
        if self.more and not len(self.left):
            self.left = self._run.rows(self._page, PAGES_A_STEP)
            self._page += PAGES_A_STEP

    def take(self, bound: tuple[int, int]) -> NDArray[np.uint64]:
        """Take the rows up to a hash and second half."""
        hashed, second = np.uint64(bound[0]), np.uint64(bound[1])
        start = int(self.left[:, 0].searchsorted(hashed))
        end = int(self.left[:, 0].searchsorted(hashed, side="right"))
        end = start + int(self.left[start:end, 1].searchsorted(second, side="right"))
        taken, self.left = self.left[:end], self.left[end:]
        return taken
