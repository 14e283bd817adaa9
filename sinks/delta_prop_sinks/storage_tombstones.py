"""Removes tombstones from the storage sink: from its file and its images first, then from memory.

In this order a tombstone in memory shows that the file may still have one, so a repeated call finds it. No
delta is folded during a step, so that a vector cannot come to life between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio
import anyio.lowlevel

from delta_prop_sinks.delta_chain import Ref
from delta_prop_sinks.image_manager import ImageManager
from delta_prop_sinks.ports import Threads
from delta_prop_sinks.resident import ResidentVectors
from delta_prop_sinks.resident_tables import in_steps
from delta_prop_sinks.storage_file import StorageFile, StoredTable

_PAGE_ROWS = 1024


class StoredTombstones:
    """The tombstones of one storage sink. Call it while the sink's changes are flushed, and no flush runs."""

    def __init__(
        self, file: StorageFile, resident: ResidentVectors, images: ImageManager, thread: Threads
    ) -> None:
        self._file, self._resident, self._images, self._thread = file, resident, images, thread

    async def remove_before(self, offset: int) -> None:
        """Remove tombstones whose last delta has an offset below `offset`, or an unknown one."""
        if offset <= 0:
            return
        is_rebuilding = self._file.rebuilding or self._resident.rebuilding
        if self._resident.complete and not is_rebuilding:
            await self._remove_resident(offset)
            return
        table: StoredTable = "vectors_next" if self._file.rebuilding else "vectors"
        after, is_last = None, False
        while not is_last:
            async with self._resident.hold():
                find = partial(self._file.find_tombstones, table, after, offset, _PAGE_ROWS)
                refs, after = await self._thread.run(find)
                await self._remove(table, [ref for ref in refs if not self._is_alive(ref)])
                is_last = after is None
            await anyio.lowlevel.checkpoint()

    async def _remove_resident(self, offset: int) -> None:
        steps, is_last = self._resident.tombstones_before(offset), False
        while not is_last:
            async with self._resident.hold():
                refs = next(steps, None)
                await self._remove("vectors", refs or [])
                is_last = refs is None
            await anyio.lowlevel.checkpoint()

    async def erase(self, erased: Sequence[Ref]) -> None:
        """Remove these tombstones, and every byte that rows of these vectors have left in files."""
        for refs in in_steps(erased):
            async with self._resident.hold():
                if self._file.rebuilding:
                    await self._remove("vectors", refs, is_deleted=True)  # these rows are all invalid
                    await self._remove("vectors_next", refs)
                else:
                    is_alive = {ref: self._is_alive(ref) for ref in refs}
                    deleted = [ref for ref in refs if is_alive[ref] is False]
                    await self._remove("vectors", deleted, is_deleted=True)
                    await self._remove("vectors", [ref for ref in refs if is_alive[ref] is None])
        if erased:
            await self._images.remove(self._thread)
            with anyio.CancelScope(shield=True):
                await self._thread.run(self._file.rewrite)

    def _is_alive(self, ref: Ref) -> bool | None:
        """True if a vector is alive, False if it is deleted, None if only the file knows."""
        is_rebuilding = self._file.rebuilding or self._resident.rebuilding
        return None if is_rebuilding else self._resident.is_alive(ref)

    async def _remove(self, table: StoredTable, refs: Sequence[Ref], *, is_deleted: bool = False) -> None:
        if refs:
            self._images.invalidate()
            with anyio.CancelScope(shield=True):
                await self._thread.run(partial(self._file.remove_rows, table, refs, is_deleted=is_deleted))
            self._resident.release_tombstones(refs)
