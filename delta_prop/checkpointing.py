"""Writes the chain's state beside its log now and then, so that a start reads a checkpoint and a short tail.

The state is copied in slices between other work, not at one moment: each origin with its own watermark, heads
and ids at or after the checkpoint's offset. What follows that offset in the log is taken in again at a start,
and what had been copied later stays as it is: origins skip what their watermark covers, of a head the last
writer counts, of an id the first. The file is written only once everything that was copied is synced.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop.chain_state import (
    SECTION,
    ChainState,
    SavedOrigins,
    Small,
    pack_changes,
    pack_ids,
    unpack,
)
from delta_prop.from_snapshot import take_snapshot
from delta_prop.id_keeping import IdKeeper, open_run
from delta_prop.ingest.heads import DEAD, HeadChanges, pack_heads
from delta_prop.ingest.id_runs import RunDamaged
from delta_prop.turns import Bell
from delta_prop_broker.log.files.checkpoints import CheckpointDamaged, PartName, part_name
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from delta_prop.committing import Committer
    from delta_prop.ingest.id_runs import IdRun
    from delta_prop.pipeline import Chain
    from delta_prop.ports import Threads, World
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.files.checkpoints import Checkpoint, Checkpoints, Position
    from delta_prop_wire.batch import LoggedBatch

logger = logging.getLogger("delta_prop")

ORIGINS_A_SLICE = 100
HEADS_A_SLICE = 2_000
READ_ROWS, READ_BYTES = 2_000, 1 << 20
WHOLE_FROM_BYTES = 16 << 20
"""Changes since all was written last, beyond as much as that was: then all is written anew."""
_ROW_COSTS_HEADS = 3
"""A row that is read again, and noted, takes as long as so many heads that are copied."""
PARTS_MAX = 100
_AMPLIFICATION = 2
"""A checkpoint waits until the log has grown by so many times the bytes that the one before wrote."""


@dataclass(slots=True)
class _Copied:
    """What goes into one checkpoint, as it was copied; `heads` gives their columns."""

    position: Position
    end: int
    whole: bool
    small: Small
    runs: list[IdRun]
    origins: SavedOrigins
    writers: list[int]
    heads: Callable[[], list[dict[str, Any]]]
    ids: _Ids


async def give_way() -> None:
    """Let others go on, between two slices."""
    await anyio.lowlevel.checkpoint()


class Checkpointer:
    """Owns when a checkpoint is written, and what is in it."""

    def __init__(self, log: DurableLog, chain: Chain, committer: Committer, world: World) -> None:
        self.written = 0
        self.restored = False
        self._log = log
        self._chain = chain
        self._committer = committer
        self._world = world
        self._threads = world.new_threads()
        self._keeper = IdKeeper(log, chain.appender.ids)
        self._moved, self._wanted = Bell(), Bell()
        self.lock = anyio.Lock()
        """Who holds it has the checkpoints' files to itself."""
        self._stopped = False
        self._whole = True  # the next one holds everything
        self._small = Small()
        self._parts: dict[str, PartName] = {}
        self._heads, self._ids, self._offsets = HeadChanges(), list[bytes](), list[int]()
        self._gathered = log.first_offset  # up to where those three tell
        self._base_frames, self._base_bytes, self._base_segment = 0, 0, -1
        self._written_bytes = 0
        self._note_written(log.first_offset)

    # --- at a start

    async def restore(self, now: float) -> int:
        """Give the chain the newest checkpoint that can be read; return from where the log is read on."""
        for checkpoint in self._log.checkpoints.kept[:]:
            try:
                state = await self._threads.run(partial(_load, checkpoint, self._log.checkpoints))
            except (CheckpointDamaged, RunDamaged, ValueError, KeyError, OSError) as error:
                logger.warning("a checkpoint is not used: %s", error)
                self._log.checkpoints.drop(checkpoint)
                continue
            self._chain.appender.take_back(state, now)
            self._small, self._parts, self._whole = state.small, dict(checkpoint.parts), False
            self._gathered, self.restored = checkpoint.offset, True
            self._note_written(checkpoint.offset)
            return checkpoint.offset
        if self._log.first_offset:
            await take_snapshot(self._chain.appender, self._log, self._threads, now)
            self._chain.appender.ids.kept_since = self._log.first_offset
        return self._log.first_offset

    async def spill_ids(self) -> None:
        """Write restored ids to the disk where they are many, unless the disk refuses."""
        try:
            await self._keeper.write_sealed(self._threads)
        except OSError as error:
            logger.warning("ids could not be written, and stay in memory: %s", error)

    def close(self) -> None:
        """Close the files of ids."""
        self._keeper.give_up_merge()
        self._chain.appender.ids.close()

    def take_in(self, logged: LoggedBatch) -> None:
        """A batch behind the checkpoint, in the log's order: the next checkpoint has what it changed."""
        if not self._whole:
            self._note_changes(logged)

    def _note_changes(self, logged: LoggedBatch) -> None:
        batch = logged.batch
        self._heads.note(batch, logged.source)
        if batch.ids is not None and not batch.is_control:
            self._ids += batch.ids
            self._offsets += range(logged.offset, logged.next_offset)
        self._gathered = logged.next_offset

    # --- while it runs

    def note(self) -> None:
        """The log's marks have moved, or never will again."""
        self._moved.ring()
        self._chain.appender.ids.forget_below(self._log.first_offset)
        if self._due() or self._keeper.wait_s == 0:
            self._wanted.ring()

    def stop(self) -> None:
        """Write no more: the log was recovered, and what this knows of its checkpoints is of the past."""
        self._stopped = True
        self._keeper.give_up_merge()
        self._moved.ring()
        self._wanted.ring()

    async def run(self) -> None:
        """Write a checkpoint whenever one is due, keep ids on the disk, until stopped or cancelled."""
        self._chain.appender.ids.on_damage = self._wanted.ring
        try:
            async with self._world.background_thread() as background:
                while not self._stopped:
                    await self._run_once(background)
        finally:
            self._keeper.give_up_merge()

    async def _run_once(self, background: Threads) -> None:
        wait_s = self._keeper.wait_s
        if self._due():
            await self.write()
        elif wait_s == 0:
            async with self.lock:
                if not self._stopped:
                    await self._keeper.step(background)
        else:
            with anyio.move_on_after(math.inf if wait_s is None else wait_s):
                await self._wanted.wait()

    async def write(self) -> None:
        """Write a checkpoint of the log's end. Where the disk refuses that is told, and tried again later."""
        async with self.lock:
            await self._write()

    async def _write(self) -> None:
        log = self._log
        kept = log.checkpoints.kept
        position = log.position()
        if self._stopped or log.failure is not None or position.offset == (kept[0].offset if kept else 0):
            self._note_written(log.needed_from or 0)
            return
        whole = self._whole or self._too_many_changes() or self._changed_often(position.offset)
        self._whole = True  # until it is written
        try:
            rows = await self._copy_origins(whole=whole)
            heads = await self._copy_heads() if whole else None
            runs, ids = await self._copy_ids() if whole else (self._written_runs(), None)
            small = self._chain.appender.save_small()
            if not await self._synced(log.next_offset):
                return
            if heads is None or ids is None:
                await self._gather(position.offset)
                writers, ids = self._heads.by_place, [(self._ids, self._offsets)]
                pack: Callable[[], list[dict[str, Any]]] = self._heads.pack
            else:
                writers, pack = list(small.vectors.writers), partial(_pack_all, heads)
            self._heads, self._ids, self._offsets = HeadChanges(), [], []
            self._gathered = position.offset
            copied = _Copied(position, log.synced, whole, small, runs, rows, writers, pack, ids)
            await self._threads.run(partial(self._store, copied))
        except (OSError, DeltaPropError) as error:
            logger.warning("a checkpoint could not be written, which is tried again later: %s", error)
            self._note_written(log.needed_from or 0)
            return
        self._whole = False
        self.written += 1
        self._note_written(position.offset)

    def _note_written(self, offset: int) -> None:
        log = self._log
        log.needed_from = offset
        self._base_frames, self._base_bytes = log.committed_frames, log.committed_bytes
        self._base_segment = log.growing_from

    def _due(self) -> bool:
        log, settings = self._log, self._log.settings
        frames, size = log.committed_frames - self._base_frames, log.committed_bytes - self._base_bytes
        if log.failure is not None or not frames:
            return False
        quarter = settings.bytes_max // 4  # retention waits for it
        if size >= quarter:
            return True
        due = frames >= settings.checkpoint_frames or size >= settings.checkpoint_bytes
        return size >= _AMPLIFICATION * self._written_bytes and (
            due or log.growing_from != self._base_segment
        )

    def _too_many_changes(self) -> bool:
        names = self._small.changes
        if len(names) + len(self._small.ids) >= PARTS_MAX:
            return True
        sizes = [self._parts[name].size for name in names]
        return not sizes or sum(sizes[1:]) > sizes[0] + WHOLE_FROM_BYTES

    def _changed_often(self, end: int) -> bool:
        """Whether it takes less to copy all vectors and ids than to look through the rows again that came."""
        appender = self._chain.appender
        held = appender.vectors.held + appender.ids.statistics().ids_open
        return held < _ROW_COSTS_HEADS * (end - self._gathered)

    async def _synced(self, end: int) -> bool:
        """Wait until the log is synced up to there; False where it never will be."""
        while self._log.synced < end:
            if self._log.failure is not None or self._stopped:
                return False
            self._committer.sync()
            await self._moved.wait()
        return self._log.failure is None

    # --- copying, a slice at a time

    async def _copy_origins(self, *, whole: bool) -> SavedOrigins:
        copied, save = SavedOrigins(), self._chain.appender.save_origin
        names, idle = self._chain.origins.all()
        if whole:
            others = (self._chain.orderer.have.keys() | idle.keys()).difference(names)
            names += [origin for origin in others if origin >= 0]  # below 0 are stand-ins of drafts
        for first in range(0, len(names), ORIGINS_A_SLICE):
            for origin in names[first : first + ORIGINS_A_SLICE]:
                save(origin, idle, copied, whole=whole)
            await give_way()
        return copied

    def _written_runs(self) -> list[IdRun]:
        """Return the runs of ids that lie on the disk: the older ones."""
        return [run for run in self._chain.appender.ids.runs if not run.in_memory]

    async def _copy_ids(self) -> tuple[list[IdRun], _Ids]:
        """Return the runs, and copy all ids that are in none of them. Raises OSError."""
        ids = self._chain.appender.ids
        while True:
            await self._keeper.write_sealed(self._threads)
            closed, opened = ids.unsealed()
            runs, count = self._written_runs(), len(opened)
            copied = [(list(closed), list(closed.values()))]
            await give_way()
            names = list(opened)
            await give_way()
            offsets = list(islice(opened.values(), len(names)))
            # It grows at its end, unless it has been sealed meanwhile: then it was emptied.
            if count <= len(names) == len(offsets) and not ids.waiting:
                return runs, [*copied, (names, offsets)]

    async def _copy_heads(self) -> list[_Heads]:
        """All heads, each at some moment from now on."""
        vectors, copied = self._chain.appender.vectors, []
        for name in list(vectors.saved().namespaces):
            for some in vectors.copied(name, HEADS_A_SLICE):
                copied.append((name, *some))
                await give_way()
        return copied

    async def _gather(self, end: int) -> None:
        """What the log's frames changed, from where that is known up to an offset."""
        while self._gathered < end:
            for logged in self._log.read(self._gathered, rows_max=READ_ROWS, bytes_max=READ_BYTES):
                if logged.offset >= end:
                    break
                self._note_changes(logged)
            await give_way()

    # --- on the thread

    def _store(self, copied: _Copied) -> None:
        """Write new parts, then the checkpoint that names them with the old ones. Raises OSError."""
        store, at = self._log.checkpoints, copied.position.offset
        small, ids = copied.small, copied.ids
        written: list[PartName] = []

        def write(kind: str, chunks: list[bytes]) -> str:
            part = store.write_part(part_name(at, kind), chunks)
            written.append(part)
            return part.name

        small.runs = [run.part.name for run in copied.runs if run.part is not None]
        above = copied.runs[-1].facts.last_offset if copied.runs else -1
        before = Small() if copied.whole else self._small
        small.ids = [one for one in before.ids if one[1] > above]
        try:
            for number, (names, offsets) in enumerate(ids):
                if names:
                    small.ids.append((write(f"ids{number}", pack_ids(names, offsets)), offsets[-1]))
            changes = pack_changes(copied.origins, copied.writers, copied.heads())
            small.changes = [*before.changes, write("changes", [changes])]
            known = {part.name: part for part in (*self._parts.values(), *written)}
            known.update((run.part.name, run.part) for run in copied.runs if run.part is not None)
            parts = [*small.changes, *(one[0] for one in small.ids), *small.runs]
            self._parts = {name: known[name] for name in parts}
            store.write(copied.position, copied.end, {SECTION: small.pack()}, list(self._parts.values()))
        except BaseException:
            for part in written:
                store.let_go(part.name)
            raise
        self._small = small
        self._written_bytes = 0 if copied.whole else sum(part.size for part in written)


_Ids = list[tuple[list[bytes], list[int]]]
_Heads = tuple[str, list[str], list[int | None], bytes]


def _pack_all(copied: list[_Heads]) -> list[dict[str, Any]]:
    """Columns of heads that were copied in slices; those dropped meanwhile are left out."""
    return [pack_heads(name, *_held(keys, codes, dead)) for name, keys, codes, dead in copied]


def _held(keys: list[str], codes: list[int | None], dead: bytes) -> tuple[list[str], list[int], bytes]:
    states = np.frombuffer(dead, np.uint8) * DEAD
    if codes.count(None) == 0:
        return keys, codes, states.tobytes()  # type: ignore[return-value]
    rows = [row for row, code in enumerate(codes) if code is not None]
    return [keys[row] for row in rows], [codes[row] or 0 for row in rows], states[rows].tobytes()


def _load(checkpoint: Checkpoint, store: Checkpoints) -> ChainState:
    def run(name: str) -> IdRun:
        return open_run(store, checkpoint.parts[name])

    return unpack(checkpoint.section(SECTION), checkpoint.part, run)
