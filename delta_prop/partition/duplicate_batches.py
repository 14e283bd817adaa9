"""Answers about dots up to their origin's watermark: their outcome, and if a resent batch is a duplicate.

Rows that memory no longer holds are read back from the log. A batch that can no longer be compared is
answered with OUTCOME_UNKNOWN, never as a duplicate. Pure but for the log that it is given.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.refusals import dot_reused, fenced, log_unreadable, outcome_unknown, refused_before
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_wire.control_rows import read_noop
from delta_prop_wire.errors import Refused
from delta_prop_wire.row_comparison import same_contents
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.partition.ingest.origins import OriginState
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import Batch, LoggedBatch

RANGES_MAX = 4_000
"""Maximum log batches that one duplicate is compared with; the outcome of one that spans more is unknown."""


def find_outcome(origin: int, counter: int, state: OriginState | None, log: Log) -> int | ErrorCode | None:
    """Return the outcome of a dot up to its origin's watermark: its offset, or the code if it is a no-op.

    Return None if the outcome is no longer known. The code is DOT_REUSED if the producer left the counter
    out. `state`: the origin's state; None while the origin is idle. Raises Refused (OUTCOME_UNKNOWN) if the
    log cannot be read.
    """
    if state is not None and (known := state.outcome(counter)) is not None:
        return known
    try:
        offset = log.find(origin, counter)
        if offset is None:
            return ErrorCode.DOT_REUSED if log.start_offset == 0 else None
        logged = _batch_at(log, offset)
    except (LogCorrupted, OSError) as error:
        raise log_unreadable(error) from error
    if logged is None or not logged.batch.is_control:
        return offset
    noop = read_noop(logged.batch)
    return noop.code if noop.first_offsets is None else noop.first_offsets[offset - logged.offset]


def ack_duplicate(batch: Batch, state: OriginState, log: Log) -> PublishAck:
    """Acknowledge a batch that was processed before, as a duplicate. Raises Refused.

    The refusal is the earlier one if that was final. It is DOT_REUSED (FENCED under an earlier epoch) if
    these dots were used for other bytes, and OUTCOME_UNKNOWN if that cannot be found out. A batch equals the
    first one if all that the producer set is equal; an outcome query (epoch 0), if ids and contents are.
    """
    # None: not known from memory alone, as for an outcome query, whose frame always differs.
    same = None if batch.epoch == 0 else state.is_same_frame(batch)
    counter, code = state.first_noop(batch) or (0, None)
    if same is False and code is not None:  # of a refused batch the log holds only its checksum
        raise different_bytes(batch, state, log)
    if code is ErrorCode.OUTCOME_UNKNOWN:  # its ids were known, but the first deltas had been removed
        raise outcome_unknown(batch)
    if code is not None and code is not ErrorCode.DOT_REUSED:
        raise refused_before(batch, counter, code)
    offsets = {row: state.first_offset(batch.counter(row)) for row in range(batch.count)} if same else {}
    if not same or None in offsets.values():
        try:
            offsets = _Comparison(batch, state, log).first_offsets()
        except (LogCorrupted, OSError) as error:
            raise log_unreadable(error) from error
    return PublishAck(offsets[0], batch.dot(0), batch.count, min(batch.ack_level, log.ack_level), offsets)


def find_offsets(batch: Batch, state: OriginState, log: Log) -> dict[int, int | None]:
    """Return the offset of each row of a processed batch; None for rows whose offset is no longer known."""
    offsets = {row: state.first_offset(batch.counter(row)) for row in range(batch.count)}
    if None in offsets.values():
        with suppress(LogCorrupted, OSError):
            _find_missing_offsets(batch, offsets, log)
    return offsets


def _find_missing_offsets(batch: Batch, offsets: dict[int, int | None], log: Log) -> None:
    range_count = 0
    for row in range(batch.count):
        if offsets[row] is not None:
            continue
        offset = log.find(batch.origin, batch.counter(row))
        logged = None if offset is None else _batch_at(log, offset)
        range_count += 1
        if offset is None or logged is None or range_count > RANGES_MAX:
            return
        shared = _count_shared(batch, row, logged.batch, offset - logged.offset)
        offsets.update((row + index, offset + index) for index in range(shared))


def different_bytes(batch: Batch, state: OriginState, log: Log) -> Refused:
    """Return the refusal of a batch whose dots were used for other bytes."""
    if 0 < batch.epoch < state.epoch:
        return fenced(batch.origin, state.epoch)
    known = find_outcome(batch.origin, batch.base, state, log) if batch.count == 1 else None
    return dot_reused(batch, known)


def _batch_at(log: Log, offset: int) -> LoggedBatch | None:
    """Return the batch that holds an offset; None if the log has removed it, or may have lost it."""
    if offset < log.start_offset:
        return None
    batches = log.read_appended(offset, rows_max=1, bytes_max=1)
    return batches[0] if batches else None


class _Comparison:
    """Comparison of a batch, row by row, with the log's rows under its dots."""

    def __init__(self, batch: Batch, state: OriginState, log: Log) -> None:
        self._batch = batch
        self._state = state
        self._log = log

    def first_offsets(self) -> dict[int, int | None]:
        """Return the offset of each row, if all rows are the same. Raises Refused, OSError."""
        batch, row, range_count = self._batch, 0, 0
        offsets = dict[int, int | None]()
        while row < batch.count:
            range_count += 1
            if range_count > RANGES_MAX:
                raise outcome_unknown(batch)
            offset = self._state.first_offset(batch.counter(row))
            if offset is None:
                offset = self._log.find(batch.origin, batch.counter(row))
            logged = None if offset is None else _batch_at(self._log, offset)
            if offset is None or logged is None:
                raise self._missing_row_refusal(row)
            row += self._compare_rows(row, offset, logged, offsets)
        return offsets

    def _missing_row_refusal(self, row: int) -> Refused:
        """Return the refusal of a row that the log does not have."""
        batch = self._batch
        known = find_outcome(batch.origin, batch.counter(row), self._state, self._log)
        if known is ErrorCode.DOT_REUSED:  # its producer left the counter out
            return different_bytes(batch, self._state, self._log)
        return outcome_unknown(batch)

    def _compare_rows(
        self, row: int, offset: int, logged: LoggedBatch, offsets: dict[int, int | None]
    ) -> int:
        """Compare as many rows as this log batch holds; return their number. Raises Refused."""
        batch, logged_row = self._batch, offset - logged.offset
        if logged.batch.origin != batch.origin or logged.batch.counter(logged_row) != batch.counter(row):
            self._check_duplicate_id(row, logged.batch, logged_row)
            offsets[row] = offset
            return 1
        count = _count_shared(batch, row, logged.batch, logged_row)
        if logged.batch.is_control:
            self._compare_noop(row, logged.batch, logged_row, count, offsets)
            return count
        if not _has_same_rows(batch, row, logged.batch, logged_row, count):
            raise different_bytes(batch, self._state, self._log)
        offsets.update((row + index, offset + index) for index in range(count))
        return count

    def _compare_noop(
        self, row: int, logged: Batch, logged_row: int, count: int, offsets: dict[int, int | None]
    ) -> None:
        """Compare rows with no-ops, which stand for known ids or for deltas that were refused for good."""
        batch, noop = self._batch, read_noop(logged)
        same = noop.crc == batch.crc
        # A no-op with first offsets stands for known ids: the first deltas hold the rows' contents.
        refused = noop.first_offsets is None
        comparable = (batch.base, batch.last) == (logged.base, logged.last) and noop.crc is not None
        if noop.code is ErrorCode.DOT_REUSED or (refused and comparable and not same and batch.epoch):
            raise different_bytes(batch, self._state, self._log)
        if noop.first_offsets is None:
            raise refused_before(batch, batch.counter(row), noop.code)
        for index in range(count):
            first = noop.first_offsets[logged_row + index]
            copy = None if first is None or same else _batch_at(self._log, first)
            if first is None or (copy is None and not same):
                raise outcome_unknown(batch)
            if copy is not None:
                self._check_duplicate_id(row + index, copy.batch, first - copy.offset)
            offsets[row + index] = first

    def _check_duplicate_id(self, row: int, logged: Batch, logged_row: int) -> None:
        """Raise Refused unless a row under another dot has the same id and contents."""
        batch = self._batch
        ids, other_ids = batch.ids, logged.ids
        same_id = ids is not None and other_ids is not None and ids[row] == other_ids[logged_row]
        if not same_id or not same_contents(batch, row, logged, logged_row):
            raise different_bytes(batch, self._state, self._log)


