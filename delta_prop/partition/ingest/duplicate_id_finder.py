"""Detection of rows with an id accepted before, and comparison with their first copies.

First copies are read from the log when they are needed, so no checksum is kept for rows that are never sent
again. Pure but for the log that it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from delta_prop.calls.refusals import (
    duplicates_scattered,
    first_copy_unreadable,
    id_reused,
    ids_backlogged,
    ids_unreadable,
)
from delta_prop.partition.ingest.id_runs import RunCorrupted
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_wire.delta import Dot, Source
from delta_prop_wire.row_comparison import first_difference, same_contents

if TYPE_CHECKING:
    from delta_prop.partition.ingest.seen_ids import SeenIds
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import Batch, LoggedBatch

COST_MAX = 10_000
"""Maximum cost of one call. Unit: comparing one range of rows with one log frame; 10,000 take up to 0.2 s."""
LOOKUP_COST = 10
"""Cost of one separate read of the log."""
GAP_ROWS = 8
"""Maximum gap, in rows, that one read spans; a wider gap costs a second read."""
_READ_BYTES = 1 << 20


class _RowRange(NamedTuple):
    """Consecutive rows, from `row` on, with consecutive first copies, from `copy` on.

    `copy`: an offset in the log, or, if the copies are in the same batch, a row number.
    """

    copy: int
    row: int
    length: int

    def is_extended_by(self, copy: int, row: int) -> bool:
        """True if this row and its copy come directly after the range."""
        return copy == self.copy + self.length and row == self.row + self.length


class DuplicateIdFinder:
    """Finds rows whose ids were accepted before, in this log or earlier in the same batch.

    Each row maps to its first copy: the copy's offset, or `-1 - row` if the copy is that row of the batch.
    """

    def __init__(self, log: Log, ids: SeenIds) -> None:
        self._log = log
        self._ids = ids
        self._cost = 0
        self.last_copy: Dot | None = None
        """Of the first copies in the log that the last `check` compared: the dot of the one with the highest
        offset."""

    def find(self, ids: Sequence[bytes] | None) -> dict[int, int]:
        """Return the rows that repeat an id, each with its first copy. Raises Refused, which is retryable."""
        if ids is None:
            return {}
        if self._ids.is_full:
            raise ids_backlogged()
        try:
            copies = self._ids.find(ids)
        except (RunCorrupted, OSError) as error:
            raise ids_unreadable(error) from error
        duplicates = {row: copy for row, copy in enumerate(copies) if copy is not None}
        if len(set(ids)) < len(ids):
            first_rows: dict[bytes, int] = {}
            for row, id_ in enumerate(ids):
                if id_ in first_rows and row not in duplicates:
                    duplicates[row] = -1 - first_rows[id_]
                first_rows.setdefault(id_, row)
        return duplicates

    def check(self, batch: Batch, duplicates: dict[int, int], source: Source) -> dict[int, int | None]:
        """Return the rows with their first copies; None if the log has removed the copy.

        Raises Refused: ID_REUSED for the first row that differs from its first copy, TOO_LARGE if the copies
        are too scattered, LOG_FAILED if one cannot be read.
        """
        start = self._log.start_offset
        self.last_copy = None
        in_log = _join_ranges(sorted((copy, row) for row, copy in duplicates.items() if copy >= start))
        in_batch = _join_ranges((-1 - copy, row) for row, copy in sorted(duplicates.items()) if copy < 0)
        read_count = sum(1 for _ in _group_by_read(in_log))
        self._cost = 0
        self._spend(len(in_log) + len(in_batch) + LOOKUP_COST * read_count)
        assert batch.ids is not None, "rows without ids have no duplicates"
        differing_rows = [
            row_range.row + row
            for row_range in in_batch
            if (row := first_difference(batch, row_range.row, batch, row_range.copy, row_range.length))
            is not None
        ]
        for group in _group_by_read(in_log):
            differing_rows += self._find_differing(batch, group, source)
        if differing_rows:
            row = min(differing_rows)
            raise id_reused(row, batch.ids[row], duplicates[row])
        return {row: None if 0 <= copy < start else copy for row, copy in duplicates.items()}

    def _find_differing(self, batch: Batch, ranges: Sequence[_RowRange], source: Source) -> Iterator[int]:
        """Yield, per range and frame, the first row that differs; one read covers these `ranges`."""
        end = ranges[-1].copy + ranges[-1].length
        frames = self._read(ranges[0].copy, end)
        logged = next(frames)
        for offset, row, count in ranges:
            while count:
                while logged.next_offset <= offset:
                    logged = next(frames)
                length = min(count, logged.next_offset - offset)
                if length < count:
                    self._spend(1)  # the range continues in another frame
                logged_row = offset - logged.offset
                if source is Source.TRANSFORM and logged.source is Source.TRANSFORM:
                    # A retry computes a transform's result from a later state, so the operands may differ.
                    same = same_contents(batch, row, logged.batch, logged_row, length, compare_operands=False)
                    difference = None if same else 0
                else:
                    difference = first_difference(batch, row, logged.batch, logged_row, length)
                self.last_copy = logged.batch.dot(logged_row + length - 1)
                if difference is not None:
                    yield row + difference
                offset, row, count = offset + length, row + length, count - length  # noqa: PLW2901 - the rest of the range

    def _spend(self, cost: int) -> None:
        """Add to the cost of this call's comparison. Raises Refused (TOO_LARGE) above the bound."""
        self._cost += cost
        if self._cost > COST_MAX:
            raise duplicates_scattered(COST_MAX // LOOKUP_COST, COST_MAX)

    def _read(self, offset: int, end: int) -> Iterator[LoggedBatch]:
        """Yield the frames from the one that holds `offset` up to `end`. Raises Refused (LOG_FAILED)."""
        while offset < end:
            try:
                frames = self._log.read_appended(offset, rows_max=end - offset, bytes_max=_READ_BYTES)
            except (OSError, LogCorrupted) as error:
                raise first_copy_unreadable(offset, error) from error
            if not frames:
                raise first_copy_unreadable(offset, "its log has failed")
            yield from frames
            offset = frames[-1].next_offset


def _join_ranges(copies: Iterable[tuple[int, int]]) -> list[_RowRange]:
    """Join pairs (first copy, row) into ranges in which both are consecutive."""
    ranges: list[_RowRange] = []
    for copy, row in copies:
        if ranges and ranges[-1].is_extended_by(copy, row):
            ranges[-1] = ranges[-1]._replace(length=ranges[-1].length + 1)
        else:
            ranges.append(_RowRange(copy, row, 1))
    return ranges


def _group_by_read(ranges: Sequence[_RowRange]) -> Iterator[list[_RowRange]]:
    """Group ranges, sorted by offset, that are close enough for one read."""
    group: list[_RowRange] = []
    end = 0
    for row_range in ranges:
        if group and row_range.copy > end + GAP_ROWS:
            yield group
            group = []
        group.append(row_range)
        end = max(end, row_range.copy + row_range.length)
    if group:
        yield group
