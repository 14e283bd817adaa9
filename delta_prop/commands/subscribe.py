"""`subscribe`: a log's deltas as JSON lines, from some place on, and what comes after as it comes.

It reads a directory beside the process that writes, or asks a server. A group's place is kept once its lines
were written, so after a kill some lines come again and none is missing.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.checks import parse_topics
from delta_prop.client import Subscriber
from delta_prop.commands import edge
from delta_prop.commands.opened import opened_log
from delta_prop.commands.places import EARLIEST, LATEST, name_fault, offset_of, parse_at, place_of
from delta_prop.commands.waiting import waiting_for
from delta_prop.group_places import NAME_BYTES_MAX, Group, GroupBusy
from delta_prop_broker.log.beside.follow import Follower
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.jsonlines import to_line
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop.client.delivered import DeliveredBatch
    from delta_prop.commands.connecting import Link
    from delta_prop.commands.places import At
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.topics import Topic

OK = 0
POLL_S = 0.02
KEEP_S = 1.0
"""How often a group's place is written down."""
STANDBY_LOOK_S = 0.5
"""How often it is looked whether the group's reader has gone."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to read where: a directory, or over a link. `start`: where a new group begins, or nobody's
    subscription; None: a group at earliest, nobody's at latest. `count` None: all. `follow`: go on where
    the log ends.
    """

    place: str | Link
    topics: tuple[str, ...] = ()
    start: str | None = None
    count: int | None = None
    group: str | None = None
    follow: bool = True


async def subscribe(wanted: Wanted) -> int:
    """Write the lines. Raises UsageError, Refused (CURSOR_TOO_OLD), LogDamaged, OSError."""
    if wanted.count is not None and wanted.count < 1:
        raise UsageError(f"--count {wanted.count}: give 1 or more")
    fault = None if wanted.group is None else name_fault("group", wanted.group, NAME_BYTES_MAX)
    if fault is not None:
        raise UsageError(fault)
    edge.check_standard_output()  # now, as a line may be long in coming
    topics = parse_topics(wanted.topics or "*")
    at = None if wanted.start is None else parse_at("--start", wanted.start, edge.wall_us())
    if not isinstance(wanted.place, str):
        await _subscribe_from(wanted.place, wanted, at)
        return OK
    group = None
    if wanted.group is not None:
        with opened_log(wanted.place) as (disk, log, _):
            log_id = log.log_id
        group = await _group(disk, wanted.group, log_id)
    try:
        with opened_log(wanted.place) as (disk, log, _):  # not before: it went on while this stood by
            if group is None or group.next_offset is None:
                begin = offset_of(at or (LATEST if group is None else EARLIEST), log)
            else:
                begin = group.next_offset
            _check(begin, log)
        if group is not None:
            group.next_offset = begin
        with closing(Follower(disk, begin, synced=log.visible)) as follower:
            await _Reading(wanted, topics, group, follower).run()
    finally:
        if group is not None:
            group.close()
    return OK


async def _group(disk: Disk, name: str, log_id: bytes) -> Group:
    """A group, once nobody else reads for it. Raises UsageError, OSError."""
    told = False
    while True:
        try:
            group = Group(disk, name, log_id)
        except GroupBusy:
            if not told:
                edge.note(f"another process reads for group {name!r}: standing by until it has ended")
            told = True
            await anyio.sleep(STANDBY_LOOK_S)
        else:
            if told:
                edge.note(f"reading for group {name!r} now")
            return group


async def _subscribe_from(link: Link, wanted: Wanted, at: At | None) -> None:
    """The same of a server."""
    try:
        subscriber = Subscriber(
            link.addresses,
            *(wanted.topics or ("*",)),
            start=None if at is None else place_of(at),
            group=wanted.group,
            ack="manual",
            name="delta-prop subscribe",
            token=link.token,
            tls=link.tls,
        )
        async with waiting_for(subscriber), subscriber:
            await _write_from(subscriber, wanted)
    except Refused as refused:
        if refused.code is not ErrorCode.BAD_REQUEST:
            raise
        raise UsageError(refused.message) from None


async def _write_from(subscriber: Subscriber, wanted: Wanted) -> None:
    left, end, look_s = wanted.count, subscriber.log_end, inf if wanted.group is None else STANDBY_LOOK_S
    while True:
        await _until_its_turn(subscriber, wanted)
        batch: DeliveredBatch | None = None
        with anyio.move_on_after(look_s if wanted.follow else POLL_S):
            batch = await subscriber.next_batch()
        if batch is None:  # nothing lies here unread
            if wanted.follow or subscriber.standing_by:
                continue
            if end is None or subscriber.received >= end:
                return
            continue
        for offset, _, delta in batch:
            if not wanted.follow and end is not None and offset >= end:
                return
            edge.put(to_line(delta, offset))
            subscriber.ack(offset)
            left = None if left is None else left - 1
            if left == 0:
                return
        await anyio.lowlevel.checkpoint()


async def _until_its_turn(subscriber: Subscriber, wanted: Wanted) -> None:
    """Wait while another member reads for the group. Raises why nothing comes any more."""
    if not subscriber.standing_by:
        return
    edge.note(f"another member reads for group {wanted.group!r}: standing by until it has gone")
    while subscriber.standing_by:
        subscriber.check()
        await anyio.sleep(POLL_S)
    edge.note(f"reading for group {wanted.group!r} now, from offset {subscriber.received}")


def _check(begin: int, log: DurableLog) -> None:
    if begin > log.visible:
        raise UsageError(f"--start {begin}: the log ends at offset {log.visible}: give that, or latest")


class _Reading:
    """One run through the log."""

    def __init__(self, wanted: Wanted, topics: list[Topic], group: Group | None, follower: Follower) -> None:
        self._wanted = wanted
        self._topics = topics
        self._group = group
        self._follower = follower
        self._begin = follower.offset
        self._left = wanted.count

    async def run(self) -> None:
        kept_at = edge.now()
        while True:
            for place in self._follower.read():
                self._write(place.logged)
                if self._left == 0:
                    return
                if edge.now() - kept_at > KEEP_S and self._group is not None:
                    self._group.keep()
                    kept_at = edge.now()
                await anyio.lowlevel.checkpoint()
            if self._group is not None:
                self._group.keep()
            if not self._wanted.follow:
                return
            await anyio.sleep(POLL_S)

    def _write(self, logged: LoggedBatch) -> None:
        for offset, line in self._lines(logged):
            edge.put(line)
            self._note(offset + 1)
            if self._left is not None:
                self._left -= 1
                if self._left == 0:
                    return
        self._note(logged.next_offset)

    def _lines(self, logged: LoggedBatch) -> Iterator[tuple[int, str]]:
        batch = logged.batch
        if batch.is_control:
            return
        for row in range(max(self._begin - logged.offset, 0), batch.count):
            delta = batch.delta(row, logged.source)
            if any(topic.matches(delta) for topic in self._topics):
                yield logged.offset + row, to_line(delta, logged.offset + row)

    def _note(self, next_offset: int) -> None:
        if self._group is not None:
            self._group.next_offset = next_offset
