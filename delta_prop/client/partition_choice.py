"""The partition that a caller names for a client. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from delta_prop_wire.bounds import check_integer, check_name
from delta_prop_wire.delta import Kind
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import PARTITION_BITS
from delta_prop_wire.stamp import DEFAULT_LOG, LogName
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delta_prop_wire.delta import Delta
    from delta_prop_wire.frames import StreamDescription

DEFAULT_STREAM = "default"
STREAM_BYTES_MAX = 249
STREAM_ID_MAX = (1 << 32) - 1
OPEN_PARTITIONS_MAX = 1_000
"""Maximum number of partitions that one client opens at a time, with a connection to each."""
CallPartition: TypeAlias = "int | Literal['sticky'] | None"
"""The partition of a call for all partitions: a number, a sticky one, or None: that of each vector."""


@dataclass(frozen=True, slots=True)
class PartitionChoice:
    """A partition as a caller names it, by the name of its stream, or by the stream's id.

    `partition`: None for the only one of the stream.
    """

    stream: str | int = DEFAULT_STREAM
    partition: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stream, str):
            check_name("stream", self.stream, STREAM_BYTES_MAX)
        else:
            check_integer("stream", self.stream, STREAM_ID_MAX)
        if self.partition is not None:
            check_integer("partition", self.partition, (1 << PARTITION_BITS) - 1)

    @property
    def known(self) -> LogName | None:
        """The partition if it is known without asking: that of the default stream, or by id; else None."""
        if isinstance(self.stream, int):
            return LogName(self.stream, self.partition or 0)
        return DEFAULT_LOG if self.stream == DEFAULT_STREAM and not self.partition else None

    def resolve(self, stream: StreamDescription) -> LogName:
        """Return the partition. Raises UsageError if there is none, or if one of several must be named."""
        number = self.partition
        if number is None and stream.count > 1:
            raise UsageError(
                f"stream {stream.name!r} has {stream.count} partitions: name one with partition=…, or use "
                "StreamProducer and StreamSubscriber for all"
            )
        if number is not None and number >= stream.count:
            raise UsageError(
                f"partition {number}: stream {stream.name!r} has {stream.count}: give 0 to {stream.count - 1}"
            )
        return LogName(stream.stream, number or 0)


def stream_with_id(streams: Iterable[StreamDescription], stream_id: int) -> StreamDescription:
    """Return the one of a service's streams that has this id. Raises UsageError."""
    for stream in streams:
        if stream.stream == stream_id:
            return stream
    raise UsageError(f"stream {stream_id}: the service has none with this id: give a name, or another id")


def check_open_count(stream: str | int, count: int, fix: str) -> None:
    """Check that one client may open this many partitions of a stream. Raises UsageError with the `fix`."""
    if count > OPEN_PARTITIONS_MAX:
        raise UsageError(
            f"stream {stream!r}: {count} partitions are too many for one client, which opens up to "
            f"{OPEN_PARTITIONS_MAX}: {fix}"
        )


def check_call_partition(partition: object, count: int) -> int | None:
    """Return the number that a caller names; None for a sticky partition. Raises UsageError."""
    if partition == "sticky":
        return None
    if not isinstance(partition, int) or isinstance(partition, bool) or not 0 <= partition < count:
        raise UsageError(f"partition {partition!r:.40}: give 'sticky', or a number from 0 to {count - 1}")
    return partition


def check_messages(deltas: Sequence[Delta]) -> None:
    """Raise UsageError unless each delta may go to any partition: an opaque message, whatever precedes it."""
    for row, delta in enumerate(deltas):
        kind = delta.operation.kind
        if kind <= Kind.METADATA and kind != Kind.OPAQUE:
            raise UsageError(
                f"row {row}: partition 'sticky' takes only opaque messages, not {kind_name(kind)}: leave "
                "`partition` out, so that the delta is in the partition of its vector"
            )
        if delta.expect is not None:
            raise UsageError(
                f"row {row}: `expect` depends on the partition of the vector: leave `partition` out"
            )