def _count_shared(batch: Batch, row: int, logged: Batch, logged_row: int) -> int:
    """Return how many rows from these on have the same counters in both batches."""
    count_max = min(batch.count - row, logged.count - logged_row)
    if not batch.has_gaps and not logged.has_gaps:
        return count_max
    for index in range(count_max):
        if batch.counter(row + index) != logged.counter(logged_row + index):
            return index
    return count_max


def same_rows(batch: Batch, other: Batch) -> bool:
    """True if two batches under the same dots are equal in each row."""
    count = batch.count
    return other.count == _count_shared(batch, 0, other, 0) == count and _has_same_rows(
        batch, 0, other, 0, count
    )


def _has_same_rows(batch: Batch, row: int, logged: Batch, logged_row: int, count: int) -> bool:
    """True if rows under the same dots are equal in everything that their producer set."""
    if (batch.base, batch.last, batch.crc) == (logged.base, logged.last, logged.crc):
        return True
    mine, theirs = slice(row, row + count), slice(logged_row, logged_row + count)
    ids, other_ids = batch.ids or (), logged.ids or ()
    if ids[mine] != other_ids[theirs] or not same_contents(batch, row, logged, logged_row, count):
        return False
    return batch.epoch == 0 or (
        batch.epoch == logged.epoch
        and batch.priority == logged.priority
        and _select_rows(batch.parents, mine) == _select_rows(logged.parents, theirs)
        and _select_rows(batch.expects, mine) == _select_rows(logged.expects, theirs)
        and all(
            batch.timestamp(row + index) == logged.timestamp(logged_row + index) for index in range(count)
        )
    )


def _select_rows(by_row: tuple[tuple[int, object], ...], rows: slice) -> list[tuple[int, object]]:
    """Return the entries of these rows, numbered from the first of them."""
    return [(row - rows.start, value) for row, value in by_row if rows.start <= row < rows.stop]
