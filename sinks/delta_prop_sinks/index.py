"""The index: finds the nearest vectors by exact scores; a delta is visible once it is applied.

It stores no copy: it reads the resident vectors, its own or those that it shares with a storage sink. Without
`hnsw` a search compares the query with every vector. With `hnsw`, a graph finds candidates among the indexed
rows; all unindexed rows, which have changed and are not in the graph yet, and the last few thousand changed
rows are candidates too. Candidates are scored again in float64, so scores do not depend on the order of
slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from numpy.typing import ArrayLike, NDArray

from delta_prop_sinks.argument_checks import check_kind, check_path, check_sink_name, check_texts
from delta_prop_sinks.hnsw_builder import Hnsw, HnswBuilder, HnswStatistics
from delta_prop_sinks.resident import ResidentVectors
from delta_prop_sinks.scoring import Metric, Scorer, check_query, median_norm, refresh_norms
from delta_prop_sinks.sink import Backlog, Delivery, ResumePoint, SinkContext, TryAgain
from delta_prop_sinks.vector_table import OTHER_DIMENSION, VECTOR, VectorTable
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Dot, Head
from delta_prop_wire.errors import UsageError
from delta_prop_wire.state_rows import StateRow

_REBUILD_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Hit:
    """One hit. A larger score is nearer; for `l2` it is minus the distance. Do not change `metadata`."""

    vector_id: str
    score: float
    dot: Dot
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """The index's progress and searches. `hnsw`: statistics of the graphs, None if all searches are exact.

    `left_out`: vectors of another dimension than their namespace has here, which no search finds: another
    service made them during a network partition. Delete them, or give them the namespace's dimension.
    """

    applied_offset: int
    vectors: int
    left_out: int
    bytes: int
    searches: int
    hnsw: HnswStatistics | None = None


class IndexSink:
    """Searches nearest vectors. Give it a storage sink's `resident` to hold the vectors once.

    While it is attached, every vector stays in memory, within the bound of the resident vectors.

    `hnsw=True`, or `hnsw=Hnsw(...)` with settings, builds a graph for each large namespace. It needs the
    extra `hnsw`. Its cost: a thread; for each vector a copy of the indexed row (2 bytes per number for
    `cosine`, 4 for `l2`) and up to `1 + tombstone_ratio_max` nodes, each of some 600 bytes and one more copy
    of the row; up to twice as many nodes while a graph is rebuilt. Its benefit: the time of a search hardly
    grows with the number of vectors, though a search finds nearly all neighbours instead of all. Only
    searches by the graph's metric use it: others are exact. `path`: a file for the graphs, so that a restart
    indexes only the rows that have changed.

    Raises UsageError if the extra is missing, or `path` is given without `hnsw`.
    """

    def __init__(
        self,
        *,
        name: str = "index",
        resident: ResidentVectors | None = None,
        hnsw: bool | Hnsw = False,
        path: str | Path | None = None,
    ) -> None:
        self.name = check_sink_name(name)
        self.resident = (
            ResidentVectors() if resident is None else check_kind("resident", resident, ResidentVectors)
        )
        self._context: SinkContext | None = None
        self._searches = 0
        self._states_end = 0  # the offset after the last delta in the states of a rebuild
        self._rebuilds = 0  # the number of rebuilds of the vectors that this index has followed
        if not isinstance(hnsw, bool | Hnsw):
            raise UsageError(f"hnsw {hnsw!r:.60} is not a bool or Hnsw: give True, False or Hnsw(metric=…)")
        if path is not None:
            check_path(path)
        if path is not None and not hnsw:
            raise UsageError("path: only an index with hnsw has a file: add hnsw=True, or leave path out")
        self._builder = HnswBuilder(Hnsw() if hnsw is True else hnsw, path) if hnsw else None

    async def open(self, context: SinkContext) -> ResumePoint:
        """Pin the vectors. Raises StopSink if memory cannot hold them all, UsageError if the storage sink
        that shares them is not attached yet, TryAgain while that sink loads rebuilt vectors.
        """
        resident = self.resident
        if resident.residency.stored and not resident.residency.loaded:
            raise UsageError(
                f"index {self.name!r} shares its vectors with a storage sink: attach the storage sink first"
            )
        if self._builder is not None:
            self._builder.check_path(resident)
        # During a rebuild, only its end shows whether memory can hold all vectors.
        if resident.rebuilding and not resident.complete:
            await self._wait_until_rebuilt(0)
        resident.enter(context)
        self._rebuilds = resident.rebuild.count
        if self._context is None:
            resident.residency.pin(resident.resident_bytes_max)
        self._context = context
        if self._builder is not None:
            try:
                await self._builder.open(resident, context.threads)
            except BaseException:  # cancellation too
                self._context = None
                resident.residency.unpin()
                raise
        return ResumePoint(self._cursor(context), resident.lamport, resident.rebuilding)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Fold rows that the vectors lack. Raises TryAgain without capacity after `capacity_timeout_s`."""
        context = self._require_open()
        if await self._follow_rebuild(deliveries):
            pass
        elif self._builder is None:
            await self.resident.apply(deliveries, context)
        else:
            await self._apply_to_graph(deliveries, self._builder, context)
        # The vectors outlive the index within the process, so folded rows need no redelivery.
        if not deliveries[-1].redelivered:
            context.committed(deliveries[-1].next_offset)

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        """Fold and return True; return False if that must wait for a rebuild or for the graphs' capacity."""
        context, resident, builder = self._context, self.resident, self._builder
        if (
            context is None
            or self._rebuilds != resident.rebuild.count
            or resident.rebuild.is_running
            or deliveries[-1].redelivered
        ):
            return False
        if builder is None:
            is_done = resident.apply_now(deliveries, context)
        else:
            keys = _keys_by_namespace(deliveries)
            if not builder.has_capacity(resident, _count_rows(keys)):
                return False
            try:
                is_done = resident.apply_now(deliveries, context)
            finally:
                builder.note(resident, keys)
        if is_done:
            context.committed(deliveries[-1].next_offset)
        return is_done

    async def _apply_to_graph(
        self, deliveries: Sequence[Delivery], builder: HnswBuilder, context: SinkContext
    ) -> None:
        builder.check(self.resident)
        done_offset: int | None = None
        for piece in _pieces(deliveries, builder.settings.piece_rows):
            keys = _keys_by_namespace(piece)
            try:
                await builder.wait_for_capacity(self.resident, _count_rows(keys))
            except TryAgain as failure:
                raise TryAgain(failure.reason, done_offset) from None
            try:
                await self.resident.apply(piece, context)
            finally:  # the rows before a rejected one are applied
                builder.note(self.resident, keys)
            if not any(delivery.redelivered for delivery in deliveries):
                done_offset = piece[-1].next_offset

    @property
    def deltas_per_call(self) -> int:
        """A large number while deltas cause refolds, else 0."""
        return self.resident.deltas_per_call

    async def forget(self, erased: Sequence[tuple[str, str]], before: int) -> None:
        """Remove tombstones, as `HoldsTombstones` says; a storage sink that shares the vectors removes them
        itself. If vectors are erased, the file of graphs is removed, and the graphs of their namespaces are
        replaced gradually: until then, saves have only the part that is replaced. Raises TryAgain.
        """
        context, resident = self._require_open(), self.resident
        if not resident.residency.stored:
            await resident.forget(erased, before, context)
        if self._builder is not None:
            self._builder.drop_absent()
            await self._builder.erase({namespace for namespace, _ in erased}, context.threads)

    async def begin_rebuild(self, offset: int) -> None:
        """Drop the vectors, unless they are shared with a storage sink, which rebuilds them itself.

        Meanwhile searches see the states loaded so far or, of shared vectors, the old states.
        """
        context, resident = self._require_open(), self.resident
        self._states_end = 0
        if not resident.residency.stored and resident.begin_rebuild(context):
            resident.clear()
            self._rebuild_graphs()

    async def load_states(self, rows: Sequence[StateRow]) -> None:
        """Load states. Raises StopSink if memory cannot hold them all."""
        self._states_end = max([self._states_end, *(row.offset + 1 for row in rows)])
        if self.resident.rebuild.is_by(self._require_open()):
            self.resident.load_states(rows)
            self.resident.check_fits()

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        """Complete the rebuild. Raises TryAgain until the sink that shares the vectors has loaded them."""
        context, resident = self._require_open(), self.resident
        if resident.rebuild.is_by(context):
            resident.end_rebuild(context, offset, lamport)
        else:
            # Rows between the last state and `offset` are not for this index, nor for a sink that shares its
            # vectors, so that sink need not reach `offset`.
            await self._wait_until_rebuilt(self._states_end)
        self._rebuild_graphs()
        self._rebuilds = resident.rebuild.count
        context.committed(offset)

    async def _follow_rebuild(self, deliveries: Sequence[Delivery]) -> bool:
        """If another sink that shares the vectors rebuilds them, wait until it has applied these deliveries.

        True if it has applied them; else the index must. Before that, nothing may be folded: the deltas
        between the rebuild and these deliveries would be lost.
        """
        resident = self.resident
        if self._rebuilds == resident.rebuild.count and not resident.rebuilding:
            return False
        is_redelivered = deliveries[-1].redelivered
        await self._wait_until_rebuilt(0 if is_redelivered else deliveries[-1].next_offset)
        if not is_redelivered:
            self._rebuild_graphs()
            self._rebuilds = resident.rebuild.count
        return not is_redelivered

    async def _wait_until_rebuilt(self, next_offset: int) -> None:
        resident, changed = self.resident, anyio.Event()

        def on_change() -> None:
            changed.set()

        resident.progress.watchers.append(on_change)
        try:
            with anyio.move_on_after(_REBUILD_TIMEOUT_S):
                while resident.rebuilding or resident.next_offset < next_offset:
                    await changed.wait()
                    changed = anyio.Event()
        finally:
            resident.progress.watchers.remove(on_change)
        if resident.rebuilding or resident.next_offset < next_offset:
            raise TryAgain(
                f"index {self.name!r} shares vectors that another sink rebuilds, now at offset "
                f"{resident.next_offset}: wait until that sink has finished and reached {next_offset}"
            )

    def _rebuild_graphs(self) -> None:
        if self._builder is not None:
            self._builder.rebuild(self.resident)

    async def background(self) -> None:
        """Index unindexed rows, and save the file at intervals, until cancelled."""
        context, builder = self._context, self._builder
        if context is None or builder is None:
            await anyio.sleep_forever()
            return
        async with context.background_thread() as thread:
            await builder.run(thread, context.clock, lambda: self._cursor(context))

    def backlog(self) -> Backlog:
        """Return the rows that wait to be indexed; none if every search is exact."""
        return Backlog(0, 1) if self._builder is None else self._builder.backlog()

    async def aclose(self) -> None:
        """Allow eviction; exact searches still work. Raises TryAgain if the graphs' file was not saved."""
        context, self._context = self._context, None
        if context is None:
            return
        try:
            if self._builder is not None:
                await self._builder.close(context.threads, self._cursor(context))
        finally:
            self.resident.abandon_rebuild(context)
            self.resident.residency.unpin()

    def _require_open(self) -> SinkContext:
        if self._context is None:
            raise UsageError(f"index {self.name!r} is not open: attach it first")
        return self._context

    def _cursor(self, context: SinkContext) -> Cursor:
        return Cursor(context.log_id, context.epoch, self.resident.next_offset)

    def dimensions(self) -> dict[str, int]:
        """Return the dimension of each namespace of which a vector was resident."""
        return self.resident.dimensions()

    def head(self, namespace: str, vector_id: str) -> Head | None:
        """Return a vector's last dot and True if it is alive; None if it is not resident."""
        return self.resident.head(namespace, vector_id)

    def statistics(self) -> IndexStatistics:
        """Return a snapshot of the index's numbers."""
        resident = self.resident.statistics()
        hnsw = None if self._builder is None else self._builder.statistics()
        tables = self.resident.tables.values()
        return IndexStatistics(
            applied_offset=self.resident.next_offset,
            vectors=resident.vectors,
            left_out=sum(
                int(np.count_nonzero(table.forms[: table.used] == OTHER_DIMENSION)) for table in tables
            ),
            bytes=resident.bytes,
            searches=self._searches,
            hnsw=hnsw,
        )

    def search(
        self, query: ArrayLike, k: int = 10, namespace: str = "default", metric: Metric = "cosine"
    ) -> list[Hit]:
        """Return the `k` nearest vectors, nearest first; equal scores by vector id. Raises UsageError.

        `cosine` is 0 for a zero vector; `dot` is the scalar product; `l2` is minus the distance. `pivot` is
        the scalar product divided by (0.5 × the median norm + 0.5 × the vector's norm), which is pivoted
        length normalisation: a compromise between dot, which favours long vectors, and cosine, which favours
        short ones, for vectors whose norm grows with the length of their text.

        An index with hnsw may miss a neighbour by the graph's metric, but never an unindexed or recently
        changed one.
        """
        check_texts(namespace=namespace)
        table = self.resident.tables.get(namespace)
        vector = check_query(query, k, metric, None if table is None else table.dimension, namespace)
        self._searches += 1
        if table is None or table.matrix is None:
            return []
        slots = self._candidates(table, vector, k, metric)
        if slots is None:
            refresh_norms(table)
            slots = (table.forms[: table.used] == VECTOR).nonzero()[0]
        else:
            refresh_norms(table, slots)
        if not len(slots):
            return []
        scorer = Scorer(vector, metric, median_norm(table) if metric == "pivot" else 0.0)
        candidates = scorer.candidates(table, slots, k)
        scores = scorer.exact(table, candidates)
        ranked = sorted(
            zip((-scores).tolist(), (str(table.slots.id(slot)) for slot in candidates.tolist()), strict=True)
        )
        return [_hit(table, vector_id, -score) for score, vector_id in ranked[:k]]

    def _candidates(
        self, table: VectorTable, query: NDArray[np.float32], k: int, metric: Metric
    ) -> NDArray[np.intp] | None:
        """Return the slots that may be nearest, found with a graph; None if all vectors must be scored."""
        builder = self._builder
        if builder is None or self._context is None:
            return None
        slots = builder.candidates(table, query, k, metric)
        if slots is not None:
            alive: NDArray[np.intp] = slots[table.forms[slots] == VECTOR]
            if len(alive) >= k:
                builder.searches_in_graph += 1
                return alive
        builder.searches_exact += 1
        return None

    def rows(self) -> Iterator[tuple[str, str, VectorState]]:
        """Yield all states of the index, tombstones included: (namespace, vector id, state)."""
        return self.resident.rows()


