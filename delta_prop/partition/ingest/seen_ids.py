"""The 16-byte ids of appended deltas, with their first offsets, exact for as long as they are stored.

Pure except for the files of the runs. It never reports an unknown id as seen: each match of a filter is
confirmed by the ids themselves, and if these cannot be read, an error is raised.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.partition.ingest.bloom import hash_id, hash_ids
from delta_prop.partition.ingest.id_runs import IdRun, RunCorrupted, RunWriter, sort_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEW_IDS = 64
"""Up to this number, ids are searched one by one, since calls of numpy would take longer."""

STEP_IDS = 4_096
"""Number of ids that one step of a sealing handles, which takes a millisecond or two."""
STEP_EVERY_IDS = 800
"""Number of added ids per step, so that a sealing ends long before the next one begins."""

WAITING_MAX = 4
"""Maximum number of runs that wait to be written, as on a failing disk; then no more ids are accepted."""

ID_OBJECT_BYTES = 64 + 32
"""Memory of an id and its offset, as Python objects, without the dict entry."""


@dataclass(frozen=True, slots=True)
class SeenIdsStatistics:
    """Statistics of the stored ids; the bytes of ids in a dict are estimated.

    `ids_open`: ids in a dict, so not sealed yet. `runs_waiting`: runs in memory, so not written yet.
    `kept_since`: the offset from which on every id is known. `confirmed`, `false_positives`: the number of
    searches in a run that found the id, or did not, though the filter (if loaded) matched.
    """

    ids: int
    ids_open: int
    runs: int
    runs_waiting: int
    runs_forgotten: int
    kept_since: int
    memory_bytes: int
    file_bytes: int
    confirmed: int
    false_positives: int


class SeenIds:
    """Ids with their first offsets: recent ones in a dict, older ones in sorted runs.

    A full dict of `generation_ids` is sealed into a run, in steps spread over the following calls of `add`;
    until then lookups use the dict. An owner with a disk writes the runs there and merges them; then their
    filters (those of smaller runs first) stay in memory up to `index_bytes_max`, together with the fences. A
    run entirely below the log's start is forgotten once `retained_min` newer ids are known: `kept_since` is
    the offset from which on every id is known.
    """

    def __init__(
        self,
        *,
        generation_ids: int = 1_000_000,
        retained_min: int = 0,
        waiting_max: int | None = None,
        index_bytes_max: int = 1 << 28,
        error_rate: float = 0.001,
    ) -> None:
        """Create an empty table.

        `retained_min`: the number of newest ids that stay stored even if the log drops their rows;
        `waiting_max`: maximum number of runs that wait to be written; None: any number.
        """
        assert generation_ids >= 1
        self.generation_ids = generation_ids
        self.error_rate = error_rate
        self.kept_since = 0
        self.corrupted_run: IdRun | None = None
        """A run that could not be read, and must be rebuilt."""
        self.on_corruption: Callable[[], None] = lambda: None
        """Called when a run could not be read."""
        self.revision = 0
        """Changes whenever the runs change, or one is corrupted."""
        self._index_bytes_max = index_bytes_max
        self._retained_min = retained_min
        self._waiting_max = waiting_max
        self._open: dict[bytes, int] = {}
        self._closed: dict[bytes, int] = {}  # the full table that is being sealed
        self._runs: list[IdRun] = []  # oldest first
        self._sealed_count = 0  # ids in the runs
        self._sealing: Iterator[None] | None = None
        self._ids_since_step = 0
        self._forgotten = 0
        self._confirmed = 0
        self._false_positives = 0

    def find(self, ids: Sequence[bytes]) -> list[int | None]:
        """Find the first offset of each id; None if it was not seen. Raises RunCorrupted, OSError."""
        if len(ids) <= FEW_IDS:
            return [self._find_id(delta_id) for delta_id in ids]
        offsets: list[int | None] = [None] * len(ids)
        if self._runs:
            hashes, seconds = hash_ids(ids)
            for run in self._runs:
                self._find_in_run(run, hashes, seconds, offsets)
        for table in (self._closed, self._open):
            if not table.keys().isdisjoint(ids):
                for row, delta_id in enumerate(ids):
                    if offsets[row] is None:
                        offsets[row] = table.get(delta_id)
        return offsets

    def __contains__(self, delta_id: object) -> bool:
        """Return True if an id was seen; False also if its run cannot be read."""
        try:
            return isinstance(delta_id, bytes) and self._find_id(delta_id) is not None
        except (RunCorrupted, OSError):
            return False

    def add(self, ids: Sequence[bytes], first_offset: int) -> None:
        """Note the ids of an appended batch: row i has the offset `first_offset + i`.

        A known id keeps its first offset.
        """
        self.add_at(ids, range(first_offset, first_offset + len(ids)))

    def add_at(self, ids: Sequence[bytes], offsets: Sequence[int]) -> None:
        """Note ids of appended rows, each with its offset. A known id keeps its first offset."""
        assert len(ids) == len(offsets)
        start = 0
        while start < len(ids):
            capacity = self.generation_ids - len(self._open)
            _note_firsts(self._open, ids[start : start + capacity], offsets[start : start + capacity])
            start += capacity
            if len(self._open) >= self.generation_ids:
                self._close_generation()
        self._continue_sealing(len(ids))

    def forget_below(self, offset: int) -> None:
        """Forget the runs that are entirely below an offset, but not the newest ids."""
        while (
            self._runs
            and self._runs[0].facts.last_offset < offset
            and self._count_ids() - self._runs[0].facts.row_count >= self._retained_min
        ):
            run = self._runs.pop(0)
            self._forgotten += 1
            self._note_change()
            self.kept_since = max(self.kept_since, run.facts.last_offset + 1)
            if run is self.corrupted_run:
                self.corrupted_run = None
            run.close()

    def statistics(self) -> SeenIdsStatistics:
        """Return the statistics of the stored ids, and of the filters' answers."""
        unsealed = len(self._open) + len(self._closed)
        return SeenIdsStatistics(
            ids=self._count_ids(),
            ids_open=unsealed,
            runs=len(self._runs),
            runs_waiting=self.waiting_run_count,
            runs_forgotten=self._forgotten,
            kept_since=self.kept_since,
            memory_bytes=unsealed * ID_OBJECT_BYTES
            + sys.getsizeof(self._open)
            + sys.getsizeof(self._closed)
            + sum(run.nbytes for run in self._runs),
            file_bytes=sum(
                0 if run.checkpoint_file is None else run.checkpoint_file.size for run in self._runs
            ),
            confirmed=self._confirmed,
            false_positives=self._false_positives,
        )

    # --- runs, for the owner that stores them

    @property
    def runs(self) -> list[IdRun]:
        """The runs, oldest first. A run never changes; the list does."""
        return self._runs[:]

    @property
    def waiting_run_count(self) -> int:
        """Number of runs that wait to be written."""
        return sum(run.is_in_memory for run in self._runs)

    @property
    def is_full(self) -> bool:
        """True while no more ids are accepted, since too many runs wait to be written."""
        return self._waiting_max is not None and self.waiting_run_count >= self._waiting_max

    @property
    def forgotten(self) -> int:
        """Number of runs forgotten so far."""
        return self._forgotten

    def unsealed_tables(self) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """Return the tables of unsealed ids, the older one first; the caller uses them in the same tick."""
        return self._closed, self._open

    def restore(self, runs: Sequence[IdRun], *, kept_since: int, forgotten: int) -> None:
        """Restore the runs of a checkpoint, oldest first; the caller then adds the unsealed ids."""
        self._runs = [*runs]
        self._note_change()
        self._fit_to_budget()
        self.kept_since, self._forgotten = kept_since, forgotten

    def seal(self) -> None:
        """Seal all ids in one call; none may be added afterwards."""
        while self._open or self._sealing is not None:
            if self._sealing is None:
                self._close_generation()
            assert self._sealing is not None
            deque(self._sealing, maxlen=0)
            self._sealing = None

    def replace_runs(self, old: Sequence[IdRun], new: Sequence[IdRun]) -> None:
        """Replace runs by others with the same ids; the old ones may have been forgotten meanwhile."""
        indexes = [index for index, run in enumerate(self._runs) if run in old]
        if indexes:
            self._runs[indexes[0] : indexes[-1] + 1] = new
        self._note_change()
        for run in old if indexes else new:
            run.close()
        if self.corrupted_run in old:
            self.corrupted_run = None
        self._fit_to_budget()

    def next_filter_to_load(self) -> IdRun | None:
        """Return the run whose filter must be loaded next; None if there is none."""
        return next(
            (run for run in self._runs_to_filter() if run.filter is None and not run.is_in_memory), None
        )

    def close(self) -> None:
        """Close all files."""
        for run in self._runs:
            run.close()

    def _note_change(self) -> None:
        self.revision += 1
        self._sealed_count = sum(run.facts.row_count for run in self._runs)

    def _count_ids(self) -> int:
        return len(self._open) + len(self._closed) + self._sealed_count

    def _runs_to_filter(self) -> Iterable[IdRun]:
        """Yield the runs whose filters fit into the bound, the smallest first."""
        budget = self._index_bytes_max - sum(run.fences_nbytes for run in self._runs)
        for run in sorted(self._runs, key=lambda run: run.facts.row_count):
            budget -= run.filter_nbytes
            if budget < 0:
                return
            yield run

    def _fit_to_budget(self) -> None:
        """Drop fences and filters beyond the bound, but not those of runs in memory."""
        written = [run for run in self._runs if not run.is_in_memory]
        while written and sum(run.fences_nbytes for run in written) > self._index_bytes_max:
            if not max(written, key=_fence_bytes).thin_fences():
                break
        allowed = list(self._runs_to_filter())
        for run in self._runs:
            if run not in allowed and not run.is_in_memory:
                run.filter = None

    # --- lookups

    def _find_id(self, delta_id: bytes) -> int | None:
        """Find the offset of one id; search the oldest run first, so that the lowest offset is returned."""
        if self._runs:
            hashed, second = hash_id(delta_id)
            for run in self._runs:
                if run.filter is None or run.filter.may_hold(hashed):
                    try:
                        offset = run.find(hashed, second)
                    except (RunCorrupted, OSError):
                        self._note_corruption(run)
                        raise
                    self._count_searches(1, int(offset is not None))
                    if offset is not None:
                        return offset
        offset = self._closed.get(delta_id)
        return self._open.get(delta_id) if offset is None else offset

    def _find_in_run(
        self,
        run: IdRun,
        hashes: NDArray[np.uint64],
        seconds: NDArray[np.uint64],
        offsets: list[int | None],
    ) -> None:
        """Set the offsets that are still None for the ids that the run has."""
        rows = np.arange(len(hashes)) if run.filter is None else run.filter.candidates(hashes)
        if not rows.size:
            return
        try:
            run_offsets = run.find_many(hashes[rows], seconds[rows])
        except (RunCorrupted, OSError):
            self._note_corruption(run)
            raise
        for row, offset in zip(rows.tolist(), run_offsets, strict=True):
            if offsets[row] is None:
                offsets[row] = offset
        self._count_searches(len(run_offsets), len(run_offsets) - run_offsets.count(None))

    def _note_corruption(self, run: IdRun) -> None:
        self.corrupted_run = run
        self.revision += 1
        self.on_corruption()

    def _count_searches(self, searched: int, confirmed: int) -> None:
        self._confirmed += confirmed
        self._false_positives += searched - confirmed

    # --- sealing

    def _close_generation(self) -> None:
        if self._sealing is not None:
            deque(self._sealing, maxlen=0)
        self._closed, self._open = self._open, {}
        self._sealing = self._seal()

    def _continue_sealing(self, added_count: int) -> None:
        if self._sealing is None:
            return
        self._ids_since_step += added_count
        while self._sealing is not None and self._ids_since_step >= STEP_EVERY_IDS:
            self._ids_since_step -= STEP_EVERY_IDS
            if next(self._sealing, self) is self:  # the default: the sealing has ended
                self._sealing, self._ids_since_step = None, 0

    def _seal(self) -> Generator[None, None, None]:
        closed = self._closed
        run = yield from _seal_table(closed, self.error_rate)
        self._runs.append(run)
        self._note_change()
        self._closed = {}
        while closed:  # in steps, since freeing a million objects takes long
            for _ in range(min(STEP_IDS, len(closed))):
                closed.popitem()
            yield


