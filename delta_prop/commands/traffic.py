"""`trace record`: when deltas came and how large, of a server's log or a directory's, into a file.

Once a second what came is written, and stays through kill -9; it is synced as often, and stays through a
power cut. What is cut off behind the last whole block is left out by whoever reads.
"""

from __future__ import annotations

import json
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.client import Subscriber
from delta_prop.commands import edge
from delta_prop.commands.opened import opened_log
from delta_prop.commands.places import (
    EARLIEST,
    LATEST,
    offset_of,
    parse_at,
    parse_span_s,
    place_of,
)
from delta_prop.commands.waiting import waiting_for
from delta_prop.dates import shown_time
from delta_prop.recorded_traffic import SALT_BYTES, TrafficWriter
from delta_prop_broker.log.beside.follow import Follower
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop.client.delivered import DeliveredBatch
    from delta_prop.commands.connecting import Link
    from delta_prop.commands.places import At
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.stamp import Stamp

OK = 0
KEEP_S = 1.0
"""How long a delta may lie in memory before it is written, and what is written may be unsynced."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to record of where: a directory, or over a link. `span`: as it was written."""

    place: str | Link
    to: str
    start: str | None = None
    until: str | None = None
    span: str | None = None


async def record(wanted: Wanted) -> int:
    """Write the recording. Raises UsageError, Refused (CURSOR_TOO_OLD, UNAUTHORIZED), LogDamaged, OSError."""
    start = None if wanted.start is None else parse_at("--start", wanted.start, edge.wall_us())
    until = None if wanted.until is None else parse_at("--until", wanted.until, edge.wall_us(), future=True)
    span_s = inf if wanted.span is None else parse_span_s("--for", wanted.span)
    if until is not None and _is_empty(start, until):
        raise UsageError(
            f"--until {wanted.until}: nothing lies between --start and there: give a later place"
        )
    part = _Part(start, until, span_s)
    if isinstance(wanted.place, str):
        await _record_directory(wanted.place, wanted.to, part)
    else:
        await _record_server(wanted.place, wanted.to, part)
    return OK


def _is_empty(start: At | None, until: At) -> bool:
    """True if nothing can lie between, whatever the log holds."""
    if start is None or start == EARLIEST:
        return False
    if until == EARLIEST:
        return True
    if start.offset is not None and until.offset is not None:
        return until.offset <= start.offset
    if start.time_us is not None and until.time_us is not None:
        return until.time_us <= start.time_us
    return start == until == LATEST


class _Part:
    """Which part of a log is wanted; batches are taken whole, from the first that comes."""

    def __init__(self, start: At | None, until: At | None, span_s: float) -> None:
        self.start = start
        self.span_s = span_s
        self._until = until
        self._end: int | None = None
        self._first_us = None if start is None else start.time_us

    def ends_at(self, log_end: int | None, *, followed: bool) -> None:
        """Where the log ends now; whether to go on there is `followed`'s, where nothing was said."""
        if self._until == LATEST or (self._until is None and not followed):
            self._end = log_end
        elif self._until is not None and self._until.time_us is None:
            self._end = 0 if self._until.earliest else self._until.offset

    def over_at(self, offset: int) -> bool:
        """Whether nothing from there on is wanted."""
        return self._end is not None and offset >= self._end

    def over(self, offset: int, time_us: int) -> bool:
        """Whether a batch that stands there, and came then, is behind the end."""
        if self._first_us is None:
            self._first_us = time_us
        if time_us - self._first_us >= 1e6 * self.span_s or self.over_at(offset):
            return True
        return self._until is not None and self._until.time_us is not None and time_us >= self._until.time_us


