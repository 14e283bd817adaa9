"""Checkpoints of the pipeline's state beside its log, so that a start replays only a short tail.

The state is copied in slices between other work, so the parts are of different moments, all after the log
had reached the checkpoint's offset. A start replays the log from that offset on. Rows that a part includes
already change nothing: an origin skips rows up to its watermark, a head is set to its last writer, an id to
its first row. The file is written only after every row that the copy includes is synced.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop.partition.ingest.heads import DEAD, HeadChanges, pack_heads
from delta_prop.partition.ingest.id_runs import IdRun, RunCorrupted
from delta_prop.partition.state.id_run_store import IdRunStore, open_run
from delta_prop.partition.state.pipeline_state import (
    SECTION,
    PipelineState,
    SavedOrigins,
    StateManifest,
    pack_changes,
    pack_ids,
    unpack,
)
from delta_prop.platform.tick_callbacks import Wakeup
from delta_prop_broker.recovery.checkpoints import (
    Checkpoint,
    CheckpointCorrupted,
    CheckpointFile,
    Checkpoints,
    Position,
)
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.errors import DeltaPropError, Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.partition.core.appender import Appender
    from delta_prop.partition.pipeline import Pipeline
    from delta_prop.partition.storage.committer import Committer
    from delta_prop.platform.ports import Threads, World
    from delta_prop_broker.log.durable import DurableLog

logger = logging.getLogger("delta_prop")

ORIGINS_PER_SLICE = 100
HEADS_PER_SLICE = 2_000
READ_ROWS, READ_BYTES = 2_000, 1 << 20
FULL_CHECKPOINT_BYTES = 16 << 20
"""The next checkpoint is full once the changes since the last full one exceed its size by this many bytes."""
_FRAMES_PER_SLICE = 16
_ROW_COST_IN_HEADS = 3
"""Cost of reading and noting one row of the log again, relative to copying one head."""
FILES_MAX = 100
"""Number of files of changes and ids from which the next checkpoint is full."""
_AMPLIFICATION = 2
"""A checkpoint waits until the log has grown by this factor times the bytes that the last one wrote."""


@dataclass(slots=True)
class _CheckpointCopy:
    """The copied content of one checkpoint.

    `position`: where a start replays the log from; `end`: offset up to which the log was synced after the
    copy. `heads` returns the columns of the heads.
    """

    position: Position
    end: int
    is_full: bool
    manifest: StateManifest
    runs: list[IdRun]
    origins: SavedOrigins
    writers: list[int]
    heads: Callable[[], list[dict[str, Any]]]
    ids: _IdColumns


async def yield_to_loop() -> None:
    """Let other tasks run between two slices."""
    await anyio.lowlevel.checkpoint()


class Checkpointer:
    """Decides when to write a checkpoint, and writes it."""

    def __init__(self, log: DurableLog, pipeline: Pipeline, committer: Committer, world: World) -> None:
        self.written = 0
        self.is_restored = False
        self._log = log
        self._pipeline = pipeline
        self._committer = committer
        self._world = world
        self._threads = world.new_threads()
        self._id_store = IdRunStore(log, pipeline.appender.ids)
        self._marks_moved, self._work_wakeup = Wakeup(), Wakeup()
        self.lock = anyio.Lock()
        """Lock for exclusive use of the checkpoint files."""
        self._stopped = False
        self._is_requested = False
        self._next_is_full = True  # the next checkpoint holds the complete state
        self._manifest = StateManifest()
        self._files: dict[str, CheckpointFile] = {}
        self._heads, self._ids, self._offsets = HeadChanges(), list[bytes](), list[int]()
        self._changes_end = log.start_offset  # end offset of the changes that these three hold
        # Counters of the log when the last checkpoint was written or skipped.
        self._base_frames, self._base_bytes, self._base_segment = 0, 0, -1
        self._written_bytes = 0
        self._note_written(log.start_offset)

    # --- at a start

    async def restore(self, now: float) -> int:
        """Restore the newest readable checkpoint into the pipeline; return the offset to replay from."""
        for checkpoint in self._log.checkpoints.stored[:]:
            try:
                state = await self._threads.run(partial(_load, checkpoint, self._log.checkpoints))
            except (CheckpointCorrupted, RunCorrupted, ValueError, KeyError, OSError) as error:
                logger.warning("a checkpoint is not used: %s", error)
                self._log.checkpoints.drop(checkpoint)
                continue
            self._pipeline.appender.restore_checkpoint(state, now)
            self._manifest, self._files, self._next_is_full = state.manifest, dict(checkpoint.files), False
            self._changes_end, self.is_restored = checkpoint.offset, True
            self._note_written(checkpoint.offset)
            return checkpoint.offset
        if self._log.start_offset:
            await _restore_from_snapshot(self._pipeline.appender, self._log, self._threads, now)
            self._pipeline.appender.ids.kept_since = self._log.start_offset
        return self._log.start_offset

    async def spill_ids(self) -> None:
        """Write restored ids to the disk if they are many, unless the disk fails."""
        try:
            await self._id_store.write_sealed(self._threads)
        except OSError as error:
            logger.warning("ids could not be written, and stay in memory: %s", error)

    def close(self) -> None:
        """Close the id files."""
        self._id_store.abort_merge()
        self._pipeline.appender.ids.close()

    def note_replayed(self, logged: LoggedBatch) -> None:
        """Note a batch replayed after the checkpoint, in log order, for the next checkpoint."""
        if not self._next_is_full:
            self._note_changes(logged)

    def _note_changes(self, logged: LoggedBatch) -> None:
        batch = logged.batch
        self._heads.note(batch, logged.source)
        if batch.ids is not None and not batch.is_control:
            self._ids += batch.ids
            self._offsets += range(logged.offset, logged.next_offset)
        self._changes_end = logged.next_offset

    # --- writing checkpoints

    def note_progress(self) -> None:
        """Wake the tasks that wait for the log's marks: they moved, or never will again."""
        self._marks_moved.notify()
        self._pipeline.appender.ids.forget_below(self._log.start_offset)
        if self._is_due() or self._id_store.wait_s == 0:
            self._work_wakeup.notify()

    def stop(self) -> None:
        """Stop writing: the log was recovered, and may have other checkpoints than this object knows."""
        self._stopped = True
        self._id_store.abort_merge()
        self._marks_moved.notify()
        self._work_wakeup.notify()

    async def run(self) -> None:
        """Write a checkpoint whenever one is due, and spill ids to the disk, until stopped or cancelled."""
        self._pipeline.appender.ids.on_corruption = self._work_wakeup.notify
        try:
            async with self._world.background_thread() as background:
                while not self._stopped:
                    await self._run_once(background)
        finally:
            self._id_store.abort_merge()

    async def _run_once(self, background: Threads) -> None:
        wait_s = self._id_store.wait_s
        if self._is_due():
            await self.write()
        elif wait_s == 0:
            async with self.lock:
                if not self._stopped:
                    await self._id_store.step(background)
        else:
            with anyio.move_on_after(math.inf if wait_s is None else wait_s):
                await self._work_wakeup.wait()

    def request(self) -> None:
        """Have a checkpoint written soon: it lets the log remove rows that a start would replay."""
        self._is_requested = True
        self._work_wakeup.notify()

    async def write(self) -> None:
        """Write a checkpoint of the log's end; log a disk error and retry later."""
        async with self.lock:
            await self._write()

    async def forget(self, namespace: str, vector_id: str) -> bool:
        """Drop the head of a deleted vector, and replace all checkpoints; return False if that failed.

        Then no checkpoint has the vector id. Raises Refused (CONFLICT) if the vector is not deleted.
        """
        async with self.lock:
            vectors = self._pipeline.appender.vectors
            head = vectors.stored_head(namespace, vector_id)
            if head is not None and not vectors.forget(namespace, vector_id):
                raise Refused(
                    ErrorCode.CONFLICT,
                    f"vector {vector_id!r} of namespace {namespace!r} was written again meanwhile: stop what "
                    "writes it, and erase it again",
                )
            self._next_is_full = True
            written = self.written
            await self._write(replaces=True)
            if self.written == written:
                return False
            await self._threads.run(self._log.checkpoints.drop_older)
            return True

    async def _write(self, *, replaces: bool = False) -> None:
        """Write a checkpoint. `replaces`: even if there is one at this offset, which it replaces."""
        log = self._log
        stored = log.checkpoints.stored
        position = log.position()
        self._is_requested = False
        is_stored = not replaces and position.offset == (stored[0].offset if stored else 0)
        if self._stopped or log.failure is not None or is_stored:
            self._note_written(log.needed_from or 0)
            return
        is_full = self._next_is_full or self._has_too_many_changes() or self._is_full_cheaper(position.offset)
        self._next_is_full = True  # reset below once it is written
        try:
            origins = await self._copy_origins(full=is_full)
            heads = await self._copy_heads() if is_full else None
            runs, ids = await self._copy_ids() if is_full else (self._written_runs(), None)
            manifest = self._pipeline.appender.save_manifest()
            if not await self._wait_synced(log.next_offset):
                return
            if heads is None or ids is None:
                await self._read_changes(position.offset)
                writers, ids = self._heads.writers, [(self._ids, self._offsets)]
                pack: Callable[[], list[dict[str, Any]]] = self._heads.pack
            else:
                writers, pack = list(manifest.vectors.writers), partial(_pack_all, heads)
            self._heads, self._ids, self._offsets = HeadChanges(), [], []
            self._changes_end = position.offset
            copied = _CheckpointCopy(
                position, log.synced, is_full, manifest, runs, origins, writers, pack, ids
            )
            await self._threads.run(partial(self._store, copied))
        except (OSError, DeltaPropError) as error:
            logger.warning("a checkpoint could not be written; the service retries later: %s", error)
            self._note_written(log.needed_from or 0)
            return
        self._next_is_full = False
        self.written += 1
        self._note_written(position.offset)

    def _note_written(self, offset: int) -> None:
        """Let the log retain what a start replays, from `offset` on; measure its growth from now on."""
        log = self._log
        log.needed_from = offset
        self._base_frames, self._base_bytes = log.committed_frames, log.committed_bytes
        self._base_segment = log.active_segment_start

    def _is_due(self) -> bool:
        log, settings = self._log, self._log.settings
        frames, size = log.committed_frames - self._base_frames, log.committed_bytes - self._base_bytes
        if log.failure is not None or self._is_requested or not frames:
            return self._is_requested and log.failure is None
        quarter = settings.bytes_max // 4  # retention waits for the checkpoint
        if size >= quarter:
            return True
        due = frames >= settings.checkpoint_frames or size >= settings.checkpoint_bytes
        return size >= _AMPLIFICATION * self._written_bytes and (
            due or log.active_segment_start != self._base_segment
        )

    def _has_too_many_changes(self) -> bool:
        file_names = self._manifest.changes
        if len(file_names) + len(self._manifest.ids) >= FILES_MAX:
            return True
        sizes = [self._files[name].size for name in file_names]
        return not sizes or sum(sizes[1:]) > sizes[0] + FULL_CHECKPOINT_BYTES

    def _is_full_cheaper(self, end: int) -> bool:
        """True if copying all vectors and ids costs less than reading the new rows of the log again."""
        appender = self._pipeline.appender
        entry_count = appender.vectors.head_count + appender.ids.statistics().ids_open
        return entry_count < _ROW_COST_IN_HEADS * (end - self._changes_end)

    async def _wait_synced(self, end: int) -> bool:
        """Wait until the log is synced up to `end`; False if it never will be."""
        while self._log.synced < end:
            if self._log.failure is not None or self._stopped:
                return False
            self._committer.request_sync()
            await self._marks_moved.wait()
        return self._log.failure is None

    # --- copying, a slice at a time

    async def _copy_origins(self, *, full: bool) -> SavedOrigins:
        """Copy the origins that changed since the last checkpoint; with `full`, all."""
        copied, save = SavedOrigins(), self._pipeline.appender.save_origin
        origins, idle = self._pipeline.origins.list_all()
        if full:
            others = (self._pipeline.orderer.watermarks.keys() | idle.keys()).difference(origins)
            # Origins below 0 are placeholders of drafts.
            origins += [origin for origin in others if origin >= 0]
        for start in range(0, len(origins), ORIGINS_PER_SLICE):
            for origin in origins[start : start + ORIGINS_PER_SLICE]:
                save(origin, idle, copied, full=full)
            await yield_to_loop()
        return copied

    def _written_runs(self) -> list[IdRun]:
        """Return the runs of ids that are on the disk: the older ones."""
        return [run for run in self._pipeline.appender.ids.runs if not run.is_in_memory]

    async def _copy_ids(self) -> tuple[list[IdRun], _IdColumns]:
        """Return the runs, and a copy of all ids that are in none of them. Raises OSError."""
        ids = self._pipeline.appender.ids
        while True:
            await self._id_store.write_sealed(self._threads)
            sealing, open_table = ids.unsealed_tables()
            runs, count = self._written_runs(), len(open_table)
            copied = [(list(sealing), list(sealing.values()))]
            await yield_to_loop()
            open_ids = list(open_table)
            await yield_to_loop()
            offsets = list(islice(open_table.values(), len(open_ids)))
            # The table only grows at its end, unless it was sealed meanwhile, which empties it.
            if count <= len(open_ids) == len(offsets) and not ids.waiting_run_count:
                return runs, [*copied, (open_ids, offsets)]

    async def _copy_heads(self) -> list[_HeadColumns]:
        """Copy all heads, each as of some moment after the call."""
        vectors, copied = self._pipeline.appender.vectors, []
        for namespace in list(vectors.save().namespaces):
            for columns in vectors.copy_heads(namespace, HEADS_PER_SLICE):
                copied.append((namespace, *columns))
                await yield_to_loop()
        return copied

    async def _read_changes(self, end: int) -> None:
        """Note what the log's frames changed, from the end of the known changes up to `end`."""
        while self._changes_end < end:
            for logged in self._log.read(self._changes_end, rows_max=READ_ROWS, bytes_max=READ_BYTES):
                if logged.offset >= end:
                    break
                self._note_changes(logged)
            await yield_to_loop()

    # --- on the thread

    def _store(self, copied: _CheckpointCopy) -> None:
        """Write the new files, then the checkpoint that lists the new and the older files. Raises OSError."""
        store, offset = self._log.checkpoints, copied.position.offset
        manifest, ids = copied.manifest, copied.ids
        written: list[CheckpointFile] = []

        def write(kind: str, chunks: list[bytes]) -> str:
            file = store.write_file(store.free_name(offset, kind), chunks)
            written.append(file)
            return file.name

        manifest.runs = [run.checkpoint_file.name for run in copied.runs if run.checkpoint_file is not None]
        last_offset_in_runs = copied.runs[-1].facts.last_offset if copied.runs else -1
        previous = StateManifest() if copied.is_full else self._manifest
        manifest.ids = [entry for entry in previous.ids if entry[1] > last_offset_in_runs]
        try:
            for id_column, offsets in ids:
                if id_column:
                    name = write("ids", pack_ids(id_column, offsets))
                    manifest.ids.append((name, offsets[-1]))
            changes = pack_changes(copied.origins, copied.writers, copied.heads())
            manifest.changes = [*previous.changes, write("changes", [changes])]
            files_by_name = {file.name: file for file in (*self._files.values(), *written)}
            files_by_name.update(
                (run.checkpoint_file.name, run.checkpoint_file)
                for run in copied.runs
                if run.checkpoint_file is not None
            )
            file_names = [*manifest.changes, *(entry[0] for entry in manifest.ids), *manifest.runs]
            self._files = {name: files_by_name[name] for name in file_names}
            store.write(copied.position, copied.end, {SECTION: manifest.pack()}, list(self._files.values()))
        except BaseException:
            for file in written:
                store.release(file.name)
            raise
        self._manifest = manifest
        self._written_bytes = 0 if copied.is_full else sum(file.size for file in written)


