"""Which 16-byte ids were seen, and at which offset first: exactly, for as long as they are kept.

Pure but for the files that runs lie in. It never answers "seen" for an id that was not: what the filters say
is looked up in the ids. Where those cannot be read it raises.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.ingest.bloom import hash_id, hash_ids
from delta_prop.ingest.id_runs import IdRun, RunDamaged, RunWriter, in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

FEW = 64
"""Up to so many ids are looked for one by one: numpy's calls cost more than their work there."""

STEP_IDS = 4_096
STEP_EVERY_IDS = 800
"""Sealing takes a step, a millisecond or two, for each 800 ids: it is done long before the next begins."""

WAITING_MAX = 4
"""Runs that wait for the disk where it takes none, before no more ids are taken."""

ID_OBJECT_BYTES = 64 + 32
"""What an id and its offset take as Python objects, beside their place in a dict."""


@dataclass(frozen=True, slots=True)
class SeenIdsStatistics:
    """What is kept: ids, where, since which offset, in how many bytes (of the open ones about).

    `runs_waiting`: of the runs, how many lie in memory until they are written.
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
    """Ids with their first offsets, the recent ones in a dict, the older ones in sorted runs.

    A full dict of `generation_ids` is sealed into a run, in steps spread over the calls of `add` that follow;
    until that is done it answers. Whoever has a disk writes the runs there and merges them; then their
    filters, the smaller ones first, stay in memory as far as `index_bytes_max` allows, beside what finds a
    page. A run that stands wholly below the log's start is forgotten when `kept_min` newer ids are known:
    `kept_since` is the offset from which on every id is.
    """

    def __init__(
        self,
        *,
        generation_ids: int = 1_000_000,
        kept_min: int = 0,
        waiting_max: int | None = None,
        index_bytes_max: int = 1 << 28,
        error_rate: float = 0.001,
    ) -> None:
        """Create an empty table.

        `kept_min`: newest ids that are kept whatever the log lets go; `waiting_max`: runs that may wait to be
        written; None: any number.
        """
        assert generation_ids >= 1
        self.generation_ids = generation_ids
        self.error_rate = error_rate
        self.kept_since = 0
        self.damaged: IdRun | None = None
        """A run that could not be read: somebody is to make it anew."""
        self.on_damage: Callable[[], None] = lambda: None
        """Called when one could not be."""
        self.revision = 0
        """Another number whenever there are other runs, or one is damaged."""
        self._index_bytes_max = index_bytes_max
        self._kept_min = kept_min
        self._waiting_max = waiting_max
        self._open: dict[bytes, int] = {}
        self._closed: dict[bytes, int] = {}  # full, being sealed
        self._runs: list[IdRun] = []  # oldest first
        self._sealed = 0  # ids in them
        self._sealing: Iterator[None] | None = None
        self._ids_since_step = 0
        self._forgotten = 0
        self._confirmed = 0
        self._false_positives = 0

    def find(self, ids: Sequence[bytes]) -> list[int | None]:
        """Find the first offset of each id; None if it was not seen. Raises RunDamaged, OSError."""
        if len(ids) <= FEW:
            return [self._find_one(one) for one in ids]
        found: list[int | None] = [None] * len(ids)
        if self._runs:
            hashes, seconds = hash_ids(ids)
            for run in self._runs:
                self._find_in(run, hashes, seconds, found)
        for recent in (self._closed, self._open):
            if not recent.keys().isdisjoint(ids):
                for row, one in enumerate(ids):
                    if found[row] is None:
                        found[row] = recent.get(one)
        return found

    def __contains__(self, one: object) -> bool:
        """Return True if an id was seen; False also while its run cannot be read."""
        try:
            return isinstance(one, bytes) and self._find_one(one) is not None
        except (RunDamaged, OSError):
            return False

    def add(self, ids: Sequence[bytes], first_offset: int) -> None:
        """Note the ids of an appended batch: row i stands at `first_offset + i`.

        Of an id that is among them twice, the first place counts.
        """
        self.add_at(ids, range(first_offset, first_offset + len(ids)))

    def add_at(self, ids: Sequence[bytes], offsets: Sequence[int]) -> None:
        """Note ids that stand at the offsets given."""
        assert len(ids) == len(offsets)
        start = 0
        while start < len(ids):
            room = self.generation_ids - len(self._open)
            _note_firsts(self._open, ids[start : start + room], offsets[start : start + room])
            start += room
            if len(self._open) >= self.generation_ids:
                self._close_generation()
        self._step(len(ids))

    def forget_below(self, offset: int) -> None:
        """Forget the runs that lie wholly below an offset, but for the newest ids."""
        while (
            self._runs
            and self._runs[0].facts.last_offset < offset
            and self._ids() - self._runs[0].facts.rows >= self._kept_min
        ):
            run = self._runs.pop(0)
            self._forgotten += 1
            self._changed()
            self.kept_since = max(self.kept_since, run.facts.last_offset + 1)
            if run is self.damaged:
                self.damaged = None
            run.close()

    def statistics(self) -> SeenIdsStatistics:
        """What is kept, and what the filters cost."""
        recent = len(self._open) + len(self._closed)
        return SeenIdsStatistics(
            ids=self._ids(),
            ids_open=recent,
            runs=len(self._runs),
            runs_waiting=sum(run.in_memory for run in self._runs),
            runs_forgotten=self._forgotten,
            kept_since=self.kept_since,
            memory_bytes=recent * ID_OBJECT_BYTES
            + sys.getsizeof(self._open)
            + sys.getsizeof(self._closed)
            + sum(run.nbytes for run in self._runs),
            file_bytes=sum(0 if run.part is None else run.part.size for run in self._runs),
            confirmed=self._confirmed,
            false_positives=self._false_positives,
        )

    # --- runs, for whoever keeps them

    @property
    def runs(self) -> list[IdRun]:
        """The runs, oldest first. They say the same all their life; the list changes."""
        return self._runs[:]

    @property
    def waiting(self) -> int:
        """Number of runs that lie in memory."""
        return sum(run.in_memory for run in self._runs)

    @property
    def full(self) -> bool:
        """True while no more ids may come, since too many wait to be written."""
        return self._waiting_max is not None and self.waiting >= self._waiting_max

    @property
    def forgotten(self) -> int:
        """Number of runs that are forgotten."""
        return self._forgotten

    def unsealed(self) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """The tables of ids that are not sealed yet, the older one first: to be read, and soon."""
        return self._closed, self._open

    def restore(self, runs: Sequence[IdRun], *, kept_since: int, forgotten: int) -> None:
        """Begin with the runs of a checkpoint, oldest first; add the ids that were not sealed afterwards."""
        self._runs = [*runs]
        self._changed()
        self._share()
        self.kept_since, self._forgotten = kept_since, forgotten

    def seal(self) -> None:
        """Seal all ids at once: nothing is added any more."""
        while self._open or self._sealing is not None:
            if self._sealing is None:
                self._close_generation()
            assert self._sealing is not None
            deque(self._sealing, maxlen=0)
            self._sealing = None

    def exchange(self, before: Sequence[IdRun], after: Sequence[IdRun]) -> None:
        """Replace runs by others with the same ids; the former may have been forgotten meanwhile."""
        places = [place for place, run in enumerate(self._runs) if run in before]
        if places:
            self._runs[places[0] : places[-1] + 1] = after
        self._changed()
        for run in before if places else after:
            run.close()
        if self.damaged in before:
            self.damaged = None
        self._share()

    def to_load(self) -> IdRun | None:
        """Choose the run whose filter is to be read into memory next; None if there is none."""
        return next((run for run in self._to_filter() if run.filter is None and not run.in_memory), None)

    def close(self) -> None:
        """Close all files."""
        for run in self._runs:
            run.close()

    def _changed(self) -> None:
        self.revision += 1
        self._sealed = sum(run.facts.rows for run in self._runs)

    def _ids(self) -> int:
        return len(self._open) + len(self._closed) + self._sealed

    def _to_filter(self) -> Iterable[IdRun]:
        """Yield the runs whose filters fit into the bound, the smallest first."""
        left = self._index_bytes_max - sum(run.fences_nbytes for run in self._runs)
        for run in sorted(self._runs, key=lambda run: run.facts.rows):
            left -= run.filter_nbytes
            if left < 0:
                return
            yield run

    def _share(self) -> None:
        """Drop fences and filters beyond the bound. Runs in memory keep theirs."""
        written = [run for run in self._runs if not run.in_memory]
        while written and sum(run.fences_nbytes for run in written) > self._index_bytes_max:
            if not max(written, key=_fences).thin():
                break
        allowed = list(self._to_filter())
        for run in self._runs:
            if run not in allowed and not run.in_memory:
                run.filter = None

    # --- looking

    def _find_one(self, one: bytes) -> int | None:
        """Oldest first, so that the first of two places is told."""
        if self._runs:
            hashed, second = hash_id(one)
            for run in self._runs:
                if run.filter is None or run.filter.may_hold(hashed):
                    try:
                        offset = run.find(hashed, second)
                    except (RunDamaged, OSError):
                        self._note_damage(run)
                        raise
                    self._count(1, int(offset is not None))
                    if offset is not None:
                        return offset
        offset = self._closed.get(one)
        return self._open.get(one) if offset is None else offset

    def _find_in(
        self,
        run: IdRun,
        hashes: NDArray[np.uint64],
        seconds: NDArray[np.uint64],
        found: list[int | None],
    ) -> None:
        rows = np.arange(len(hashes)) if run.filter is None else run.filter.candidates(hashes)
        if not rows.size:
            return
        try:
            offsets = run.find_many(hashes[rows], seconds[rows])
        except (RunDamaged, OSError):
            self._note_damage(run)
            raise
        for row, offset in zip(rows.tolist(), offsets, strict=True):
            if found[row] is None:
                found[row] = offset
        self._count(len(offsets), len(offsets) - offsets.count(None))

    def _note_damage(self, run: IdRun) -> None:
        self.damaged = run
        self.revision += 1
        self.on_damage()

    def _count(self, looked_up: int, confirmed: int) -> None:
        self._confirmed += confirmed
        self._false_positives += looked_up - confirmed

    # --- sealing

    def _close_generation(self) -> None:
        if self._sealing is not None:
            deque(self._sealing, maxlen=0)
        self._closed, self._open = self._open, {}
        self._sealing = self._seal()

    def _step(self, ids: int) -> None:
        if self._sealing is None:
            return
        self._ids_since_step += ids
        while self._sealing is not None and self._ids_since_step >= STEP_EVERY_IDS:
            self._ids_since_step -= STEP_EVERY_IDS
            if next(self._sealing, self) is self:
                self._sealing, self._ids_since_step = None, 0

    def _seal(self) -> Generator[None, None, None]:
        closed = self._closed
        run = yield from _sealed(closed, self.error_rate)
        self._runs.append(run)
        self._changed()
        self._closed = {}
        while closed:  # freeing a million objects at once would be the longest step of all
            for _ in range(min(STEP_IDS, len(closed))):
                closed.popitem()
            yield


def _fences(run: IdRun) -> int:
    return run.fences_nbytes


def _note_firsts(table: dict[bytes, int], ids: Iterable[bytes], offsets: Iterable[int]) -> None:
    """`setdefault` for each pair, looped over in C."""
    deque(map(table.setdefault, ids, offsets), maxlen=0)


def _sealed(table: dict[bytes, int], error_rate: float) -> Generator[None, None, IdRun]:
    """Turn a dict that no longer changes into a run, a bounded part at a time.

    First sorted stretches of a few thousand ids each, in the order they came; then, bucket by bucket of
    the hash, what all stretches have in it. The hashes are spread evenly, so buckets are of one size.
    """
    bucket_bits = max(len(table) // STEP_IDS, 1).bit_length() - 1
    edges = np.arange(1, 1 << bucket_bits, dtype=np.uint64) << np.uint64(64 - bucket_bits)
    ids, offsets = iter(table), iter(table.values())
    stretches, cuts = [], []
    while some := list(islice(ids, STEP_IDS)):
        hashes, seconds = hash_ids(some)
        rows = np.stack((hashes, seconds, np.fromiter(offsets, np.uint64, len(some))), axis=1)
        stretches.append(rows[hashes.argsort()])
        cuts.append([0, *stretches[-1][:, 0].searchsorted(edges).tolist(), len(some)])
        yield
    writer = RunWriter(len(table), error_rate)
    pages: list[bytes] = []
    for bucket in range(1 << bucket_bits):
        parts = [one[cut[bucket] : cut[bucket + 1]] for one, cut in zip(stretches, cuts, strict=True)]
        pages += writer.add(in_order(np.concatenate(parts)))
        yield
    facts, last = writer.finish()
    run = IdRun(facts, writer.fences, pages=[*pages, *last])
    run.filter = writer.filter
    return run
