"""The file `time` of a log: the seen times of the log and of its segments.

Seen time is the time for which processes had the log open. The file is replaced now and then, so it can only
lag: after a crash, some time is missing, and rows count as younger than they are. Without the file, all rows
count as new.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.log_clock import ClockJump
from delta_prop_broker.segments.paths import TIME
from delta_prop_broker.segments.small_file import Checksum, read_checked, replace_checked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log_clock import LogClock
    from delta_prop_broker.segments.segment import Segment, Segments

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
