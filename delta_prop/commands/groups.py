"""`groups list`, `groups reset`: lists the cursors of consumer groups, and moves one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delta_prop.commands import system
from delta_prop.commands.log_positions import offset_of, parse_position
from delta_prop.commands.readonly_log import open_readonly_log
from delta_prop.commands.request_client import submit_request
from delta_prop.commands.status import read_sinks
from delta_prop.commands.top import open_http_client
from delta_prop.group_cursor import GroupBusy, read_position, reset_group
from delta_prop_broker.log.files.paths import LOCK_PATH
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.commands.connect_options import ConnectOptions
    from delta_prop_broker.disk import Disk

OK, FAILED = 0, 1
WAIT_S = 3.0
"""Time for the last member of a group to leave it."""
_POLL_S = 0.05


def list_directory_groups(data: str, *, as_json: bool) -> int:
    """List every group of a directory; return exit status 1 if a group's cursor is corrupted.

    Raises UsageError, LogCorrupted, OSError.
    """
    with open_readonly_log(data) as (disk, log, _):
        found = [one for one in read_sinks(disk, log) if one["kind"] == "group"]
    rows = [
        {"name": one["name"], "offset": one["offset"], "lag": one["lag"]}
        | ({"corruption": one["corruption"]} if "corruption" in one else {})
        for one in found
    ]
    _print_groups(rows, as_json=as_json)
    return FAILED if any("corruption" in one for one in rows) else OK


async def list_server_groups(link: ConnectOptions, *, as_json: bool) -> int:
    """List every group of a server, and who reads or stands by for it. Raises UsageError, NoAnswer."""
    async with open_http_client(link) as web:
        status: dict[str, Any] = await web.get("/api/status")
    _print_groups(status["groups"], as_json=as_json)
    return OK


def reset(data: str, name: str, to: str, *, force: bool) -> int:
    """Move a group to another offset. Raises UsageError, LogCorrupted, OSError.

    `to` is resolved here: a request that is carried out later, or twice, then means the same offset.
    """
    with open_readonly_log(data) as (disk, log, _):
        first, end = log.start_offset, log.high_watermark
        offset = offset_of(parse_position("--to", to, system.wall_us()), log)
        if not first <= offset <= end:
            raise UsageError(
                f"--to {to:.40}: give earliest, latest, a time or an offset from {first} to {end}"
            )
        if read_position(disk, name, log.log_id) is None:
            known = (
                ", ".join(one["name"] for one in read_sinks(disk, log) if one["kind"] == "group") or "none"
            )
            raise UsageError(f"group {name!r}: there is no such group: name an existing one ({known})")
    try:
        _reset_when_free(disk, name, log.log_id, offset, wait_s=0.0 if force else WAIT_S)
    except GroupBusy:
        if not force:
            raise UsageError(
                f"group {name!r}: a member reads for it: end that member, or give --force and it goes "
                "on from the new offset"
            ) from None
        if system.find_lock_holder(data, LOCK_PATH) is None:
            raise UsageError(
                f"group {name!r}: `subscribe --data` reads for it: end that command first"
            ) from None
        what, done = (
            f"reset of group {name!r} to offset {offset}",
            f"group {name!r} goes on at offset {offset}",
        )
        submit_request(data, "reset-group", name, (offset,), what, done=done)
    else:
        system.confirm(f"done: group {name!r} goes on at offset {offset}")
    return OK


def _reset_when_free(disk: Disk, name: str, log_id: bytes, offset: int, *, wait_s: float) -> None:
    """Move the group; a server holds it for a moment after its last member left. Raises GroupBusy."""
    until = system.now() + wait_s
    while True:
        try:
            return reset_group(disk, name, log_id, offset)
        except GroupBusy:
            if system.now() >= until:
                raise
        system.pause(_POLL_S)


def _print_groups(groups: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        system.put_all(map(json.dumps, groups))
        return
    system.put(f"{'group':24}  {'offset':>12}  {'lag':>12}  notes")
    for one in groups:
        offset, lag = ("?" if at is None else f"{at:,}" for at in (one["offset"], one["lag"]))
        notes = [one["corruption"]] if "corruption" in one else []
        if "has_member" in one:
            notes.append("a member reads" if one["has_member"] else "nobody reads")
        if one.get("standing_by"):
            notes.append(f"{one['standing_by']:,} standing by")
        system.put(f"{one['name']:24}  {offset:>12}  {lag:>12}  {', '.join(notes)}".rstrip())
