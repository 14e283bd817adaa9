"""The commit queue: what waits for the next commit, and counts of what earlier commits wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.segments.commit import SegmentWrite

if TYPE_CHECKING:
    from delta_prop_broker.segments.segment import Segment


class CommitQueue:
    """The work of the next commit. Appends add to `writes`, retention to `removed_segments`.

    `unwritten_bytes`: bytes that were appended and are not on disk yet, those of a running commit included.
    `wants_sync`: the next commit syncs all rows. `commits`, `syncs_skipped`, `committed_frames`,
    `committed_bytes` and `removed_count` (of segments) count since the log was opened.
    """

    def __init__(self) -> None:
        self.writes: list[SegmentWrite] = []
        """The writes of the next commit, one per segment."""
        self.removed_segments: list[Segment] = []
        self.unwritten_bytes = 0
        self.wants_sync = False
        self.commits = self.syncs_skipped = self.removed_count = 0
        self.committed_frames = self.committed_bytes = 0

    def write_of(self, segment: Segment) -> SegmentWrite:
        """Return the write of the last segment, `segment`; begin one if there is none."""
        if not self.writes or self.writes[-1].segment is not segment:
            self.writes.append(SegmentWrite(segment, segment.size, end=segment.size))
        return self.writes[-1]

    def note_written(self, frames: int, size: int) -> None:
        """Count a commit that wrote these frames."""
        self.commits += 1
        self.unwritten_bytes -= size
        self.committed_bytes += size
        self.committed_frames += frames

    def clear(self) -> None:
        """Drop what waits: the log was recovered without it. The counts stay."""
        self.writes, self.removed_segments = [], []
        self.unwritten_bytes, self.wants_sync = 0, False
