"""Scores vectors by a metric: a fast pass over many rows, then an exact pass over the best of them."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from delta_prop_sinks.vector_table import STALE, VECTOR, VectorTable
from delta_prop_wire.errors import UsageError

Metric = Literal["cosine", "dot", "l2", "pivot"]
"""`pivot` is pivoted length normalisation (Singhal): `IndexSink.search` has the formula."""

K_MAX = 10_000
_CHUNK_ROWS = 1024
_HALF_ULP = 2.0**-24
_BLOCK_NUMBERS = 32_768
"""Numbers per matrix product. They fit the processor's cache, and BLAS does not spread them over threads,
which would gain little here and busy-wait after each call, at the cost of all other work.
"""

_NORM_NUMBERS = 131_072
"""Numbers whose squares are summed at once."""

GATHER_COST = 3
"""How many contiguous rows can be scored in the time that one scattered row takes."""


def check_query(
    query: ArrayLike, k: int, metric: str, dimension: int | None, namespace: str
) -> NDArray[np.float32]:
    """Return the query as float32 numbers. Raises UsageError for an invalid argument."""
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
        index = int((~np.isfinite(vector)).nonzero()[0][0])
        raise UsageError(f"query: number {index} is {vector[index]}: give finite float32 numbers only")
    return vector


def refresh_norms(table: VectorTable, rows: NDArray[np.intp] | None = None) -> None:
    """Compute the norms that are out of date, of `rows` or, by default, of all rows."""
    assert table.matrix is not None
    if rows is None:
        stale = (table.flags[: table.used] & STALE).nonzero()[0]
    else:
        stale = rows[(table.flags[rows] & STALE) != 0]
    size = max(_NORM_NUMBERS // table.matrix.shape[1], 16)
    for start in range(0, len(stale), size):
        part = stale[start : start + size]
        first, last = int(part[0]), int(part[-1])
        # A contiguous range, as after a start, is read as a slice, without a copy.
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
    """Scores rows by one query: a fast pass over all rows, then an exact pass over the best of them."""

    def __init__(self, query: NDArray[np.float32], metric: str, median: float) -> None:
        self._query, self._metric, self._median = query, metric, median
        self._query_float64 = query.astype(np.float64)
        self._norm = float(np.sqrt(np.square(self._query_float64).sum()))

    def candidates(self, table: VectorTable, live: NDArray[np.intp], k: int) -> NDArray[np.intp]:
        """Return slots whose rough score is within rounding error of the k-th best."""
        if k >= len(live):
            return live
        assert table.matrix is not None
        products = self._products(table, table.matrix, live)
        norms = table.norms[live]
        # Twice the maximum error of a float32 sum of n products in any order.
        errors = 2 * (len(self._query) + 2) * _HALF_ULP * self._norm * norms
        scores = np.nan_to_num(self._scores(products, norms), nan=np.inf)
        errors = errors * 2 if self._metric == "l2" else errors / self._divisors(norms)
        floor = np.partition(scores - errors, len(live) - k)[len(live) - k]
        candidates: NDArray[np.intp] = live[scores + errors >= floor]
        return candidates

    def _products(
        self, table: VectorTable, matrix: NDArray[np.float32], live: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        size = max(_BLOCK_NUMBERS // matrix.shape[1], 16)
        with np.errstate(over="ignore", invalid="ignore"):
            if len(live) * GATHER_COST > table.used:
                products = np.empty(table.used)
                for start in range(0, table.used, size):
                    rows = matrix[start : min(start + size, table.used)]
                    products[start : start + size] = rows @ self._query
                return products if len(live) == table.used else products[live]
            products = np.empty(len(live))
            block = np.empty((min(size, len(live)), matrix.shape[1]), np.float32)
            for start in range(0, len(live), size):
                rows = block[: len(live) - start]
                np.take(matrix, live[start : start + size], axis=0, out=rows, mode="clip")
                products[start : start + size] = rows @ self._query
            return products

    def exact(self, table: VectorTable, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return float64 scores. Each row is summed separately, so its score does not depend on its slot."""
        assert table.matrix is not None
        scores = np.empty(len(slots))
        for start in range(0, len(slots), _CHUNK_ROWS):
            part = slots[start : start + _CHUNK_ROWS]
            block = table.matrix[part].astype(np.float64)
            if self._metric == "l2":
                scores[start : start + len(part)] = -np.sqrt(
                    np.square(block - self._query_float64).sum(axis=1)
                )
            else:
                scores[start : start + len(part)] = self._scores(
                    (block * self._query_float64).sum(axis=1), table.norms[part]
                )
        return scores

    def _scores(self, products: NDArray[np.float64], norms: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._metric == "l2":  # minus the squared distance suffices to compare scores
            return 2 * products - norms * norms - self._norm * self._norm
        return products / self._divisors(norms)

    def _divisors(self, norms: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._metric == "dot":
            return np.ones_like(norms)
        divisors = norms * self._norm if self._metric == "cosine" else 0.5 * (self._median + norms)
        return np.where(divisors > 0, divisors, 1.0)  # where a divisor is 0, the product is too
