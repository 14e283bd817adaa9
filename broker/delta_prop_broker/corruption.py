"""Errors of a log on disk; the messages say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from shlex import quote

from delta_prop_wire.errors import DeltaPropError

REPAIR = (
    "`delta-prop log export --skip-corrupt` exports the readable part; a copy of the file from a backup "
    "or another machine repairs it"
)
FIX = f"nothing was changed; `delta-prop log verify` lists all corruption; {REPAIR}"


class LogCorrupted(DeltaPropError):
    """Bytes that were on stable storage do not read back as they were written.

    `path`: the file, relative to the data directory, which `add_directory_to_errors` adds to the message.
    `position`: where the first bad frame is in the file (None: the file as a whole is bad). `offset` to `end`
    (exclusive): the deltas that are lost or in doubt (None: not known).
    """

    def __init__(
        self, path: str, reason: str, *, position: int | None = None, offset: int | None = None,
        end: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(path, reason)
        self.path = path
        self.reason = reason
        self.position = position
        self.offset = offset
        self.end = end
        self.directory: str | None = None

    def __str__(self) -> str:
        return f"{self.description}; {FIX}"

    @property
    def description(self) -> str:
        """The message without the fix."""
        path = self.path if self.directory is None else f"{self.directory}/{self.path}"
        where = "" if self.position is None else f", byte {self.position}"
        what = "" if self.offset is None else f", offset {self.offset}"
        what += "" if self.offset is None or self.end is None else f" to {self.end}"
        return f"corruption in {path}{where}{what}: {self.reason}"


@contextmanager
def add_directory_to_errors(directory: str) -> Iterator[None]:
    """Add the data directory to a LogCorrupted that is raised in the block, and re-raise it."""
    try:
        yield
    except LogCorrupted as error:
        error.directory = directory
        raise


class CodecMissing(DeltaPropError):
    """Frames of the log are compressed with a codec that is not installed; `codec` names it."""

    def __init__(self, codec: str) -> None:
        super().__init__(
            f"the log holds segments compressed with {codec}, which is not installed here: install "
            "delta-prop[compress]; nothing was changed"
        )
        self.codec = codec


class LogBusy(DeltaPropError):
    """Another process has locked the data directory; the message names it."""


class FormatUnknown(DeltaPropError):
    """A later version made the data directory, in a format that this version does not know.

    `format`: the number of that format.
    """

    def __init__(self, path: str, found: int, known: int, made_by: str) -> None:
        super().__init__(
            f"{path} has format {found} (made by {made_by or 'an unknown version'}), but this version reads "
            f"up to {known}: use that version or a later one; nothing was changed"
        )
        self.format = found
        self.known = known


class FormatOutdated(DeltaPropError):
    """The data directory has an earlier format, or its migration is unfinished. `format`: its number."""

    def __init__(self, directory: str, found: int, known: int, *, unfinished: bool) -> None:
        why = "its migration was interrupted" if unfinished else f"this version reads only format {known}"
        once_more = " once more" if unfinished else ""
        super().__init__(
            f"{directory!r} has format {found}: {why}: run `delta-prop log migrate {quote(directory)}`"
            f"{once_more}; nothing was changed"
        )
        self.format = found
        self.known = known


class InsufficientDiskSpace(DeltaPropError):
    """A migration needs more space than the disk has. Sizes in bytes."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(
            f"the disk has {free:,} bytes free, but the migration needs {needed:,}, since old and new files "
            "exist side by side until it is done: free disk space, and run it again; nothing was changed"
        )
        self.needed = needed
        self.free = free


class BadFrame(Exception):
    """No valid frame is at `position`, where the frame of `offset` belongs.

    `skip`: bytes to the next position at which a frame may start. `is_misplaced`: the frame is valid but has
    another offset, which no torn write explains.
    """

    def __init__(
        self, position: int, offset: int, reason: str, *, skip: int, is_misplaced: bool = False
    ) -> None:
        super().__init__(reason)
        self.position = position
        self.offset = offset
        self.reason = reason
        self.skip = skip
        self.is_misplaced = is_misplaced
