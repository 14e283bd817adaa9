"""Which 16-byte ids were seen, and at which offset first: exactly, for as long as they are kept.

Pure. It never answers "seen" for an id that was not: what the filters say is looked up in the ids.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delta_prop.ingest.bloom import IdFilter, hash_id, hash_ids, perhaps_in

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

FEW = 64
"""Up to so many ids are looked for one by one: numpy's calls cost more than their work there."""

STEP_IDS = 4_096
STEP_EVERY_IDS = 800
"""Sealing takes a step, a millisecond or two, for each 800 ids: it is done long before the next begins."""

ID_OBJECT_BYTES = 64 + 32
"""What an id and its offset take as Python objects, beside their place in a dict."""


@dataclass(frozen=True, slots=True)
class SeenIdsStatistics:
    """What is kept: ids, where, since which offset, in how many bytes (of the open ones about)."""

    ids: int
    ids_open: int
    generations: int
    generations_forgotten: int
    kept_since: int
    bytes: int
    confirmed: int
    false_positives: int


class SavedGeneration(NamedTuple):
    """A sealed generation as a checkpoint keeps it: columns, and the bits of a filter for `filter_ids`."""

    hashes: NDArray[np.uint64]
    seconds: NDArray[np.uint64]
    offsets: NDArray[np.uint64]
    bits: bytes | memoryview
    filter_ids: int
    last_offset: int


class SeenIds:
    """Ids with their first offsets, the recent ones in a dict, the older ones in sealed generations.

    A generation of `generation_ids` ids takes 26 bytes an id: two sorted columns for the id, one for
    its offset, and a filter that answers "never seen" without touching them. Its `generations_max`
    newest are kept, or fewer: `kept_since` is the offset from which on every id is known.

    Sealing is spread over the calls of `add` that follow. Until it is done the dict answers.
    """

    def __init__(
        self,
        *,
        generation_ids: int = 1_000_000,
        generations_max: int = 16,
        error_rate: float = 0.001,
    ) -> None:
        assert generation_ids >= 1
        assert generations_max >= 1
        self._generation_ids = generation_ids
        self._generations_max = generations_max
        self._error_rate = error_rate
        self._filter_ids = generation_ids  # filters are all of one size, whatever a checkpoint brought
        self._open: dict[bytes, int] = {}
        self._closed: dict[bytes, int] = {}  # full, being sealed
        self._sealed: list[Generation] = []  # oldest first
        self._filters: list[IdFilter] = []  # theirs
        self._sealing: Iterator[None] | None = None
        self._ids_since_step = 0
        self._forgotten = 0
        self._confirmed = 0
        self._false_positives = 0
        self.kept_since = 0

    def find(self, ids: Sequence[bytes]) -> list[int | None]:
        """The first offset of each id that was seen, None of each that was not."""
        if len(ids) <= FEW:
            return [self._find_one(one) for one in ids]
        found: list[int | None] = [None] * len(ids)
        if self._sealed:
            hashes, seconds = hash_ids(ids)
            for generation in self._sealed:
                self._find_in(generation, hashes, seconds, found)
        for recent in (self._closed, self._open):
            if not recent.keys().isdisjoint(ids):
                for row, one in enumerate(ids):
                    if found[row] is None:
                        found[row] = recent.get(one)
        return found

    def __contains__(self, one: object) -> bool:
        return isinstance(one, bytes) and self._find_one(one) is not None

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
            room = self._generation_ids - len(self._open)
            _note_firsts(self._open, ids[start : start + room], offsets[start : start + room])
            start += room
            if len(self._open) >= self._generation_ids:
                self._close_generation()
        self._step(len(ids))

    def forget_below(self, offset: int) -> None:
        """Forget the sealed generations that lie wholly below an offset."""
        while self._sealed and self._sealed[0].last_offset < offset:
            self._forget_oldest()

    def statistics(self) -> SeenIdsStatistics:
        """What is kept, and what the filters cost."""
        recent = len(self._open) + len(self._closed)
        return SeenIdsStatistics(
            ids=recent + sum(len(generation.offsets) for generation in self._sealed),
            ids_open=recent,
            generations=len(self._sealed),
            generations_forgotten=self._forgotten,
            kept_since=self.kept_since,
            bytes=recent * ID_OBJECT_BYTES
            + sys.getsizeof(self._open)
            + sys.getsizeof(self._closed)
            + sum(generation.nbytes for generation in self._sealed),
            confirmed=self._confirmed,
            false_positives=self._false_positives,
        )

    # --- checkpoints

    @property
    def sealed(self) -> list[Generation]:
        """The sealed generations, oldest first. They never change; the list does."""
        return self._sealed[:]

    @property
    def forgotten(self) -> int:
        """How many generations are forgotten."""
        return self._forgotten

    def unsealed(self) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """The tables of ids that are not sealed yet, the older one first: to be read, and soon."""
        return self._closed, self._open

    def restore(self, sealed: Sequence[SavedGeneration], *, kept_since: int, forgotten: int) -> None:
        """Begin with the generations of a checkpoint, oldest first; ids that were not sealed are added then.

        Their filters serve if all are of the size that new ones get, else they are made anew.
        """
        self._filter_ids = max([self._generation_ids, *(len(one.hashes) for one in sealed)])
        for saved in sealed:
            filter_ = IdFilter(self._filter_ids, self._error_rate)
            if not filter_.load(saved.bits, len(saved.hashes)) or saved.filter_ids != self._filter_ids:
                filter_ = IdFilter(self._filter_ids, self._error_rate)
                filter_.add(saved.hashes)
            self._sealed.append(
                Generation(filter_, saved.hashes, saved.seconds, saved.offsets, saved.last_offset)
            )
            self._filters.append(filter_)
        self.kept_since, self._forgotten = kept_since, forgotten
        while len(self._sealed) > self._generations_max:
            self._forget_oldest()

    # --- looking

    def _find_one(self, one: bytes) -> int | None:
        """Oldest first, so that the first of two places is told."""
        if self._sealed:
            hashed, second = hash_id(one)
            for at in perhaps_in(self._filters, hashed):
                offset = self._sealed[at].find(hashed, second)
                self._count(1, int(offset is not None))
                if offset is not None:
                    return offset
        offset = self._closed.get(one)
        return self._open.get(one) if offset is None else offset

    def _find_in(
        self,
        generation: Generation,
        hashes: NDArray[np.uint64],
        seconds: NDArray[np.uint64],
        found: list[int | None],
    ) -> None:
        rows = generation.filter.candidates(hashes)
        if not rows.size:
            return
        offsets = generation.find_many(hashes[rows], seconds[rows])
        for row, offset in zip(rows.tolist(), offsets, strict=True):
            if found[row] is None:
                found[row] = offset
        self._count(len(offsets), len(offsets) - offsets.count(None))

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
        generation = yield from _sealed(closed, self._filter_ids, self._error_rate)
        self._sealed.append(generation)
        self._filters.append(generation.filter)
        self._closed = {}
        if len(self._sealed) > self._generations_max:
            self._forget_oldest()
        while closed:  # freeing a million objects at once would be the longest step of all
            for _ in range(min(STEP_IDS, len(closed))):
                closed.popitem()
            yield

    def _forget_oldest(self) -> None:
        self._forgotten += 1
        del self._filters[0]
        self.kept_since = max(self.kept_since, self._sealed.pop(0).last_offset + 1)


