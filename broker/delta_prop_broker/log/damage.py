"""What is wrong with a log on disk, as errors that name the place and the way out."""

from __future__ import annotations

from contextlib import contextmanager
from shlex import quote
from typing import TYPE_CHECKING

from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from collections.abc import Iterator

REPAIR = (
    "`delta-prop log export --around-damage` writes out what can be read, a copy of the file from a backup "
    "or another machine repairs it"
)
CURE = f"nothing was changed; `delta-prop log verify` lists all damage, {REPAIR}"


class LogDamaged(DeltaPropError):
    """Bytes that were on stable storage cannot be read as what was written.

    `path` names the file below the data directory, which `naming` adds to the message, `position` the first
    wrong byte's frame in it (None: the file as a whole), `offset` to `end` (exclusive) the deltas that are
    lost or in doubt (None: not known).
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
        return f"{self.description}; {CURE}"

    @property
    def description(self) -> str:
        """The message without the cure."""
        path = self.path if self.directory is None else f"{self.directory}/{self.path}"
        where = "" if self.position is None else f", byte {self.position}"
        what = "" if self.offset is None else f", offset {self.offset}"
        what += "" if self.offset is None or self.end is None else f" to {self.end}"
        return f"damage in {path}{where}{what}: {self.reason}"


@contextmanager
def naming(directory: str) -> Iterator[None]:
    """Have damage found meanwhile say in which data directory its file lies. Raises LogDamaged."""
    try:
        yield
    except LogDamaged as damage:
        damage.directory = directory
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
    """Another process has the data directory; the message says which."""


class FormatUnknown(DeltaPropError):
    """The data directory was made by a version with another format. `format` is its number."""

    def __init__(self, path: str, found: int, known: int, made_by: str) -> None:
        super().__init__(
            f"{path} says format {found} (made by {made_by or 'an unknown version'}), this version knows up "
            f"to {known}: use that version or a later one; nothing was changed"
        )
        self.format = found
        self.known = known


class FormatOutdated(DeltaPropError):
    """The data directory is of an earlier format, or on its way from there. `format` is its number."""

    def __init__(self, directory: str, found: int, known: int, *, unfinished: bool) -> None:
        why = "its migration was broken off" if unfinished else f"this version reads format {known} alone"
        again = " once more" if unfinished else ""
        super().__init__(
            f"{directory!r} has format {found}: {why}: run `delta-prop log migrate {quote(directory)}`"
            f"{again}; nothing was changed"
        )
        self.format = found
        self.known = known


class RoomMissing(DeltaPropError):
    """A migration needs more room than the disk has. Sizes in bytes."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(
            f"the disk has {free:,} bytes of free room: the migration needs {needed:,}, since old and new "
            "files lie side by side until it is done: make room, and run it again; the directory is as it was"
        )
        self.needed = needed
        self.free = free


class BadFrame(Exception):
    """No sound frame at `position`, where that of `offset` belongs; `skip` leads to the next candidate.

    `misplaced`: it is sound but for its place, which no torn write explains.
    """

    def __init__(
        self, position: int, offset: int, reason: str, *, skip: int, misplaced: bool = False
    ) -> None:
        super().__init__(reason)
        self.position = position
        self.offset = offset
        self.reason = reason
        self.skip = skip
        self.misplaced = misplaced
