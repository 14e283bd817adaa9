"""Answers dots that are dealt with: what became of them, and whether a batch that comes again is the same.

What memory no longer tells is read back from the log. A batch of which nobody can tell any more is answered
with OUTCOME_UNKNOWN, never as the same. Pure but for the log that it is handed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop.published import Published
from delta_prop.refusals import dot_reused, fenced, outcome_unknown, unreadable, void_before
from delta_prop_broker.log.damage import LogDamaged
from delta_prop_wire.contents import same_contents
from delta_prop_wire.control_rows import read_void
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.ingest.origins import OriginState
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import Batch, LoggedBatch
    from delta_prop_wire.errors import Refused

STRETCHES_MAX = 4_000
"""Batches of the log that one repeat is compared with at most; of one that lies in more nobody can tell."""


def outcome_of(origin: int, counter: int, state: OriginState | None, log: Log) -> int | ErrorCode | None:
    """Return the offset of a dot below its origin's watermark, or the code if it is void; None: not known.

    DOT_REUSED if its producer left the counter out. `state`: of its origin; None while that is idle. Raises
    Refused (OUTCOME_UNKNOWN) if the log cannot be read.
    """
    if state is not None and (known := state.outcome(counter)) is not None:
        return known
    try:
        at = log.find(origin, counter)
        if at is None:
            return ErrorCode.DOT_REUSED if log.first_offset == 0 else None
        logged = _batch_at(log, at)
    except (LogDamaged, OSError) as error:
        raise unreadable(error) from error
    if logged is None or not logged.batch.is_control:
        return at
    void = read_void(logged.batch)
    return void.code if void.firsts is None else void.firsts[at - logged.offset]


def answer_repeat(batch: Batch, state: OriginState, log: Log) -> Published:
    """Acknowledge a batch that is dealt with as a duplicate. Raises Refused.

    With the first refusal if it was refused for good, with DOT_REUSED (FENCED under an epoch of before) if
    these dots had other bytes, with OUTCOME_UNKNOWN if nobody can tell. Of a batch that asks (epoch 0), ids
    and contents have to be the same, of any other all that its producer said.
    """
    same = None if batch.epoch == 0 else state.same_frame(batch)
    counter, code = state.first_void(batch) or (0, None)
    if same is False and code is not None:  # the log has nothing of what was refused but its checksum
        raise other_bytes(batch, state, log)
    if code is ErrorCode.OUTCOME_UNKNOWN:  # under ids that were known, of deltas that were gone
        raise outcome_unknown(batch)
    if code is not None and code is not ErrorCode.DOT_REUSED:
        raise void_before(batch, counter, code)
    firsts = {row: state.first_offset(batch.counter(row)) for row in range(batch.count)} if same else {}
    if not same or None in firsts.values():
        try:
            firsts = _Comparison(batch, state, log).firsts()
        except (LogDamaged, OSError) as error:
            raise unreadable(error) from error
    return Published(firsts[0], batch.dot(0), batch.count, min(batch.ack_level, log.level), firsts)


def places_of(batch: Batch, state: OriginState, log: Log) -> dict[int, int | None]:
    """Return where the log has the dots of a batch that is dealt with; None where nobody knows any more."""
    places = {row: state.first_offset(batch.counter(row)) for row in range(batch.count)}
    if None in places.values():
        with suppress(LogDamaged, OSError):
            _look_up(batch, places, log)
    return places


def _look_up(batch: Batch, places: dict[int, int | None], log: Log) -> None:
    stretches = 0
    for row in range(batch.count):
        if places[row] is not None:
            continue
        at = log.find(batch.origin, batch.counter(row))
        logged = None if at is None else _batch_at(log, at)
        stretches += 1
        if at is None or logged is None or stretches > STRETCHES_MAX:
            return
        shared = _shared(batch, row, logged.batch, at - logged.offset)
        places.update((row + one, at + one) for one in range(shared))


def other_bytes(batch: Batch, state: OriginState, log: Log) -> Refused:
    """The refusal of a batch whose dots were used for other bytes."""
    if 0 < batch.epoch < state.epoch:
        return fenced(batch.origin, state.epoch)
    known = outcome_of(batch.origin, batch.base, state, log) if batch.count == 1 else None
    return dot_reused(batch, known)


def _batch_at(log: Log, offset: int) -> LoggedBatch | None:
    """The batch that holds an offset; None if the log has let it go, or may have lost it."""
    if offset < log.first_offset:
        return None
    found = log.read_appended(offset, rows_max=1, bytes_max=1)
    return found[0] if found else None


class _Comparison:
    """A batch, row by row beside what the log has under its dots."""

    def __init__(self, batch: Batch, state: OriginState, log: Log) -> None:
        self._batch = batch
        self._state = state
        self._log = log

    def firsts(self) -> dict[int, int | None]:
        """The offset of each row, all of which are the same. Raises Refused, OSError."""
        batch, row, stretches = self._batch, 0, 0
        firsts = dict[int, int | None]()
        while row < batch.count:
            stretches += 1
            if stretches > STRETCHES_MAX:
                raise outcome_unknown(batch)
            at = self._state.first_offset(batch.counter(row))
            if at is None:
                at = self._log.find(batch.origin, batch.counter(row))
            logged = None if at is None else _batch_at(self._log, at)
            if at is None or logged is None:
                raise self._not_there(row)
            row += self._take(row, at, logged, firsts)
        return firsts

    def _not_there(self, row: int) -> Refused:
        """The refusal of a row that the log does not have."""
        batch = self._batch
        known = outcome_of(batch.origin, batch.counter(row), self._state, self._log)
        if known is ErrorCode.DOT_REUSED:  # its producer left it out
            return other_bytes(batch, self._state, self._log)
        return outcome_unknown(batch)

    def _take(self, row: int, at: int, logged: LoggedBatch, firsts: dict[int, int | None]) -> int:
        """Compare as many rows as this batch of the log has; how many. Raises Refused."""
        batch, there = self._batch, at - logged.offset
        if logged.batch.origin != batch.origin or logged.batch.counter(there) != batch.counter(row):
            self._check_twin(row, logged.batch, there)
            firsts[row] = at
            return 1
        count = _shared(batch, row, logged.batch, there)
        if logged.batch.is_control:
            self._take_void(row, logged.batch, there, count, firsts)
            return count
        if not _same_rows(batch, row, logged.batch, there, count):
            raise other_bytes(batch, self._state, self._log)
        firsts.update((row + one, at + one) for one in range(count))
        return count

    def _take_void(
        self, row: int, logged: Batch, there: int, count: int, firsts: dict[int, int | None]
    ) -> None:
        """Compare rows whose dots are void, as their ids had been accepted before, or for good."""
        batch, void = self._batch, read_void(logged)
        same = void.crc == batch.crc
        refused = void.firsts is None  # else their ids were known, and the first deltas tell what they said
        comparable = (batch.base, batch.last) == (logged.base, logged.last) and void.crc is not None
        if void.code is ErrorCode.DOT_REUSED or (refused and comparable and not same and batch.epoch):
            raise other_bytes(batch, self._state, self._log)
        if void.firsts is None:
            raise void_before(batch, batch.counter(row), void.code)
        for one in range(count):
            first = void.firsts[there + one]
            copy = None if first is None or same else _batch_at(self._log, first)
            if first is None or (copy is None and not same):
                raise outcome_unknown(batch)
            if copy is not None:
                self._check_twin(row + one, copy.batch, first - copy.offset)
            firsts[row + one] = first

    def _check_twin(self, row: int, logged: Batch, there: int) -> None:
        """Raise Refused unless a row under another dot has the same id and contents."""
        batch = self._batch
        ids, other_ids = batch.ids, logged.ids
        same_id = ids is not None and other_ids is not None and ids[row] == other_ids[there]
        if not same_id or not same_contents(batch, row, logged, there):
            raise other_bytes(batch, self._state, self._log)


def _shared(batch: Batch, row: int, logged: Batch, there: int) -> int:
    """How many rows from these on have the same counters in both."""
    most = min(batch.count - row, logged.count - there)
    if not batch.leaps and not logged.leaps:
        return most
    for one in range(most):
        if batch.counter(row + one) != logged.counter(there + one):
            return one
    return most


def same_rows(batch: Batch, other: Batch) -> bool:
    """True if two batches under the same dots say the same of each row."""
    count = batch.count
    return other.count == _shared(batch, 0, other, 0) == count and _same_rows(batch, 0, other, 0, count)


def _same_rows(batch: Batch, row: int, logged: Batch, there: int, count: int) -> bool:
    """True if rows under the same dots are the same in everything that their producer said of them."""
    if (batch.base, batch.last, batch.crc) == (logged.base, logged.last, logged.crc):
        return True
    mine, theirs = slice(row, row + count), slice(there, there + count)
    ids, other_ids = batch.ids or (), logged.ids or ()
    if ids[mine] != other_ids[theirs] or not same_contents(batch, row, logged, there, count):
        return False
    return batch.epoch == 0 or (
        batch.epoch == logged.epoch
        and batch.priority == logged.priority
        and _of_rows(batch.parents, mine) == _of_rows(logged.parents, theirs)
        and _of_rows(batch.expects, mine) == _of_rows(logged.expects, theirs)
        and all(batch.timestamp(row + one) == logged.timestamp(there + one) for one in range(count))
    )


def _of_rows(named: tuple[tuple[int, object], ...], rows: slice) -> list[tuple[int, object]]:
    """What these rows name, by row from the first of them on."""
    return [(row - rows.start, one) for row, one in named if rows.start <= row < rows.stop]
