"""What a sink is held to: how far the log tells, how far the sink has come, what its quarantine holds."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop.auditing.folding import Span
from delta_prop.commands.opened import opened_log, snapshot_before
from delta_prop.commands.quarantine import quarantined
from delta_prop.cursors import read_cursors
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop.auditing.stored import Rows, StoredFile
    from delta_prop.route.quarantine import Quarantine
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.files.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class AuditedLog:
    """A log of which everything is told, from its beginning or from a snapshot on."""

    log_id: bytes
    begin: int
    end: int
    disk: Disk
    snapshot: Snapshot | None

    def span(self, come: int | None, rows: Rows) -> Span:
        """What of it is folded for a sink with these rows, which has come behind offset `come`; None: all."""
        come = self.end if come is None else come
        # A row may be ahead of its sink's cursor; it is held to what the log has up to its own delta.
        ahead = None
        if rows.highest_offset() >= come:

            def ahead(key: str) -> int:
                namespace, _, vector_id = key.partition("\0")
                return rows.offset_of(namespace, vector_id)

        return Span(self.disk, self.snapshot, self.begin, self.end, come, ahead)


@contextmanager
def audited_log(path: str) -> Iterator[AuditedLog]:
    """The log in a data directory as it is now. Raises UsageError, LogDamaged, OSError."""
    with opened_log(path) as (disk, log, _), snapshot_before(log) as snapshot:
        begin = log.first_offset if snapshot is None else snapshot.offset
        whole = log.first_offset == 0 if snapshot is None else snapshot.facts.begin == 0
        if not whole:
            raise lost_beginning(path)
        yield AuditedLog(log.log_id, begin, max(log.visible, begin), disk, snapshot)


def lost_beginning(path: str) -> UsageError:
    """The message about a log that cannot tell of all."""
    return UsageError(f"the log in {path!r} lost its beginning without a snapshot: it cannot tell of all")


def reached_by(file: StoredFile, path: str, log_id: bytes) -> int:
    """The offset behind what a storage sink has taken. Raises UsageError where its file is of another log."""
    if file.come is not None and file.come.log_id != log_id:
        raise UsageError(
            f"{file.path} is of log {file.come.log_id.hex()}, the log in {path!r} is {log_id.hex()}: name "
            "the directory of the log that it was attached to, or rebuild it"
        )
    return 0 if file.come is None else file.come.next_offset


def check_come(come: int, begin: int, end: int) -> None:
    """Raises UsageError where a log from `begin` to `end` cannot tell of a sink that has come so far."""
    if come < begin:
        raise UsageError(
            f"the sink has come to offset {come}, the log tells of single deltas from {begin} on: it "
            "is rebuilt when it is attached; audit it then"
        )
    if come > end:
        raise UsageError(
            f"the sink has come to offset {come}, the log ends at {end}: it is ahead, by what the log "
            "has lost, or is of another copy of it"
        )


def known_sinks(path: str) -> dict[str, Quarantine | None]:
    """The sinks that a data directory remembers, and what they have set aside.

    Raises UsageError, QuarantineDamaged, OSError.
    """
    with opened_log(path) as (disk, log, _):
        known: dict[str, Quarantine | None] = dict.fromkeys(read_cursors(disk, log.log_id))
        return known | quarantined(disk, log.log_id, log.epoch_end)


def set_aside(path: str, name: str | None) -> frozenset[str]:
    """The keys of the vectors of which a sink's quarantine holds deltas; none where it has no name.

    Raises UsageError where no such sink is remembered.
    """
    if name is None:
        return frozenset()
    known = known_sinks(path)
    if name not in known:
        told = ", ".join(sorted(known)) or "none"
        raise UsageError(
            f"no sink named {name!r:.100} is remembered in {path!r:.300}; sinks that are: {told}"
        )
    kept = known[name]
    return frozenset() if kept is None else frozenset("\0".join(one.vector) for one in kept.records())