async def _record_directory(data: str, to: str, part: _Part) -> None:
    with opened_log(data) as (disk, log, _):
        begin, end = offset_of(part.start or EARLIEST, log), log.visible
    if begin > end:
        raise UsageError(f"--start {begin}: the log ends at offset {end}: give that, or latest")
    part.ends_at(end, followed=False)
    with closing(Follower(disk, begin, synced=end)) as follower, _recording(to) as recording:
        for place in follower.read():
            logged = place.logged
            if part.over(logged.offset, place.stamp.append_time):
                return
            recording.add(logged.batch, place.stamp, max(begin - logged.offset, 0))
            await anyio.lowlevel.checkpoint()


async def _record_server(link: Link, to: str, part: _Part) -> None:
    subscriber = Subscriber(
        link.addresses,
        "*",
        start="latest" if part.start is None else place_of(part.start),
        name="delta-prop trace record",
        token=link.token,
        tls=link.tls,
    )
    async with waiting_for(subscriber), subscriber:
        part.ends_at(subscriber.log_end, followed=True)
        with _recording(to) as recording, anyio.move_on_after(part.span_s):
            while True:
                batch: DeliveredBatch | None = None
                all_came = part.over_at(subscriber.received)
                with anyio.move_on_after(0 if all_came else recording.due_s):
                    batch = await subscriber.next_batch()
                if batch is None and all_came:
                    return
                if batch is None:
                    recording.keep()
                    continue
                assert batch.batch is not None
                assert batch.stamp is not None
                if part.over(batch.offset, batch.stamp.append_time):
                    return
                recording.add(batch.batch, batch.stamp, batch.first)
                await anyio.lowlevel.checkpoint()


@contextmanager
def _recording(to: str) -> Iterator[_Recording]:
    """A recording in a new file; it ends well when the block does, or when somebody interrupts it."""
    with edge.output(to) as out:
        recording = _Recording(out)
        try:
            yield recording
        except Exception:
            recording.keep()
            raise
        except BaseException:
            recording.end()
            raise
        recording.end()


class _Recording:
    """A file that is being written, and what is in it."""

    def __init__(self, out: edge.Output) -> None:
        self._out = out
        self._writer = TrafficWriter(edge.draw(SALT_BYTES))
        self._progress = edge.Progress()
        self._batches = self._deltas = self._bytes = 0
        self._first_us: int | None = None
        self._last_us = 0
        self._waiting_since: float | None = None
        self._write(self._writer.begin(edge.wall_us()))
        self.keep()

    @property
    def due_s(self) -> float:
        """How long until something must be written down; for ever where nothing waits."""
        return inf if self._waiting_since is None else self._waiting_since + KEEP_S - edge.now()

    def add(self, batch: Batch, stamp: Stamp, first: int) -> None:
        """Take its rows from `first` on. Raises OSError."""
        if batch.is_control:
            return
        self._first_us = stamp.append_time if self._first_us is None else self._first_us
        self._last_us = stamp.append_time
        self._batches += 1
        self._deltas += batch.count - first
        if self._waiting_since is None:
            self._waiting_since = edge.now()
        self._write(self._writer.add(batch, stamp.append_time, stamp.source, first))
        if self.due_s <= 0:
            self.keep()
        self._progress.tell(f"{self._deltas:,} deltas in {self._bytes:,} bytes")

    def keep(self) -> None:
        """Write down and sync what has come. Raises OSError."""
        self._write(self._writer.flush())
        self._out.sync()
        self._waiting_since = None

    def end(self) -> None:
        """Say that this is all. Raises OSError."""
        self._write(self._writer.end(edge.wall_us()))
        self._out.sync()
        self._progress.end()
        edge.confirm(json.dumps(self._told()))

    def _write(self, raw: bytes) -> None:
        if raw:
            self._out.write(raw)
            self._bytes += len(raw)

    def _told(self) -> dict[str, object]:
        told: dict[str, object] = {"batches": self._batches, "deltas": self._deltas, "bytes": self._bytes}
        if self._first_us is not None:
            told |= {"first": shown_time(self._first_us), "last": shown_time(self._last_us)}
        return told
