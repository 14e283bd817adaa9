"""Writes the deltas of a data directory as lines, of one partition of a stream or of all."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.calls.argument_checks import parse_topics
from delta_prop.commands.line_writer import LineWriter
from delta_prop.delivery.group_cursor import GroupBusy, GroupCursor
from delta_prop.directory.log_positions import (
    EARLIEST,
    LATEST,
    LogPosition,
    check_reached,
    check_start_of_all,
    offset_of,
)
from delta_prop.directory.readonly_log import (
    DEFAULT_PARTITION,
    PartitionName,
    find_place,
    is_used,
    open_disk,
    open_readonly_log,
)
from delta_prop.platform import system
from delta_prop_broker.catalogue.store import read_catalogue
from delta_prop_broker.catalogue.stream import DEFAULT_ID, DEFAULT_STREAM, Stream
from delta_prop_broker.readonly.follow import Follower

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from delta_prop_broker.disk import Disk
    from delta_prop_broker.segments.frames import FrameLocation
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.topics import Topic

POLL_S = 0.02
READ_S = 0.002
"""Minimum pause for each partition after all were read without a new row."""
DEFAULT = Stream(DEFAULT_STREAM, DEFAULT_ID)
SAVE_INTERVAL_S = 1.0
"""Interval between commits of a group's offset."""
OPEN_POLL_S = 0.5
"""Interval between checks that the group is free, and that a partition has a log."""


class PartitionReader:
    """Writes the lines of one partition, and stores the offset of its group; to be closed after use."""

    def __init__(
        self,
        follower: Follower,
        group: GroupCursor | None,
        topics: list[Topic],
        writer: LineWriter,
        partition: int | None,
    ) -> None:
        """`partition`: for the lines; None if they are of one partition."""
        self._follower = follower
        self._group = group
        self._topics = topics
        self._writer = writer
        self._partition = partition
        self._start_offset = follower.offset
        self._frames: Iterator[FrameLocation] = iter(())

    def write_next(self) -> bool:
        """Write the lines of the next batch; return False if there is none now. Raises Refused, OSError."""
        location = next(self._frames, None)
        if location is None:
            self._frames = self._follower.read()
            location = next(self._frames, None)
        if location is None:
            return False
        self._write(location.logged)
        return True

    def store(self) -> None:
        """Store the group's offset, if it has changed. Raises OSError."""
        if self._group is not None:
            self._group.store()

    def close(self) -> None:
        """Store the group's offset, and close all files. Raises OSError."""
        with closing(self._follower):
            if self._group is not None:
                self._group.close()

    def _write(self, logged: LoggedBatch) -> None:
        batch = logged.batch
        count = 0 if batch.is_control else batch.count
        for row in range(max(self._start_offset - logged.offset, 0), count):
            delta = batch.delta(row, logged.source)
            if any(topic.matches(delta) for topic in self._topics):
                self._writer.put(delta, logged.offset + row, self._partition)
                self._advance(logged.offset + row + 1)
                if self._writer.is_done:
                    return
        self._advance(logged.next_offset)

    def _advance(self, next_offset: int) -> None:
        if self._group is not None:
            self._group.next_offset = next_offset


class _Opening:
    """Opens a partition once it has a log, and once no other process reads it for the group."""

    def __init__(
        self, data: str, name: PartitionName, options: Namespace, position: LogPosition | None
    ) -> None:
        self.is_standing_by = False
        """True while another process reads for the group."""
        self._data = data
        self._name = name
        self._group_name: str | None = options.group
        self._position = position or (LATEST if options.group is None else EARLIEST)
        self._log: tuple[Disk, bytes] | None = None  # the directory of its groups, and its id

    def note_missing(self) -> None:
        """Note that it has no log yet: all that it will have is new."""
        if self._position == LATEST:
            self._position = EARLIEST

    def open(self, topics: list[Topic], writer: LineWriter, partition: int | None) -> PartitionReader | None:
        """Open it; return None while another process reads for the group.

        Raises UsageError, Refused, LogCorrupted, OSError.
        """
        group = None
        if self._group_name is not None:
            group = self._acquire(self._group_name, partition)
            if group is None:
                return None
        try:
            # The log is opened again, since it has grown while this process stood by.
            with open_readonly_log(self._data, self._name) as (_, log, _):
                cursor = None if group is None else group.next_offset
                start = offset_of(self._position, log) if cursor is None else cursor
                check_reached(start, log)
            if group is not None:
                group.next_offset = start
            disk = open_disk(self._data)
            directory = find_place(disk, self._name).log_path
            follower = Follower(disk, start, directory, synced=log.high_watermark)
        except BaseException:
            if group is not None:
                group.close()
            raise
        return PartitionReader(follower, group, topics, writer, partition)

    def _acquire(self, name: str, partition: int | None) -> GroupCursor | None:
        if self._log is None:
            with open_readonly_log(self._data, self._name) as (disk, log, _):
                self._log = disk, log.log_id
        of_partition = "" if partition is None else f" partition {partition}"
        try:
            group = GroupCursor(self._log[0], name, self._log[1])
        except GroupBusy:
            if not self.is_standing_by:
                system.note(
                    f"another process reads{of_partition} for group {name!r}: standing by until it ends"
                )
            self.is_standing_by = True
            return None
        if self.is_standing_by:
            system.note(f"reading{of_partition} for group {name!r} now")
        self.is_standing_by = False
        return group


async def read_directory(data: str, options: Namespace, position: LogPosition | None) -> None:
    """Write the deltas of a directory. Raises UsageError, Refused, LogCorrupted, OSError."""
    disk, name = open_disk(data), PartitionName(options.stream, options.partition)
    stream = DEFAULT if name == DEFAULT_PARTITION else read_catalogue(disk).require(options.stream)
    if options.partition is not None or stream.partitions == 1:
        openings: dict[int | None, _Opening] = {None: _Opening(data, name, options, position)}
    else:
        check_start_of_all(position, stream.name, stream.partitions)
        openings = {
            number: _Opening(data, PartitionName(stream.name, number), options, position)
            for number in range(stream.partitions)
        }
    writer, topics = LineWriter(options.count), parse_topics(options.topic or "*")
    readers: list[PartitionReader] = []
    opened_at, stored_at = float("-inf"), system.now()
    with ExitStack() as exits:
        while True:
            if openings and system.now() - opened_at >= OPEN_POLL_S:
                for number in [one for one in openings if one is None or is_used(disk, stream, one)]:
                    reader = openings[number].open(topics, writer, number)
                    if reader is not None:
                        exits.callback(reader.close)
                        readers.append(reader)
                        del openings[number]
                opened_at = system.now()
                for opening in openings.values():
                    opening.note_missing()
            has_written = False
            for reader in readers:
                has_written |= reader.write_next()
                if writer.is_done:
                    return
                await anyio.lowlevel.checkpoint()
            if not has_written or system.now() - stored_at > SAVE_INTERVAL_S:
                for reader in readers:
                    reader.store()
                stored_at = system.now()
            if not has_written:
                if not options.follow and not any(one.is_standing_by for one in openings.values()):
                    return
                await anyio.sleep(max(POLL_S, len(readers) * READ_S))
