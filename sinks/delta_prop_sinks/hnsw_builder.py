"""Keeps the graphs of all namespaces up to date with applied deltas, limits unindexed rows, saves the graphs.

All of it runs on the event loop, except `Chunk.add_nodes`, `Sample.find_neighbours` and file access, which
get copies. The library locks each graph; a search waits for at most one step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_args

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.argument_checks import check_number
from delta_prop_sinks.graph_file import GraphFile, GraphPart, pack, unpack
from delta_prop_sinks.hnsw import GraphError, Space, require_usearch
from delta_prop_sinks.hnsw_rows import HnswRows
from delta_prop_sinks.ports import Clock, Threads
from delta_prop_sinks.resident import ResidentVectors
from delta_prop_sinks.scoring import Metric
from delta_prop_sinks.sink import Backlog, TryAgain
from delta_prop_sinks.vector_table import VectorTable
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hnsw:
    """Settings of an index with HNSW graphs. Raises UsageError for invalid values.

    `metric`: the metric by which graphs find neighbours. `unindexed_rows_max`: maximum number of rows that
    wait to enter a graph, over all namespaces; every search scores each of them, in about 0.15 ms for 1,000
    rows of 128 numbers. `graph_rows_min`: smaller namespaces have no graph. `tombstone_ratio_max`: maximum
    dead nodes per row before a new graph is built beside the old one. `drift_share_max`: how far a row may
    move before it is indexed at its new position, as a share of the distance between near neighbours; below a
    half, a row's own node is still the nearest to it. `recent_rows`: in each namespace, every search also
    scores this many of the rows changed last, even if they are indexed: a graph may miss a row, but a delta
    just applied must be visible. `expansion_add`: search width when a row is indexed; 32 costs two thirds of
    48 and loses ten times as many rows, 64 costs a third more and loses hardly any. `threads`: number of
    threads that index; leave the event loop a processor of its own. `capacity_timeout_s`: how long `apply`
    waits for capacity before it raises TryAgain. `save_s`: seconds between writes of the file, if there is
    one and a row was indexed.
    """

    metric: Space = "cosine"
    unindexed_rows_max: int = 10_000
    graph_rows_min: int = 5_000
    tombstone_ratio_max: float = 1.0
    drift_share_max: float = 0.25
    recent_rows: int = 4_096
    expansion_add: int = 48
    threads: int = 1
    capacity_timeout_s: float = 5.0
    save_s: float = 600.0

    def __post_init__(self) -> None:
        if self.metric not in get_args(Space):
            raise UsageError(
                f"metric {self.metric!r} is not one of {', '.join(get_args(Space))}: give one of them; "
                "searches by other metrics are always exact"
            )
        for name in ("unindexed_rows_max", "drift_share_max"):
            check_number(name, getattr(self, name))
        for name in (
            "graph_rows_min",
            "recent_rows",
            "expansion_add",
            "threads",
            "tombstone_ratio_max",
            "capacity_timeout_s",
            "save_s",
        ):
            if not check_number(name, getattr(self, name)) > 0:
                raise UsageError(f"{name} {getattr(self, name)!r} is not above 0: give a larger number")
        if not 0 <= self.drift_share_max < 0.5:
            raise UsageError(
                f"drift_share_max {self.drift_share_max!r} is not from 0 to below 0.5: give a smaller share, "
                "because farther away a row's node is no longer the nearest to it"
            )
        if self.unindexed_rows_max < 2 * self.graph_rows_min:
            raise UsageError(
                f"unindexed_rows_max {self.unindexed_rows_max} is below twice graph_rows_min "
                f"({self.graph_rows_min}): raise it, as the first graph of a namespace needs capacity"
            )

    @property
    def piece_rows(self) -> int:
        """Maximum rows applied at once: up to a quarter of the limit, so that as many as fit are applied."""
        return max(min(self.recent_rows, self.unindexed_rows_max // 4), 1)


@dataclass(frozen=True, slots=True)
class HnswStatistics:
    """The contents of the graphs, and counts since the index was made.

    `indexed_rows`: rows in graphs; `unindexed_rows`: rows that wait to enter a graph;
    `unindexed_rows_highest`: their maximum since the index was opened. `added_rows`: rows ever added to
    graphs. `rebuilds`: graphs that replaced one with too many tombstones. `capacity_waits`: calls that waited
    for capacity. `searches_in_graph`: searches by graph. `file`: the state of the file, as text;
    `saved_offset`: the offset below which all deltas were applied at the last save.
    """

    indexed_rows: int
    unindexed_rows: int
    unindexed_rows_highest: int
    unindexed_rows_max: int
    tombstones: int
    graphs: int
    bytes: int
    added_rows: int
    rebuilds: int
    capacity_waits: int
    searches_in_graph: int
    searches_exact: int
    file: str
    saved_offset: int


class HnswBuilder:
    """The graphs of all namespaces of one index."""

    def __init__(self, settings: Hnsw, path: str | Path | None) -> None:
        require_usearch()
        self.settings = settings
        self.rows_by_namespace: dict[str, HnswRows] = {}
        self.searches_in_graph = self.searches_exact = 0
        self._file = None if path is None else GraphFile(path)
        self._file_state = "none" if path is None else "not written yet"
        # `_changes` counts changes of the rows in graphs; `_saved_changes`: its value at the last save.
        self._saved_offset = self._saved_changes = self._changes = 0
        self._failure: str | None = None
        self._excess = 0  # by how much `unindexed_rows_max` is raised
        self._unindexed_highest = self._capacity_waits = 0
        self._rows_added = self._rebuilds_before = 0
        self._turn = 0  # the index of the namespace that `_step` serves next
        self._work_ready = anyio.Event()
        self._capacity_freed = anyio.Event()
        self._saving = anyio.Lock(fast_acquire=True)

    # --- open, close, background work

    def check_path(self, resident: ResidentVectors) -> None:
        """Raise UsageError if there is a file, but no storage sink that shares the vectors."""
        if self._file is not None and not resident.residency.stored:
            raise UsageError(
                "path: a file of graphs needs a storage sink that shares its vectors: "
                "give resident=storage.resident, or leave path out"
            )

    async def open(self, resident: ResidentVectors, threads: Threads) -> None:
        """Load the file, if there is one; rows that it lacks, or that have moved since, are unindexed."""
        self._clear()
        self._failure = None
        if self._file is not None:
            await self._load(self._file, resident, threads)
        self._ensure_all_rows(resident)
        self._unindexed_highest = self.unindexed_rows
        self._saved_changes = self._changes

    async def _load(self, file: GraphFile, resident: ResidentVectors, threads: Threads) -> None:
        space = self.settings.metric
        try:
            content = await threads.run(file.read)
            if content is None:
                return
            self._saved_offset, parts = await threads.run(
                lambda: unpack(content, space, self.settings.expansion_add)
            )
        except Exception as failure:  # on any failure the graphs are rebuilt from the vectors
            self._file_state = f"not used; all rows are indexed from the start: {failure}"
            return
        for part in parts:
            table = resident.tables.get(part.namespace)
            if table is not None and table.dimension == part.dimension:
                if part.namespace not in self.rows_by_namespace:
                    self.rows_by_namespace[part.namespace] = self._new_rows(table)
                hnsw_rows = self.rows_by_namespace[part.namespace]
                for _ in part.adopt_into(hnsw_rows):
                    await anyio.lowlevel.checkpoint()
        for hnsw_rows in self.rows_by_namespace.values():
            hnsw_rows.mark_unindexed()
        self._file_state = "loaded"

    async def close(self, threads: Threads, cursor: Cursor) -> None:
        """Save if there is a file, and release the graphs. Raises TryAgain if they cannot be saved."""
        try:
            if self._file is not None and self._failure is None and self._changes != self._saved_changes:
                try:
                    await self._save(self._file, threads, cursor)
                except Exception as failure:
                    raise TryAgain(f"the file of graphs was not saved: {failure}") from failure
        finally:
            self._clear()

    async def run(self, thread: Threads, clock: Clock, cursor: Callable[[], Cursor]) -> None:
        """Index unindexed rows, chunk by chunk, until cancelled. After a failure, wait for `check`."""
        save_at = clock.now() + self.settings.save_s
        while True:
            try:
                if self._file is not None and clock.now() >= save_at:
                    save_at = clock.now() + self.settings.save_s
                    if self._changes != self._saved_changes:
                        await self._save(self._file, thread, cursor())
                if self._failure is None and await self._step(thread):
                    # A call on the thread is never cancelled, so that its outcome is known; so check here.
                    await anyio.lowlevel.checkpoint_if_cancelled()
                    continue
            except Exception as failure:
                self._fail(failure)
            self._work_ready = anyio.Event()
            with anyio.move_on_after(self.settings.save_s):
                await self._work_ready.wait()

    async def _step(self, thread: Threads) -> bool:
        """Index one chunk of rows of the next namespace that has work; False if none has."""
        rows_in_turn = list(self.rows_by_namespace.values())
        for step in range(len(rows_in_turn)):
            hnsw_rows = rows_in_turn[(self._turn + step) % len(rows_in_turn)]
            sample = hnsw_rows.sample()
            if sample is not None:
                hnsw_rows.set_drift_max(sample, await self._call(hnsw_rows, thread, sample.find_neighbours))
            chunk = hnsw_rows.next_chunk()
            if chunk is not None:
                self._turn = (self._turn + step + 1) % len(rows_in_turn)
                await self._call(hnsw_rows, thread, chunk.add_nodes)
                hnsw_rows.install(chunk)
                self._changes += 1
                self._rows_added += chunk.done
                self._excess = max(0, min(self._excess - chunk.done // 2, self.unindexed_rows))
                self._capacity_freed.set()
                return True
        return False

    async def _call(self, hnsw_rows: HnswRows, thread: Threads, function: Callable[[], T]) -> T:
        try:
            return await thread.run(function)
        except GraphError:
            self._drop(hnsw_rows)
            raise

    def _drop(self, hnsw_rows: HnswRows) -> None:
        if self.rows_by_namespace.get(hnsw_rows.table.namespace) is hnsw_rows:
            self._rebuilds_before += hnsw_rows.rebuilds
            del self.rows_by_namespace[hnsw_rows.table.namespace]

    def _fail(self, failure: Exception) -> None:
        self._failure = str(failure) or repr(failure)
        self._capacity_freed.set()

    async def _save(self, file: GraphFile, thread: Threads, cursor: Cursor) -> None:
        async with self._saving:
            changes, space = self._changes, self.settings.metric
            parts = [part for rows in self.rows_by_namespace.values() for part in GraphPart.all_of(rows)]
            for part in parts:
                part.generation.is_saving = True
            try:
                await thread.run(lambda: file.write(pack(parts, space, cursor)))
                self._file_state, self._saved_offset, self._saved_changes = (
                    "saved",
                    cursor.next_offset,
                    changes,
                )
            except Exception as failure:
                self._file_state = f"not saved: {failure}"
                raise
            finally:
                for part in parts:
                    part.generation.is_saving = False

    def _clear(self) -> None:
        self._rebuilds_before += sum(rows.rebuilds for rows in self.rows_by_namespace.values())
        self.rows_by_namespace.clear()
        self._excess = 0
        self._work_ready.set()
        self._capacity_freed.set()

    def drop_absent(self) -> None:
        """Drop the nodes of deleted vectors, whose slots may be free."""
        for hnsw_rows in self.rows_by_namespace.values():
            hnsw_rows.drop_absent()

    async def erase(self, namespaces: Collection[str], threads: Threads) -> None:
        """Remove the file, and save no node of these namespaces that exists now. Raises TryAgain."""
        if self._file is None or not namespaces:
            return
        for namespace in namespaces:
            if (hnsw_rows := self.rows_by_namespace.get(namespace)) is not None:
                hnsw_rows.replace_all()
        self._changes += 1
        self._work_ready.set()
        async with self._saving:
            try:
                with anyio.CancelScope(shield=True):
                    await threads.run(self._file.remove)
            except OSError as failure:
                raise TryAgain(f"{self._file.path} cannot be removed: {failure}") from failure
            self._file_state = "removed, because it may contain erased vectors"

    def rebuild(self, resident: ResidentVectors) -> None:
        """Index all rows from the start, because the vectors were replaced."""
        self._clear()
        self._ensure_all_rows(resident)
        self._changes += 1

    # --- applied rows

    def check(self, resident: ResidentVectors) -> None:
        """Raise TryAgain once if background work has failed; the work then continues."""
        failure, self._failure = self._failure, None
        if failure is not None:
            self._ensure_all_rows(resident)
            self._work_ready.set()
            raise TryAgain(f"indexing rows failed: {failure}; rows not in a graph are searched exactly")

    def _ensure_all_rows(self, resident: ResidentVectors) -> None:
        """Prepare the graph rows of all large tables; raise the limit if more rows are then unindexed."""
        for table in resident.tables.values():
            self._ensure_rows(table)
        unindexed = self.unindexed_rows
        self._unindexed_highest = max(self._unindexed_highest, unindexed)
        self._excess = unindexed if unindexed > self.settings.unindexed_rows_max else 0

    async def wait_for_capacity(self, resident: ResidentVectors, rows: Mapping[str, int]) -> None:
        """Wait for capacity for these new rows by namespace. Raises TryAgain after `capacity_timeout_s`."""
        growth = self._total_growth(resident, rows)
        if self.unindexed_rows + growth <= self.unindexed_rows_max:
            return
        self._capacity_waits += 1
        with anyio.move_on_after(self.settings.capacity_timeout_s):
            while self.unindexed_rows + growth > self.unindexed_rows_max and self._failure is None:
                self._capacity_freed = anyio.Event()
                await self._capacity_freed.wait()
        self.check(resident)
        if self.unindexed_rows + growth > self.unindexed_rows_max:
            raise TryAgain(
                f"{self.unindexed_rows} rows wait to be indexed and {growth} more would exceed "
                f"unindexed_rows_max {self.unindexed_rows_max}: deltas arrive faster than rows are indexed"
            )

    def has_capacity(self, resident: ResidentVectors, rows: Mapping[str, int]) -> bool:
        """True if `rows` can be applied at once, there is capacity for them, and no work has failed."""
        is_one_piece = sum(rows.values()) <= self.settings.piece_rows
        return (
            is_one_piece
            and self._failure is None
            and self.unindexed_rows + self._total_growth(resident, rows) <= self.unindexed_rows_max
        )

    def _total_growth(self, resident: ResidentVectors, rows: Mapping[str, int]) -> int:
        """Return how many more rows would be unindexed once these rows are applied."""
        growth = 0
        for namespace, count in rows.items():
            table = resident.tables.get(namespace)
            if (
                table is not None
                and namespace not in self.rows_by_namespace
                and self._ensure_rows(table) is not None
            ):
                self._ensure_all_rows(resident)  # another sink that shares the vectors made the table large
            growth += self._unindexed_growth(table, count)
        return growth

    def _unindexed_growth(self, table: VectorTable | None, count: int) -> int:
        """Return the same for `count` rows of one table. If it gets a graph by them, all its rows count."""
        if table is not None and table.namespace in self.rows_by_namespace:
            return count
        rows = (0 if table is None else len(table.slots)) + count
        return rows if rows >= self.settings.graph_rows_min else 0

    def note(self, resident: ResidentVectors, keys: Mapping[str, Sequence[str]]) -> None:
        """Note rows that were applied. `keys`: their vector ids by namespace."""
        for namespace, vector_ids in keys.items():
            table = resident.tables.get(namespace)
            if table is None:
                continue
            hnsw_rows = self.rows_by_namespace.get(namespace)
            if hnsw_rows is not None:
                slots = [slot for slot in map(table.slots.get, vector_ids) if slot is not None]
                hnsw_rows.note(np.array(slots, np.intp))
            else:
                hnsw_rows = self._ensure_rows(table)
            if hnsw_rows is not None and hnsw_rows.unindexed_rows:
                self._work_ready.set()
        self._changes += 1
        self._unindexed_highest = max(self._unindexed_highest, self.unindexed_rows)

    def _ensure_rows(self, table: VectorTable) -> HnswRows | None:
        """Return the graph rows of a table that is large enough for a graph, else None."""
        hnsw_rows = self.rows_by_namespace.get(table.namespace)
        if (
            hnsw_rows is None
            and table.matrix is not None
            and len(table.slots) >= self.settings.graph_rows_min
        ):
            hnsw_rows = self.rows_by_namespace[table.namespace] = self._new_rows(table)
            hnsw_rows.mark_unindexed()
        return hnsw_rows

    def _new_rows(self, table: VectorTable) -> HnswRows:
        return HnswRows(
            table,
            self.settings.metric,
            tombstone_ratio_max=self.settings.tombstone_ratio_max,
            drift_share_max=self.settings.drift_share_max,
            threads=self.settings.threads,
            expansion_add=self.settings.expansion_add,
            recent_rows=self.settings.recent_rows,
        )

    def candidates(
        self, table: VectorTable, query: NDArray[np.float32], k: int, metric: Metric
    ) -> NDArray[np.intp] | None:
        """Return slots of vectors that may be among the `k` nearest; None if all rows must be searched."""
        hnsw_rows = self.rows_by_namespace.get(table.namespace)
        if hnsw_rows is None or hnsw_rows.table is not table:  # the table was rebuilt
            return None
        if metric != self.settings.metric or not hnsw_rows.indexed_rows:
            return None
        if metric == "cosine":
            norm = float(np.sqrt(np.square(query.astype(np.float64)).sum()))
            if norm == 0:
                return None  # every vector has the same similarity to a zero query
            query = (query / norm).astype(np.float32)
        try:
            return hnsw_rows.candidates(query, k)
        except GraphError as failure:
            self._drop(hnsw_rows)
            self._fail(failure)
            return None

    @property
    def unindexed_rows(self) -> int:
        """Rows that wait to enter a graph."""
        return sum(rows.unindexed_rows for rows in self.rows_by_namespace.values())

    @property
    def unindexed_rows_max(self) -> int:
        """The present limit. If a start had more rows, it falls by one for every two rows indexed."""
        return self.settings.unindexed_rows_max + self._excess

    def backlog(self) -> Backlog:
        """Return the number of unindexed rows and its limit."""
        return Backlog(self.unindexed_rows, self.unindexed_rows_max, self._excess)

    def statistics(self) -> HnswStatistics:
        """Return a snapshot."""
        all_rows = self.rows_by_namespace.values()
        return HnswStatistics(
            indexed_rows=sum(rows.indexed_rows for rows in all_rows),
            unindexed_rows=self.unindexed_rows,
            unindexed_rows_highest=self._unindexed_highest,
            unindexed_rows_max=self.unindexed_rows_max,
            tombstones=sum(rows.tombstones for rows in all_rows),
            graphs=len(self.rows_by_namespace),
            bytes=sum(rows.size for rows in all_rows),
            added_rows=self._rows_added,
            rebuilds=self._rebuilds_before + sum(rows.rebuilds for rows in all_rows),
            capacity_waits=self._capacity_waits,
            searches_in_graph=self.searches_in_graph,
            searches_exact=self.searches_exact,
            file=self._file_state,
            saved_offset=self._saved_offset,
        )
