"""The exact index: nearest vectors by comparing the query with every one; a delta is seen once applied.

It keeps no copy: it reads the resident vectors, its own or those that it shares with a storage sink.
Scores are exact whatever the slot order: candidates of the fast pass are scored again in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from delta_prop_sinks.resident import Resident
from delta_prop_sinks.sink import ResumePoint
from delta_prop_sinks.table import STALE, VECTOR
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from delta_prop_sinks.sink import Delivery, SinkContext
    from delta_prop_sinks.table import Table
    from delta_prop_wire.algebra import State

Metric = Literal["cosine", "dot", "l2", "pivot"]

K_MAX = 10_000
_CHUNK_ROWS = 1024
_HALF_ULP = 2.0**-24


@dataclass(frozen=True, slots=True)
class Hit:
    """A vector found. A larger score is nearer; for `l2` it is minus the distance. Do not change metadata."""

    vector_id: str
    score: float
    dot: Dot
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """How far the index is, and what it was asked."""

    applied_offset: int
    vectors: int
    bytes: int
    searches: int


class IndexSink:
    """Searches vectors by nearness. Give it a storage sink's `resident` to hold the vectors once.

    While it is attached every vector stays in memory, within the resident vectors' bound.
    """

    def __init__(self, *, name: str = "index", resident: Resident | None = None) -> None:
        self.name = name
        self.resident = Resident() if resident is None else resident
        self._context: SinkContext | None = None
        self._searches = 0

    # --- the contract

    async def open(self, context: SinkContext) -> ResumePoint:
        """Pin the vectors. Raises StopSink where memory does not hold them all, UsageError too early."""
        resident = self.resident
        if resident.stored and not resident.loaded:
            raise UsageError(
                f"index {self.name!r} shares its vectors with a storage sink: attach the storage sink first"
            )
        resident.enter(context)
        if self._context is None:
            resident.pin()
        self._context = context
        return ResumePoint(Cursor(context.log_id, context.epoch, resident.next_offset), resident.lamport)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Fold what the shared vectors do not hold yet."""
        if self._context is None:
            raise UsageError(f"index {self.name!r} is not open: attach it first")
        self.resident.apply(deliveries, self._context)
        # The vectors outlive the index within the process, so what is folded need not come again.
        self._context.committed(deliveries[-1].next_offset)

    async def aclose(self) -> None:
        """Let vectors leave memory again; what is there can still be searched."""
        if self._context is not None:
            self._context = None
            self.resident.unpin()

    def dimensions(self) -> dict[str, int]:
        """The dimension of each namespace of which a vector was resident."""
        return self.resident.dimensions()

    def head(self, namespace: str, vector_id: str) -> Dot | None:
        """The last dot of a vector, None where it is not resident."""
        return self.resident.head(namespace, vector_id)

    def statistics(self) -> IndexStatistics:
        """A snapshot of the index's numbers."""
        resident = self.resident.statistics()
        return IndexStatistics(self.resident.next_offset, resident.vectors, resident.bytes, self._searches)

    # --- for readers

    def search(
        self, query: ArrayLike, k: int = 10, namespace: str = "default", metric: Metric = "cosine"
    ) -> list[Hit]:
        """The `k` nearest vectors, nearest first; equal scores by vector id. Raises UsageError.

        `cosine` 0 for a zero vector; `dot` the scalar product; `l2` minus the distance; `pivot` the scalar
        product over 0.5 × the median norm + 0.5 × the vector's: between dot, which favours long vectors, and
        cosine, which favours short ones, for vectors whose length grows with their text's.
        """
        table = self.resident.tables.get(namespace)
        vector = _checked(query, k, metric, None if table is None else table.dimension, namespace)
        self._searches += 1
        if table is None or table.matrix is None:
            return []
        _refresh_norms(table)
        median = _median_norm(table) if metric == "pivot" else 0.0
        live = (table.forms[: table.used] == VECTOR).nonzero()[0]
        if not len(live):
            return []
        scorer = _Scorer(vector, metric, median)
        candidates = scorer.candidates(table, live, k)
        scores = scorer.exact(table, candidates)
        found = sorted(
            zip((-scores).tolist(), (str(table.ids[slot]) for slot in candidates.tolist()), strict=True)
        )
        return [_hit(table, vector_id, -score) for score, vector_id in found[:k]]

    def rows(self) -> Iterator[tuple[str, str, State]]:
        """All states that the index holds, tombstones included: (namespace, vector id, state)."""
        return self.resident.rows()


