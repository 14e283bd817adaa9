"""Keeps runs of ids on the disk: writes those that are sealed, merges them, makes anew what cannot be read.

One step at a time, what waits for the disk on a thread. Where the disk refuses that is told, and tried again.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.ingest.id_merging import Merge, choose
from delta_prop.ingest.id_runs import IdRun, RunDamaged
from delta_prop.ingest.seen_ids import SeenIds
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.ports import Threads
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.files.checkpoints import Checkpoints, PartName, PartWriter

logger = logging.getLogger("delta_prop")

AGAIN_S = 10.0
REST_S = 0.001
"""How long to wait after a failure, and between two steps of a merge."""
READ_ROWS, READ_BYTES = 2_000, 1 << 20


def open_run(checkpoints: Checkpoints, part: PartName) -> IdRun:
    """Open a run that was written. Raises RunDamaged, OSError."""
    file = checkpoints.open_part(part)
    try:
        return IdRun.open(file, part, checkpoints.path_of(part))
    except BaseException:
        file.close()
        raise


class IdKeeper:
    """Owns the files of the runs of one chain's ids."""

    def __init__(self, log: DurableLog, ids: SeenIds) -> None:
        self._log = log
        self._ids = ids
        self._merge: Merge | None = None
        self._writer: PartWriter | None = None
        self._not_before = 0.0
        self._idle_at = -1  # revision of the ids when nothing was to be done

    @property
    def wait_s(self) -> float | None:
        """Seconds until `step` has something to do; None: nothing, until ids come or go."""
        ids = self._ids
        if ids.revision == self._idle_at or self._log.failure is not None:
            return None
        if (
            ids.damaged is None
            and self._merge is None
            and not ids.waiting
            and not choose(ids.runs, ids.generation_ids)
            and ids.to_load() is None
        ):
            self._idle_at = ids.revision
            return None
        return max(self._not_before - anyio.current_time(), 0.0)

    async def step(self, threads: Threads) -> None:
        """Do the most urgent of what is to be done."""
        ids = self._ids
        try:
            if ids.waiting:
                await self.write_sealed(threads)
            elif ids.damaged is not None:
                await self._make_anew(ids.damaged, threads)
            elif (unfiltered := ids.to_load()) is not None:
                await _load_filter(unfiltered, threads)
            else:
                await self._go_on_merging(threads)
        except (OSError, DeltaPropError) as error:
            logger.warning("ids could not be kept on the disk, which is tried again: %s", error)
            if isinstance(error, RunDamaged):
                ids.damaged = next((run for run in ids.runs if run.path == error.path), ids.damaged)
            self._not_before = anyio.current_time() + AGAIN_S
            self.give_up_merge()

    async def write_sealed(self, threads: Threads) -> None:
        """Write all runs that lie in memory. Raises OSError."""
        await self._write_all(self._ids, threads)

    def give_up_merge(self) -> None:
        """Abort the merge that is under way, and remove its file."""
        writer, merge, self._writer, self._merge = self._writer, self._merge, None, None
        if merge is not None:
            merge.close()
        if writer is not None:
            self._log.checkpoints.let_go(writer.name)
            writer.abort()

    async def _write_all(self, ids: SeenIds, threads: Threads) -> None:
        while (run := next((one for one in ids.runs if one.in_memory), None)) is not None:
            await self._write(ids, run, threads)

    async def _write(self, ids: SeenIds, run: IdRun, threads: Threads) -> None:
        checkpoints = self._log.checkpoints
        name = checkpoints.free_name(run.facts.last_offset, "run")

        def write() -> IdRun:
            return open_run(checkpoints, checkpoints.write_part(name, run.chunks()))

        written = await threads.run(write)
        written.filter = run.filter
        ids.exchange([run], [written])

    # --- merging

    async def _go_on_merging(self, threads: Threads) -> None:
        ids, checkpoints = self._ids, self._log.checkpoints
        if self._merge is None or self._writer is None:
            runs = choose(ids.runs, ids.generation_ids)
            if not runs:
                return
            needed = sum(run.part.size for run in runs if run.part is not None)
            if self._log.free_bytes < needed + self._log.settings.free_bytes_min:
                raise OSError(f"{needed} bytes are needed to merge {len(runs)} of them, and are not free")
            self._merge = Merge(runs, ids.error_rate)
            name = checkpoints.free_name(runs[-1].facts.last_offset, "run")
            self._writer = await threads.run(partial(checkpoints.begin_part, name))
        merge, writer = self._merge, self._writer
        await threads.run(partial(_go_on, merge, writer))
        if not merge.done:
            await anyio.sleep(REST_S)
            return
        part = await threads.run(writer.finish)
        merged = merge.result(checkpoints.open_part(part), part, checkpoints.path_of(part))
        self._writer = None  # its file stays
        self.give_up_merge()
        self._exchange(merge.runs, [merged])

    def _exchange(self, before: Sequence[IdRun], after: Sequence[IdRun]) -> None:
        for run in before:
            if run.part is not None:
                self._log.checkpoints.let_go(run.part.name)
        self._ids.exchange(before, after)

    # --- making anew

    async def _make_anew(self, run: IdRun, threads: Threads) -> None:
        """Read the ids of a run from the log again. Raises LogDamaged, OSError."""
        logger.warning("ids at offsets %d to %d cannot be read and are read from the log again",
                       run.facts.first_offset, run.facts.last_offset)  # fmt: skip
        self.give_up_merge()
        log = self._log
        again = SeenIds(generation_ids=self._ids.generation_ids, error_rate=self._ids.error_rate)
        last = run.facts.last_offset
        offset = max(run.facts.first_offset, log.first_offset)
        while offset <= last:
            found = log.read_appended(offset, rows_max=READ_ROWS, bytes_max=READ_BYTES)
            for logged in found:
                ids = logged.batch.ids
                if ids is not None and not logged.batch.is_control:
                    rows = range(max(offset - logged.offset, 0), min(last + 1 - logged.offset, logged.count))
                    again.add_at([ids[row] for row in rows], [logged.offset + row for row in rows])
                offset = logged.next_offset
            if not found:
                raise OSError("the log has failed")
            await self._write_all(again, threads)
            await anyio.lowlevel.checkpoint()
        again.seal()
        await self._write_all(again, threads)
        self._exchange([run], again.runs)
        if run.facts.first_offset < log.first_offset:
            self._ids.kept_since = max(self._ids.kept_since, log.first_offset)


async def _load_filter(run: IdRun, threads: Threads) -> None:
    run.hold()
    try:
        run.filter = await threads.run(run.load_filter)
    finally:
        run.release()


def _go_on(merge: Merge, writer: PartWriter) -> None:
    for chunk in merge.step():
        writer.add(chunk)
