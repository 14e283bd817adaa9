"""`groups list`, `groups reset`: how far groups of subscribers are, and having one go on elsewhere."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delta_prop.commands import edge
from delta_prop.commands.asking import ask
from delta_prop.commands.look import all_sinks
from delta_prop.commands.opened import opened_log
from delta_prop.commands.places import offset_of, parse_at
from delta_prop.commands.top import web_of
from delta_prop.group_places import GroupBusy, read_place, reset_group
from delta_prop_broker.log.files.names import LOCK_PATH
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.commands.connecting import Link
    from delta_prop_broker.disk import Disk

OK, FAILED = 0, 1
WAIT_S = 3.0
"""How long a command waits until nobody has the group."""
_LOOK_S = 0.05


def list_of_directory(data: str, *, as_json: bool) -> int:
    """Every group of a directory; exit status 1 where a place is damaged. Raises UsageError, LogDamaged,
    OSError.
    """
    with opened_log(data) as (disk, log, _):
        found = [one for one in all_sinks(disk, log) if one["kind"] == "group"]
    told = [
        {"name": one["name"], "offset": one["offset"], "lag": one["lag"]}
        | ({"damage": one["damage"]} if "damage" in one else {})
        for one in found
    ]
    _put(told, as_json=as_json)
    return FAILED if any("damage" in one for one in told) else OK


async def list_of_server(link: Link, *, as_json: bool) -> int:
    """Every group, who reads for it at this server and who stands by. Raises UsageError, NotTold."""
    async with web_of(link) as web:
        status: dict[str, Any] = await web.get("/api/status")
    _put(status["groups"], as_json=as_json)
    return OK


def reset(data: str, name: str, to: str, *, force: bool) -> int:
    """Have a group go on elsewhere. Raises UsageError, LogDamaged, OSError.

    What is meant is fixed here: a request that is carried out later, or twice, means the same offset.
    """
    with opened_log(data) as (disk, log, _):
        first, end = log.first_offset, log.visible
        offset = offset_of(parse_at("--to", to, edge.wall_us()), log)
        if not first <= offset <= end:
            raise UsageError(
                f"--to {to:.40}: give earliest, latest, a time or an offset from {first} to {end}"
            )
        if read_place(disk, name, log.log_id) is None:
            known = ", ".join(one["name"] for one in all_sinks(disk, log) if one["kind"] == "group") or "none"
            raise UsageError(f"no group named {name!r} has a place; groups that have: {known}")
    try:
        _reset(disk, name, log.log_id, offset, wait_s=0.0 if force else WAIT_S)
    except GroupBusy:
        if not force:
            raise UsageError(
                f"group {name!r} has a member that reads for it: end that one, or give --force, and it goes "
                "on from there"
            ) from None
        if edge.lock_holder(data, LOCK_PATH) is None:
            raise UsageError(f"group {name!r} is read by `subscribe --data`: end that one first") from None
        what, done = (
            f"reset of group {name!r} to offset {offset}",
            f"group {name!r} goes on at offset {offset}",
        )
        ask(data, "reset-group", name, (offset,), what, done=done)
    else:
        edge.confirm(f"done: group {name!r} goes on at offset {offset}")
    return OK


def _reset(disk: Disk, name: str, log_id: bytes, offset: int, *, wait_s: float) -> None:
    """Move it; a server has the group for a moment after its last member has left. Raises GroupBusy."""
    until = edge.now() + wait_s
    while True:
        try:
            return reset_group(disk, name, log_id, offset)
        except GroupBusy:
            if edge.now() >= until:
                raise
        edge.pause(_LOOK_S)


def _put(groups: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        edge.put_all(map(json.dumps, groups))
        return
    edge.put(f"{'group':24}  {'offset':>12}  {'lag':>12}  notes")
    for one in groups:
        offset, lag = ("?" if at is None else f"{at:,}" for at in (one["offset"], one["lag"]))
        notes = [one["damage"]] if "damage" in one else []
        if "has_member" in one:
            notes.append("a member reads" if one["has_member"] else "nobody reads")
        if one.get("standing_by"):
            notes.append(f"{one['standing_by']:,} standing by")
        edge.put(f"{one['name']:24}  {offset:>12}  {lag:>12}  {', '.join(notes)}".rstrip())
