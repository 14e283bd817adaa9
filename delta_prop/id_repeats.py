"""Rows that bring an id of before: finds them, and compares what they say with what was accepted then.

The first copies are read from the log, so that nobody pays for a checksum of each row that is never sent
again. Pure but for the log it is handed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop.ingest.id_runs import RunDamaged
from delta_prop.refusals import (
    first_copy_unreadable,
    id_reused,
    ids_unreadable,
    ids_wait,
    repeats_scattered,
)
from delta_prop_broker.log.damage import LogDamaged
from delta_prop_wire.contents import first_difference, same_contents
from delta_prop_wire.delta import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from delta_prop.ingest.seen_ids import SeenIds
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import Batch, LoggedBatch
    from delta_prop_wire.delta import Dot

COST_MAX = 10_000
"""What comparing the rows of one call may cost, in stretches of rows within a frame of the log, so that
nobody waits long for it: 0.2 s at most."""
PLACE_COSTS = 10
"""What a place of the log costs that has to be looked for."""
GAP_ROWS = 8
"""So many rows are read over rather than looking for a place anew."""
_READ_BYTES = 1 << 20


class _Stretch(NamedTuple):
    """Rows in order whose first copies stand in order too, from offset `at` on (below 0: see `IdRepeats`)."""

    at: int
    row: int
    length: int

    def goes_on(self, at: int, row: int) -> bool:
        """Return True if the stretch can be longer by this row."""
        return at == self.at + self.length and row == self.row + self.length


class IdRepeats:
    """Finds rows whose ids were accepted before, in this log or further up in the same batch.

    A row is told with its first copy: the copy's offset, or -1 - the row of the batch that holds it.
    """

    def __init__(self, log: Log, ids: SeenIds) -> None:
        self._log = log
        self._ids = ids
        self._spent = 0
        self.last_copy: Dot | None = None
        """The dot of the first copy that stands last in the log, of those that `check` has compared."""

    def find(self, ids: Sequence[bytes] | None) -> dict[int, int]:
        """Find the rows that repeat an id, each with its first copy. Raises Refused, to be tried again."""
        if ids is None:
            return {}
        if self._ids.full:
            raise ids_wait()
        try:
            found = self._ids.find(ids)
        except (RunDamaged, OSError) as error:
            raise ids_unreadable(error) from error
        repeats = {row: at for row, at in enumerate(found) if at is not None}
        if len(set(ids)) < len(ids):
            first: dict[bytes, int] = {}
            for row, one in enumerate(ids):
                if one in first and row not in repeats:
                    repeats[row] = -1 - first[one]
                first.setdefault(one, row)
        return repeats

    def check(self, batch: Batch, repeats: dict[int, int], source: Source) -> dict[int, int | None]:
        """Return the rows with their first copies; None where the log has let that go: nobody can compare.

        Raises Refused: ID_REUSED for the first row that says something else than its first copy, TOO_LARGE
        if these are too scattered, LOG_FAILED if one cannot be read.
        """
        start = self._log.first_offset
        self.last_copy = None
        logged = _stretches(sorted((at, row) for row, at in repeats.items() if at >= start))
        in_batch = _stretches((-1 - at, row) for row, at in sorted(repeats.items()) if at < 0)
        places = sum(1 for _ in _places(logged))
        self._spent = 0
        self._spend(len(logged) + len(in_batch) + PLACE_COSTS * places)
        assert batch.ids is not None, "rows without ids repeat none"
        wrong = [
            one.row + row
            for one in in_batch
            if (row := first_difference(batch, one.row, batch, one.at, one.length)) is not None
        ]
        for place in _places(logged):
            wrong += self._differing(batch, place, source)
        if wrong:
            row = min(wrong)
            raise id_reused(row, batch.ids[row], repeats[row])
        return {row: None if 0 <= at < start else at for row, at in repeats.items()}

    def _differing(self, batch: Batch, stretches: Sequence[_Stretch], source: Source) -> Iterator[int]:
        """Yield, of each stretch and frame, the first row that differs; the stretches are one group."""
        end = stretches[-1].at + stretches[-1].length
        frames = self._read(stretches[0].at, end)
        logged = next(frames)
        for at, row, count in stretches:
            while count:
                while logged.next_offset <= at:
                    logged = next(frames)
                here = min(count, logged.next_offset - at)
                self._spend(here < count)
                place = at - logged.offset
                if source is Source.TRANSFORM is logged.source:  # made anew from what the vector was since
                    same = same_contents(batch, row, logged.batch, place, here, operands=False)
                    differs = None if same else 0
                else:
                    differs = first_difference(batch, row, logged.batch, place, here)
                self.last_copy = logged.batch.dot(place + here - 1)
                if differs is not None:
                    yield row + differs
                at, row, count = at + here, row + here, count - here  # noqa: PLW2901 - the rest of it

    def _spend(self, cost: int) -> None:
        """Count what this call's comparison costs. Raises Refused (TOO_LARGE) beyond the bound."""
        self._spent += cost
        if self._spent > COST_MAX:
            raise repeats_scattered(COST_MAX // PLACE_COSTS, COST_MAX)

    def _read(self, offset: int, end: int) -> Iterator[LoggedBatch]:
        """Yield the frames from the one that holds `offset` up to `end`. Raises Refused (LOG_FAILED)."""
        while offset < end:
            try:
                found = self._log.read_appended(offset, rows_max=end - offset, bytes_max=_READ_BYTES)
            except (OSError, LogDamaged) as error:
                raise first_copy_unreadable(offset, error) from error
            if not found:
                raise first_copy_unreadable(offset, "its log has failed")
            yield from found
            offset = found[-1].next_offset


def _stretches(copies: Iterable[tuple[int, int]]) -> list[_Stretch]:
    """Join pairs (first copy, row) into stretches where both go on."""
    found: list[_Stretch] = []
    for at, row in copies:
        if found and found[-1].goes_on(at, row):
            found[-1] = found[-1]._replace(length=found[-1].length + 1)
        else:
            found.append(_Stretch(at, row, 1))
    return found


def _places(stretches: Sequence[_Stretch]) -> Iterator[list[_Stretch]]:
    """Group stretches, which come in order of offset, that are close enough for one read."""
    place: list[_Stretch] = []
    end = 0
    for one in stretches:
        if place and one.at > end + GAP_ROWS:
            yield place
            place = []
        place.append(one)
        end = max(end, one.at + one.length)
    if place:
        yield place
