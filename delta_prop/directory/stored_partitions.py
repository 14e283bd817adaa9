"""The partitions of a data directory that have a log, as operators' commands name and list them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from delta_prop.directory.readonly_log import (
    DEFAULT_PARTITION,
    PartitionName,
    find_place,
    is_used,
    open_disk,
    open_readonly_log,
)
from delta_prop_broker.catalogue.catalogue import Catalogue
from delta_prop_broker.catalogue.store import PLACE_OF_DEFAULT, PartitionPlace, place_of, read_catalogue
from delta_prop_broker.catalogue.stream import DEFAULT_STREAM
from delta_prop_broker.segments.identity import Identity, read_identity
from delta_prop_broker.segments.paths import IDENTITY
from delta_prop_broker.subdirectory import Subdirectory
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.recovery.recovery import RecoveryReport


class StoredPartition(NamedTuple):
    """A partition in the data directory `data`. `root`: that directory; `place`: where the partition lies."""

    data: str
    root: Disk
    stream: str
    partition: int
    place: PartitionPlace

    @property
    def is_default(self) -> bool:
        """True for the partition of the default stream."""
        return self.place == PLACE_OF_DEFAULT

    @property
    def disk(self) -> Disk:
        """The directory of the log's readers: cursors, groups, quarantines, jobs."""
        return Subdirectory(self.root, self.place.state_path) if self.place.state_path else self.root

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.stream}/{self.partition}"

    @property
    def suffix(self) -> str:
        """The words after a sink's or group's name in a sentence; nothing for the default partition."""
        return "" if self.is_default else f" in {self.label}"

    @property
    def arguments(self) -> str:
        """The options that name it in a command."""
        options = "" if self.is_default else f" --stream {quote(self.stream)} --partition {self.partition}"
        return f"--data {quote(self.data)}{options}"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that name it in JSON."""
        return {"stream": self.stream, "partition": self.partition}

    def find_identity(self) -> Identity | None:
        """Return the identity of its log; None if it has no log yet. Raises LogCorrupted, OSError."""
        return read_identity(self.root, f"{self.place.log_path}/{IDENTITY}")

    def read_identity(self) -> Identity:
        """Return the identity of its log. Raises UsageError, LogCorrupted, OSError."""
        identity = self.find_identity()
        if identity is None:
            raise UsageError(
                f"{self.data!r} holds no log yet{self.suffix}: publish something, or name another directory"
            )
        return identity

    def open_log(self) -> AbstractContextManager[tuple[Disk, DurableLog, RecoveryReport]]:
        """Open its log to read, as `open_readonly_log` does."""
        name = DEFAULT_PARTITION if self.is_default else PartitionName(self.stream, self.partition)
        return open_readonly_log(self.data, name)


def find_partition(
    data: str, name: PartitionName = DEFAULT_PARTITION, *, allow_corrupt: bool = False
) -> StoredPartition:
    """Return the partition that a command names. `allow_corrupt`: as `open_disk` has it.

    Raises UsageError, Refused (UNKNOWN_STREAM, WRONG_PARTITION), LogCorrupted, OSError.
    """
    root = open_disk(data, allow_corrupt=allow_corrupt)
    if name.stream == DEFAULT_STREAM and not name.partition:
        return StoredPartition(data, root, DEFAULT_STREAM, 0, PLACE_OF_DEFAULT)
    return StoredPartition(data, root, name.stream, name.partition or 0, find_place(root, name))


def list_partitions(
    data: str, stream: str | None = None, partition: int | None = None, *, allow_corrupt: bool = False
) -> list[StoredPartition]:
    """Return the partitions that have a log, the default one first: those of a stream, or of all.

    Returns the default partition if none has. Raises as `find_partition`.
    """
    if partition is not None:
        name = PartitionName(stream or DEFAULT_STREAM, partition)
        return [find_partition(data, name, allow_corrupt=allow_corrupt)]
    root = open_disk(data, allow_corrupt=allow_corrupt)
    streams = (Catalogue() if stream == DEFAULT_STREAM else read_catalogue(root)).streams
    chosen = sorted(streams.values(), key=lambda one: (one.name != DEFAULT_STREAM, one.name))
    if stream is not None:
        chosen = [read_catalogue(root).require(stream)]
    found = [
        StoredPartition(data, root, one.name, number, place_of(one, number))
        for one in chosen
        for number in range(one.partitions)
        if is_used(root, one, number)
    ]
    if not found and stream not in (None, DEFAULT_STREAM):
        raise UsageError(f"stream {stream!r} was never used: it has no log yet")
    return found or [StoredPartition(data, root, DEFAULT_STREAM, 0, PLACE_OF_DEFAULT)]


def have_column(partitions: list[StoredPartition]) -> bool:
    """Return True if a table of these partitions needs a column with their names."""
    return any(not partition.is_default for partition in partitions)
