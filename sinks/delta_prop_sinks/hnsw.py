"""An append-only graph of near neighbours with numbered nodes, made with the library usearch.

Nodes are never removed and numbers never reused: replacing nodes in place destroys paths through the graph
(after every row was replaced once, it permanently finds only four in five neighbours), and needs a table of
keys. The owner of the graph knows which nodes represent a row, and builds a new graph when too few do.

usearch has its own lock in each graph and releases the GIL before it takes it, so `add` on one thread and
`search` on another are safe; each waits until the other returns. Keep calls short.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from delta_prop_wire.errors import UsageError

Space = Literal["cosine", "l2"]

CONNECTIVITY = 16
EXPANSION_SEARCH = 96
"""Neighbours that a node stores, and the width of a search. With 8 neighbours every tenth row is not found;
a wider search hardly finds more, since the missed rows were connected in the wrong place."""


class GraphError(Exception):
    """The library rejected a call; the message is the library's."""


def require_usearch() -> None:
    """Raise UsageError if usearch is not installed."""
    try:
        import usearch.index  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"hnsw=… needs usearch ({error}): pip install 'delta-prop[hnsw]', "
            "or leave hnsw out and search exactly"
        ) from None


class Graph:
    """Nodes of one space. With `cosine` it takes unit rows as float16, with `l2` rows unchanged."""

    def __init__(self, space: Space, dimension: int, expansion_add: int) -> None:
        from usearch.index import Index

        self.space, self.dimension, self.expansion_add = space, dimension, expansion_add
        self._index: Any = Index(
            ndim=dimension,
            metric="ip" if space == "cosine" else "l2sq",
            dtype="f16" if space == "cosine" else "f32",
            connectivity=CONNECTIVITY,
            expansion_add=expansion_add,
            expansion_search=EXPANSION_SEARCH,
            enable_key_lookups=False,
        )

    def __len__(self) -> int:
        return len(self._index)

    @property
    def size(self) -> int:
        """Bytes of memory that the library has allocated."""
        return int(self._index.memory_usage)

    def add(self, numbers: NDArray[np.uint64], rows: NDArray[np.floating[Any]], threads: int = 1) -> None:
        """Add nodes, on `threads` threads. Raises GraphError."""
        try:
            self._index.add(numbers, rows, threads=threads)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise GraphError(f"usearch: {error}") from error

    def search(self, queries: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        """Return node numbers near each query, nearest first, padded with -1. Raises GraphError."""
        numbers = np.full((len(queries), count), -1, np.int64)
        if not len(self._index):
            return numbers
        try:
            matches = self._index.search(queries, count, threads=1)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise GraphError(f"usearch: {error}") from error
        keys, counts = np.atleast_2d(matches.keys), getattr(matches, "counts", None)
        for row in range(len(queries)):
            match_count = keys.shape[1] if counts is None else int(counts[row])
            numbers[row, :match_count] = keys[row, :match_count]
        return numbers

    def dump(self) -> memoryview:
        """Return the graph as bytes. The library holds the GIL meanwhile, about 0.6 µs per node."""
        return memoryview(self._index.save())

    def load(self, content: bytes) -> None:
        """Load a dumped graph. Raises GraphError if the library cannot read it."""
        try:
            self._index.load(content)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise GraphError(f"usearch: {error}") from error
        self._index.expansion_add, self._index.expansion_search = self.expansion_add, EXPANSION_SEARCH
        if self._index.ndim != self.dimension:
            raise GraphError(f"usearch: the graph has dimension {self._index.ndim}, not {self.dimension}")


def row_type(space: Space) -> type[np.float16] | type[np.float32]:
    """Return the type that a graph stores: half precision for unit rows, where nothing can overflow."""
    return np.float16 if space == "cosine" else np.float32


def graph_rows(space: Space, rows: NDArray[np.float32]) -> NDArray[np.floating[Any]]:
    """Return rows as a graph of that space stores them."""
    if space == "l2":
        return rows
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    norms[norms == 0] = 1.0
    unit: NDArray[np.float16] = (rows / norms[:, None]).astype(np.float16)
    return unit
