"""The partitions of a service's stream: finds them, their bounds, and reads one of them.

The driver finds a stream once by its name; tasks get its id, which is never used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop.client.facts import describe
from delta_prop.client.partition_choice import DEFAULT_STREAM, PartitionChoice
from delta_prop.client.ranges import LogBounds, RangeReader
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import StreamDescription
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import DEFAULT_LOG, LogName

if TYPE_CHECKING:
    from delta_prop.spark.options import Remote

_NAMES_LISTED_MAX = 10


@dataclass(frozen=True, slots=True)
class ServedStream:
    """A stream of a service: its name, its id, and the number of its partitions."""

    name: str = DEFAULT_STREAM
    stream_id: int = DEFAULT_LOG.stream
    count: int = 1

    def log_name(self, partition: int) -> LogName:
        """Return the name of a partition's log."""
        return LogName(self.stream_id, partition)

    def choose(self, partition: int | None) -> Sequence[int]:
        """Return the number of one partition; of all for None. Raises UsageError if there is none."""
        if partition is None:
            return range(self.count)
        description = StreamDescription(self.name, self.stream_id, (), self.count)
        return [PartitionChoice(self.name, partition).resolve(description).partition]


DEFAULT_SERVED = ServedStream()


def find_served_stream(remote: Remote, name: str) -> ServedStream:
    """Return a service's stream; the default one is known without asking. Raises UsageError, Unreachable."""
    if name == DEFAULT_STREAM:
        return DEFAULT_SERVED
    # All are described, since a request for one that is unknown is retried until its timeout.
    described = describe(
        remote.addresses,
        token=remote.token,
        tls=remote.tls,
        timeout_s=remote.settings.open_timeout_s,
    ).streams
    found = next((stream for stream in described if stream.name == name), None)
    if found is None:
        names = ", ".join(stream.name for stream in described[:_NAMES_LISTED_MAX])
        raise UsageError(f"stream {name!r:.80}: unknown: give one of {names}, or create it")
    return ServedStream(found.name, found.stream, found.count)


def read_bounds(remote: Remote, stream: ServedStream, numbers: Sequence[int]) -> dict[int, LogBounds]:
    """Return the bounds of these partitions, by number. Raises Refused, Unreachable, UsageError."""
    found: dict[int, LogBounds] = {}
    if len(numbers) > 1:  # one request instead of a connection for each
        found = _describe_bounds(remote, stream)
    return {number: found.get(number) or _bounds_of(remote, stream, number) for number in numbers}


def _describe_bounds(remote: Remote, stream: ServedStream) -> dict[int, LogBounds]:
    try:
        (found,) = describe(
            remote.addresses,
            stream.name,
            ranges=True,
            token=remote.token,
            tls=remote.tls,
            timeout_s=remote.settings.open_timeout_s,
        ).streams
    except Refused as refused:
        if refused.code is ErrorCode.UNKNOWN_STREAM:
            raise UsageError(refused.message) from None
        raise
    if found.stream != stream.stream_id:
        raise UsageError(f"stream {stream.name!r} was deleted, and another one created: start the job again")
    return {
        one.partition: LogBounds(one.log.log_id, one.log.epoch, one.start_offset, one.log.next_offset)
        for one in found.partitions
    }


def _bounds_of(remote: Remote, stream: ServedStream, number: int) -> LogBounds:
    return partition_reader(remote, stream.log_name(number)).bounds()


def partition_reader(remote: Remote, log: LogName = DEFAULT_LOG) -> RangeReader:
    """Return a reader of one partition of a service."""
    return RangeReader(
        remote.addresses, token=remote.token, tls=remote.tls, settings=remote.settings, partition=log
    )
