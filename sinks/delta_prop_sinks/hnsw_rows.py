"""The rows of one namespace: those that are in a graph, and those that searches score one by one.

A row that is a vector is either *indexed* (a node represents it, and it has moved little since) or
*unindexed*. Nodes of rows that moved or were deleted stay in the graph as tombstones. When there are too
many, a new generation begins: changed rows enter it, and unchanged rows are moved to it gradually. Until all
are moved, searches use both.

This module uses no thread and no clock: `next_chunk` returns a chunk of work with copies of its rows, the
owner runs it on any thread, and `install` takes the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.hnsw import EXPANSION_SEARCH, Graph, Space, graph_rows, row_type
from delta_prop_sinks.scoring import GATHER_COST
from delta_prop_sinks.vector_table import VECTOR, VectorTable

STEP_NUMBERS = 4096
"""Numbers per step. A step is one library call of a few ms, and no search waits for more than one."""

CHUNK_STEPS = 8
"""Steps per chunk. A chunk runs without a return to the event loop unless a search arrives."""

MARGIN_MIN = 16
"""Minimum number of nodes that a search requests beyond `k`, since the graph's scores are rough."""
FETCH_MAX = 4096
"""Maximum number of nodes that a search requests from the graph; a full search replaces a larger request."""
LISTED_PER_FETCHED = 8
"""Rows that can be scored one by one in the time that the graph takes to find one more."""

SAMPLE_ROWS = 32
"""Rows per measurement of distances between neighbours."""
SAMPLE_QUANTILE = 0.1
"""Quantile of the measured distances, of which `drift_max` is a share."""


