"""`sinks pause`, `resume`, `reset`, `rebuild`: leave a request to stop, continue, move or rebuild a sink."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Literal

from delta_prop.delivery.cursors import read_cursors
from delta_prop.delivery.group_cursor import read_groups
from delta_prop.directory.log_positions import offset_of, parse_position
from delta_prop.directory.readonly_log import open_readonly_log
from delta_prop.directory.request_client import open_directory, submit_request
from delta_prop.platform import system
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.delivery.status import SavedCursor

OK = 0


def set_paused(data: str, name: str, verb: Literal["pause", "resume"]) -> int:
    """Request that a sink pauses or resumes. Raises UsageError, OSError."""
    _find_cursor(data, name)
    submit_request(data, verb, name, (), f"{verb} of sink {name!r}")
    return OK


def reset(data: str, name: str, to: str) -> int:
    """Request that a sink continues from another position. Raises UsageError, LogCorrupted, OSError.

    `to` is resolved here, so that a request means the same offset if it is carried out later, or twice.
    """
    if _find_cursor(data, name).own:
        raise UsageError(
            f"sink {name!r}: it stores its cursor with its data, which a reset would not change: if it can "
            f"be rebuilt, run `delta-prop sinks rebuild {quote(name)} --data {quote(data)}`, else give it "
            "new data and a new name"
        )
    position = parse_position("--to", to, system.wall_us())
    with open_readonly_log(data) as (_, log, _):
        start, end, offset = log.start_offset, log.high_watermark, offset_of(position, log)
    if not start <= offset <= end:
        raise UsageError(f"--to {to:.40}: give earliest, latest, a time or an offset from {start} to {end}")
    submit_request(data, "reset", name, (offset,), f"reset of sink {name!r} to offset {offset}")
    return OK


def rebuild(data: str, name: str) -> int:
    """Request that a sink's data is replaced from the log. Raises UsageError, RequestRefused, OSError."""
    _find_cursor(data, name)
    success = f"rebuild of sink {name!r} is requested; `delta-prop sinks --http HOST:PORT` shows its progress"
    submit_request(data, "rebuild", name, (), f"rebuild of sink {name!r}", success=success)
    return OK


def _find_cursor(data: str, name: str) -> SavedCursor:
    disk, log = open_directory(data)
    cursors = read_cursors(disk, log.log_id)
    if name in cursors:
        return cursors[name]
    if name in read_groups(disk, log.log_id):
        raise UsageError(f"{name!r} is a group, not a sink: move it with `groups reset {name} --to POSITION`")
    known = ", ".join(sorted(cursors)) or "none"
    raise UsageError(f"sink {name!r}: there is no such sink: name an existing one ({known})")