def _checked(
    query: ArrayLike, k: int, metric: str, dimension: int | None, namespace: str
) -> NDArray[np.float32]:
    if metric not in get_args(Metric):
        raise UsageError(f"metric: {metric!r} is not one of {', '.join(get_args(Metric))}")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= K_MAX:
        raise UsageError(f"k: {k!r} is not a whole number from 1 to {K_MAX}")
    try:
        with np.errstate(over="ignore"):
            vector = np.ascontiguousarray(query, np.float32)
    except (TypeError, ValueError):
        raise UsageError(f"query: {query!r:.80} is not a list of numbers") from None
    if vector.ndim != 1:
        raise UsageError(f"query: has shape {vector.shape}; search for one vector at a time")
    if dimension is not None and len(vector) != dimension:
        raise UsageError(
            f"query: {len(vector)} numbers, but namespace {namespace!r} has dimension {dimension}"
        )
    if not np.isfinite(vector).all():
        at = int((~np.isfinite(vector)).nonzero()[0][0])
        raise UsageError(f"query: number {at} is {vector[at]}; all must be finite float32")
    return vector


def _refresh_norms(table: Table) -> None:
    """Bring the norms of touched rows up to date."""
    assert table.matrix is not None
    stale = (table.marks[: table.used] & STALE).nonzero()[0]
    for at in range(0, len(stale), _CHUNK_ROWS):
        slots = stale[at : at + _CHUNK_ROWS]
        block = table.matrix[slots].astype(np.float64)
        table.norms[slots] = np.sqrt(np.square(block, out=block).sum(axis=1))
    if len(stale):
        table.marks[stale] &= ~np.uint8(STALE)
        table.median_norm = None


def _median_norm(table: Table) -> float:
    if table.median_norm is None:
        norms = table.norms[: table.used][table.forms[: table.used] == VECTOR]
        table.median_norm = float(np.median(norms)) if len(norms) else 0.0
    return table.median_norm


class _Scorer:
    """One query's arithmetic: a fast pass over all rows, an exact one over the best."""

    def __init__(self, query: NDArray[np.float32], metric: str, median: float) -> None:
        self._query, self._metric, self._median = query, metric, median
        self._wide = query.astype(np.float64)
        self._length = float(np.sqrt(np.square(self._wide).sum()))

    def candidates(self, table: Table, live: NDArray[np.intp], k: int) -> NDArray[np.intp]:
        """Slots that may be among the `k` nearest: those whose rough score is within rounding of the k-th."""
        if k >= len(live):
            return live
        assert table.matrix is not None
        with np.errstate(over="ignore", invalid="ignore"):
            products = (table.matrix[: table.used] @ self._query)[live].astype(np.float64)
        norms = table.norms[live]
        # Twice what a float32 sum of n products may be off by, in whatever order it is summed.
        errors = 2 * (len(self._query) + 2) * _HALF_ULP * self._length * norms
        scores = np.nan_to_num(self._scores(products, norms), nan=np.inf)
        errors = errors * 2 if self._metric == "l2" else errors / self._divisors(norms)
        floor = np.partition(scores - errors, len(live) - k)[len(live) - k]
        chosen: NDArray[np.intp] = live[scores + errors >= floor]
        return chosen

    def exact(self, table: Table, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """Scores in float64, each row summed by itself, so that they do not depend on where a row lies."""
        assert table.matrix is not None
        scores = np.empty(len(slots))
        for at in range(0, len(slots), _CHUNK_ROWS):
            part = slots[at : at + _CHUNK_ROWS]
            block = table.matrix[part].astype(np.float64)
            if self._metric == "l2":
                scores[at : at + len(part)] = -np.sqrt(np.square(block - self._wide).sum(axis=1))
            else:
                scores[at : at + len(part)] = self._scores(
                    (block * self._wide).sum(axis=1), table.norms[part]
                )
        return scores

    def _scores(self, products: NDArray[np.float64], norms: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._metric == "l2":  # minus the square, while scores are only compared
            return 2 * products - norms * norms - self._length * self._length
        return products / self._divisors(norms)

    def _divisors(self, norms: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._metric == "dot":
            return np.ones_like(norms)
        divisors = norms * self._length if self._metric == "cosine" else 0.5 * (self._median + norms)
        return np.where(divisors > 0, divisors, 1.0)  # where it is 0, so is the product


def _hit(table: Table, vector_id: str, score: float) -> Hit:
    slot = table.slots[vector_id]
    _, origin, counter, _ = table.head(slot)
    return Hit(vector_id, score + 0.0, Dot(origin, counter), table.metadata.get(slot, {}))