@dataclass(frozen=True, slots=True)
class Generation:
    """Sealed ids in three columns, ordered by hash, then by second half."""

    filter: IdFilter
    hashes: NDArray[np.uint64]
    seconds: NDArray[np.uint64]
    offsets: NDArray[np.uint64]
    last_offset: int

    @property
    def nbytes(self) -> int:
        return self.filter.nbytes + 3 * self.hashes.nbytes

    def find(self, hashed: int, second: int) -> int | None:
        """The offset of one id. Ids that share a hash, which a foe may make many of, are searched too."""
        wanted = np.uint64(hashed)
        start = int(self.hashes.searchsorted(wanted))
        end = int(self.hashes.searchsorted(wanted, side="right"))
        at = start + int(self.seconds[start:end].searchsorted(np.uint64(second)))
        return int(self.offsets[at]) if at < end and self.seconds[at] == second else None

    def find_many(self, hashes: NDArray[np.uint64], seconds: NDArray[np.uint64]) -> list[int | None]:
        at = np.minimum(self.hashes.searchsorted(hashes), len(self.hashes) - 1)
        found: list[int | None] = self.offsets[at].tolist()
        same_hash = self.hashes[at] == hashes
        for row in np.flatnonzero(~same_hash | (self.seconds[at] != seconds)).tolist():
            found[row] = self.find(int(hashes[row]), int(seconds[row])) if same_hash[row] else None
        return found


def _note_firsts(table: dict[bytes, int], ids: Iterable[bytes], offsets: Iterable[int]) -> None:
    """`setdefault` for each pair, looped over in C."""
    deque(map(table.setdefault, ids, offsets), maxlen=0)


def _sealed(table: dict[bytes, int], filter_ids: int, error_rate: float) -> Generator[None, None, Generation]:
    """Turn a dict that no longer changes into columns and a filter, a bounded part at a time.

    First sorted runs of a few thousand ids each, in the order they came; then, bucket by bucket of
    the hash, what all runs have in it. The hashes are spread evenly, so buckets are of one size.
    """
    filter_ = IdFilter(filter_ids, error_rate)
    bucket_bits = max(len(table) // STEP_IDS, 1).bit_length() - 1
    edges = np.arange(1, 1 << bucket_bits, dtype=np.uint64) << np.uint64(64 - bucket_bits)
    ids, offsets = iter(table), iter(table.values())
    runs, cuts = [], []
    while some := list(islice(ids, STEP_IDS)):
        hashes, seconds = hash_ids(some)
        filter_.add(hashes)
        columns = np.stack((hashes, seconds, np.fromiter(offsets, np.uint64, len(some))))
        runs.append(columns[:, hashes.argsort()])
        cuts.append([0, *runs[-1][0].searchsorted(edges).tolist(), len(some)])
        yield
    whole = np.empty((3, len(table)), dtype=np.uint64)
    start = 0
    for bucket in range(1 << bucket_bits):
        part = np.hstack([run[:, cut[bucket] : cut[bucket + 1]] for run, cut in zip(runs, cuts, strict=True)])
        whole[:, start : start + part.shape[1]] = part[:, _order(part[0], part[1])]
        start += part.shape[1]
        yield
    return Generation(filter_, whole[0], whole[1], whole[2], int(whole[2].max()))


def _order(hashes: NDArray[np.uint64], seconds: NDArray[np.uint64]) -> NDArray[np.intp]:
    """By hash, then by second half. Equal hashes are rare, and sorting by both is slow."""
    order = hashes.argsort()
    ordered = hashes[order]
    return np.lexsort((seconds, hashes)) if (ordered[1:] == ordered[:-1]).any() else order