def _fence_bytes(run: IdRun) -> int:
    return run.fences_nbytes


def _note_firsts(table: dict[bytes, int], ids: Iterable[bytes], offsets: Iterable[int]) -> None:
    """Call `setdefault` for each pair, in a loop in C."""
    deque(map(table.setdefault, ids, offsets), maxlen=0)


def _seal_table(table: dict[bytes, int], error_rate: float) -> Generator[None, None, IdRun]:
    """Make a run from a dict that no longer changes, in bounded steps.

    First split the ids, in order of arrival, into blocks of a few thousand, and sort each; then, for each
    bucket of hashes, merge the rows of all blocks. Hashes are uniform, so buckets have about the same size.
    """
    bucket_bits = max(len(table) // STEP_IDS, 1).bit_length() - 1
    edges = np.arange(1, 1 << bucket_bits, dtype=np.uint64) << np.uint64(64 - bucket_bits)
    ids, offsets = iter(table), iter(table.values())
    blocks, block_bounds = [], []
    while block_ids := list(islice(ids, STEP_IDS)):
        hashes, seconds = hash_ids(block_ids)
        rows = np.stack((hashes, seconds, np.fromiter(offsets, np.uint64, len(block_ids))), axis=1)
        blocks.append(rows[hashes.argsort()])
        block_bounds.append([0, *blocks[-1][:, 0].searchsorted(edges).tolist(), len(block_ids)])
        yield
    writer = RunWriter(len(table), error_rate)
    pages: list[bytes] = []
    for bucket in range(1 << bucket_bits):
        parts = [
            block[bounds[bucket] : bounds[bucket + 1]]
            for block, bounds in zip(blocks, block_bounds, strict=True)
        ]
        pages += writer.add(sort_rows(np.concatenate(parts)))
        yield
    facts, last_pages = writer.finish()
    run = IdRun(facts, writer.fences, pages=[*pages, *last_pages])
    run.filter = writer.filter
    return run
