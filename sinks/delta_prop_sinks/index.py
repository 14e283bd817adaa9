"""The index: nearest vectors by exact scores; a delta is seen once it is applied.

It keeps no copy: it reads the resident vectors, its own or those that it shares with a storage sink. Without
`linked` a search compares the query with every vector. With it, a graph names candidates among the linked
rows; all unlinked ones, which are those that changed and are not linked yet, and the last few thousand that
changed at all, are candidates too.
Scores are exact whatever the slot order: candidates are scored again in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from delta_prop_sinks.bounds import check_kind, check_path, check_sink_name, check_texts
from delta_prop_sinks.linking import Linked, LinkedStatistics, Linker
from delta_prop_sinks.resident import Resident
from delta_prop_sinks.scoring import Metric, Scorer, checked_query, median_norm, refresh_norms
from delta_prop_sinks.sink import Backlog, Delivery, ResumePoint, TryAgain
from delta_prop_sinks.table import ODD, VECTOR
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    from delta_prop_sinks.sink import SinkContext
    from delta_prop_sinks.table import Table
    from delta_prop_wire.algebra import State
    from delta_prop_wire.delta import Head
    from delta_prop_wire.states import StateRow


_BROUGHT_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Hit:
    """A vector found. A larger score is nearer; for `l2` it is minus the distance. Do not change metadata."""

    vector_id: str
    score: float
    dot: Dot
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """How far the index is, and what it was asked. `linked`: None where it searches exactly.

    `left_out`: vectors of another dimension than their namespace has here, which no search finds: another
    service made them while the two could not see each other. Delete them, or give them the others' dimension.
    """

    applied_offset: int
    vectors: int
    left_out: int
    bytes: int
    searches: int
    linked: LinkedStatistics | None = None


class IndexSink:
    """Searches vectors by nearness. Give it a storage sink's `resident` to hold the vectors once.

    While it is attached every vector stays in memory, within the resident vectors' bound.

    `linked=True`, or `Linked(...)` with settings, puts a graph behind each large namespace. It needs the
    extra `hnsw`. It costs a thread; for each vector the row it was linked with (2 bytes a number for
    `cosine`, 4 for `l2`) and up to `1 + tombstone_ratio_max` nodes of some 600 bytes and as much again for
    their numbers, at most twice as many nodes while a graph is built anew. It brings searches that hardly
    grow with the number of vectors, and that find nearly all neighbours instead of all. Only the metric it
    is linked for uses it: others are exact.
    `path`: a file for the graphs, so that a restart links only what has changed.

    Raises UsageError where the extra is missing, or `path` is given without `linked`.
    """

    def __init__(
        self,
        *,
        name: str = "index",
        resident: Resident | None = None,
        linked: bool | Linked = False,
        path: str | Path | None = None,
    ) -> None:
        self.name = check_sink_name(name)
        self.resident = Resident() if resident is None else check_kind("resident", resident, Resident)
        self._context: SinkContext | None = None
        self._searches = 0
        self._states_end = 0  # behind the last delta that the states of a rebuild count in
        self._rebuilds = 0  # of the vectors, as far as this index has followed
        if not isinstance(linked, bool | Linked):
            raise UsageError(f"linked={linked!r:.60}: give True or False, or settings as Linked(metric=…)")
        if path is not None:
            check_path(path)
        if path is not None and not linked:
            raise UsageError("path: only a linked index has a file; add linked=True, or leave path out")
        self._linker = Linker(Linked() if linked is True else linked, path) if linked else None

    # --- the contract

    async def open(self, context: SinkContext) -> ResumePoint:
        """Pin the vectors. Raises StopSink where memory does not hold them all, UsageError too early,
        TryAgain while a storage that shares them loads what it made anew.
        """
        resident = self.resident
        if resident.stored and not resident.loaded:
            raise UsageError(
                f"index {self.name!r} shares its vectors with a storage sink: attach the storage sink first"
            )
        if self._linker is not None:
            self._linker.fits(resident)
        if resident.void and not resident.complete:  # what is missing comes, or is too large: not known yet
            await self._until_brought(0)
        resident.enter(context)
        self._rebuilds = resident.rebuilds
        if self._context is None:
            resident.pin()
        self._context = context
        if self._linker is not None:
            try:
                await self._linker.open(resident, context.threads)
            except BaseException:  # cancelled
                self._context = None
                resident.unpin()
                raise
        return ResumePoint(self._cursor(context), resident.lamport, resident.void)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Fold what the shared vectors do not hold yet.

        A linked index waits first, where too many rows wait to be linked; TryAgain after `room_s_max`.
        """
        context = self._opened()
        if await self._are_brought(deliveries):
            pass
        elif self._linker is None:
            await self.resident.apply(deliveries, context)
        else:
            await self._apply_linked(deliveries, self._linker, context)
        # The vectors outlive the index within the process, so what is folded need not come again.
        if not deliveries[-1].late:
            context.committed(deliveries[-1].next_offset)

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        """Fold where nothing is to be waited for: another sink's rebuild, room for rows to be linked."""
        context, resident, linker = self._context, self.resident, self._linker
        if context is None or self._rebuilds != resident.rebuilds or resident.void or deliveries[-1].late:
            return False
        if linker is None:
            done = resident.apply_now(deliveries, context)
        else:
            keys = _keys(deliveries)
            if not linker.has_room(resident, {name: len(some) for name, some in keys.items()}):
                return False
            try:
                done = resident.apply_now(deliveries, context)
            finally:
                linker.note(resident, keys)
        if done:
            context.committed(deliveries[-1].next_offset)
        return done

    async def _apply_linked(
        self, deliveries: Sequence[Delivery], linker: Linker, context: SinkContext
    ) -> None:
        linker.check(self.resident)
        done: int | None = None
        for pieces in _pieces(deliveries, linker.settings.piece_rows):
            keys = _keys(pieces)
            try:
                await linker.room(self.resident, {name: len(some) for name, some in keys.items()})
            except TryAgain as failure:
                raise TryAgain(failure.reason, done) from None
            try:
                await self.resident.apply(pieces, context)
            finally:  # of a piece that was rejected, what lies before it is applied
                linker.note(self.resident, keys)
            if not any(delivery.late for delivery in deliveries):
                done = pieces[-1].next_offset

    @property
    def deltas_a_call(self) -> int:
        """Many, while what comes has vectors folded again."""
        return self.resident.deltas_a_call

    # --- rebuilt

    async def begin_rebuild(self, offset: int) -> None:
        """Forget the vectors; of those that it shares with a store, that one makes them anew.

        What is searched meanwhile is what has come so far; of shared vectors the old ones.
        """
        context, resident = self._opened(), self.resident
        self._states_end = 0
        if not resident.stored and resident.begin_rebuild(context):
            resident.clear()
            self._link_anew()

    async def take_states(self, rows: Sequence[StateRow]) -> None:
        """Hold these. Raises StopSink where memory does not hold them all."""
        self._states_end = max([self._states_end, *(row.offset + 1 for row in rows)])
        if self.resident.is_rebuilt_by(self._opened()):
            self.resident.take_states(rows)
            self.resident.check_fits()

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        """The vectors are whole. Raises TryAgain while another sink that shares them has not brought them."""
        context, resident = self._opened(), self.resident
        if resident.is_rebuilt_by(context):
            resident.end_rebuild(context, offset, lamport)
        else:
            # What lies between the last of the states and `offset` is not for this index, nor for who shares
            # its vectors, and moves nothing there.
            await self._until_brought(self._states_end)
        self._link_anew()
        self._rebuilds = resident.rebuilds
        context.committed(offset)

    async def _are_brought(self, deliveries: Sequence[Delivery]) -> bool:
        """Whether another sink that shares the vectors made them anew and brought these deliveries since.

        Until it has come that far nothing may be folded: what lies between would be missing for ever.
        """
        resident = self.resident
        if self._rebuilds == resident.rebuilds and not resident.void:
            return False
        late = deliveries[-1].late
        await self._until_brought(0 if late else deliveries[-1].next_offset)
        if not late:
            self._link_anew()
            self._rebuilds = resident.rebuilds
        return not late

    async def _until_brought(self, next_offset: int) -> None:
        resident, changed = self.resident, anyio.Event()

        def tell() -> None:
            changed.set()

        resident.watchers.append(tell)
        try:
            with anyio.move_on_after(_BROUGHT_S_MAX):
                while resident.void or resident.next_offset < next_offset:
                    await changed.wait()
                    changed = anyio.Event()
        finally:
            resident.watchers.remove(tell)
        if resident.void or resident.next_offset < next_offset:
            raise TryAgain(
                f"index {self.name!r} shares vectors that another sink makes anew, which is at offset "
                f"{resident.next_offset}, not yet at {next_offset}: that one goes first"
            )

    def _link_anew(self) -> None:
        if self._linker is not None:
            self._linker.begin_again(self.resident)

    async def background(self) -> None:
        """Link what is unlinked, and save the file now and then, until cancelled."""
        context, linker = self._context, self._linker
        if context is None or linker is None:
            await anyio.sleep_forever()
            return
        async with context.background_thread() as thread:
            await linker.run(thread, context.clock, lambda: self._cursor(context))

    def backlog(self) -> Backlog:
        """Rows that wait to be linked; none where every search is exact."""
        return Backlog(0, 1) if self._linker is None else self._linker.backlog()

    async def aclose(self) -> None:
        """Let vectors leave memory again; what is there can still be searched, exactly.

        Raises TryAgain where the file of a linked index could not be saved.
        """
        context, self._context = self._context, None
        if context is None:
            return
        try:
            if self._linker is not None:
                await self._linker.close(context.threads, self._cursor(context))
        finally:
            self.resident.abandon_rebuild(context)
            self.resident.unpin()

    def _opened(self) -> SinkContext:
        if self._context is None:
            raise UsageError(f"index {self.name!r} is not open: attach it first")
        return self._context

    def _cursor(self, context: SinkContext) -> Cursor:
        return Cursor(context.log_id, context.epoch, self.resident.next_offset)

    def dimensions(self) -> dict[str, int]:
        """The dimension of each namespace of which a vector was resident."""
        return self.resident.dimensions()

    def head(self, namespace: str, vector_id: str) -> Head | None:
        """The last dot of a vector and whether it is there, None where it is not resident."""
        return self.resident.head(namespace, vector_id)

    def statistics(self) -> IndexStatistics:
        """A snapshot of the index's numbers."""
        resident = self.resident.statistics()
        linked = None if self._linker is None else self._linker.statistics()
        tables = self.resident.tables.values()
        return IndexStatistics(
            applied_offset=self.resident.next_offset,
            vectors=resident.vectors,
            left_out=sum(int(np.count_nonzero(table.forms[: table.used] == ODD)) for table in tables),
            bytes=resident.bytes,
            searches=self._searches,
            linked=linked,
        )

    # --- for readers

    def search(
        self, query: ArrayLike, k: int = 10, namespace: str = "default", metric: Metric = "cosine"
    ) -> list[Hit]:
        """The `k` nearest vectors, nearest first; equal scores by vector id. Raises UsageError.

        `cosine` 0 for a zero vector; `dot` the scalar product; `l2` minus the distance; `pivot` the scalar
        product over 0.5 × the median norm + 0.5 × the vector's: between dot, which favours long vectors, and
        cosine, which favours short ones, for vectors whose length grows with their text's.

        A linked index may miss a neighbour of the metric it is linked for, but none that is unlinked or among
        the last to have changed.
        """
        check_texts(namespace=namespace)
        table = self.resident.tables.get(namespace)
        vector = checked_query(query, k, metric, None if table is None else table.dimension, namespace)
        self._searches += 1
        if table is None or table.matrix is None:
            return []
        rows = self._candidates(table, vector, k, metric)
        if rows is None:
            refresh_norms(table)
            rows = (table.forms[: table.used] == VECTOR).nonzero()[0]
        else:
            refresh_norms(table, rows)
        if not len(rows):
            return []
        scorer = Scorer(vector, metric, median_norm(table) if metric == "pivot" else 0.0)
        candidates = scorer.candidates(table, rows, k)
        scores = scorer.exact(table, candidates)
        found = sorted(
            zip((-scores).tolist(), (str(table.ids[slot]) for slot in candidates.tolist()), strict=True)
        )
        return [_hit(table, vector_id, -score) for score, vector_id in found[:k]]

    def _candidates(
        self, table: Table, query: NDArray[np.float32], k: int, metric: Metric
    ) -> NDArray[np.intp] | None:
        """The rows that may be the nearest, by the graph; None for all."""
        linker = self._linker
        if linker is None or self._context is None:
            return None
        rows = linker.candidates(table, query, k, metric)
        if rows is not None:
            alive: NDArray[np.intp] = rows[table.forms[rows] == VECTOR]
            if len(alive) >= k:
                linker.searches_linked += 1
                return alive
        linker.searches_exact += 1
        return None

    def rows(self) -> Iterator[tuple[str, str, State]]:
        """All states that the index holds, tombstones included: (namespace, vector id, state)."""
        return self.resident.rows()


