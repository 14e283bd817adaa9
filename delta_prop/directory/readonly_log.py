"""Opens a data directory only to read, also while a process writes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from delta_prop.platform.path_checks import DATA_DIRECTORY_FIX
from delta_prop.platform.system import open_existing_disk, pause
from delta_prop_broker.corruption import LogCorrupted, add_directory_to_errors
from delta_prop_broker.disk import Disk
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.recovery.recovery import RecoveryReport
from delta_prop_broker.retention.snapshot import Snapshot
from delta_prop_broker.segments.identity import check_format
from delta_prop_wire.errors import UsageError

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


@contextmanager
def open_readonly_log(path: str) -> Iterator[tuple[Disk, DurableLog, RecoveryReport]]:
    """Open the log up to its recovery point; at the end its files are closed, but its counts stay readable.

    Raises UsageError, LogCorrupted, FormatUnknown, OSError.
    """
    disk, log, report = _open_with_retries(path)
    try:
        with add_directory_to_errors(path):
            yield disk, log, report
    finally:
        log.close()


def _open_with_retries(path: str) -> tuple[Disk, DurableLog, RecoveryReport]:
    disk = open_disk(path)
    for attempt in range(_ATTEMPTS_MAX):
        try:
            log, report = DurableLog.open(
                disk, settings=LogSettings(), randomness=_NoRandomness(), clock=_NoClock(), read_only=True
            )
        except (LogCorrupted, FileNotFoundError):
            # The writer may have removed or sealed a segment since the directory was listed.
            if attempt + 1 == _ATTEMPTS_MAX:
                raise
            pause(_RETRY_S)
        else:
            return disk, log, report
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
