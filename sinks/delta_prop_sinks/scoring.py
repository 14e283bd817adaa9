"""Scores of vectors: the metrics, a fast pass over many rows, an exact one over the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from delta_prop_sinks.vector_table import STALE, VECTOR
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from delta_prop_sinks.vector_table import VectorTable

Metric = Literal["cosine", "dot", "l2", "pivot"]

K_MAX = 10_000
_CHUNK_ROWS = 1024
_HALF_ULP = 2.0**-24
_BLOCK_NUMBERS = 32_768
"""Numbers per product: they fit the processor's cache, and BLAS does not spread them over threads, which
would gain little here and busy-wait after each call, at the cost of all other work."""

_NORM_NUMBERS = 131_072
"""Numbers whose squares are summed at once."""

GATHER_COST = 3
"""Cost of a scattered row, in rows of a contiguous block."""


def check_query(
    query: ArrayLike, k: int, metric: str, dimension: int | None, namespace: str
) -> NDArray[np.float32]:
    if metric not in get_args(Metric):
        raise UsageError(f"metric {metric!r} is not one of {', '.join(get_args(Metric))}: give one of them")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= K_MAX:
        raise UsageError(f"k {k!r} is not a whole number from 1 to {K_MAX}: give one")
    try:
        with np.errstate(over="ignore"):
            vector = np.ascontiguousarray(query, np.float32)
    except (TypeError, ValueError):
        raise UsageError(f"query {query!r:.80} is not a list of numbers: give one") from None
    if vector.ndim != 1:
        raise UsageError(f"query: it has shape {vector.shape}: search for one vector at a time")
    if dimension is not None and len(vector) != dimension:
        raise UsageError(
            f"query: it has {len(vector)} numbers and namespace {namespace!r} has dimension {dimension}: "
            "give a query of that dimension"
        )
    if not np.isfinite(vector).all():
        at = int((~np.isfinite(vector)).nonzero()[0][0])
        raise UsageError(f"query: number {at} is {vector[at]}: give finite float32 numbers only")
    return vector


def refresh_norms(table: VectorTable, among: NDArray[np.intp] | None = None) -> None:
    """Compute the norms of changed rows; only of `among`, None for all."""
    assert table.matrix is not None
    if among is None:
        stale = (table.flags[: table.used] & STALE).nonzero()[0]
    else:
        stale = among[(table.flags[among] & STALE) != 0]
    size = max(_NORM_NUMBERS // table.matrix.shape[1], 16)
    for at in range(0, len(stale), size):
        part = stale[at : at + size]
        first, last = int(part[0]), int(part[-1])
        # A contiguous range, as after a start, is a slice instead of a copy.
        slots = slice(first, last + 1) if last - first == len(part) - 1 else part
        block = table.matrix[slots].astype(np.float64)
        table.norms[slots] = np.sqrt(np.square(block, out=block).sum(axis=1))
    if len(stale):
        table.flags[stale] &= ~np.uint8(STALE)
        table.median_norm = None


def median_norm(table: VectorTable) -> float:
    """Return the median norm of a namespace's vectors."""
    if table.median_norm is None:
        norms = table.norms[: table.used][table.forms[: table.used] == VECTOR]
        table.median_norm = float(np.median(norms)) if len(norms) else 0.0
    return table.median_norm


class Scorer:
    """One query's arithmetic: a fast pass over all rows, an exact one over the best."""

    def __init__(self, query: NDArray[np.float32], metric: str, median: float) -> None:
        self._query, self._metric, self._median = query, metric, median
        self._wide = query.astype(np.float64)
        self._length = float(np.sqrt(np.square(self._wide).sum()))

    def candidates(self, table: VectorTable, live: NDArray[np.intp], k: int) -> NDArray[np.intp]:
        """Return slots of possible `k` nearest vectors: with a rough score within rounding of the k-th."""
        if k >= len(live):
            return live
        assert table.matrix is not None
        products = self._products(table, table.matrix, live)
        norms = table.norms[live]
        # Twice the maximum error of a float32 sum of n products in any order.
        errors = 2 * (len(self._query) + 2) * _HALF_ULP * self._length * norms
        scores = np.nan_to_num(self._scores(products, norms), nan=np.inf)
        errors = errors * 2 if self._metric == "l2" else errors / self._divisors(norms)
        floor = np.partition(scores - errors, len(live) - k)[len(live) - k]
        chosen: NDArray[np.intp] = live[scores + errors >= floor]
        return chosen

    def _products(
        self, table: VectorTable, matrix: NDArray[np.float32], live: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        size = max(_BLOCK_NUMBERS // matrix.shape[1], 16)
        with np.errstate(over="ignore", invalid="ignore"):
            if len(live) * GATHER_COST > table.used:
                products = np.empty(table.used)
                for at in range(0, table.used, size):
                    rows = matrix[at : min(at + size, table.used)]
                    products[at : at + size] = rows @ self._query
                return products if len(live) == table.used else products[live]
            products = np.empty(len(live))
            block = np.empty((min(size, len(live)), matrix.shape[1]), np.float32)
            for at in range(0, len(live), size):
                rows = block[: len(live) - at]
                np.take(matrix, live[at : at + size], axis=0, out=rows, mode="clip")
                products[at : at + size] = rows @ self._query
            return products

    def exact(self, table: VectorTable, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return float64 scores. Each row is summed separately, so its position does not matter."""
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
        if self._metric == "l2":  # minus the square suffices to compare scores
            return 2 * products - norms * norms - self._length * self._length
        return products / self._divisors(norms)

    def _divisors(self, norms: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._metric == "dot":
            return np.ones_like(norms)
        divisors = norms * self._length if self._metric == "cosine" else 0.5 * (self._median + norms)
        return np.where(divisors > 0, divisors, 1.0)  # where a divisor is 0, the product is too