class Generation:
    """A graph, and the slot that each node represents; -1 for none, else the node is live.

    `must_be_replaced`: the graph may contain rows of erased vectors, so it is not saved, and its live rows
    are moved to a new generation.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.slots: NDArray[np.int32] = np.full(64, -1, np.int32)
        self.node_count = 0
        self.live_count = 0
        self.is_saving = False
        self.must_be_replaced = False
        self.has_waiting_search = False

    def allot(self, count: int) -> NDArray[np.uint64]:
        """Allocate numbers for new nodes, which represent no row yet."""
        first, self.node_count = self.node_count, self.node_count + count
        if self.node_count > len(self.slots):
            slots = np.full(max(2 * len(self.slots), self.node_count), -1, np.int32)
            slots[:first] = self.slots[:first]
            self.slots = slots
        return np.arange(first, self.node_count, dtype=np.uint64)

    def find_live_nodes(self) -> NDArray[np.intp]:
        """Return the numbers of the nodes that represent a row."""
        return (self.slots[: self.node_count] >= 0).nonzero()[0]

    @property
    def tombstones(self) -> int:
        """Nodes that represent no row."""
        return self.node_count - self.live_count


@dataclass(slots=True, eq=False)
class Chunk:
    """Copies of rows to add to a graph, and the rows' change counters at the time of the copy.

    `done`: the number of rows that are added.
    """

    step_rows: int

    generation: Generation
    slots: NDArray[np.intp]
    rows: NDArray[np.floating[Any]]
    numbers: NDArray[np.uint64]
    changes: NDArray[np.uint32]
    threads: int
    done: int = 0

    def add_nodes(self) -> None:
        """Add nodes until a search waits for the graph. May run on any thread. Raises GraphError."""
        for index in range(0, len(self.slots), self.step_rows):
            step = slice(index, index + self.step_rows)
            self.generation.graph.add(self.numbers[step], self.rows[step], self.threads)
            self.done = min(step.stop, len(self.slots))
            if self.generation.has_waiting_search:  # else the next step might get the library's lock first
                return


@dataclass(slots=True, eq=False)
class Sample:
    """Indexed rows whose nearest neighbours show how dense the rows are."""

    generation: Generation
    slots: NDArray[np.intp]
    rows: NDArray[np.float32]

    def find_neighbours(self) -> NDArray[np.int64]:
        """Return nodes near each row. May run on any thread. Raises GraphError."""
        graph = self.generation.graph
        starts = range(0, len(self.rows), 8)  # a few rows per library call
        return np.concatenate([graph.search(self.rows[start : start + 8], MARGIN_MIN) for start in starts])


class HnswRows:
    """The graph rows of one table.

    `base`: the present generation. `young`: the next one, while unchanged rows are moved to it, else None.
    `drift_max`: how far a row may move before it is indexed again, a length in the graph's space; 0 until it
    is measured.
    """

    def __init__(
        self,
        table: VectorTable,
        space: Space,
        *,
        tombstone_ratio_max: float,
        drift_share_max: float,
        expansion_add: int = 48,
        recent_rows: int = 4096,
        threads: int = 1,
    ) -> None:
        assert table.dimension is not None
        self.table, self.space = table, space
        self.dimension = table.dimension
        self.step_rows = threads * max(STEP_NUMBERS // self.dimension, 4)
        self.chunk_rows = CHUNK_STEPS * self.step_rows
        self.drift_max = 0.0
        self.unindexed_rows = 0
        self.rows_added = self.rebuilds = 0
        self._threads = threads
        self.expansion_add = expansion_add
        self._recent: NDArray[np.intp] = np.full(recent_rows, -1, np.intp)
        self._recent_position = 0
        self._tombstone_ratio_max, self._drift_share_max = tombstone_ratio_max, drift_share_max
        self.base = self._new_generation()
        self.young: Generation | None = None
        # By slot: the row's node, -1 for none; True if `young` has the node; True if the row is unindexed;
        # how often the row has changed; the row as it was indexed.
        self._nodes: NDArray[np.int32] = np.full(0, -1, np.int32)
        self._is_in_young: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._is_unindexed: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._changes: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._indexed_matrix: NDArray[np.floating[Any]] = np.zeros((0, self.dimension), row_type(space))
        self._queue: NDArray[np.intp] = np.zeros(0, np.intp)  # slots of rows to index
        self._queue_position = self._move_position = 0
        self._moves_are_next = False
        self._sample_due_at = 1000

    def _new_generation(self) -> Generation:
        return Generation(Graph(self.space, self.dimension, self.expansion_add))

    # --- changed rows

    def note(self, slots: NDArray[np.intp]) -> None:
        """Note rows that may have changed, or were added or deleted."""
        slots = np.unique(slots)
        self._grow()
        self._changes[slots] += 1
        alive = self.table.forms[slots] == VECTOR
        deleted, slots = slots[~alive], slots[alive]
        self._drop_nodes(deleted)
        self._set_unindexed(deleted, False)
        self._note_recent(slots)
        is_indexed = self._nodes[slots] >= 0
        moved = slots[is_indexed]
        if len(moved):
            moved = moved[self._have_moved(moved, self._rows(moved))]
            self._drop_nodes(moved)
        self._set_unindexed(np.concatenate((slots[~is_indexed], moved)), True)

    def _note_recent(self, slots: NDArray[np.intp]) -> None:
        """Record the rows changed last in a ring buffer: searches always score them, indexed or not."""
        slots = slots[-len(self._recent) :]
        positions = (self._recent_position + np.arange(len(slots))) % len(self._recent)
        self._recent[positions] = slots
        self._recent_position = (self._recent_position + len(slots)) % len(self._recent)

    def mark_unindexed(self) -> None:
        """Mark all vectors that no node represents as unindexed."""
        self._grow()
        slots = (self.table.forms[: self.table.used] == VECTOR).nonzero()[0]
        self._set_unindexed(slots[self._nodes[slots] < 0], True)

    def drop_absent(self) -> None:
        """Drop the nodes of slots that no longer hold a vector, without the ids of the deleted vectors."""
        self._grow()
        is_absent = self.table.forms[: len(self._nodes)] != VECTOR
        slots = (is_absent & ((self._nodes >= 0) | self._is_unindexed)).nonzero()[0]
        self._changes[slots] += 1
        self._drop_nodes(slots)
        self._set_unindexed(slots, False)

    def replace_all(self) -> None:
        """Replace all nodes, as some may hold rows of erased vectors."""
        for generation in (self.base, self.young):
            if generation is not None:
                generation.must_be_replaced |= generation.node_count > 0

    def adopt(self, generation: Generation) -> None:
        """Adopt a loaded graph. A second one was being built during the save, so it becomes `young`."""
        self._grow()
        if self.base.node_count:
            self.young = generation
        else:
            self.base = generation

    def adopt_rows(
        self, generation: Generation, slots: NDArray[np.intp], nodes: NDArray[np.intp], rows: NDArray[Any]
    ) -> None:
        """Restore the nodes of the slots whose rows have hardly moved since the save."""
        self._indexed_matrix[slots] = rows
        is_near = (self.table.forms[slots] == VECTOR) & ~self._have_moved(slots, self._rows(slots))
        slots, nodes = slots[is_near], nodes[is_near]
        generation.slots[nodes] = slots
        generation.live_count += len(slots)
        self._nodes[slots] = nodes
        self._is_in_young[slots] = generation is self.young
        self._sample_due_at = max(1000, generation.live_count // 2)

    def _have_moved(self, slots: NDArray[np.intp], rows: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
        """Return a mask of the rows that are too far from the position at which they were indexed."""
        with np.errstate(over="ignore", invalid="ignore"):
            differences = rows.astype(np.float32) - self._indexed_matrix[slots]
            is_near: NDArray[np.bool_] = np.einsum("ij,ij->i", differences, differences) <= self.drift_max**2
        return ~is_near

    def _rows(self, slots: NDArray[np.intp]) -> NDArray[np.floating[Any]]:
        assert self.table.matrix is not None
        return graph_rows(self.space, self.table.matrix[slots])

    def next_chunk(self) -> Chunk | None:
        """Return the next rows to index, None if there are none."""
        self._rotate_generations()
        self._moves_are_next = not self._moves_are_next  # half of the work moves unchanged rows
        slots = self._next_moves() if self._moves_are_next else self._next_unindexed()
        if not len(slots):
            slots = self._next_unindexed() if self._moves_are_next else self._next_moves()
        if not len(slots):
            return None
        generation = self.young or self.base
        rows = self._rows(slots)
        numbers, changes = generation.allot(len(slots)), self._changes[slots]
        return Chunk(self.step_rows, generation, slots, rows, numbers, changes, self._threads)

    def install(self, chunk: Chunk) -> None:
        """Note that the first `done` rows of a chunk are in the graph: those that have hardly moved are now
        indexed.

        The chunk's other rows stay as they were, and their node numbers are reused.
        """
        self.rows_added += chunk.done
        slots, numbers, rows = (
            chunk.slots[: chunk.done],
            chunk.numbers[: chunk.done],
            chunk.rows[: chunk.done],
        )
        chunk.generation.node_count -= len(chunk.slots) - chunk.done
        changed = self._changes[slots] != chunk.changes[: chunk.done]
        if changed.any():
            is_near = ~changed
            changed_rows = changed.nonzero()[0]
            changed_rows = changed_rows[self.table.forms[slots[changed_rows]] == VECTOR]
            with np.errstate(over="ignore", invalid="ignore"):
                differences = self._rows(slots[changed_rows]).astype(np.float32) - rows[changed_rows]
                is_near[
                    changed_rows[np.einsum("ij,ij->i", differences, differences) <= self.drift_max**2]
                ] = True
            slots, numbers, rows = slots[is_near], numbers[is_near], rows[is_near]
        self._drop_nodes(slots)
        self._nodes[slots] = numbers
        self._is_in_young[slots] = chunk.generation is self.young
        self._indexed_matrix[slots] = rows
        chunk.generation.slots[numbers] = slots
        chunk.generation.live_count += len(slots)
        self._set_unindexed(slots, False)

    def _next_unindexed(self) -> NDArray[np.intp]:
        while True:
            part = self._queue[self._queue_position : self._queue_position + self.chunk_rows]
            self._queue_position += len(part)
            part = part[self._is_unindexed[part]]
            if len(part) or not self.unindexed_rows:
                return part
            if self._queue_position >= len(self._queue):
                self._queue, self._queue_position = self._is_unindexed.nonzero()[0], 0

    def _next_moves(self) -> NDArray[np.intp]:
        base = self.base
        while self.young is not None and base.live_count:
            part = base.slots[
                self._move_position : min(self._move_position + 4 * self.chunk_rows, base.node_count)
            ]
            indexes = (part >= 0).nonzero()[0][: self.chunk_rows]
            if len(indexes):
                self._move_position += int(indexes[-1]) + 1
                return part[indexes].astype(np.intp)
            self._move_position += len(part)
            if not len(part):  # some rows changed while they were copied, and are still in the base
                self._move_position = 0
        return np.zeros(0, np.intp)

    def _rotate_generations(self) -> None:
        """Drop the base once all its rows are moved; begin a new generation if there are many tombstones."""
        base = self.base
        if self.young is not None and not base.live_count:
            self.base, self.young = self.young, None
            self._is_in_young[:] = False
            self.rebuilds += 1
        elif self.young is None and (
            base.must_be_replaced or base.tombstones > max(self._tombstone_ratio_max * base.live_count, 1000)
        ):
            self.young = self._new_generation()
            self._move_position = 0

    def sample(self) -> Sample | None:
        """Return rows for a measurement of distances between neighbours; None if none is due."""
        generation = self.young or self.base
        if self.rows_added < self._sample_due_at or generation.live_count < SAMPLE_ROWS:
            return None
        alive = generation.find_live_nodes()
        nodes = alive[np.linspace(0, len(alive) - 1, SAMPLE_ROWS).astype(np.intp)]
        slots = generation.slots[nodes].astype(np.intp)
        self._sample_due_at = self.rows_added + max(1000, generation.live_count // 2)
        return Sample(generation, slots, self._indexed_matrix[slots].astype(np.float32))

    def set_drift_max(self, sample: Sample, neighbours: NDArray[np.int64]) -> None:
        """Set how far a row may move: a share of the distance between near neighbours."""
        nearest = []
        for slot, row, numbers in zip(sample.slots.tolist(), sample.rows, neighbours, strict=True):
            slots = sample.generation.slots[numbers[numbers >= 0]]
            others = slots[(slots >= 0) & (slots != slot)]
            if len(others):
                with np.errstate(over="ignore"):
                    differences = self._indexed_matrix[others].astype(np.float32) - row
                    nearest.append(float(np.sqrt(np.einsum("ij,ij->i", differences, differences).min())))
        if nearest:
            distance = float(np.quantile(nearest, SAMPLE_QUANTILE))
            self.drift_max = self._drift_share_max * distance if math.isfinite(distance) else 0.0

    def candidates(self, query: NDArray[np.float32], k: int) -> NDArray[np.intp] | None:
        """Return slots near a query: unindexed, changed recently, or in the graph; None for a full search."""
        if self.unindexed_rows * GATHER_COST > self.table.used:
            return None
        nearest = self.nearest_slots(query, k)
        if nearest is None:
            return None
        is_candidate = self._is_unindexed.copy()
        is_candidate[self._recent[self._recent >= 0]] = True
        is_candidate[nearest] = True
        return is_candidate.nonzero()[0]

    def nearest_slots(self, query: NDArray[np.float32], k: int) -> NDArray[np.intp] | None:
        """Return slots of indexed rows near a query in the graph's space; None if a full search is needed."""
        margin = k + max(MARGIN_MIN, k // 2)
        slots_by_generation = []
        for generation in (self.base, self.young):
            if generation is not None and generation.live_count:
                slots = None if generation.is_saving else _find_nearest(generation, query, margin)
                if slots is None:
                    return None
                slots_by_generation.append(slots)
        if not slots_by_generation:
            return np.zeros(0, np.intp)
        return np.concatenate(slots_by_generation).astype(np.intp)

    @property
    def indexed_rows(self) -> int:
        """Rows that a node represents."""
        return self.base.live_count + (self.young.live_count if self.young else 0)

    @property
    def tombstones(self) -> int:
        """Nodes that represent no row."""
        return self.base.tombstones + (self.young.tombstones if self.young else 0)

    @property
    def size(self) -> int:
        """Bytes of memory that graphs and columns take."""
        graphs = self.base.graph.size + (self.young.graph.size if self.young else 0)
        nodes = self.base.slots.nbytes + (self.young.slots.nbytes if self.young else 0)
        width = self._indexed_matrix.itemsize * self.dimension
        return graphs + nodes + (width + 10) * self.table.used

    @property
    def indexed_matrix(self) -> NDArray[np.floating[Any]]:
        """The row that each slot was indexed with; changes only when a chunk is installed."""
        return self._indexed_matrix

    def _drop_nodes(self, slots: NDArray[np.intp]) -> None:
        slots = slots[self._nodes[slots] >= 0]
        young = self._is_in_young[slots]
        for generation, dropped in ((self.base, slots[~young]), (self.young, slots[young])):
            if generation is not None and len(dropped):
                generation.slots[self._nodes[dropped]] = -1
                generation.live_count -= len(dropped)
        self._nodes[slots] = -1
        self._is_in_young[slots] = False

    def _set_unindexed(self, slots: NDArray[np.intp], value: bool) -> None:
        self.unindexed_rows += (1 if value else -1) * int(
            np.count_nonzero(self._is_unindexed[slots] != value)
        )
        self._is_unindexed[slots] = value

    def _grow(self) -> None:
        old_size, new_size = len(self._nodes), len(self.table.heads)
        if old_size >= new_size:
            return
        more = new_size - old_size
        self._nodes = np.concatenate((self._nodes, np.full(more, -1, np.int32)))
        self._is_in_young = np.concatenate((self._is_in_young, np.zeros(more, np.bool_)))
        self._is_unindexed = np.concatenate((self._is_unindexed, np.zeros(more, np.bool_)))
        self._changes = np.concatenate((self._changes, np.zeros(more, np.uint32)))
        rows = np.zeros((new_size, self.dimension), self._indexed_matrix.dtype)
        rows[:old_size] = self._indexed_matrix
        self._indexed_matrix = rows


def _find_nearest(
    generation: Generation, query: NDArray[np.float32], count_min: int
) -> NDArray[np.int32] | None:
    """Return slots of at least `count_min` live nodes near a query, or of all; None for a full search."""
    # Tombstones are found too, so ask for more nodes in proportion.
    count = math.ceil(max(count_min, EXPANSION_SEARCH) * generation.node_count / generation.live_count)
    while True:
        if generation.live_count <= LISTED_PER_FETCHED * count:
            listed: NDArray[np.int32] = generation.slots[: generation.node_count]
            return listed[listed >= 0]
        if count > FETCH_MAX:
            return None
        generation.has_waiting_search = True
        try:
            numbers = generation.graph.search(query[None], count)[0]
        finally:
            generation.has_waiting_search = False
        numbers = numbers[numbers >= 0]
        slots: NDArray[np.int32] = generation.slots[numbers]
        slots = slots[slots >= 0]
        if len(slots) >= count_min:
            return slots
        count *= 2
