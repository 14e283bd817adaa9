"""Storage of id runs on the disk: writes sealed runs, merges runs, rebuilds those that cannot be read.

It does one step at a time; disk waits run on a thread. A disk failure is logged, and the step retried.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.partition.ingest.id_merging import RunMerge, choose_runs
from delta_prop.partition.ingest.id_runs import IdRun, RunCorrupted
from delta_prop.partition.ingest.seen_ids import SeenIds
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from delta_prop.platform.ports import Threads
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.recovery.checkpoints import CheckpointFile, CheckpointFileWriter, Checkpoints

logger = logging.getLogger("delta_prop")

RETRY_S = 10.0
PAUSE_S = 0.001
"""Seconds to wait after a failure, and between two steps of a merge."""
READ_ROWS, READ_BYTES = 2_000, 1 << 20


def open_run(checkpoints: Checkpoints, checkpoint_file: CheckpointFile) -> IdRun:
    """Open a written run. Raises RunCorrupted, OSError."""
    file = checkpoints.open_file(checkpoint_file)
    try:
        return IdRun.open(file, checkpoint_file, checkpoints.path_of(checkpoint_file))
    except BaseException:
        file.close()
        raise


class IdRunStore:
    """Owns the files of the runs of one pipeline's ids."""

    def __init__(self, log: DurableLog, ids: SeenIds) -> None:
        self._log = log
        self._ids = ids
        self._merge: RunMerge | None = None
        self._writer: CheckpointFileWriter | None = None
        self._retry_at = 0.0
        self._idle_revision = -1  # revision of the ids at which `step` had nothing to do

    @property
    def wait_s(self) -> float | None:
        """Seconds until `step` has something to do; None: it has nothing to do until ids change."""
        ids = self._ids
        if ids.revision == self._idle_revision or self._log.failure is not None:
            return None
        if (
            ids.corrupted_run is None
            and self._merge is None
            and not ids.waiting_run_count
            and not choose_runs(ids.runs, ids.generation_ids)
            and ids.next_filter_to_load() is None
        ):
            self._idle_revision = ids.revision
            return None
        return max(self._retry_at - anyio.current_time(), 0.0)

    async def step(self, threads: Threads) -> None:
        """Run the most urgent step."""
        ids = self._ids
        try:
            if ids.waiting_run_count:
                await self.write_sealed(threads)
            elif ids.corrupted_run is not None:
                await self._rebuild_run(ids.corrupted_run, threads)
            elif (unfiltered := ids.next_filter_to_load()) is not None:
                await _load_filter(unfiltered, threads)
            else:
                await self._continue_merge(threads)
        except (OSError, DeltaPropError) as error:
            logger.warning("ids could not be stored on the disk; the service retries: %s", error)
            if isinstance(error, RunCorrupted):
                ids.corrupted_run = next(
                    (run for run in ids.runs if run.path == error.path), ids.corrupted_run
                )
            self._retry_at = anyio.current_time() + RETRY_S
            self.abort_merge()

    async def write_sealed(self, threads: Threads) -> None:
        """Write all runs that are in memory. Raises OSError."""
        await self._write_all(self._ids, threads)

    def abort_merge(self) -> None:
        """Abort the merge that is under way, and remove its file."""
        writer, merge, self._writer, self._merge = self._writer, self._merge, None, None
        if merge is not None:
            merge.close()
        if writer is not None:
            self._log.checkpoints.release(writer.name)
            writer.abort()

    async def _write_all(self, ids: SeenIds, threads: Threads) -> None:
        while unwritten := [run for run in ids.runs if run.is_in_memory]:
            await self._write(ids, unwritten[0], threads)

    async def _write(self, ids: SeenIds, run: IdRun, threads: Threads) -> None:
        checkpoints = self._log.checkpoints
        name = checkpoints.free_name(run.facts.last_offset, "run")

        def write() -> IdRun:
            return open_run(checkpoints, checkpoints.write_file(name, run.chunks()))

        written_run = await threads.run(write)
        written_run.filter = run.filter
        ids.replace_runs([run], [written_run])

    # --- merging

    async def _continue_merge(self, threads: Threads) -> None:
        ids, checkpoints = self._ids, self._log.checkpoints
        if self._merge is None or self._writer is None:
            runs = choose_runs(ids.runs, ids.generation_ids)
            if not runs:
                return
            needed_bytes = sum(run.checkpoint_file.size for run in runs if run.checkpoint_file is not None)
            if self._log.free_bytes < needed_bytes + self._log.settings.free_bytes_min:
                raise OSError(f"merging {len(runs)} id runs needs {needed_bytes} free bytes: free disk space")
            self._merge = RunMerge(runs, ids.error_rate)
            name = checkpoints.free_name(runs[-1].facts.last_offset, "run")
            self._writer = await threads.run(partial(checkpoints.begin_file, name))
        merge, writer = self._merge, self._writer
        await threads.run(partial(_run_merge_step, merge, writer))
        if not merge.is_done:
            await anyio.sleep(PAUSE_S)
            return
        file = await threads.run(writer.finish)
        merged_run = merge.result(checkpoints.open_file(file), file, checkpoints.path_of(file))
        self._writer = None  # the merged file stays
        self.abort_merge()
        self._replace_runs(merge.runs, [merged_run])

    def _replace_runs(self, before: Sequence[IdRun], after: Sequence[IdRun]) -> None:
        for run in before:
            if run.checkpoint_file is not None:
                self._log.checkpoints.release(run.checkpoint_file.name)
        self._ids.replace_runs(before, after)

    # --- rebuilding

    async def _rebuild_run(self, run: IdRun, threads: Threads) -> None:
        """Read the ids of a run from the log again. Raises LogCorrupted, OSError."""
        logger.warning("the id run of offsets %d to %d cannot be read and is rebuilt from the log",
                       run.facts.first_offset, run.facts.last_offset)  # fmt: skip
        self.abort_merge()
        log = self._log
        rebuilt = SeenIds(generation_ids=self._ids.generation_ids, error_rate=self._ids.error_rate)
        last = run.facts.last_offset
        offset = max(run.facts.first_offset, log.start_offset)
        while offset <= last:
            batches = log.read_appended(offset, rows_max=READ_ROWS, bytes_max=READ_BYTES)
            for logged in batches:
                ids = logged.batch.ids
                if ids is not None and not logged.batch.is_control:
                    rows = range(max(offset - logged.offset, 0), min(last + 1 - logged.offset, logged.count))
                    rebuilt.add_at([ids[row] for row in rows], [logged.offset + row for row in rows])
                offset = logged.next_offset
            if not batches:
                raise OSError("the log has failed")
            await self._write_all(rebuilt, threads)
            await anyio.lowlevel.checkpoint()
        rebuilt.seal()
        await self._write_all(rebuilt, threads)
        self._replace_runs([run], rebuilt.runs)
        if run.facts.first_offset < log.start_offset:
            self._ids.kept_since = max(self._ids.kept_since, log.start_offset)


async def _load_filter(run: IdRun, threads: Threads) -> None:
    run.hold()
    try:
        run.filter = await threads.run(run.load_filter)
    finally:
        run.release()


def _run_merge_step(merge: RunMerge, writer: CheckpointFileWriter) -> None:
    for chunk in merge.step():
        writer.add(chunk)