def _pieces(deliveries: Sequence[Delivery], rows_max: int) -> Iterator[list[Delivery]]:
    """Yield the deliveries in order, in groups of up to `rows_max` rows; a larger delivery is split."""
    group: list[Delivery] = []
    count = 0
    for delivery in deliveries:
        if group and count + delivery.count > rows_max:
            yield group
            group, count = [], 0
        if delivery.count > rows_max:
            all_rows = np.arange(delivery.logged.count)
            rows = all_rows if delivery.rows is None else delivery.rows
            for start in range(0, len(rows), rows_max):
                piece = rows[start : start + rows_max]
                is_last = start + rows_max >= len(rows)
                end = delivery.end if is_last else delivery.first_offset + int(piece[-1]) + 1
                yield [Delivery(delivery.logged, piece, delivery.redelivered, end)]
        else:
            group.append(delivery)
            count += delivery.count
    if group:
        yield group


def _count_rows(keys: Mapping[str, Sequence[str]]) -> dict[str, int]:
    return {namespace: len(vector_ids) for namespace, vector_ids in keys.items()}


def _keys_by_namespace(deliveries: Sequence[Delivery]) -> dict[str, list[str]]:
    keys_by_namespace: dict[str, list[str]] = {}
    for delivery in deliveries:
        batch = delivery.batch
        if batch.is_control:
            continue
        keys = batch.keys
        if batch.namespace is not None:
            row_keys = keys if delivery.rows is None else [keys[row] for row in delivery.rows.tolist()]
            keys_by_namespace.setdefault(batch.namespace, []).extend(row_keys)
            continue
        namespaces = batch.namespaces
        for row in range(batch.count) if delivery.rows is None else delivery.rows.tolist():
            keys_by_namespace.setdefault(namespaces[row], []).append(keys[row])
    return keys_by_namespace


def _hit(table: VectorTable, vector_id: str, score: float) -> Hit:
    slot = table.slots[vector_id]
    _, origin, counter, _ = table.head(slot)
    return Hit(vector_id, score + 0.0, Dot(origin, counter), table.metadata.get(slot, {}))
