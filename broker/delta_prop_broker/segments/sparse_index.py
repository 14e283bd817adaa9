"""The sparse index of a segment, which leads to a frame by offset, by time or by dot.

It has one entry per about 4 KB of frames, runs of counters for each origin, and the offsets of control rows.
It is built only from frames. The log fills in the *stamp* of each frame, which has a checksum. A stored index
holds the checksum of the last frame's stamp, and each frame to which it leads is checked.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_wire.crc import crc32c
from delta_prop_wire.spec import Attribute

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.stamp import LoggedRun

STEP_BYTES = 4096
_GAPS, _CONTROL = int(Attribute.COUNTER_GAPS), int(Attribute.CONTROL)

_MAGIC = b"dp-index"
_HEADER = struct.Struct("<8sIIQQQIIQQQQ")
"""magic, version, flags, base, end offset, data bytes, CRC of the stamp before the first frame, CRC of the
last stamp, first time, latest time, entries, origins. Then columns, little-endian; then the CRC32C of all
before it. Flags: bit n if a frame is compressed with codec n; bit 16 if compression was tried, or is done;
bit 17 if the last column holds the offsets of frames of control rows, which older indexes lack."""
_VERSION = 1
_CRC = struct.Struct("<I")
_CODECS, _TRIED, _CONTROLS = 0xFFFF, 1 << 16, 1 << 17


class Entry(NamedTuple):
    """The offset and position of a frame, and the checksum of the stamp before it."""

    offset: int
    position: int
    previous_crc: int | None


class _CounterRuns:
    """Runs of counters of one origin: `bases[i]` to `lasts[i]` are in the log from `offsets[i]` on."""

    __slots__ = ("bases", "lasts", "offsets")

    def __init__(self) -> None:
        self.bases, self.lasts, self.offsets = array("Q"), array("Q"), array("Q")

    def add(self, batch: Batch, offset: int) -> None:
        if batch.attributes & _GAPS:
            self._append(batch.base, batch.last, offset)
        else:
            self.add_range(batch.base, batch.base + batch.count - 1, offset)

    def add_range(self, base: int, last: int, offset: int) -> None:
        """Add contiguous counters that are in the log from `offset` on."""
        if self.lasts:
            previous = self.lasts[-1]
            if previous + 1 == base and self.offsets[-1] + base - self.bases[-1] == offset:
                self.lasts[-1] = last
                return
        self._append(base, last, offset)

    def _append(self, base: int, last: int, offset: int) -> None:
        self.bases.append(base)
        self.lasts.append(last)
        self.offsets.append(offset)


class _Entries:
    """The columns of the entries: offset, position, latest time, and checksum of the stamp before."""

    __slots__ = ("offsets", "positions", "previous", "times")

    def __init__(self, columns: Sequence[array[int]] = ()) -> None:
        """`columns`: offsets, positions, times and previous checksums; none: without entries."""
        self.offsets, self.positions, self.times, self.previous = columns or (array("Q") for _ in range(4))

    def __len__(self) -> int:
        return len(self.offsets)

    def columns(self) -> list[array[int]]:
        """Return the columns, in the order of the file."""
        return [self.offsets, self.positions, self.times, self.previous]

    def at(self, number: int) -> Entry:
        """Return an entry; the first one if the number is below 0."""
        number = max(number, 0)
        return Entry(self.offsets[number], self.positions[number], self.previous[number])

    def copy_until(self, end: int) -> _Entries:
        """Return a copy of the entries before offset `end`."""
        count = bisect_left(self.offsets, end)
        return _Entries([column[:count] for column in self.columns()])


class SparseIndex:
    """The index of one segment, while it grows and when it is sealed."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.end = base  # offset after the last row
        self.size = 0  # bytes of the frames on disk
        self.crc_before: int | None = None  # checksum of the stamp before the first frame
        self.last_crc: int | None = None  # checksum of the last stamp
        self.first_time = 0  # append times, in microseconds since 1970
        self.latest_time = 0
        self.codecs = 0  # bit n: a frame is compressed with codec n
        self.compression_tried = False  # it was compressed, or compression saves too little
        self.controls: array[int] | None = array("Q")
        """The offsets of frames of control rows; None if an older index lacks them."""
        self._entries = _Entries()
        self._runs: dict[int, _CounterRuns] = {}

    def add(
        self, batch: Batch, *, offset: int, size: int, time: int, previous_crc: int, crc: int, codec: int = 0
    ) -> None:
        """Add the next frame; `size` is its size on disk, `time` is in microseconds since 1970."""
        if codec:
            self.codecs |= 1 << codec
        if self.crc_before is None:
            self.crc_before = previous_crc
            self.first_time = time
        # The latest time never falls, even if the clock was set back, so that times can be searched.
        self.latest_time = max(self.latest_time, time)
        entries = self._entries
        if not entries.positions or self.size >= entries.positions[-1] + STEP_BYTES:
            # Appended here, since each large batch has an entry, and a call would cost more than the appends.
            entries.offsets.append(offset)
            entries.positions.append(self.size)
            entries.times.append(self.latest_time)
            entries.previous.append(previous_crc)
        self._runs_of(batch.origin).add(batch, offset)
        if batch.attributes & _CONTROL and self.controls is not None:
            self.controls.append(offset)
        self.size += size
        self.end = offset + batch.count
        self.last_crc = crc

    @property
    def next_entry(self) -> tuple[int, int, int]:
        """The size of the segment, the size from which on the next frame has an entry, and `STEP_BYTES`."""
        positions = self._entries.positions
        return self.size, positions[-1] + STEP_BYTES if positions else 0, STEP_BYTES

    def add_run(self, run: LoggedRun, *, time: int, previous_crc: int) -> None:
        """Add the next frames, all stamped at `time`: deltas of one origin, with contiguous counters.

        `previous_crc`: checksum of the stamp before the first.
        """
        if self.crc_before is None:
            self.crc_before, self.first_time = previous_crc, time
        self.latest_time = max(self.latest_time, time)
        if run.entries:
            entries = self._entries
            for offset, position, stamp_before in run.entries:
                entries.offsets.append(offset)
                entries.positions.append(position)
                entries.times.append(self.latest_time)
                entries.previous.append(stamp_before)
        first, last = run.batches[0], run.batches[-1]
        self.size += run.size
        self.end, self.last_crc = last.next_offset, run.crc
        base = first.batch.base
        self._runs_of(first.batch.origin).add_range(base, base + self.end - first.offset - 1, first.offset)

    def _runs_of(self, origin: int) -> _CounterRuns:
        runs = self._runs.get(origin)
        if runs is None:
            runs = self._runs[origin] = _CounterRuns()
        return runs

    def entry_before(self, offset: int) -> Entry:
        """Return the last entry at or before an offset of this segment."""
        return self._entries.at(bisect_right(self._entries.offsets, offset) - 1)

    def entry_before_time(self, time: int) -> Entry:
        """Return an entry at or before the first frame that was stamped at `time` or later."""
        return self._entries.at(bisect_left(self._entries.times, time) - 1)

    def entry_before_both(self, offset: int, position: int) -> Entry:
        """Return the last entry that is at or before both an offset and a position."""
        entries = self._entries
        number = min(bisect_right(entries.offsets, offset), bisect_right(entries.positions, position))
        return entries.at(number - 1)

    def last_entry(self) -> Entry:
        """Return the last entry; the segment has a frame."""
        return self._entries.at(len(self._entries) - 1)

    def copy_until(self, end: int, size: int, last_crc: int, latest_time: int) -> SparseIndex:
        """Return a copy as of offset `end`; another thread may add frames to the index meanwhile.

        The last run of an origin may include later frames; readers check each frame that they find anyway.
        """
        copy = SparseIndex(self.base)
        copy.end, copy.size, copy.last_crc, copy.latest_time = end, size, last_crc, latest_time
        copy.crc_before, copy.first_time = self.crc_before, self.first_time
        copy._entries = self._entries.copy_until(end)
        if self.controls is None:
            copy.controls = None
        else:
            copy.controls = self.controls[: bisect_left(self.controls, end)]
        for origin, runs in list(self._runs.items()):
            count = bisect_left(runs.offsets, end)  # `add` writes this column last
            if count:
                prefix = copy._runs[origin] = _CounterRuns()
                prefix.bases, prefix.lasts, prefix.offsets = (
                    runs.bases[:count],
                    runs.lasts[:count],
                    runs.offsets[:count],
                )
        return copy

    def find_run(self, origin: int, counter: int) -> tuple[int, int] | None:
        """Return the offset of the run that spans this counter, and the offset of the counter's row.

        The second one is right only if the run has no gaps. Returns None if no run spans the counter.
        """
        runs = self._runs.get(origin)
        if runs is None:
            return None
        number = bisect_right(runs.bases, counter) - 1
        if number < 0 or counter > runs.lasts[number]:
            return None
        return runs.offsets[number], runs.offsets[number] + counter - runs.bases[number]

    # --- bytes

    def pack(self) -> bytes:
        """Return the bytes of the index file."""
        counts, origins = array("Q"), array("Q", sorted(self._runs))
        columns = [*self._entries.columns(), origins, counts]
        for kind in ("bases", "lasts", "offsets"):
            column = array("Q")
            for origin in origins:
                column.extend(getattr(self._runs[origin], kind))
            columns.append(column)
        counts.extend(len(self._runs[origin].bases) for origin in origins)
        columns.append(self.controls or array("Q"))
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.codecs
            | (_TRIED if self.compression_tried else 0)
            | (0 if self.controls is None else _CONTROLS),
            self.base,
            self.end,
            self.size,
            self.crc_before or 0,
            self.last_crc or 0,
            self.first_time,
            self.latest_time,
            len(self._entries),
            len(origins),
        )
        packed = b"".join((header, *(_to_little_endian(column) for column in columns)))
        return packed + _CRC.pack(crc32c(packed))

    @classmethod
    def unpack(cls, raw: bytes, base: int) -> SparseIndex | None:
        """Read an index file; None unless it is a valid index of a segment with this base."""
        if len(raw) < _HEADER.size + _CRC.size or crc32c(raw[: -_CRC.size]) != _CRC.unpack(raw[-4:])[0]:
            return None
        magic, version, flags, found_base, end, size, first_crc, last_crc, first, latest, entries, origins = (
            _HEADER.unpack_from(raw)
        )
        if (magic, version, found_base) != (_MAGIC, _VERSION, base) or not entries:
            return None
        index = cls(base)
        index.end, index.size, index.first_time, index.latest_time = end, size, first, latest
        index.crc_before, index.last_crc = first_crc, last_crc
        index.codecs, index.compression_tried = flags & _CODECS, bool(flags & _TRIED)
        words = _read_words(raw[_HEADER.size : -_CRC.size])
        position = 0
        columns = []
        for length in (entries,) * 4 + (origins,) * 2:
            columns.append(words[position : position + length])
            position += length
        index._entries = _Entries(columns[:4])
        origin_column, counts = columns[4:]
        total = sum(counts)
        controls = words[position + 3 * total :]
        index.controls = controls if flags & _CONTROLS else None
        if len(words) < position + 3 * total or (controls and index.controls is None):
            return None
        for origin, count in zip(origin_column, counts, strict=True):
            runs = index._runs[origin] = _CounterRuns()
            runs.bases = words[position : position + count]
            runs.lasts = words[position + total : position + total + count]
            runs.offsets = words[position + 2 * total : position + 2 * total + count]
            position += count
        return index


def _to_little_endian(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array("Q", column)
        column.byteswap()
    return column.tobytes()


def _read_words(raw: bytes) -> array[int]:
    words = array("Q")
    words.frombytes(raw[: len(raw) // 8 * 8])
    if sys.byteorder == "big":
        words.byteswap()
    return words
