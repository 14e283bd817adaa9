"""Cursors of named subscriber groups, each in a file of its own beside the log.

One process at a time reads for a group, under the group's lock. The log retains nothing for a group: if it
lags too far, its deltas are removed, and it gets an error. An operator may set the cursor (`groups reset`);
the number of resets is stored with it, by which a reader tells a reset from a cursor that merely lags.
"""

from __future__ import annotations

import json
from typing import NamedTuple
from urllib.parse import quote, unquote

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.disk import Disk
from delta_prop_broker.segments.small_file import Checksum, read_checked, read_file, replace_checked
from delta_prop_wire.bounds import check_name
from delta_prop_wire.errors import InvalidDelta, UsageError

NAME_BYTES_MAX = 64
DIRECTORY = "groups"
_SUFFIX = ".cursor"


class GroupBusy(UsageError):
    """Another process reads for the group."""


class GroupPosition(NamedTuple):
    """Cursor of a group, and how often an operator has reset it."""

    next_offset: int
    resets: int = 0


class GroupCursor:
    """Cursor of one group, locked by this process until `close`. Raises GroupBusy, UsageError, OSError."""

    def __init__(self, disk: Disk, name: str, log_id: bytes, *, prepared: bool = False) -> None:
        """Lock the group and read its cursor; `prepared`: True if the directory exists already."""
        self._disk = disk
        self._path = _path(name)
        self._log_id = log_id
        if not prepared:
            create_directory(disk)
        try:
            self._lock = disk.lock(self._path + ".lock")
        except BlockingIOError:
            raise GroupBusy(
                f"group {name!r} is read by another process: stop that one, or name another group"
            ) from None
        try:
            self._stored = read_position(disk, name, log_id)
        except BaseException:
            self._lock.release()
            raise
        self.next_offset = None if self._stored is None else self._stored.next_offset
        """Offset at which the group continues; None: at its start position."""
        self.resets = 0 if self._stored is None else self._stored.resets
        """Number of times that an operator has reset the cursor."""

    def store(self) -> None:
        """Store `next_offset` and `resets` durably, if they have changed. Raises OSError."""
        position = None if self.next_offset is None else GroupPosition(self.next_offset, self.resets)
        if position is None or position == self._stored:
            return
        fields: dict[str, object] = {"log_id": self._log_id.hex(), "next_offset": position.next_offset}
        if position.resets:
            fields["resets"] = position.resets
        replace_checked(self._disk, self._path, json.dumps(fields).encode(), Checksum.FIRST_LINE)
        self._stored = position

    @property
    def stored(self) -> GroupPosition | None:
        """Position that is stored on the disk."""
        return self._stored

    def release(self) -> None:
        """Unlock the group without storing its cursor."""
        self._lock.release()

    def close(self) -> None:
        """Store the cursor, and unlock the group. Raises OSError."""
        try:
            self.store()
        finally:
            self._lock.release()


def create_directory(disk: Disk) -> None:
    """Create the directory of the groups, if it is missing; durable when it returns. Raises OSError."""
    disk.make_directory(DIRECTORY)
    disk.sync_directory("")


def list_names(disk: Disk) -> set[str]:
    """Return the groups that have a cursor, or once had a reader."""
    files = (name.removesuffix(".lock") for name in disk.list(DIRECTORY))
    return {unquote(name.removesuffix(_SUFFIX)) for name in files if name.endswith(_SUFFIX)}


def read_groups(disk: Disk, log_id: bytes) -> dict[str, int | UsageError]:
    """Return the groups of this log with their next offsets, or the error of a cursor that cannot be read."""
    files = disk.list(DIRECTORY)
    stems = (file.removesuffix(_SUFFIX) for file in files if file.endswith(_SUFFIX))
    offsets = {name: _read_or_error(disk, name, log_id) for name in sorted(map(unquote, stems))}
    return {name: offset for name, offset in offsets.items() if offset is not None}


def _read_or_error(disk: Disk, name: str, log_id: bytes) -> int | UsageError | None:
    try:
        return read_group(disk, name, log_id)
    except UsageError as error:
        return error


def read_group(disk: Disk, name: str, log_id: bytes) -> int | None:
    """Return a group's next offset, as `read_position` reads it."""
    position = read_position(disk, name, log_id)
    return None if position is None else position.next_offset


def reset_group(disk: Disk, name: str, log_id: bytes, offset: int) -> None:
    """Set the cursor of a group without a reader, durably. Raises GroupBusy, UsageError, OSError."""
    group = GroupCursor(disk, name, log_id)
    try:
        group.next_offset = offset
        group.resets += 1
    finally:
        group.close()


def read_position(disk: Disk, name: str, log_id: bytes) -> GroupPosition | None:
    """Return a group's cursor; None if it has none in this log. Raises UsageError if it is corrupted."""
    try:
        body = read_checked(disk, _path(name), Checksum.FIRST_LINE)
    except LogCorrupted:
        raise UsageError(
            f"the cursor of group {name!r} ({_path(name)}) is corrupted: remove it with "
            f"`delta-prop sinks forget {name}`, then subscribe with a start position"
        ) from None
    if body is None:
        return None
    fields = json.loads(body)
    if fields["log_id"] != log_id.hex():
        return None
    return GroupPosition(int(fields["next_offset"]), int(fields.get("resets", 0)))


def forget_group(disk: Disk, name: str) -> bool:
    """Remove a group's cursor; return True if it had one. Raises UsageError if a process reads for it."""
    if not disk.list(DIRECTORY) or read_file(disk, _path(name)) is None:
        return False
    try:
        lock = disk.lock(_path(name) + ".lock")
    except BlockingIOError:
        raise UsageError(f"group {name!r} is read by a process: stop that one first") from None
    try:
        disk.remove(_path(name))
        disk.sync_directory(DIRECTORY)
    finally:
        lock.release()
    return True


def _path(name: str) -> str:
    try:
        check_name("group", name, NAME_BYTES_MAX)
    except InvalidDelta as error:
        raise UsageError(error.message) from None
    return f"{DIRECTORY}/{quote(name, safe='')}{_SUFFIX}"
