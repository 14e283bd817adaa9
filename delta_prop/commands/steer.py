"""`sinks pause`, `resume`, `reset`, `rebuild`: whether a sink gets deltas, from where on, or all of it anew.

They leave a request.
"""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Literal

from delta_prop.commands import edge
from delta_prop.commands.asking import ask, open_directory
from delta_prop.commands.opened import opened_log
from delta_prop.commands.places import offset_of, parse_at
from delta_prop.cursors import read_cursors
from delta_prop.group_places import read_groups
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.route.status import KeptCursor

OK = 0


def set_paused(data: str, name: str, verb: Literal["pause", "resume"]) -> int:
    """Bring a sink nothing more, or go on. Raises UsageError, OSError."""
    _remembered(data, name)
    ask(data, verb, name, (), f"{verb} of sink {name!r}")
    return OK


def reset(data: str, name: str, to: str) -> int:
    """Have a sink go on from another offset. Raises UsageError, LogDamaged, OSError.

    What is meant is fixed here: a request that is carried out later, or twice, means the same offset.
    """
    if _remembered(data, name).own:
        raise UsageError(
            f"sink {name!r} keeps its cursor with its data, which would not follow: `delta-prop sinks "
            f"rebuild {quote(name)} --data {quote(data)}` makes it anew, if it can be rebuilt; else give it "
            "data and a name of its own"
        )
    at = parse_at("--to", to, edge.wall_us())
    with opened_log(data) as (_, log, _):
        first, end, offset = log.first_offset, log.visible, offset_of(at, log)
    if not first <= offset <= end:
        raise UsageError(f"--to {to:.40}: give earliest, latest, a time or an offset from {first} to {end}")
    ask(data, "reset", name, (offset,), f"reset of sink {name!r} to offset {offset}")
    return OK


def rebuild(data: str, name: str) -> int:
    """Have a sink's data replaced by what the log holds. Raises UsageError, NotDone, OSError."""
    _remembered(data, name)
    begun = f"rebuild of sink {name!r} is asked for; `delta-prop sinks --http HOST:PORT` shows how far it is"
    ask(data, "rebuild", name, (), f"rebuild of sink {name!r}", done=begun)
    return OK


def _remembered(data: str, name: str) -> KeptCursor:
    disk, log = open_directory(data)
    cursors = read_cursors(disk, log.log_id)
    if name in cursors:
        return cursors[name]
    if name in read_groups(disk, log.log_id):
        raise UsageError(f"{name!r} is a group, not a sink: `groups reset {name} --to PLACE` moves it")
    known = ", ".join(sorted(cursors)) or "none"
    raise UsageError(f"no sink named {name!r} is remembered; sinks that are: {known}")
