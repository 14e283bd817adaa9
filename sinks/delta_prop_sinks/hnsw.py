"""One graph of near neighbours: numbered nodes that are only ever added. usearch does the work.

Nodes are never removed and numbers never used again: replacing nodes in place costs a graph its paths (four
in five neighbours found after every row was replaced once, and that does not mend), and needs a table of
keys. Who holds the graph knows which nodes still count, and builds a new graph when too few do.

usearch has a lock of its own in each graph and lets go of the interpreter before it takes it, so `add` on a
thread and `search` on another are safe; either waits for the other's whole call. Keep calls short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Space = Literal["cosine", "l2"]

CONNECTIVITY = 16
EXPANSION_SEARCH = 96
"""Neighbours that a node keeps, and how widely is looked when searching. With 8 neighbours every tenth row
is not found; looking wider finds hardly more, since what is missed was linked in the wrong place."""


class GraphFailed(Exception):
    """The library refused a call; the message is its own."""


def require_usearch() -> None:
    """Raise UsageError where usearch is not installed."""
    try:
        import usearch.index  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"a linked index needs usearch ({error}): pip install 'delta-prop[hnsw]', "
            "or leave linked out and search exactly"
        ) from None


class Graph:
    """Nodes of one space. `cosine` takes unit rows as float16, `l2` rows as they are."""

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
        """Bytes of memory that the library has taken."""
        return int(self._index.memory_usage)

    def add(self, numbers: NDArray[np.uint64], rows: NDArray[np.floating[Any]], threads: int = 1) -> None:
        """Add nodes, on that many threads. Raises GraphFailed."""
        try:
            self._index.add(numbers, rows, threads=threads)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise GraphFailed(f"usearch: {error}") from error

    def search(self, queries: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        """Node numbers near each query, nearest first; -1 fills rows of fewer. Raises GraphFailed."""
        found = np.full((len(queries), count), -1, np.int64)
        if not len(self._index):
            return found
        try:
            matches = self._index.search(queries, count, threads=1)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise GraphFailed(f"usearch: {error}") from error
        keys, counts = np.atleast_2d(matches.keys), getattr(matches, "counts", None)
        for row in range(len(queries)):
            some = keys.shape[1] if counts is None else int(counts[row])
            found[row, :some] = keys[row, :some]
        return found

    def dump(self) -> memoryview:
        """The graph as bytes. The library holds the interpreter meanwhile, about 0.6 µs a node."""
        return memoryview(self._index.save())

    def load(self, content: bytes) -> None:
        """Become what was dumped. Raises GraphFailed where the library cannot read it."""
        try:
            self._index.load(content)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise GraphFailed(f"usearch: {error}") from error
        self._index.expansion_add, self._index.expansion_search = self.expansion_add, EXPANSION_SEARCH
        if self._index.ndim != self.dimension:
            raise GraphFailed(f"usearch: the graph has dimension {self._index.ndim}, not {self.dimension}")


def row_type(space: Space) -> type[np.float16] | type[np.float32]:
    """The numbers that a graph keeps: half the width for unit rows, where nothing can overflow."""
    return np.float16 if space == "cosine" else np.float32


def graph_rows(space: Space, rows: NDArray[np.float32]) -> NDArray[np.floating[Any]]:
    """Rows as a graph of that space keeps them."""
    if space == "l2":
        return rows
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    lengths[lengths == 0] = 1.0
    unit: NDArray[np.float16] = (rows / lengths[:, None]).astype(np.float16)
    return unit
