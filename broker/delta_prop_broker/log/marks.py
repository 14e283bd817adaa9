"""The marks of a log on disk: offsets that say how far it is appended, written, synced and readable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from delta_prop_broker.log.settings import ReadLevel


class LogMarks:
    """Offsets in ascending order: `start_offset`, `synced`, `written`, `next_offset`.

    `synced`, `written` and `high_watermark` are exclusive, and only the methods move them. The appender moves
    `next_offset`, and retention `start_offset`.
    """

    __slots__ = (
        "high_watermark",
        "needed_from",
        "next_offset",
        "reads_synced",
        "start_offset",
        "synced",
        "written",
    )

    def __init__(self, read_level: ReadLevel) -> None:
        self.reads_synced = read_level is AckLevel.DURABLE
        """True if readers see only synced rows; they see written ones otherwise."""
        self.start_offset = self.next_offset = self.written = self.synced = 0
        self.high_watermark = 0
        """The offset up to which readers may read."""
        self.needed_from: int | None = None
        """The offset from which a start would now replay the log; None if that is not known."""

    def restart(self, start: int, end: int, synced: int) -> None:
        """Continue from a recovery that found rows from `start` to `end`. `needed_from` stays."""
        self.start_offset, self.next_offset = start, end
        self.written = self.synced = self.high_watermark = synced

    def advance(self, written: int, synced: int) -> None:
        """Note that a commit has written and synced rows up to these offsets."""
        assert self.synced <= synced <= written <= self.next_offset
        assert self.written <= written
        self.written, self.synced = written, synced
        self.high_watermark = synced if self.reads_synced else written

    def fall_back(self) -> None:
        """Hide rows that are written and not synced: a failed sync may have dropped them."""
        self.written = self.high_watermark = self.synced

    @property
    def removable_end(self) -> int:
        """The offset below which the log itself no longer needs its rows."""
        needed_from = self.needed_from
        return self.high_watermark if needed_from is None else min(self.high_watermark, needed_from)
