"""`subscribe`: writes a log's deltas as JSON lines from a position on, new ones as they come.

It reads a server, or a directory, also while a process writes it. A group's offset is committed after the
lines are written, so after a kill some lines are repeated and none is missing.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from delta_prop.calls.argument_checks import parse_topics
from delta_prop.client import StreamSubscriber, Subscriber
from delta_prop.client.connector import Connector
from delta_prop.client.partition_choice import PartitionChoice, check_open_count
from delta_prop.client.stream_lookup import describe_stream
from delta_prop.commands.connect_options import ConnectOptions, read_position, source_of
from delta_prop.commands.directory_reader import read_directory
from delta_prop.commands.line_writer import LineWriter
from delta_prop.commands.wait_reporter import (
    NO_PORT,
    WaitReporter,
    report_lookup,
    report_subscriber_waits,
)
from delta_prop.delivery.group_cursor import NAME_BYTES_MAX
from delta_prop.directory.log_positions import (
    LogPosition,
    check_name_argument,
    check_start_of_all,
    subscribe_start_of,
)
from delta_prop.platform import system
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from argparse import Namespace

    from delta_prop.client.delivered_batch import DeliveredBatch

OK = 0
POLL_S = 0.02
STANDBY_POLL_S = 0.5
"""Interval between checks that this member reads for its group."""


async def subscribe(options: Namespace) -> int:
    """Write the deltas as lines. Raises UsageError, Refused (CURSOR_TOO_OLD), LogCorrupted, OSError."""
    source = source_of(options)
    if options.group is not None:
        check_name_argument("group", options.group, NAME_BYTES_MAX)
    system.check_standard_output()  # now, since the first line may come much later
    parse_topics(options.topic or "*")
    position = read_position("--start", options.start, None)
    if isinstance(source, str):
        await read_directory(source, options, position)
    else:
        await _subscribe_to_server(source, options, position)
    return OK


async def _subscribe_to_server(
    connect_options: ConnectOptions, options: Namespace, position: LogPosition | None
) -> None:
    addresses, token, tls = connect_options
    common: dict[str, Any] = {
        "start": None if position is None else subscribe_start_of(position),
        "group": options.group,
        "ack": "manual",
        "name": "delta-prop subscribe",
        "token": token,
        "tls": tls,
        "stream": options.stream,
    }
    topics = options.topic or ("*",)
    try:
        choice = PartitionChoice(options.stream, options.partition)
        count = 1
        if choice.known is None and choice.partition is None:
            count = await _find_partition_count(connect_options, choice.stream)
        if count == 1:
            subscriber = Subscriber(addresses, *topics, partition=options.partition, **common)
            async with report_subscriber_waits(subscriber), subscriber:
                await _write_from_server(subscriber, options)
        else:
            check_open_count(options.stream, count, "name one with --partition")
            check_start_of_all(position, options.stream, count)
            merged = StreamSubscriber(addresses, *topics, **common)
            async with report_subscriber_waits(merged), merged:
                await _write_all_partitions(merged, options)
    except Refused as refused:
        if refused.code not in (ErrorCode.BAD_REQUEST, ErrorCode.UNKNOWN_STREAM, ErrorCode.WRONG_PARTITION):
            raise
        raise UsageError(refused.message) from None


async def _find_partition_count(connect_options: ConnectOptions, stream: str | int) -> int:
    """Ask a server for a stream. Raises Refused, Unreachable, UsageError."""
    addresses, token, tls = connect_options
    connector = Connector(addresses, token=token, tls=tls, settings=None, world=None)
    connector.open()
    wait_reporter = WaitReporter(NO_PORT)
    async with wait_reporter.report():
        return (await describe_stream(stream, connector, on_link=report_lookup(wait_reporter))).count


async def _write_from_server(subscriber: Subscriber, options: Namespace) -> None:
    writer, end = LineWriter(options.count), subscriber.log_end
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
            writer.put(delta, offset)
            subscriber.ack(offset)
            if writer.is_done:
                return
        await anyio.lowlevel.checkpoint()


async def _write_all_partitions(subscriber: StreamSubscriber, options: Namespace) -> None:
    writer, standing_by = LineWriter(options.count), set[int]()
    unfinished = dict(enumerate([] if options.follow else await subscriber.end_offsets()))
    follow_s = inf if options.group is None else STANDBY_POLL_S
    while True:
        standing_by = _report_standby(subscriber, standing_by, options.group)
        for partition, cursor in enumerate(subscriber.cursors):
            if cursor is not None and cursor.next_offset >= unfinished.get(partition, inf):
                del unfinished[partition]
        if not (options.follow or unfinished):
            return
        found: tuple[int, DeliveredBatch] | None = None
        with anyio.move_on_after(follow_s if options.follow else POLL_S):
            found = await subscriber.next_batch()
        if found is None:
            continue
        partition, batch = found
        for offset, _, delta in batch:
            if not options.follow and offset >= unfinished.get(partition, 0):
                unfinished.pop(partition, None)
                break
            writer.put(delta, offset, partition)
            subscriber.ack(partition, offset)
            if writer.is_done:
                return
        await anyio.lowlevel.checkpoint()


def _report_standby(subscriber: StreamSubscriber, before: set[int], group: str | None) -> set[int]:
    """Report the partitions that other members read, and those that this one reads now; return the former."""
    standing_by = set(subscriber.standing_by)
    for partition in sorted(standing_by - before):
        system.note(
            f"another member reads partition {partition} for group {group!r}: standing by until it leaves"
        )
    for partition in sorted(before - standing_by):
        system.note(f"reading partition {partition} for group {group!r} now")
    return standing_by


async def _wait_while_standby(subscriber: Subscriber, options: Namespace) -> None:
    """Wait while another member reads for the group. Raises the reason why nothing more comes."""
    if not subscriber.standing_by:
        return
    system.note(f"another member reads for group {options.group!r}: standing by until it leaves")
    while subscriber.standing_by:
        subscriber.check()
        await anyio.sleep(POLL_S)
    system.note(f"reading for group {options.group!r} now, from offset {subscriber.received}")
