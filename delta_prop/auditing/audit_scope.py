"""Scope of an audit: the range of the log, the sink's progress, and the sink's quarantine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from delta_prop.auditing.folding import FoldInput
from delta_prop.auditing.sink_file import SinkRows, StorageSinkFile
from delta_prop.delivery.cursors import read_cursors
from delta_prop.delivery.quarantine import Quarantine
from delta_prop.directory.readonly_log import (
    DEFAULT_PARTITION,
    PartitionName,
    open_prefix_snapshot,
    open_readonly_log,
)
from delta_prop.directory.stored_partitions import find_partition
from delta_prop.directory.stored_sinks import read_quarantines
from delta_prop_broker.disk import Disk
from delta_prop_broker.retention.snapshot import Snapshot
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_wire.errors import UsageError


@dataclass(frozen=True, slots=True)
class AuditedLog:
    """A complete log: it has all rows since its beginning, or a snapshot in place of the first ones."""

    log_id: bytes
    start: int
    end: int
    disk: Disk
    snapshot: Snapshot | None
    directory: str = DIRECTORY

    def fold_input(self, sink_offset: int | None, rows: SinkRows) -> FoldInput:
        """Return the input of a fold up to the sink's progress, `sink_offset`; None: up to the log's end."""
        sink_offset = self.end if sink_offset is None else sink_offset
        # A row may be ahead of its sink's cursor; it is compared with the log up to its own delta.
        row_offset_of = None
        if rows.highest_offset() >= sink_offset:

            def row_offset_of(key: str) -> int:
                namespace, _, vector_id = key.partition("\0")
                return rows.offset_of(namespace, vector_id)

        return FoldInput(
            self.disk, self.snapshot, self.start, self.end, sink_offset, row_offset_of, self.directory
        )


@contextmanager
def open_audited_log(path: str, name: PartitionName = DEFAULT_PARTITION) -> Iterator[AuditedLog]:
    """Open a log in a data directory as it is now. Raises UsageError, Refused, LogCorrupted, OSError."""
    partition = find_partition(path, name)
    with partition.open_log() as (_, log, _), open_prefix_snapshot(log) as snapshot:
        start = log.start_offset if snapshot is None else snapshot.offset
        is_complete = log.start_offset == 0 if snapshot is None else snapshot.facts.begin == 0
        if not is_complete:
            raise lost_prefix_error(path)
        end, directory = max(log.high_watermark, start), partition.place.log_path
        yield AuditedLog(log.log_id, start, end, partition.root, snapshot, directory)


def lost_prefix_error(path: str) -> UsageError:
    """Return the error of a log without its beginning."""
    return UsageError(
        f"log in {path!r}: its beginning was lost without a snapshot, so it is incomplete: audit a copy "
        "that has the beginning"
    )


def sink_offset_of(file: StorageSinkFile, path: str, log_id: bytes) -> int:
    """Return a storage sink's progress: the next offset of its cursor, or 0 if it has none.

    Raises UsageError if its file is of another log.
    """
    if file.cursor is not None and file.cursor.log_id != log_id:
        raise UsageError(
            f"{file.path} belongs to log {file.cursor.log_id.hex()}, but {path!r} has log {log_id.hex()}: "
            "name the directory of the log that the sink was attached to, or rebuild the sink"
        )
    return 0 if file.cursor is None else file.cursor.next_offset


def check_sink_offset(sink_offset: int, start: int, end: int) -> None:
    """Raise UsageError if a log from `start` to `end` does not include a sink's progress."""
    if sink_offset < start:
        raise UsageError(
            f"the sink has reached offset {sink_offset}, but the log has uncompacted deltas only from "
            f"{start} on: attach the sink, which rebuilds it, and then audit it"
        )
    if sink_offset > end:
        raise UsageError(
            f"the sink has reached offset {sink_offset}, but the log ends at {end}: the log lost rows, or "
            "the sink followed another copy of it: rebuild the sink, or name that copy"
        )


def read_known_sinks(path: str, partition: PartitionName = DEFAULT_PARTITION) -> dict[str, Quarantine | None]:
    """Read the names of the sinks that a partition remembers, with the quarantine of each, if any.

    Raises UsageError, Refused, QuarantineCorrupted, OSError.
    """
    with open_readonly_log(path, partition) as (disk, log, _):
        known: dict[str, Quarantine | None] = dict.fromkeys(read_cursors(disk, log.log_id))
        return known | read_quarantines(disk, log.log_id, log.epoch_end)


def read_quarantined_keys(
    path: str, name: str | None, partition: PartitionName = DEFAULT_PARTITION
) -> frozenset[str]:
    """Return the keys of the vectors with deltas in a sink's quarantine; none if `name` is None.

    Raises UsageError if no such sink is remembered.
    """
    if name is None:
        return frozenset()
    known = read_known_sinks(path, partition)
    if name not in known:
        names = ", ".join(sorted(known)) or "none"
        raise UsageError(
            f"no sink named {name!r:.100} is remembered in {path!r:.300}: give one of these: {names}"
        )
    quarantine = known[name]
    return (
        frozenset()
        if quarantine is None
        else frozenset("\0".join(record.vector) for record in quarantine.records())
    )
