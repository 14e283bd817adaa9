"""Which rows of one namespace stand in a graph, which must be searched one by one, and why.

A row that is a vector is either *linked* (one node stands for it, and it has moved only a little since) or
*unlinked*. Nodes of rows that changed, moved or went stay in the graph and count no more; when there are too
many, a new generation is begun: what changes goes there, and what stands still is moved there bit by bit.
Until that is done both are searched.

No thread and no clock: `take` gives a chunk of work with copies of its rows, its owner has the graph do it
wherever he likes, `install` says that it is done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_prop_sinks.hnsw import EXPANSION_SEARCH, Graph, graph_rows, row_type
from delta_prop_sinks.scoring import GATHER_COST
from delta_prop_sinks.table import VECTOR

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop_sinks.hnsw import Space
    from delta_prop_sinks.table import Table

STEP_NUMBERS = 4096
"""A step is one call of the library, for this many numbers: a few ms, and no search waits for more."""

CHUNK_STEPS = 8
"""So many steps make a chunk, done without asking the event loop in between, unless a search comes."""

MARGIN_MIN = 16
FETCH_MAX = 4096
LISTED_PER_FETCHED = 8
"""So many rows can be scored one by one in the time that the graph takes to find one more."""

SAMPLE_ROWS = 32
SAMPLE_QUANTILE = 0.1


class Generation:
    """A graph, and the slot that each of its nodes stands for, -1 for none."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.slots: NDArray[np.int32] = np.full(64, -1, np.int32)
        self.nodes = 0
        self.live = 0
        self.saving = False
        self.wanted = False  # a search is waiting

    def allot(self, count: int) -> NDArray[np.uint64]:
        """Numbers for new nodes; they stand for nothing yet."""
        first, self.nodes = self.nodes, self.nodes + count
        if self.nodes > len(self.slots):
            slots = np.full(max(2 * len(self.slots), self.nodes), -1, np.int32)
            slots[:first] = self.slots[:first]
            self.slots = slots
        return np.arange(first, self.nodes, dtype=np.uint64)

    @property
    def dead(self) -> int:
        """Nodes that stand for nothing."""
        return self.nodes - self.live


@dataclass(slots=True, eq=False)
class Chunk:
    """Rows on their way into a graph: copies, and by `changes` the moment they were taken."""

    step_rows: int

    generation: Generation
    slots: NDArray[np.intp]
    rows: NDArray[np.floating[Any]]
    numbers: NDArray[np.uint64]
    changes: NDArray[np.uint32]
    threads: int
    done: int = 0

    def link(self) -> None:
        """Add nodes, until a search wants the graph; on any thread. Raises GraphFailed."""
        for at in range(0, len(self.slots), self.step_rows):
            step = slice(at, at + self.step_rows)
            self.generation.graph.add(self.numbers[step], self.rows[step], self.threads)
            self.done = min(step.stop, len(self.slots))
            if self.generation.wanted:  # else the next step might be the first to get the library's lock
                return


@dataclass(slots=True, eq=False)
class Sample:
    """Linked rows whose nearest neighbours tell how densely rows lie."""

    generation: Generation
    slots: NDArray[np.intp]
    rows: NDArray[np.float32]

    def look(self) -> NDArray[np.int64]:
        """Find their neighbours, few at a call; on any thread. Raises GraphFailed."""
        graph = self.generation.graph
        parts = [graph.search(self.rows[at : at + 8], MARGIN_MIN) for at in range(0, len(self.rows), 8)]
        return np.concatenate(parts)