def _pieces(deliveries: Sequence[Delivery], rows_max: int) -> Iterator[list[Delivery]]:
    """The deliveries in order, in groups of few rows; those that are too large are cut."""
    group: list[Delivery] = []
    count = 0
    for delivery in deliveries:
        if group and count + delivery.count > rows_max:
            yield group
            group, count = [], 0
        if delivery.count > rows_max:
            whole = np.arange(delivery.logged.count)
            rows = whole if delivery.rows is None else delivery.rows
            for at in range(0, len(rows), rows_max):
                piece = rows[at : at + rows_max]
                more = at + rows_max < len(rows)
                end = delivery.first_offset + int(piece[-1]) + 1 if more else delivery.end
                yield [Delivery(delivery.logged, piece, delivery.late, end)]
        else:
            group.append(delivery)
            count += delivery.count
    if group:
        yield group


def _keys(deliveries: Sequence[Delivery]) -> dict[str, list[str]]:
    """The vector ids that are meant, by namespace."""
    found: dict[str, list[str]] = {}
    for delivery in deliveries:
        batch = delivery.batch
        if batch.is_control:
            continue
        keys = batch.keys
        if batch.namespace is not None:
            some = keys if delivery.rows is None else [keys[row] for row in delivery.rows.tolist()]
            found.setdefault(batch.namespace, []).extend(some)
            continue
        namespaces = batch.namespaces
        for row in range(batch.count) if delivery.rows is None else delivery.rows.tolist():
            found.setdefault(namespaces[row], []).append(keys[row])
    return found


def _hit(table: Table, vector_id: str, score: float) -> Hit:
    slot = table.slots[vector_id]
    _, origin, counter, _ = table.head(slot)
    return Hit(vector_id, score + 0.0, Dot(origin, counter), table.metadata.get(slot, {}))
