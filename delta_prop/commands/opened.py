"""A data directory, opened for reading alone: beside the process that writes it, if there is one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from delta_prop.commands.edge import existing_disk, pause
from delta_prop.local_places import THE_ONE_WRITTEN
from delta_prop_broker.log.damage import LogDamaged, naming
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.files.identity import check_format
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.files.snapshot import Snapshot
    from delta_prop_broker.log.parts.recovered import RecoveryReport

_TRIES = 5
_TRY_AGAIN_S = 0.05


def open_disk(path: str, *, damaged: bool = False, cure: str = THE_ONE_WRITTEN) -> Disk:
    """The disk of a data directory, with `damaged` one whose format file cannot be read too.

    `cure`: what to do where there is none.

    Raises UsageError where there is none, LogDamaged, FormatUnknown, FormatOutdated, OSError.
    """
    disk = existing_disk(path, cure)
    try:
        formatted = check_format(disk)
    except LogDamaged:
        if not damaged:
            raise
        formatted = True
    if not formatted and not disk.list("streams"):
        raise UsageError(f"{path!r} is no data directory: {cure}")
    return disk


@contextmanager
def opened_log(path: str) -> Iterator[tuple[Disk, DurableLog, RecoveryReport]]:
    """The log as far as it is synced; its files are closed at the end, and what it knows of itself stays.

    Raises UsageError, LogDamaged, FormatUnknown, OSError.
    """
    disk, log, report = _open_log(path)
    try:
        with naming(path):
            yield disk, log, report
    finally:
        log.close()


def _open_log(path: str) -> tuple[Disk, DurableLog, RecoveryReport]:
    disk = open_disk(path)
    for tried in range(_TRIES):
        try:
            log, report = DurableLog.open(
                disk, settings=LogSettings(), draw=_draws_nothing, clock=_NoClock(), read_only=True
            )
        except (LogDamaged, FileNotFoundError):
            # The writer may have removed or sealed a segment between two looks at the directory.
            if tried + 1 == _TRIES:
                raise
            pause(_TRY_AGAIN_S)
        else:
            return disk, log, report
    raise AssertionError


@contextmanager
def snapshot_before(log: DurableLog) -> Iterator[Snapshot | None]:
    """The snapshot that stands for what the log no longer tells; None where that is nothing, or not kept.

    Its file is closed at the end. Raises LogDamaged, OSError.
    """
    snapshot = log.snapshot() if log.first_offset else None
    try:
        yield snapshot
    finally:
        if snapshot is not None:
            snapshot.close()


def snapshot_told(log: DurableLog) -> dict[str, Any] | None:
    """What is said of a log's snapshot, None where there is none. Raises LogDamaged, OSError."""
    found = log.snapshot()
    if found is None:
        return None
    found.close()
    facts = found.facts
    told: dict[str, Any] = {"offset": found.offset, "rows": found.rows, "bytes": found.bytes}
    told |= {"alive": facts.alive, "late": facts.late, "unfolded": facts.unfolded}
    return told | {"counts_from": facts.begin} if facts.begin else told


class _NoClock:
    """A clock for reading alone, which asks for no time."""

    def now(self) -> float:
        raise AssertionError("reading alone asks for no time")

    wall_us: Any = now


def _draws_nothing(count: int) -> bytes:
    raise AssertionError(f"reading alone draws no {count} random bytes")