class Links:
    """The links of one table. `drift_max` is a length in the graph's space; 0 until it was measured."""

    def __init__(
        self,
        table: Table,
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
        self.unlinked_rows = 0
        self.links_done = self.rebuilds = 0
        self._threads = threads
        self.expansion_add = expansion_add
        self._recent: NDArray[np.intp] = np.full(recent_rows, -1, np.intp)
        self._recent_at = 0
        self._tombstone_ratio_max, self._drift_share_max = tombstone_ratio_max, drift_share_max
        self.base = self._new_generation()
        self.young: Generation | None = None
        self._node: NDArray[np.int32] = np.full(0, -1, np.int32)
        self._in_young: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._unlinked: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._changes: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._linked_rows: NDArray[np.floating[Any]] = np.zeros((0, self.dimension), row_type(space))
        self._waiting: NDArray[np.intp] = np.zeros(0, np.intp)
        self._waiting_at = self._move_at = 0
        self._moves_next = False
        self._sample_at = 1000

    def _new_generation(self) -> Generation:
        return Generation(Graph(self.space, self.dimension, self.expansion_add))

    # --- what changed

    def note(self, slots: NDArray[np.intp]) -> None:
        """These rows may have changed, come or gone."""
        slots = np.unique(slots)
        self._grow()
        self._changes[slots] += 1
        alive = self.table.forms[slots] == VECTOR
        gone, slots = slots[~alive], slots[alive]
        self._drop_nodes(gone)
        self._set_unlinked(gone, False)
        self._remember(slots)
        linked = self._node[slots] >= 0
        moved = slots[linked]
        if len(moved):
            moved = moved[self._moved(moved, self._rows(moved))]
            self._drop_nodes(moved)
        self._set_unlinked(np.concatenate((slots[~linked], moved)), True)

    def _remember(self, slots: NDArray[np.intp]) -> None:
        """Rows changed last, in a ring: a search sees them for certain, linked or not."""
        slots = slots[-len(self._recent) :]
        at = (self._recent_at + np.arange(len(slots))) % len(self._recent)
        self._recent[at] = slots
        self._recent_at = (self._recent_at + len(slots)) % len(self._recent)

    def begin(self) -> None:
        """All vectors that no node stands for are unlinked."""
        self._grow()
        slots = (self.table.forms[: self.table.used] == VECTOR).nonzero()[0]
        self._set_unlinked(slots[self._node[slots] < 0], True)

    def adopt(self, generation: Generation) -> None:
        """Take over a loaded graph; a second one was saved while a new generation was on its way."""
        self._grow()
        if self.base.nodes:
            self.young = generation
        else:
            self.base = generation

    def adopt_rows(
        self, generation: Generation, slots: NDArray[np.intp], nodes: NDArray[np.intp], rows: NDArray[Any]
    ) -> None:
        """Its nodes stand for those of these slots that still lie where their rows lay."""
        self._linked_rows[slots] = rows
        same = (self.table.forms[slots] == VECTOR) & ~self._moved(slots, self._rows(slots))
        slots, nodes = slots[same], nodes[same]
        generation.slots[nodes] = slots
        generation.live += len(slots)
        self._node[slots] = nodes
        self._in_young[slots] = generation is self.young
        self._sample_at = max(1000, generation.live // 2)

    def _moved(self, slots: NDArray[np.intp], rows: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
        """Whether these rows are farther from where they were linked than may be."""
        with np.errstate(over="ignore", invalid="ignore"):
            gaps = rows.astype(np.float32) - self._linked_rows[slots]
            near: NDArray[np.bool_] = np.einsum("ij,ij->i", gaps, gaps) <= self.drift_max**2
        return ~near

    def _rows(self, slots: NDArray[np.intp]) -> NDArray[np.floating[Any]]:
        assert self.table.matrix is not None
        return graph_rows(self.space, self.table.matrix[slots])

    # --- work

    def take(self) -> Chunk | None:
        """The next rows to link, None where there is nothing to do."""
        self._turn_over()
        self._moves_next = not self._moves_next  # half of the work is moving what stands still
        slots = self._next_moves() if self._moves_next else self._next_unlinked()
        if not len(slots):
            slots = self._next_unlinked() if self._moves_next else self._next_moves()
        if not len(slots):
            return None
        generation = self.young or self.base
        rows = self._rows(slots)
        numbers, changes = generation.allot(len(slots)), self._changes[slots]
        return Chunk(self.step_rows, generation, slots, rows, numbers, changes, self._threads)

    def install(self, chunk: Chunk) -> None:
        """What was done of a chunk is in the graph: rows that did not move away meanwhile are linked.

        Its other rows stay as they are, and their numbers are given out again.
        """
        self.links_done += chunk.done
        slots, numbers, rows = (
            chunk.slots[: chunk.done],
            chunk.numbers[: chunk.done],
            chunk.rows[: chunk.done],
        )
        chunk.generation.nodes -= len(chunk.slots) - chunk.done
        changed = self._changes[slots] != chunk.changes[: chunk.done]
        if changed.any():
            stays = ~changed
            again = changed.nonzero()[0]
            again = again[self.table.forms[slots[again]] == VECTOR]
            with np.errstate(over="ignore", invalid="ignore"):
                gaps = self._rows(slots[again]).astype(np.float32) - rows[again]
                stays[again[np.einsum("ij,ij->i", gaps, gaps) <= self.drift_max**2]] = True
            slots, numbers, rows = slots[stays], numbers[stays], rows[stays]
        self._drop_nodes(slots)
        self._node[slots] = numbers
        self._in_young[slots] = chunk.generation is self.young
        self._linked_rows[slots] = rows
        chunk.generation.slots[numbers] = slots
        chunk.generation.live += len(slots)
        self._set_unlinked(slots, False)

    def _next_unlinked(self) -> NDArray[np.intp]:
        while True:
            part = self._waiting[self._waiting_at : self._waiting_at + self.chunk_rows]
            self._waiting_at += len(part)
            part = part[self._unlinked[part]]
            if len(part) or not self.unlinked_rows:
                return part
            if self._waiting_at >= len(self._waiting):
                self._waiting, self._waiting_at = self._unlinked.nonzero()[0], 0

    def _next_moves(self) -> NDArray[np.intp]:
        base = self.base
        while self.young is not None and base.live:
            part = base.slots[self._move_at : min(self._move_at + 4 * self.chunk_rows, base.nodes)]
            alive = (part >= 0).nonzero()[0][: self.chunk_rows]
            if len(alive):
                self._move_at += int(alive[-1]) + 1
                return part[alive].astype(np.intp)
            self._move_at += len(part)
            if not len(part):  # some moved away while they were moved over, and came back
                self._move_at = 0
        return np.zeros(0, np.intp)

    def _turn_over(self) -> None:
        """Begin a new generation where too many nodes stand for nothing; let go of one that is empty."""
        base = self.base
        if self.young is not None and not base.live:
            self.base, self.young = self.young, None
            self._in_young[:] = False
            self.rebuilds += 1
        elif self.young is None and base.dead > max(self._tombstone_ratio_max * base.live, 1000):
            self.young = self._new_generation()
            self._move_at = 0

    # --- how far a row may move

    def sample(self) -> Sample | None:
        """Rows to measure neighbours' distances with, None while the last measure holds."""
        generation = self.young or self.base
        if self.links_done < self._sample_at or generation.live < SAMPLE_ROWS:
            return None
        alive = (generation.slots[: generation.nodes] >= 0).nonzero()[0]
        nodes = alive[np.linspace(0, len(alive) - 1, SAMPLE_ROWS).astype(np.intp)]
        slots = generation.slots[nodes].astype(np.intp)
        self._sample_at = self.links_done + max(1000, generation.live // 2)
        return Sample(generation, slots, self._linked_rows[slots].astype(np.float32))

    def measured(self, sample: Sample, found: NDArray[np.int64]) -> None:
        """Set how far a row may move: a share of what lies between near neighbours."""
        nearest = []
        for slot, row, numbers in zip(sample.slots.tolist(), sample.rows, found, strict=True):
            slots = sample.generation.slots[numbers[numbers >= 0]]
            others = slots[(slots >= 0) & (slots != slot)]
            if len(others):
                with np.errstate(over="ignore"):
                    gaps = self._linked_rows[others].astype(np.float32) - row
                    nearest.append(float(np.sqrt(np.einsum("ij,ij->i", gaps, gaps).min())))
        if nearest:
            distance = float(np.quantile(nearest, SAMPLE_QUANTILE))
            self.drift_max = self._drift_share_max * distance if math.isfinite(distance) else 0.0

    # --- searching

    def candidates(self, query: NDArray[np.float32], k: int) -> NDArray[np.intp] | None:
        """Slots that may be near: unlinked, changed last, by the graph. None: only a full search will do, or
        it costs no more, as after a start with very many unlinked rows; and it misses nothing.
        """
        if self.unlinked_rows * GATHER_COST > self.table.used:
            return None
        near = self.near(query, k)
        if near is None:
            return None
        chosen = self._unlinked.copy()
        chosen[self._recent[self._recent >= 0]] = True
        chosen[near] = True
        return chosen.nonzero()[0]

    def near(self, query: NDArray[np.float32], k: int) -> NDArray[np.intp] | None:
        """Slots of linked rows near a query in the graph's space; None where only a full search will do."""
        margin = k + max(MARGIN_MIN, k // 2)
        found = []
        for generation in (self.base, self.young):
            if generation is not None and generation.live:
                slots = None if generation.saving else _near(generation, query, margin)
                if slots is None:
                    return None
                found.append(slots)
        return np.concatenate(found).astype(np.intp) if found else np.zeros(0, np.intp)

    # --- numbers

    @property
    def linked_rows(self) -> int:
        """Rows that a node stands for."""
        return self.base.live + (self.young.live if self.young else 0)

    @property
    def tombstones(self) -> int:
        """Nodes that stand for nothing."""
        return self.base.dead + (self.young.dead if self.young else 0)

    @property
    def size(self) -> int:
        """Bytes of memory of graphs and columns."""
        graphs = self.base.graph.size + (self.young.graph.size if self.young else 0)
        nodes = self.base.slots.nbytes + (self.young.slots.nbytes if self.young else 0)
        width = self._linked_rows.itemsize * self.dimension
        return graphs + nodes + (width + 10) * self.table.used

    @property
    def linked_matrix(self) -> NDArray[np.floating[Any]]:
        """By slot the row that it was linked with; changes only where a chunk is installed."""
        return self._linked_rows

    # --- columns

    def _drop_nodes(self, slots: NDArray[np.intp]) -> None:
        slots = slots[self._node[slots] >= 0]
        young = self._in_young[slots]
        for generation, some in ((self.base, slots[~young]), (self.young, slots[young])):
            if generation is not None and len(some):
                generation.slots[self._node[some]] = -1
                generation.live -= len(some)
        self._node[slots] = -1
        self._in_young[slots] = False

    def _set_unlinked(self, slots: NDArray[np.intp], value: bool) -> None:
        self.unlinked_rows += (1 if value else -1) * int(np.count_nonzero(self._unlinked[slots] != value))
        self._unlinked[slots] = value

    def _grow(self) -> None:
        have, want = len(self._node), len(self.table.heads)
        if have >= want:
            return
        more = want - have
        self._node = np.concatenate((self._node, np.full(more, -1, np.int32)))
        self._in_young = np.concatenate((self._in_young, np.zeros(more, np.bool_)))
        self._unlinked = np.concatenate((self._unlinked, np.zeros(more, np.bool_)))
        self._changes = np.concatenate((self._changes, np.zeros(more, np.uint32)))
        rows = np.zeros((want, self.dimension), self._linked_rows.dtype)
        rows[:have] = self._linked_rows
        self._linked_rows = rows


def _near(generation: Generation, query: NDArray[np.float32], wanted: int) -> NDArray[np.int32] | None:
    """Slots of live nodes near a query: as many as wanted or more, all of them where they are few."""
    # As wide as among live nodes alone: those that stand for nothing take their share of what is found.
    count = math.ceil(max(wanted, EXPANSION_SEARCH) * generation.nodes / generation.live)
    while True:
        if generation.live <= LISTED_PER_FETCHED * count:
            listed: NDArray[np.int32] = generation.slots[: generation.nodes]
            return listed[listed >= 0]
        if count > FETCH_MAX:
            return None
        generation.wanted = True
        try:
            numbers = generation.graph.search(query[None], count)[0]
        finally:
            generation.wanted = False
        numbers = numbers[numbers >= 0]
        slots: NDArray[np.int32] = generation.slots[numbers]
        slots = slots[slots >= 0]
        if len(slots) >= wanted:
            return slots
        count *= 2
