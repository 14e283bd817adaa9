"""Opens a data directory only to read, also while a process writes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from delta_prop.platform.path_checks import DATA_DIRECTORY_FIX
from delta_prop.platform.system import open_existing_disk, pause
from delta_prop_broker.catalogue.store import PLACE_OF_DEFAULT, PartitionPlace, place_of, read_catalogue
from delta_prop_broker.catalogue.stream import DEFAULT_STREAM, Stream, check_partition
from delta_prop_broker.corruption import LogCorrupted, add_directory_to_errors
from delta_prop_broker.disk import Disk
from delta_prop_broker.log.data_directory import DataDirectory
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.recovery.recovery import RecoveryReport
from delta_prop_broker.retention.snapshot import Snapshot
from delta_prop_broker.segments.identity import check_format
from delta_prop_broker.subdirectory import Subdirectory
from delta_prop_wire.errors import UsageError
from delta_prop_wire.murmur import partition_of

_ATTEMPTS_MAX = 5
_RETRY_S = 0.05


def open_disk(path: str, *, allow_corrupt: bool = False, fix: str = DATA_DIRECTORY_FIX) -> Disk:
    """Return the disk of a data directory; with `allow_corrupt` also if its format file cannot be read.

    `fix`: the fix that the error names if there is no data directory.

    Raises UsageError if there is none, LogCorrupted, FormatUnknown, FormatOutdated, OSError.
    """
    disk = open_existing_disk(path, fix)
    try:
        has_format = check_format(disk)
    except LogCorrupted:
        if not allow_corrupt:
            raise
        has_format = True
    if not has_format and not disk.list("streams"):
        raise UsageError(f"{path!r} is not a data directory: {fix}")
    return disk


class PartitionName(NamedTuple):
    """A partition of a data directory, as a command names it; `partition`: None for the stream's only one."""

    stream: str = DEFAULT_STREAM
    partition: int | None = None


DEFAULT_PARTITION = PartitionName()


def find_place(disk: Disk, name: PartitionName) -> PartitionPlace:
    """Return where a partition is stored. Raises UsageError, Refused, LogCorrupted, OSError."""
    stream = read_catalogue(disk).require(name.stream)
    if name.partition is None and stream.partitions > 1:
        raise UsageError(
            f"stream {stream.name!r} has {stream.partitions} partitions: name one with --partition"
        )
    number = name.partition or 0
    check_partition(stream, number)
    place = place_of(stream, number)
    if not disk.list(place.log_path):
        raise UsageError(f"partition {number} of stream {stream.name!r} was never used: it has no log yet")
    return place


def is_used(disk: Disk, stream: Stream, partition: int) -> bool:
    """Return True if a partition has a log: it was used. Raises OSError."""
    return bool(disk.list(place_of(stream, partition).log_path))


def partition_of_vector(path: str, stream: str, namespace: str, vector_id: str) -> PartitionName:
    """Return the partition of a vector. Raises UsageError, Refused, LogCorrupted, OSError."""
    if stream == DEFAULT_STREAM:
        return DEFAULT_PARTITION
    count = read_catalogue(open_disk(path)).require(stream).partitions
    return PartitionName(stream, partition_of(namespace, vector_id, count))


@contextmanager
def open_readonly_log(
    path: str, name: PartitionName = DEFAULT_PARTITION
) -> Iterator[tuple[Disk, DurableLog, RecoveryReport]]:
    """Open a log up to its recovery point; at the end its files are closed, but its counts stay readable.

    Yields the directory of the log's readers too. Raises UsageError, Refused (UNKNOWN_STREAM,
    WRONG_PARTITION), LogCorrupted, FormatUnknown, OSError.
    """
    disk, log, report = _open_with_retries(path, name)
    try:
        with add_directory_to_errors(path):
            yield disk, log, report
    finally:
        log.close()


def _open_with_retries(path: str, name: PartitionName) -> tuple[Disk, DurableLog, RecoveryReport]:
    disk = open_disk(path)
    place = PLACE_OF_DEFAULT if name == DEFAULT_PARTITION else find_place(disk, name)
    data = DataDirectory.open(disk, reserve_bytes=0, clock=_NoClock(), read_only=True)
    state = Subdirectory(disk, place.state_path) if place.state_path else disk
    for attempt in range(_ATTEMPTS_MAX):
        try:
            log, report = DurableLog.open_in(
                data,
                place.log_path,
                place.name,
                settings=LogSettings(),
                randomness=_NoRandomness(),
                clock=_NoClock(),
            )
        except (LogCorrupted, FileNotFoundError):
            # The writer may have removed or sealed a segment since the directory was listed.
            if attempt + 1 == _ATTEMPTS_MAX:
                raise
            pause(_RETRY_S)
        else:
            return state, log, report
    raise AssertionError


@contextmanager
def open_prefix_snapshot(log: DurableLog) -> Iterator[Snapshot | None]:
    """Open the snapshot that replaces the log's removed prefix; None if no prefix was removed.

    At the end its file is closed. Raises LogCorrupted, OSError.
    """
    snapshot = log.snapshot() if log.start_offset else None
    try:
        yield snapshot
    finally:
        if snapshot is not None:
            snapshot.close()


def snapshot_to_json(log: DurableLog) -> dict[str, Any] | None:
    """Describe a log's snapshot; None if there is none. Raises LogCorrupted, OSError."""
    snapshot = log.snapshot()
    if snapshot is None:
        return None
    snapshot.close()
    facts = snapshot.facts
    fields: dict[str, Any] = {"offset": snapshot.offset, "rows": snapshot.rows, "bytes": snapshot.bytes}
    fields |= {"alive": facts.alive, "out_of_order": facts.out_of_order, "unfolded": facts.unfolded}
    return fields | {"counts_from": facts.begin} if facts.begin else fields


class _NoClock:
    """A clock that fails if it is used, because reading needs no time."""

    def now(self) -> float:
        raise AssertionError("a log opened to read asked for the time")

    wall_us: Any = now


class _NoRandomness:
    """A source that fails if it is used, because reading draws nothing."""

    def bytes(self, count: int) -> bytes:
        raise AssertionError(f"a log opened to read asked for {count} random bytes")
