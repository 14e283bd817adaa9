"""`groups list`, `groups reset`: lists the cursors of consumer groups, and moves one."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from delta_prop.commands.tables import Table, are_of_several, name_of
from delta_prop.commands.top import fetch_rows
from delta_prop.delivery.group_cursor import GroupBusy, read_position, reset_group
from delta_prop.directory.log_positions import offset_to_reset_to
from delta_prop.directory.request_client import submit_request
from delta_prop.directory.stored_partitions import (
    StoredPartition,
    find_partition,
    have_column,
    list_partitions,
)
from delta_prop.directory.stored_sinks import read_sinks
from delta_prop.platform import system
from delta_prop_broker.disk import Disk
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.segments.paths import LOCK_PATH
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

OK, FAILED = 0, 1
WAIT_S = 3.0
"""Seconds for which a reset waits until the last member has left the group."""
_POLL_S = 0.05


def list_groups(options: Namespace) -> int | Coroutine[Any, Any, int]:
    """List every group of a directory or a server; return exit status 1 if a group's cursor is corrupted.

    Raises UsageError, LogCorrupted, OSError.
    """
    if options.data is None:
        return _list_server_groups(options)
    partitions = list_partitions(options.data, options.stream, options.partition)
    groups: list[dict[str, Any]] = []
    for partition in partitions:
        with partition.open_log() as (_, log, _):
            groups += _read_groups(partition, log)
    keys = ("name", "stream", "partition", "offset", "lag", "corruption")
    rows = [{key: group[key] for key in keys if key in group} for group in groups]
    _print_groups(rows, Table(has_partitions=have_column(partitions)), as_json=options.json)
    return FAILED if any("corruption" in row for row in rows) else OK


async def _list_server_groups(options: Namespace) -> int:
    rows = await fetch_rows(options, "/api/status", "groups")
    _print_groups(rows, Table(has_partitions=are_of_several(rows)), as_json=options.json)
    return OK


def _read_groups(partition: StoredPartition, log: DurableLog) -> list[dict[str, Any]]:
    return [entry for entry in read_sinks(partition, log) if entry["kind"] == "group"]


def reset(options: Namespace) -> int:
    """Move a group to another position. Raises UsageError, LogCorrupted, OSError."""
    name, force = options.name, options.force
    partition = find_partition(options.data, name_of(options))
    with partition.open_log() as (disk, log, _):
        offset = offset_to_reset_to(options.to, log, system.wall_us())
        if read_position(disk, name, log.log_id) is None:
            known = ", ".join(group["name"] for group in _read_groups(partition, log)) or "none"
            raise UsageError(
                f"group {name!r}: there is no such group{partition.suffix}: name an existing one ({known})"
            )
    success = f"group {name!r}{partition.suffix} goes on at offset {offset}"
    try:
        _reset_when_free(disk, name, log.log_id, offset, wait_s=0.0 if force else WAIT_S)
    except GroupBusy:
        if not force:
            raise UsageError(
                f"group {name!r}: a member reads for it: end that member, or give --force and it goes "
                "on from the new offset"
            ) from None
        if system.find_lock_holder(options.data, LOCK_PATH) is None:
            raise UsageError(
                f"group {name!r}: `subscribe --data` reads for it: end that command first"
            ) from None
        subject = f"reset of group {name!r}{partition.suffix} to offset {offset}"
        submit_request(partition, "reset-group", name, (offset,), subject=subject, success=success)
    else:
        system.confirm(f"done: {success}")
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


def _print_groups(groups: Sequence[Mapping[str, Any]], table: Table, *, as_json: bool) -> None:
    if as_json:
        system.put_all(map(json.dumps, groups))
        return
    table.put_head(f"{'group':24}  {'offset':>12}  {'lag':>12}  notes")
    for group in groups:
        offset, lag = ("?" if value is None else f"{value:,}" for value in (group["offset"], group["lag"]))
        notes = [group["corruption"]] if "corruption" in group else []
        if "has_member" in group:
            notes.append("a member reads" if group["has_member"] else "nobody reads")
        if group.get("standing_by"):
            notes.append(f"{group['standing_by']:,} standing by")
        table.put(group, f"{group['name']:24}  {offset:>12}  {lag:>12}  {', '.join(notes)}")
