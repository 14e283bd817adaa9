"""`groups list`, `groups reset`: lists the cursors of consumer groups, and moves one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delta_prop.commands.top import open_http_client
from delta_prop.delivery.group_cursor import GroupBusy, read_position, reset_group
from delta_prop.directory.log_positions import offset_of, parse_position
from delta_prop.directory.readonly_log import open_readonly_log
from delta_prop.directory.request_client import submit_request
from delta_prop.directory.stored_sinks import read_sinks
from delta_prop.platform import system
from delta_prop_broker.segments.paths import LOCK_PATH
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.commands.connect_options import ConnectOptions
    from delta_prop_broker.disk import Disk

OK, FAILED = 0, 1
WAIT_S = 3.0
"""Seconds for which a reset waits until the last member has left the group."""
_POLL_S = 0.05


def list_directory_groups(data: str, *, as_json: bool) -> int:
    """List every group of a directory; return exit status 1 if a group's cursor is corrupted.

    Raises UsageError, LogCorrupted, OSError.
    """
    with open_readonly_log(data) as (disk, log, _):
        groups = [entry for entry in read_sinks(disk, log) if entry["kind"] == "group"]
    rows = [
        {"name": group["name"], "offset": group["offset"], "lag": group["lag"]}
        | ({"corruption": group["corruption"]} if "corruption" in group else {})
        for group in groups
    ]
    _print_groups(rows, as_json=as_json)
    return FAILED if any("corruption" in row for row in rows) else OK


async def list_server_groups(connect_options: ConnectOptions, *, as_json: bool) -> int:
    """List every group of a server, and who reads or stands by for it. Raises UsageError, NoAnswer."""
    async with open_http_client(connect_options) as http_client:
        status: dict[str, Any] = await http_client.get("/api/status")
    _print_groups(status["groups"], as_json=as_json)
    return OK


def reset(data: str, name: str, to: str, *, force: bool) -> int:
    """Move a group to another position. Raises UsageError, LogCorrupted, OSError.

    `to` is resolved here, so that a request means the same offset if it is carried out later, or twice.
    """
    with open_readonly_log(data) as (disk, log, _):
        start, end = log.start_offset, log.high_watermark
        offset = offset_of(parse_position("--to", to, system.wall_us()), log)
        if not start <= offset <= end:
            raise UsageError(
                f"--to {to:.40}: give earliest, latest, a time or an offset from {start} to {end}"
            )
        if read_position(disk, name, log.log_id) is None:
            known = (
                ", ".join(entry["name"] for entry in read_sinks(disk, log) if entry["kind"] == "group")
                or "none"
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
        subject = f"reset of group {name!r} to offset {offset}"
        success = f"group {name!r} goes on at offset {offset}"
        submit_request(data, "reset-group", name, (offset,), subject, success=success)
    else:
        system.confirm(f"done: group {name!r} goes on at offset {offset}")
    return OK


def _reset_when_free(disk: Disk, name: str, log_id: bytes, offset: int, *, wait_s: float) -> None:
    """Move the group; retry while it is in use, as a server holds it briefly after the last member has left.

    Raises GroupBusy.
    """
    deadline = system.now() + wait_s
    while True:
        try:
            return reset_group(disk, name, log_id, offset)
        except GroupBusy:
            if system.now() >= deadline:
                raise
        system.pause(_POLL_S)


def _print_groups(groups: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        system.put_all(map(json.dumps, groups))
        return
    system.put(f"{'group':24}  {'offset':>12}  {'lag':>12}  notes")
    for group in groups:
        offset, lag = ("?" if value is None else f"{value:,}" for value in (group["offset"], group["lag"]))
        notes = [group["corruption"]] if "corruption" in group else []
        if "has_member" in group:
            notes.append("a member reads" if group["has_member"] else "nobody reads")
        if group.get("standing_by"):
            notes.append(f"{group['standing_by']:,} standing by")
        system.put(f"{group['name']:24}  {offset:>12}  {lag:>12}  {', '.join(notes)}".rstrip())
