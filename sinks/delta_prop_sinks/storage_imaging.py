"""When the storage sink's image is written, how it joins the storage file, and whether a start may use it.

What is written is named by the storage file only with a flush that began when all of the image was durable.
So every row that changed while it was written is in the file, under a later commit, and overrules the image.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop_sinks.storage_file import ImageName
from delta_prop_sinks.storage_image import (
    Columns,
    ImageFailed,
    ImageLoad,
    image_path,
    new_image_name,
    remove_images,
    write_image,
)

if TYPE_CHECKING:
    from delta_prop_sinks.ports import Threads
    from delta_prop_sinks.resident import Resident
    from delta_prop_sinks.storage_file import Opened, StorageFile

_PAGE_ROWS = 4_000
_SHARE_CHANGED = 0.25
"""An image is written anew when so many rows have been written since, as a share of all."""
_SHARE_CHANGED_AT_CLOSE = 0.05
_ALL = 1 << 60
"""More rows than there are: no image holds what was written."""


class Imaging:
    """The image of one storage sink. `rows_min`: with fewer rows none is worth while."""

    def __init__(self, file: StorageFile, resident: Resident, *, rows_min: int) -> None:
        self.rows_min = rows_min
        self.state = "none"
        self.wanted = anyio.Event()
        self._file, self._resident = file, resident
        self._written = 0
        self._ready: ImageName | None = None

    # --- at the start

    async def load(self, opened: Opened, log_id: bytes, thread: Threads) -> bool:
        """Bring all rows into memory by the image; False, and nothing has changed, where that cannot be."""
        file, resident, name = self._file, self._resident, opened.image
        self._ready = None
        await thread.run(lambda: remove_images(file.path, None if name is None else name.image))
        self._written = _ALL
        if name is None or opened.rebuilding or resident.void or resident.tables:
            return False
        load = ImageLoad(image_path(file.path, name.image), name.image, log_id)
        steps = load.steps()
        try:
            while await thread.run(lambda: next(steps, None)) is not None:
                await anyio.lowlevel.checkpoint()
            if sum(table.size for table in load.tables.values()) > resident.resident_bytes_max // 8 * 7:
                raise ImageFailed("its rows take more memory than resident_bytes_max allows")
        except ImageFailed as failure:
            self.state = f"not used, all rows were read one by one: {failure}"
            return False
        finally:
            steps.close()
        newer = await self._overrule(load, name, thread) if opened.last_commit > name.after else 0
        resident.adopt(load.tables.values(), load.lamport)
        self._written = newer
        self.state = f"loaded, and {newer} rows that were written later"
        return True

    async def _overrule(self, load: ImageLoad, name: ImageName, thread: Threads) -> int:
        count, after = 0, None
        while True:
            page = partial(self._file.page_of_blocks, after, _PAGE_ROWS, written_after=name.after)
            blocks, after = await thread.run(page)
            for block in blocks:
                load.overrule(block)
                count += len(block.keys)
            if after is None:
                return count

    # --- writing

    def note_written(self, rows: int) -> None:
        """So many rows were written to the file; says by `wanted` when that calls for an image."""
        self._written += rows
        if self._worth_while(_SHARE_CHANGED):
            self.wanted.set()

    def worth_while_at_close(self) -> bool:
        """Whether enough has changed since the last image to write one now."""
        return self._worth_while(_SHARE_CHANGED_AT_CLOSE)

    def _worth_while(self, share: float) -> bool:
        few = self._written < share * self.rows_min
        if few or self._resident.void or not self._resident.complete:
            return False
        rows = sum(len(table.slots) for table in self._resident.tables.values())
        return rows >= self.rows_min and self._written >= max(share * rows, 1)

    async def write(self, threads: Threads, log_id: bytes) -> None:
        """Write an image and get it ready to be named by the next flush. A failure stands in `state`."""
        name = ImageName(new_image_name(), self._file.last_commit)
        written, path = self._written, image_path(self._file.path, name.image)
        rebuilds = self._resident.rebuilds
        columns = [Columns(table) for table in self._resident.tables.values()]
        steps = write_image(path, name.image, log_id, columns)
        self.wanted, done = anyio.Event(), False
        try:
            while await threads.run(lambda: next(steps, None)) is not None:
                await anyio.lowlevel.checkpoint_if_cancelled()
            done = True
        except ImageFailed as failure:
            self.state = f"not written: {failure}"
            return
        finally:
            if not done:
                with anyio.CancelScope(shield=True):
                    await threads.run(steps.close)
        resident = self._resident
        if resident.complete and not resident.void and resident.rebuilds == rebuilds:
            self._ready = name
            self._written -= written

    def take_ready(self) -> ImageName | None:
        """The image that the flush which begins now is to name."""
        return self._ready

    def begin_rebuild(self) -> None:
        """What the file holds is void, and what was written of it too."""
        self._ready, self.state = None, "none"

    def end_rebuild(self) -> None:
        """All rows have been written anew."""
        self.note_written(sum(len(table.slots) for table in self._resident.tables.values()))

    async def named(self, name: ImageName, thread: Threads) -> None:
        """The storage file names it: the one before is of no use any more."""
        if self._ready is name:
            self._ready = None
        self.state = "written"
        await thread.run(lambda: remove_images(self._file.path, name.image))
