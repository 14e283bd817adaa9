"""Room in a log on disk: whole segments go, the oldest first, and only those that are sealed and safe."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_broker.log.files.segment import Segment, Segments
    from delta_prop_broker.log.retention.cover import Cover
    from delta_prop_broker.log.retention.holders import Holders
    from delta_prop_broker.log.settings import LogSettings


class Room:
    """Counts the bytes of the segments held, and lets the oldest go. `bytes` is what the log holds."""

    def __init__(self, settings: LogSettings, segments: Segments, holders: Holders, cover: Cover) -> None:
        self.bytes = sum(segment.size for segment in segments.all)
        self._settings = settings
        self._segments = segments
        self._holders = holders
        self._cover = cover
        self._removed: list[Segment] = []

    def take_removed(self) -> list[Segment]:
        """Segments that were let go since the last call, oldest first."""
        removed, self._removed = self._removed, []
        return removed

    def held(self, offset: int) -> int:
        """The bytes of all segments from the one that holds `offset` on."""
        return sum(segment.size for segment in self._segments.since(offset))

    def kept_share(self, offset: int, seen_us: int) -> float:
        """How near the segment of `offset` is to going: from 1 on it may. The last one stays."""
        settings, last = self._settings, self._segments.last
        if last is None or offset >= last.base:
            return 0.0
        bytes_max = settings.compact_from_bytes if settings.compact else settings.keep_bytes_max
        age_s = (seen_us - self._segments.holding(offset).seen_last_us) / 1e6
        return max(self.held(offset) / bytes_max, age_s / settings.kept_s)

    def find(self, size: int, *, readable: int, end: int) -> bool:
        """Make room for so many bytes below the hard limit; whether there is."""
        if self._fits(size):
            return True
        self._make(size, readable, end)
        if not self._fits(size) and self._would_fit(size, readable, end):
            while not self._fits(size) and self._holders.let_go():
                self._make(size, readable, end)
        return self._fits(size)

    def retain(self, seen_us: int, *, readable: int, end: int) -> None:
        """Let go what is beyond `keep_bytes_max` or older than `keep_s`, unless somebody needs it.

        With compaction: what a snapshot covers, since it was beyond that when the snapshot was made.
        """
        floor = self._floor(self._holders.floor(end), readable)
        while self._removable(floor):
            too_old = seen_us - self._segments.all[0].seen_last_us > self._settings.keep_s * 1e6
            kept = not too_old and self.bytes <= self._settings.keep_bytes_max
            if kept and not self._settings.compact:
                return
            self._remove()

    def _floor(self, needed: int, readable: int) -> int:
        return min(needed, self._cover.floor(readable))

    def _fits(self, size: int) -> bool:
        return self.bytes + size <= self._settings.bytes_max

    def _make(self, size: int, readable: int, end: int) -> None:
        floor = self._floor(self._holders.floor(end), readable)
        while not self._fits(size) and self._removable(floor):
            self._remove()

    def _removable(self, floor: int) -> bool:
        """Whether the oldest segment may go: nobody needs it, and it is not the last one.

        The last one's name says where the log stands; a commit writes it before it removes this one.
        """
        held = self._segments.all
        return len(held) > 1 and held[0].end <= floor

    def _remove(self) -> None:
        segment = self._segments.drop_first()
        self.bytes -= segment.size
        self._removed.append(segment)

    def _would_fit(self, size: int, readable: int, end: int) -> bool:
        """Whether there would be room without those who give way: nobody is let go for nothing."""
        floor = self._floor(self._holders.staying_floor(end), readable)
        held = self.bytes
        for segment in self._segments.all[:-1]:
            if segment.end > floor:
                break
            held -= segment.size
        return held + size <= self._settings.bytes_max
