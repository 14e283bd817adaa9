"""Named groups of subscribers: how far each is, in a file of its own beside the log.

One process at a time reads for a group, under the group's lock. Nobody's log waits for a group: one that
stays away too long finds its place gone, and is told. An operator may set the place (`groups reset`); how
often that was done stands beside it, so that who had come further knows it from a place that lags behind.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

from delta_prop_broker.log.files.identity import read_small, replace_file
from delta_prop_wire.bounds import check_name
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import InvalidDelta, UsageError

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk

NAME_BYTES_MAX = 64
DIRECTORY = "groups"
_SUFFIX = ".cursor"


class GroupBusy(UsageError):
    """Another process reads for the group."""


class Place(NamedTuple):
    """A group's place, and how often an operator has set it."""

    next_offset: int
    resets: int = 0


class Group:
    """One group, held by this process until `close`. Raises GroupBusy where another one has it, UsageError,
    OSError.
    """

    def __init__(self, disk: Disk, name: str, log_id: bytes, *, prepared: bool = False) -> None:
        """`prepared`: the directory is there, so that nothing waits for the disk."""
        self._disk = disk
        self._path = _path(name)
        self._log_id = log_id
        if not prepared:
            prepare(disk)
        try:
            self._lock = disk.lock(self._path + ".lock")
        except BlockingIOError:
            raise GroupBusy(
                f"group {name!r} is read by another process: stop that one, or name another group"
            ) from None
        try:
            self._kept = read_place(disk, name, log_id)
        except BaseException:
            self._lock.release()
            raise
        self.next_offset = None if self._kept is None else self._kept.next_offset
        """Where the group goes on; None where it begins."""
        self.resets = 0 if self._kept is None else self._kept.resets
        """The number of times that an operator has set the place."""

    def keep(self) -> None:
        """Write down `next_offset` and `resets`, if they have changed; durable then. Raises OSError."""
        place = None if self.next_offset is None else Place(self.next_offset, self.resets)
        if place is None or place == self._kept:
            return
        told: dict[str, object] = {"log_id": self._log_id.hex(), "next_offset": place.next_offset}
        if place.resets:
            told["resets"] = place.resets
        body = json.dumps(told).encode()
        replace_file(self._disk, DIRECTORY, self._path, [b"%08x\n" % crc32c(body), body])
        self._kept = place

    @property
    def kept(self) -> Place | None:
        """What is written down."""
        return self._kept

    def release(self) -> None:
        """Let others have the group, at the place that is written down."""
        self._lock.release()

    def close(self) -> None:
        """Keep the place, and let others have the group. Raises OSError."""
        try:
            self.keep()
        finally:
            self._lock.release()


def prepare(disk: Disk) -> None:
    """Make the directory of the groups, where it is not there; durable then. Raises OSError."""
    disk.make_directory(DIRECTORY)
    disk.sync_directory("")


def names_taken(disk: Disk) -> set[str]:
    """The groups that have a place, or once were read for."""
    files = (one.removesuffix(".lock") for one in disk.list(DIRECTORY))
    return {unquote(one.removesuffix(_SUFFIX)) for one in files if one.endswith(_SUFFIX)}


def read_groups(disk: Disk, log_id: bytes) -> dict[str, int | UsageError]:
    """The groups of this log and where each goes on, or why that cannot be told."""
    stems = (one.removesuffix(_SUFFIX) for one in disk.list(DIRECTORY) if one.endswith(_SUFFIX))
    found = {name: _read_or_why(disk, name, log_id) for name in sorted(map(unquote, stems))}
    return {name: place for name, place in found.items() if place is not None}


def _read_or_why(disk: Disk, name: str, log_id: bytes) -> int | UsageError | None:
    try:
        return read_group(disk, name, log_id)
    except UsageError as error:
        return error


def read_group(disk: Disk, name: str, log_id: bytes) -> int | None:
    """A group's place, as `read_place` reads it."""
    place = read_place(disk, name, log_id)
    return None if place is None else place.next_offset


def reset_group(disk: Disk, name: str, log_id: bytes, offset: int) -> None:
    """Have a group that nobody reads for go on at an offset; durable then. Raises GroupBusy, UsageError,
    OSError.
    """
    group = Group(disk, name, log_id)
    try:
        group.next_offset = offset
        group.resets += 1
    finally:
        group.close()


def read_place(disk: Disk, name: str, log_id: bytes) -> Place | None:
    """A group's place; None where it has none, or one in another log. Raises UsageError where that cannot be
    told.
    """
    raw = read_small(disk, _path(name))
    if raw is None:
        return None
    checksum, _, body = raw.partition(b"\n")
    if checksum != b"%08x" % crc32c(body):
        raise UsageError(
            f"the place of group {name!r} ({_path(name)}) is damaged: `delta-prop sinks forget` it, then "
            "say where it starts"
        )
    told = json.loads(body)
    if told["log_id"] != log_id.hex():
        return None
    return Place(int(told["next_offset"]), int(told.get("resets", 0)))


def forget_group(disk: Disk, name: str) -> bool:
    """Remove a group's place; whether it had one. Raises UsageError where it is being read."""
    if not disk.list(DIRECTORY) or read_small(disk, _path(name)) is None:
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
