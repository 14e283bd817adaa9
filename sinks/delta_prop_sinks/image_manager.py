"""Decides when the storage sink writes an image, whether a start may use it, and when the file names it.

The storage file names a new image only with a flush that began when the full image was durable. So every row
that changed while the image was written is in the file, under a later commit, and overrides the image's row.
"""

from __future__ import annotations

from functools import partial

import anyio
import anyio.lowlevel

from delta_prop_sinks.ports import Threads
from delta_prop_sinks.resident import ResidentVectors
from delta_prop_sinks.storage_file import ImageName, StorageFile, StorageFileState
from delta_prop_sinks.storage_image import (
    ImageError,
    ImageLoader,
    TableColumns,
    image_path,
    new_image_name,
    remove_all_images,
    remove_images,
    write_image,
)

_PAGE_ROWS = 4_000
_SHARE_CHANGED = 0.25
"""Share of all rows that must be written before a new image is due."""
_SHARE_CHANGED_AT_CLOSE = 0.05
_ALL_ROWS = 1 << 60
"""More rows than exist: there is no image that includes any of them."""


class ImageManager:
    """The image of one storage sink. `rows_min`: with fewer rows no image is written.

    `state`: the state of the image, as text. `image_due`: set when an image is due.
    """

    def __init__(self, file: StorageFile, resident: ResidentVectors, *, rows_min: int) -> None:
        self.rows_min = rows_min
        self.state = "none"
        self.image_due = anyio.Event()
        self._file, self._resident = file, resident
        self._rows_written = 0  # rows written to the storage file since the last image
        self._ready_image: ImageName | None = None  # durable, and not named by the storage file yet
        self._invalidations = 0
        self._writing = anyio.Lock(fast_acquire=True)

    async def load(self, opened: StorageFileState, log_id: bytes, thread: Threads) -> bool:
        """Load all rows into memory from the image; False, with nothing changed, if no image is usable."""
        file, resident, name = self._file, self._resident, opened.image
        self._ready_image = None
        await thread.run(lambda: remove_images(file.path, None if name is None else name.image))
        self._rows_written = _ALL_ROWS
        if name is None or opened.rebuilding or resident.rebuilding or resident.tables:
            return False
        loader = ImageLoader(image_path(file.path, name.image), name.image, log_id)
        steps = loader.steps()
        try:
            while await thread.run(lambda: next(steps, None)) is not None:
                await anyio.lowlevel.checkpoint()
            if sum(table.size for table in loader.tables.values()) > resident.resident_bytes_max // 8 * 7:
                raise ImageError("its rows need more memory than resident_bytes_max allows")
        except ImageError as failure:
            self.state = f"not used; all rows were read one by one: {failure}"
            return False
        finally:
            steps.close()
        later_rows = await self._override(loader, name, thread) if opened.last_commit > name.after else 0
        resident.adopt(loader.tables.values(), loader.lamport)
        self._rows_written = later_rows
        self.state = f"loaded, with {later_rows} rows that were written later"
        return True

    async def _override(self, loader: ImageLoader, name: ImageName, thread: Threads) -> int:
        """Replace the rows that were written to the file after the image was begun; return their number."""
        count, after = 0, None
        while True:
            page = partial(self._file.page_of_blocks, after, _PAGE_ROWS, written_after=name.after)
            blocks, after = await thread.run(page)
            for block in blocks:
                loader.override(block)
                count += len(block.keys)
            if after is None:
                return count

    def note_written(self, rows: int) -> None:
        """Count rows written to the file; set `image_due` if an image is due."""
        self._rows_written += rows
        if self._is_due(_SHARE_CHANGED):
            self.image_due.set()

    def is_due_at_close(self) -> bool:
        """True if enough has changed since the last image to write one now."""
        return self._is_due(_SHARE_CHANGED_AT_CLOSE)

    def _is_due(self, share: float) -> bool:
        too_few = self._rows_written < share * self.rows_min
        if too_few or self._resident.rebuilding or not self._resident.complete:
            return False
        rows = sum(len(table.slots) for table in self._resident.tables.values())
        return rows >= self.rows_min and self._rows_written >= max(share * rows, 1)

    async def write(self, threads: Threads, log_id: bytes) -> None:
        """Write an image, which the next flush names. After a failure, `state` has the reason."""
        async with self._writing:
            name = ImageName(new_image_name(), self._file.last_commit)
            written = self._rows_written
            self.image_due = anyio.Event()
            if await self._write_all(name, threads, log_id):
                self._ready_image = name
                self._rows_written -= written

    async def _write_all(self, name: ImageName, threads: Threads, log_id: bytes) -> bool:
        """Write an image until it is complete, or until the rows are invalid; True if it can be named."""
        resident, invalidations = self._resident, self._invalidations
        rebuilds, done = resident.rebuild.count, False
        columns = [TableColumns(table) for table in resident.tables.values()]
        steps = write_image(image_path(self._file.path, name.image), name.image, log_id, columns)
        try:
            while await threads.run(lambda: next(steps, None)) is not None:
                await anyio.lowlevel.checkpoint_if_cancelled()
                if invalidations != self._invalidations:
                    return False
            done = True
        except ImageError as failure:
            self.state = f"not written: {failure}"
            return False
        finally:
            if not done:
                with anyio.CancelScope(shield=True):
                    await threads.run(steps.close)
        is_valid = invalidations == self._invalidations and resident.rebuild.count == rebuilds
        return is_valid and resident.complete and not resident.rebuilding

    def take_ready(self) -> ImageName | None:
        """Return the image that a flush must name if it begins now; None if there is no new one."""
        return self._ready_image

    def begin_rebuild(self) -> None:
        """Drop the image that is ready: the file's rows are invalid, and so is the image."""
        self._ready_image, self.state = None, "none"

    def invalidate(self) -> None:
        """Drop the image that is ready or being written: rows that it contains are removed from the file.

        A new one is due, as the file names none from the next removal on.
        """
        self._invalidations += 1
        self._ready_image, self.state = None, "none"
        self.note_written(sum(len(table.slots) for table in self._resident.tables.values()))

    async def remove(self, thread: Threads) -> None:
        """Remove all image files, durably; first wait for the end of one that is being written."""
        self.invalidate()
        async with self._writing:
            with anyio.CancelScope(shield=True):
                await thread.run(lambda: remove_all_images(self._file.path))

    def end_rebuild(self) -> None:
        """Count all rows as written."""
        self.note_written(sum(len(table.slots) for table in self._resident.tables.values()))

    async def note_named(self, name: ImageName, thread: Threads) -> None:
        """Note that the storage file names the image; remove older ones."""
        if self._ready_image is name:
            self._ready_image = None
        self.state = "written"
        await thread.run(lambda: remove_images(self._file.path, name.image))
