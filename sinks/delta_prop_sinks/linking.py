"""Keeps the graphs of all namespaces behind what was applied: whose turn it is, the bound, the file.

One owner: everything here runs on the event loop but `Chunk.link`, `Sample.look` and what reads and writes
the file, which get copies. A graph has its library's lock; a search waits for one step at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, get_args

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop_sinks.bounds import check_number
from delta_prop_sinks.graph_file import GraphFile
from delta_prop_sinks.hnsw import GraphFailed, Space, require_usearch
from delta_prop_sinks.links import Links
from delta_prop_sinks.saved_links import Part, pack, unpack
from delta_prop_sinks.sink import Backlog, TryAgain
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from delta_prop_sinks.ports import Clock, Threads
    from delta_prop_sinks.resident import Resident
    from delta_prop_sinks.scoring import Metric
    from delta_prop_sinks.table import Table
    from delta_prop_wire.cursor import Cursor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Linked:
    """How a linked index links. Raises UsageError where a value makes no sense.

    `metric`: whose neighbours the graphs hold. `unlinked_rows_max`: rows that may wait to be linked, all
    namespaces together; every search scores them one by one, about 0.15 ms for 1,000 of 128 numbers.
    `graph_rows_min`: smaller namespaces have no graph. `tombstone_ratio_max`: nodes that count no more, per
    row, before a graph is built anew beside the old one. `drift_share_max`: how far a row may move before it
    is linked again, as a share of the distance between near neighbours; below a half, a row's own node is
    still the nearest to it. `recent_rows`: so many rows changed last are scored one by one even if they are
    linked, in each namespace: a graph may miss one, and a delta just applied is to be seen for certain.
    `expansion_add`: how widely is looked when a row is linked; 32 costs two thirds of 48 and loses ten times
    as many rows, 64 a third more and loses hardly any. `threads`: how many link at once; leave the event loop
    a processor of its own. `room_s_max`: how long `apply` waits for room before it says so.
    `save_s`: seconds between savings of the file, if there is one and something was linked.
    """

    metric: Space = "cosine"
    unlinked_rows_max: int = 10_000
    graph_rows_min: int = 5_000
    tombstone_ratio_max: float = 1.0
    drift_share_max: float = 0.25
    recent_rows: int = 4_096
    expansion_add: int = 48
    threads: int = 1
    room_s_max: float = 5.0
    save_s: float = 600.0

    def __post_init__(self) -> None:
        if self.metric not in get_args(Space):
            raise UsageError(
                f"metric: {self.metric!r} is not one of {', '.join(get_args(Space))}; "
                "other metrics are searched exactly, whatever is linked"
            )
        for name in ("unlinked_rows_max", "drift_share_max"):
            check_number(name, getattr(self, name))
        for name in (
            "graph_rows_min",
            "recent_rows",
            "expansion_add",
            "threads",
            "tombstone_ratio_max",
            "room_s_max",
            "save_s",
        ):
            if not check_number(name, getattr(self, name)) > 0:
                raise UsageError(f"{name}: {getattr(self, name)!r} is not above 0")
        if not 0 <= self.drift_share_max < 0.5:
            raise UsageError(
                f"drift_share_max: {self.drift_share_max!r} is not from 0 to below 0.5: "
                "farther away, a row's node is not the nearest to it any more"
            )
        if self.unlinked_rows_max < 2 * self.graph_rows_min:
            raise UsageError(
                f"unlinked_rows_max: {self.unlinked_rows_max} is below twice graph_rows_min "
                f"({self.graph_rows_min}): a namespace that gets its first graph needs room"
            )

    @property
    def piece_rows(self) -> int:
        """Rows that are applied at once: a quarter of the bound at most, so that what fits goes on."""
        return max(min(self.recent_rows, self.unlinked_rows_max // 4), 1)


@dataclass(frozen=True, slots=True)
class LinkedStatistics:
    """What the graphs hold now, and counts since the index was made.

    `unlinked_rows_highest`: since it was opened. `file`: none, or what became of it.
    """

    linked_rows: int
    unlinked_rows: int
    unlinked_rows_highest: int
    unlinked_rows_max: int
    tombstones: int
    graphs: int
    bytes: int
    links_done: int
    rebuilds: int
    waits_for_room: int
    searches_linked: int
    searches_exact: int
    file: str
    saved_offset: int


class Linker:
    """The links of all namespaces of one index."""

    def __init__(self, settings: Linked, path: str | Path | None) -> None:
        require_usearch()
        self.settings = settings
        self.links: dict[str, Links] = {}
        self.searches_linked = self.searches_exact = 0
        self._file = None if path is None else GraphFile(path)
        self._file_state = "none" if path is None else "not there yet"
        self._saved_offset = self._saved_changes = self._changes = 0
        self._failure: str | None = None
        self._excess = self._highest = self._waits = 0
        self._links_done = self._rebuilds_before = 0
        self._turn = 0
        self._work = anyio.Event()
        self._room = anyio.Event()

    # --- life

    def fits(self, resident: Resident) -> None:
        """Raise UsageError where the file is of no use."""
        if self._file is not None and not resident.stored:
            raise UsageError(
                "a linked index with a file must share a storage sink's vectors (resident=storage.resident): "
                "without them nothing is there at the start that the file could stand for"
            )

    async def open(self, resident: Resident, threads: Threads) -> None:
        """Load the file, if there is one; what has moved since, and what it does not hold, is unlinked."""
        self._forget()
        self._failure = None
        if self._file is not None:
            await self._load(self._file, resident, threads)
        self._enter_all(resident)
        self._highest = self.unlinked_rows
        self._saved_changes = self._changes

    async def _load(self, file: GraphFile, resident: Resident, threads: Threads) -> None:
        space = self.settings.metric
        try:
            content = await threads.run(file.read)
            if content is None:
                return
            self._saved_offset, parts = await threads.run(
                lambda: unpack(content, space, self.settings.expansion_add)
            )
        except Exception as failure:  # whatever it is: the vectors are there, all else can be made anew
            self._file_state = f"not used, all is linked anew: {failure}"
            return
        for part in parts:
            table = resident.tables.get(part.namespace)
            if table is not None and table.dimension == part.dimension:
                if part.namespace not in self.links:
                    self.links[part.namespace] = self._new_links(table)
                links = self.links[part.namespace]
                for _ in part.adopt_into(links):
                    await anyio.lowlevel.checkpoint()
        for links in self.links.values():
            links.begin()
        self._file_state = "loaded"

    async def close(self, threads: Threads, cursor: Cursor) -> None:
        """Save, where there is a file, and let go of the graphs. Raises TryAgain where it cannot be saved."""
        try:
            if self._file is not None and self._failure is None and self._changes != self._saved_changes:
                try:
                    await self._save(self._file, threads, cursor)
                except Exception as failure:
                    raise TryAgain(f"the graphs were not saved: {failure}") from failure
        finally:
            self._forget()

    async def run(self, thread: Threads, clock: Clock, cursor: Callable[[], Cursor]) -> None:
        """Link what is unlinked, chunk by chunk, until cancelled. After a failure it waits to be told."""
        save_at = clock.now() + self.settings.save_s
        while True:
            try:
                if self._file is not None and clock.now() >= save_at:
                    save_at = clock.now() + self.settings.save_s
                    if self._changes != self._saved_changes:
                        await self._save(self._file, thread, cursor())
                if self._failure is None and await self._step(thread):
                    # A call on the thread is never broken off, so that its outcome is known: here it may end.
                    await anyio.lowlevel.checkpoint_if_cancelled()
                    continue
            except Exception as failure:
                self._fail(failure)
            self._work = anyio.Event()
            with anyio.move_on_after(self.settings.save_s):
                await self._work.wait()

    async def _step(self, thread: Threads) -> bool:
        """One piece of work, of one namespace after the other."""
        every = list(self.links.values())
        for at in range(len(every)):
            links = every[(self._turn + at) % len(every)]
            sample = links.sample()
            if sample is not None:
                links.measured(sample, await self._call(links, thread, sample.look))
            chunk = links.take()
            if chunk is not None:
                self._turn = (self._turn + at + 1) % len(every)
                await self._call(links, thread, chunk.link)
                links.install(chunk)
                self._changes += 1
                self._links_done += chunk.done
                self._excess = max(0, min(self._excess - chunk.done // 2, self.unlinked_rows))
                self._room.set()
                return True
        return False

    async def _call(self, links: Links, thread: Threads, function: Callable[[], T]) -> T:
        """Call on the thread; a graph that refuses is given up."""
        try:
            return await thread.run(function)
        except GraphFailed:
            self._give_up(links)
            raise

    def _give_up(self, links: Links) -> None:
        if self.links.get(links.table.namespace) is links:
            self._rebuilds_before += links.rebuilds
            del self.links[links.table.namespace]

    def _fail(self, failure: Exception) -> None:
        self._failure = str(failure) or repr(failure)
        self._room.set()

    async def _save(self, file: GraphFile, thread: Threads, cursor: Cursor) -> None:
        changes, space = self._changes, self.settings.metric
        parts = [part for links in self.links.values() for part in Part.all_of(links)]
        for part in parts:
            part.generation.saving = True
        try:
            await thread.run(lambda: file.write(pack(parts, space, cursor)))
            self._file_state, self._saved_offset, self._saved_changes = "saved", cursor.next_offset, changes
        except Exception as failure:
            self._file_state = f"not saved: {failure}"
            raise
        finally:
            for part in parts:
                part.generation.saving = False

    def _forget(self) -> None:
        self._rebuilds_before += sum(links.rebuilds for links in self.links.values())
        self.links.clear()
        self._excess = 0
        self._work.set()
        self._room.set()

    def begin_again(self, resident: Resident) -> None:
        """The vectors are others now: link them all."""
        self._forget()
        self._enter_all(resident)
        self._changes += 1

    # --- what is applied

    def check(self, resident: Resident) -> None:
        """Raise TryAgain, once, where work in the background has failed; it then goes on."""
        failure, self._failure = self._failure, None
        if failure is not None:
            self._enter_all(resident)
            self._work.set()
            raise TryAgain(f"linking has failed: {failure}; what it had not done is searched exactly")

    def _enter_all(self, resident: Resident) -> None:
        """Get ready for what the vectors are now; if these are more unlinked rows than may be, so be it."""
        for table in resident.tables.values():
            self._enter(table)
        unlinked = self.unlinked_rows
        self._highest = max(self._highest, unlinked)
        self._excess = unlinked if unlinked > self.settings.unlinked_rows_max else 0

    async def room(self, resident: Resident, rows: Mapping[str, int]) -> None:
        """Wait until so many rows more may be unlinked, by namespace. Raises TryAgain after `room_s_max`."""
        need = self._needed(resident, rows)
        if self.unlinked_rows + need <= self.unlinked_rows_max:
            return
        self._waits += 1
        with anyio.move_on_after(self.settings.room_s_max):
            while self.unlinked_rows + need > self.unlinked_rows_max and self._failure is None:
                self._room = anyio.Event()
                await self._room.wait()
        self.check(resident)
        if self.unlinked_rows + need > self.unlinked_rows_max:
            raise TryAgain(
                f"{self.unlinked_rows} rows wait to be linked and {need} would join them, "
                f"{self.unlinked_rows_max} may (unlinked_rows_max): linking does not keep up"
            )

    def has_room(self, resident: Resident, rows: Mapping[str, int]) -> bool:
        """Whether so many rows more may be unlinked, and few enough come at once, and linking is well."""
        few = sum(rows.values()) <= self.settings.piece_rows and self._failure is None
        return few and self.unlinked_rows + self._needed(resident, rows) <= self.unlinked_rows_max

    def _needed(self, resident: Resident, rows: Mapping[str, int]) -> int:
        """How many rows so many more would add to those that are unlinked."""
        need = 0
        for name, count in rows.items():
            table = resident.tables.get(name)
            if table is not None and name not in self.links and self._enter(table) is not None:
                self._enter_all(resident)  # another sink has brought its rows
            need += self._growth(table, count)
        return need

    def _growth(self, table: Table | None, count: int) -> int:
        if table is not None and table.namespace in self.links:
            return count
        rows = (0 if table is None else len(table.slots)) + count
        return rows if rows >= self.settings.graph_rows_min else 0

    def note(self, resident: Resident, keys: Mapping[str, Sequence[str]]) -> None:
        """These rows were applied, by namespace."""
        for namespace, some in keys.items():
            table = resident.tables.get(namespace)
            if table is None:
                continue
            links = self.links.get(namespace)
            if links is not None:
                slots = [slot for slot in map(table.slots.get, some) if slot is not None]
                links.note(np.array(slots, np.intp))
            else:
                links = self._enter(table)
            if links is not None and links.unlinked_rows:
                self._work.set()
        self._changes += 1
        self._highest = max(self._highest, self.unlinked_rows)

    def _enter(self, table: Table) -> Links | None:
        """The links of a table that is large enough for a graph."""
        links = self.links.get(table.namespace)
        if links is None and table.matrix is not None and len(table.slots) >= self.settings.graph_rows_min:
            links = self.links[table.namespace] = self._new_links(table)
            links.begin()
        return links

    def _new_links(self, table: Table) -> Links:
        return Links(
            table,
            self.settings.metric,
            tombstone_ratio_max=self.settings.tombstone_ratio_max,
            drift_share_max=self.settings.drift_share_max,
            threads=self.settings.threads,
            expansion_add=self.settings.expansion_add,
            recent_rows=self.settings.recent_rows,
        )

    def candidates(
        self, table: Table, query: NDArray[np.float32], k: int, metric: Metric
    ) -> NDArray[np.intp] | None:
        """Slots that may be the nearest; None for all rows."""
        links = self.links.get(table.namespace)
        if links is None or links.table is not table:  # made anew since
            return None
        if metric != self.settings.metric or not links.linked_rows:
            return None
        if metric == "cosine":
            length = float(np.sqrt(np.square(query.astype(np.float64)).sum()))
            if length == 0:
                return None  # as near to all
            query = (query / length).astype(np.float32)
        try:
            return links.candidates(query, k)
        except GraphFailed as failure:
            self._give_up(links)
            self._fail(failure)
            return None

    # --- numbers

    @property
    def unlinked_rows(self) -> int:
        """Rows that wait to be linked."""
        return sum(links.unlinked_rows for links in self.links.values())

    @property
    def unlinked_rows_max(self) -> int:
        """How many may. After a start with more, the bound comes down by one row for two that are linked."""
        return self.settings.unlinked_rows_max + self._excess

    def backlog(self) -> Backlog:
        """Rows that wait, and how many may."""
        return Backlog(self.unlinked_rows, self.unlinked_rows_max, self._excess)

    def statistics(self) -> LinkedStatistics:
        """A snapshot."""
        every = self.links.values()
        return LinkedStatistics(
            linked_rows=sum(links.linked_rows for links in every),
            unlinked_rows=self.unlinked_rows,
            unlinked_rows_highest=self._highest,
            unlinked_rows_max=self.unlinked_rows_max,
            tombstones=sum(links.tombstones for links in every),
            graphs=len(self.links),
            bytes=sum(links.size for links in every),
            links_done=self._links_done,
            rebuilds=self._rebuilds_before + sum(links.rebuilds for links in every),
            waits_for_room=self._waits,
            searches_linked=self.searches_linked,
            searches_exact=self.searches_exact,
            file=self._file_state,
            saved_offset=self._saved_offset,
        )