_IdColumns = list[tuple[list[bytes], list[int]]]
_HeadColumns = tuple[str, list[str], list[int | None], bytes]
"""Namespace, keys, codes of the last writers (None: the head was dropped meanwhile), flags of the dead."""


def _pack_all(copied: list[_HeadColumns]) -> list[dict[str, Any]]:
    """Pack columns of heads that were copied in slices, without those dropped meanwhile."""
    return [
        pack_heads(namespace, *_drop_missing(keys, writer_codes, dead))
        for namespace, keys, writer_codes, dead in copied
    ]


def _drop_missing(
    keys: list[str], writer_codes: list[int | None], dead: bytes
) -> tuple[list[str], list[int], bytes]:
    dead_flags = np.frombuffer(dead, np.uint8) * DEAD
    if writer_codes.count(None) == 0:
        return keys, writer_codes, dead_flags.tobytes()  # type: ignore[return-value]
    rows = [row for row, code in enumerate(writer_codes) if code is not None]
    return [keys[row] for row in rows], [writer_codes[row] or 0 for row in rows], dead_flags[rows].tobytes()


def _load(checkpoint: Checkpoint, store: Checkpoints) -> PipelineState:
    def open_id_run(name: str) -> IdRun:
        return open_run(store, checkpoint.files[name])

    return unpack(checkpoint.section(SECTION), checkpoint.read_file, open_id_run)


async def _restore_from_snapshot(appender: Appender, log: DurableLog, threads: Threads, now: float) -> None:
    """Restore heads, dimensions, watermarks and clocks of the newest snapshot; the caller replays the rest.

    A snapshot has neither ids nor first offsets of removed deltas, which is logged. Raises LogCorrupted,
    OSError.
    """
    snapshot = await threads.run(log.snapshot)
    if snapshot is None:
        return
    try:
        appender.restore_snapshot(snapshot.watermarks, snapshot.lamport, now)
        frames = snapshot.frames()
        while batches := await threads.run(lambda: list(islice(frames, _FRAMES_PER_SLICE))):
            for logged in batches:
                appender.vectors.load_states(logged.batch)
                await anyio.lowlevel.checkpoint()
    finally:
        await threads.run(snapshot.close)
    logger.warning(
        "no checkpoint is usable, so the pipeline starts from the snapshot at offset %d: ids of deltas "
        "before offset %d are forgotten, so a duplicate of one is accepted as new",
        snapshot.offset,
        log.start_offset,
    )
