"""`subscribe`: writes a log's deltas as JSON lines from a position on, new ones as they come.

It reads a server, or a directory, also while a process writes it. A group's offset is committed after the
lines are written, so after a kill some lines are repeated and none is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from math import inf
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.calls.argument_checks import parse_topics
from delta_prop.client import Subscriber
from delta_prop.commands.connect_options import ConnectOptions, read_position, source_of
from delta_prop.commands.wait_reporter import report_subscriber_waits
from delta_prop.delivery.group_cursor import NAME_BYTES_MAX, GroupBusy, GroupCursor
from delta_prop.directory.log_positions import (
    EARLIEST,
    LATEST,
    LogPosition,
    check_name_argument,
    check_reached,
    offset_of,
    subscribe_start_of,
)
from delta_prop.directory.readonly_log import PartitionName, find_place, open_disk, open_readonly_log
from delta_prop.platform import system
from delta_prop_broker.disk import Disk
from delta_prop_broker.readonly.follow import Follower
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.jsonlines import to_line
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    from argparse import Namespace

    from delta_prop.client.delivered_batch import DeliveredBatch

OK = 0
POLL_S = 0.02
SAVE_INTERVAL_S = 1.0
"""Interval between commits of a group's offset."""
STANDBY_POLL_S = 0.5
"""Interval between checks that the group is free."""


async def subscribe(options: Namespace) -> int:
    """Write the deltas as lines. Raises UsageError, Refused (CURSOR_TOO_OLD), LogCorrupted, OSError."""
    source = source_of(options)
    if options.group is not None:
        check_name_argument("group", options.group, NAME_BYTES_MAX)
    system.check_standard_output()  # now, since the first line may come much later
    topics = parse_topics(options.topic or "*")
    position = read_position("--start", options.start, None)
    if not isinstance(source, str):
        await _subscribe_to_server(source, options, position)
        return OK
    group = None
    name = PartitionName(options.stream, options.partition)
    if options.group is not None:
        with open_readonly_log(source, name) as (disk, log, _):
            log_id = log.log_id
        group = await _acquire_group(disk, options.group, log_id)
    try:
        # The log is opened again, since it has grown while this process stood by.
        with open_readonly_log(source, name) as (_, log, _):
            if group is None or group.next_offset is None:
                start = offset_of(position or (LATEST if group is None else EARLIEST), log)
            else:
                start = group.next_offset
            check_reached(start, log)
        if group is not None:
            group.next_offset = start
        disk = open_disk(source)
        directory = find_place(disk, name).log_path
        with closing(Follower(disk, start, directory, synced=log.high_watermark)) as follower:
            await _DirectoryReader(options, topics, group, follower).run()
    finally:
        if group is not None:
            group.close()
    return OK


async def _acquire_group(disk: Disk, name: str, log_id: bytes) -> GroupCursor:
    """Open a group once no other process reads for it. Raises UsageError, OSError."""
    is_reported = False
    while True:
        try:
            group = GroupCursor(disk, name, log_id)
        except GroupBusy:
            if not is_reported:
                system.note(f"another process reads for group {name!r}: standing by until it ends")
            is_reported = True
            await anyio.sleep(STANDBY_POLL_S)
        else:
            if is_reported:
                system.note(f"reading for group {name!r} now")
            return group


async def _subscribe_to_server(
    connect_options: ConnectOptions, options: Namespace, position: LogPosition | None
) -> None:
    try:
        subscriber = Subscriber(
            connect_options.addresses,
            *(options.topic or ("*",)),
            start=None if position is None else subscribe_start_of(position),
            group=options.group,
            ack="manual",
            name="delta-prop subscribe",
            token=connect_options.token,
            tls=connect_options.tls,
            stream=options.stream,
            partition=options.partition,
        )
        async with report_subscriber_waits(subscriber), subscriber:
            await _write_from_server(subscriber, options)
    except Refused as refused:
        if refused.code not in (ErrorCode.BAD_REQUEST, ErrorCode.UNKNOWN_STREAM, ErrorCode.WRONG_PARTITION):
            raise
        raise UsageError(refused.message) from None


async def _write_from_server(subscriber: Subscriber, options: Namespace) -> None:
    remaining, end = options.count, subscriber.log_end
    poll_s = inf if options.group is None else STANDBY_POLL_S
    while True:
        await _wait_while_standby(subscriber, options)
        batch: DeliveredBatch | None = None
        with anyio.move_on_after(poll_s if options.follow else POLL_S):
            batch = await subscriber.next_batch()
        if batch is None:  # nothing unread is buffered
            if options.follow or subscriber.standing_by:
                continue
            if end is None or subscriber.received >= end:
                return
            continue
        for offset, _, delta in batch:
            if not options.follow and end is not None and offset >= end:
                return
            system.put(to_line(delta, offset))
            subscriber.ack(offset)
            remaining = None if remaining is None else remaining - 1
            if remaining == 0:
                return
        await anyio.lowlevel.checkpoint()


async def _wait_while_standby(subscriber: Subscriber, options: Namespace) -> None:
    """Wait while another member reads for the group. Raises the reason why nothing more comes."""
    if not subscriber.standing_by:
        return
    system.note(f"another member reads for group {options.group!r}: standing by until it leaves")
    while subscriber.standing_by:
        subscriber.check()
        await anyio.sleep(POLL_S)
    system.note(f"reading for group {options.group!r} now, from offset {subscriber.received}")


class _DirectoryReader:
    """Writes deltas of a directory's log as lines, and stores the group's offset."""

    def __init__(
        self, options: Namespace, topics: list[Topic], group: GroupCursor | None, follower: Follower
    ) -> None:
        self._options = options
        self._topics = topics
        self._group = group
        self._follower = follower
        self._start_offset = follower.offset
        self._remaining = options.count

    async def run(self) -> None:
        stored_at = system.now()
        while True:
            for location in self._follower.read():
                self._write(location.logged)
                if self._remaining == 0:
                    return
                if system.now() - stored_at > SAVE_INTERVAL_S and self._group is not None:
                    self._group.store()
                    stored_at = system.now()
                await anyio.lowlevel.checkpoint()
            if self._group is not None:
                self._group.store()
            if not self._options.follow:
                return
            await anyio.sleep(POLL_S)

    def _write(self, logged: LoggedBatch) -> None:
        for offset, line in self._lines(logged):
            system.put(line)
            self._advance(offset + 1)
            self._remaining = None if self._remaining is None else self._remaining - 1
            if self._remaining == 0:
                return
        self._advance(logged.next_offset)

    def _lines(self, logged: LoggedBatch) -> Iterator[tuple[int, str]]:
        batch = logged.batch
        if batch.is_control:
            return
        for row in range(max(self._start_offset - logged.offset, 0), batch.count):
            delta = batch.delta(row, logged.source)
            if any(topic.matches(delta) for topic in self._topics):
                yield logged.offset + row, to_line(delta, logged.offset + row)

    def _advance(self, next_offset: int) -> None:
        if self._group is not None:
            self._group.next_offset = next_offset
