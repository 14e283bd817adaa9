"""The directory of a log on disk: opens, recovers and closes it, and writes its small files.

The file `time` has the seen times of the log and of its segments: the time for which processes had the log
open. It is replaced now and then, so it can only lag: after a crash, some time is missing, and rows count as
younger than they are. Without the file, all rows count as new.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from delta_prop_broker.corruption import LogCorrupted, add_directory_to_errors
from delta_prop_broker.log.data_directory import DataDirectory
from delta_prop_broker.log_clock import ClockJump, LogClock
from delta_prop_broker.recovery.checkpoints import PART_SUFFIX
from delta_prop_broker.recovery.checkpoints import SUFFIX as CHECKPOINT_SUFFIX
from delta_prop_broker.recovery.recovery import RecoveryResult, recover
from delta_prop_broker.segments.identity import Randomness, write_identity
from delta_prop_broker.segments.paths import IDENTITY, TEMPORARY, TIME
from delta_prop_broker.segments.reserve import Reserve, report_full_disk
from delta_prop_broker.segments.segment import NAME_DIGITS, Segment, Segments
from delta_prop_broker.segments.small_file import Checksum, read_checked, replace_checked

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_wire.stamp import LogName

_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Times:
    """Seen time and log time at one moment, in microseconds, and the newest jump of the wall clock.

    `ended_us`: the seen time of the last append to each sealed segment, keyed by its first offset. `growing`:
    the first offset of the active segment, and the seen time of the first append to it.
    """

    seen_us: int = 0
    time_us: int = 0
    jump: ClockJump | None = None
    ended_us: Mapping[int, int] = field(default_factory=dict)
    growing: tuple[int, int] | None = None

    @classmethod
    def of(cls, clock: LogClock, segments: Segments) -> Times:
        """Return the times of a log, as of the last read of its clock."""
        last = segments.last
        return cls(
            clock.seen_us,
            clock.time_us,
            clock.jump,
            {segment.base: segment.seen_last_us for segment in segments.all[:-1]},
            None if last is None else (last.base, last.seen_first_us),
        )

    def set_ages(self, segments: Iterable[Segment], seen_us: int) -> None:
        """Set the seen times of recovered segments. `seen_us`: the seen time now."""
        for segment in segments:
            # The last append to a segment that the times lack may be as recent as this moment.
            segment.seen_last_us = segment.seen_first_us = self.ended_us.get(segment.base, seen_us)
            if self.growing is not None and self.growing[0] == segment.base:
                segment.seen_first_us = self.growing[1]


def read_times(disk: Disk, directory: str, notes: list[str]) -> Times:
    """Read the file; if it is missing or cannot be used, return the times of a new log.

    If it cannot be used, append the reason to `notes`.
    """
    path = f"{directory}/{TIME}"
    try:
        body = read_checked(disk, path, Checksum.FIRST_LINE, bytes_max=_BYTES_MAX)
    except OSError as error:
        notes.append(f"{path} cannot be read ({error}) and is not used: all rows of the log count as new")
        return Times()
    except LogCorrupted:
        notes.append(f"{path} is corrupted and not used: all rows of the log count as new")
        return Times()
    if body is None:
        return Times()
    fields = json.loads(body)
    return Times(
        seen_us=fields["seen_us"],
        time_us=fields["time_us"],
        jump=None if fields["jump"] is None else ClockJump(*fields["jump"]),
        ended_us=dict(fields["ended_us"]),
        growing=None if fields["growing"] is None else tuple(fields["growing"]),
    )


def write_times(disk: Disk, directory: str, times: Times) -> None:
    """Replace the file durably. Raises OSError."""
    fields = asdict(times) | {"ended_us": list(times.ended_us.items())}
    replace_checked(disk, f"{directory}/{TIME}", json.dumps(fields).encode(), Checksum.FIRST_LINE)


class LogDirectory:
    """The open directory of a log, until `close`.

    `path`: its path in the data directory; `name`: for its stamps. `is_writable`: False if the log is open
    read-only, or closed. `recoveries`: number of recoveries in place.
    """

    def __init__(
        self,
        data: DataDirectory,
        path: str,
        name: LogName,
        recovered: RecoveryResult,
        *,
        settings: LogSettings,
        randomness: Randomness,
    ) -> None:
        """Use `open`."""
        self.data, self.path, self.name = data, path, name
        data.open_logs.add(path)
        self.owns_data = False  # True: the data directory closes with this one
        self.is_writable = data.is_writable
        self.identity = recovered.identity
        self.checkpoints = recovered.checkpoints
        self.recovery_point = recovered.recovery_point
        self.recoveries = 0
        self._made_by = settings.made_by
        self._randomness = randomness

    @property
    def disk(self) -> Disk:
        """The disk of the data directory."""
        return self.data.disk

    @property
    def reserve(self) -> Reserve:
        """The disk space for writes that must succeed on a full disk."""
        return self.data.reserve

    @classmethod
    def open(
        cls, data: DataDirectory, path: str, name: LogName, settings: LogSettings, randomness: Randomness
    ) -> tuple[LogDirectory, RecoveryResult]:
        """Recover a log's directory, or create it; the caller closes it. Raises as `DurableLog.open`."""
        disk, read_only = data.disk, not data.is_writable

        def run_recovery() -> RecoveryResult:
            return recover(disk, path, randomness=randomness, made_by=settings.made_by, read_only=read_only)

        with add_directory_to_errors(disk.name), report_full_disk(disk):
            recovered = run_recovery() if read_only else data.reserve.use(run_recovery)
        return cls(data, path, name, recovered, settings=settings, randomness=randomness), recovered

    def recover(self, synced: int) -> RecoveryResult:
        """Recover the directory again, under the same lock; `resume` adopts the result.

        `synced`: the offset up to which rows are known to be synced. For a thread. Raises OSError,
        LogCorrupted, FormatUnknown.
        """
        recovered = self.reserve.use(
            lambda: recover(
                self.disk, self.path, randomness=self._randomness, made_by=self._made_by, synced=synced
            )
        )
        if recovered.identity.log_id != self.identity.log_id:
            recovered.close()
            raise LogCorrupted(f"{self.path}/{IDENTITY}", "it names another log than before")
        return recovered

    def resume(self, recovered: RecoveryResult) -> None:
        """Adopt the files of a recovery."""
        if self.recovery_point is not None:
            self.recovery_point.close()
        self.identity = recovered.identity
        self.checkpoints = recovered.checkpoints
        self.recovery_point = recovered.recovery_point
        self.recoveries += 1

    def raise_openings(self, openings: int) -> None:
        """Raise the number of openings to at least `openings`, durably. For a thread. Raises OSError."""
        identity = self.identity.with_openings(openings)
        write_identity(self.disk, f"{self.path}/{IDENTITY}", identity)
        self.identity = identity

    def read_times(self, notes: list[str]) -> Times:
        """Read the file of times, as the function `read_times` does."""
        return read_times(self.disk, self.path, notes)

    def write_times(self, times: Times) -> None:
        """Write the file of times. For a thread. Raises OSError."""
        write_times(self.disk, self.path, times)

    def write_clean(self, times: Times, *, synced: int, start: int) -> None:
        """Mark the log as closed, and store its times. Raises OSError."""
        assert self.recovery_point is not None, "the log is read-only: nothing to write"
        with suppress(OSError):  # Without times, segments only seem younger.
            self.write_times(times)
        self.recovery_point.write_clean(synced, start)

    def has_files_of(self, end: int) -> bool:
        """Return True if a segment or snapshot has rows below `end`, or a file is being written."""
        names = self.disk.list(self.path)
        stems = [name[:NAME_DIGITS] for name in names if not name.endswith((CHECKPOINT_SUFFIX, PART_SUFFIX))]
        return any(int(stem) < end for stem in stems if stem.isdecimal()) or any(
            name.endswith(TEMPORARY) for name in names
        )

    def close(self) -> None:
        """Close the recovery point, and the data directory if it is owned, unless that was done before."""
        self.data.open_logs.discard(self.path)
        was_writable, self.is_writable = self.is_writable, False
        if was_writable and self.recovery_point is not None:
            self.recovery_point.close()
        if self.owns_data:
            self.data.close()
