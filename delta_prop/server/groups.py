"""Named groups of subscribers: their readers, standbys and cursors.

The cursors are in the same files as those of `subscribe --data`. A stored cursor may lag behind the current
one, but never leads it: after a crash, rows are redelivered. No log retains rows for a group.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import anyio

from delta_prop.delivery.group_cursor import (
    NAME_BYTES_MAX,
    GroupBusy,
    GroupCursor,
    create_directory,
    list_names,
    read_groups,
    read_position,
)
from delta_prop.server.start_offsets import check_cursor, check_offset, resolve_start
from delta_prop_broker.disk import Disk
from delta_prop_wire.bounds import check_name
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.frames import StartAt, Subscription
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.platform.ports import Threads, World
    from delta_prop.server.consumer_session import ConsumerSession
    from delta_prop_broker.log.contract import Log

logger = logging.getLogger("delta_prop.server")

ABSENT_CACHE_FACTOR = 10
"""The cursors of absent groups are cached for this many times the duration of reading them."""
STORE_INTERVAL_S = 1.0
"""Minimum interval between two stores of cursors."""
GROUPS_MAX = 10_000
_RETRY_AFTER_MS = 1_000
_POLL_INTERVAL_S = 0.1


class GroupAssignment(NamedTuple):
    """A group's state for a member: the cursor to resume from, and how often an operator has reset it."""

    offset: int
    resets: int
    is_standby: bool = False


class GroupStatistics(NamedTuple):
    """A group's cursor and members. `has_member`: True if one reads; `standing_by`: how many stand by."""

    next_offset: int | None
    has_member: bool
    standing_by: int = 0


class _Membership(NamedTuple):
    """A member that reads or stands by. `member_id`: names the client on all its connections."""

    member: ConsumerSession
    member_id: bytes | None


@dataclass(slots=True, eq=False)
class _GroupState:
    """A group that this process reads or waits for.

    `offset`: the committed offset; None before the first reader. `cursor`: the file that stores it.
    `resets`: how often an operator has moved it.
    """

    offset: int | None
    cursor: GroupCursor | None = None  # None with a log in memory, and while another process has the group
    is_remote: bool = False  # another process reads for it
    reader: _Membership | None = None
    standby: deque[_Membership] = field(default_factory=deque)
    resets: int = 0

    @property
    def is_settled(self) -> bool:
        """True if there is nothing left to store or release."""
        return self.cursor is None or (self.reader is not None and self.is_stored)

    @property
    def is_stored(self) -> bool:
        """True if the cursor is stored."""
        stored = None if self.cursor is None else self.cursor.stored
        return stored == (None if self.offset is None else (self.offset, self.resets))

    def assignment(self, *, is_standby: bool = False) -> GroupAssignment:
        """Return the answer to a member."""
        assert self.offset is not None, "the first member sets it"
        return GroupAssignment(self.offset, self.resets, is_standby)


class Groups:
    """All groups of one log. In each, one member reads, and the others stand by in the order of joining.

    With a log in memory, the cursors are lost with this object.
    """

    def __init__(self, disk: Disk | None, log: Log, world: World) -> None:
        self._disk = disk
        self._log = log
        self._world = world
        self._groups: dict[str, _GroupState] = {}
        self._names: set[str] = set()  # of every group, as far as this process knows
        self._prepared = False  # True once the directory exists
        self._absent: dict[str, int] = {}  # cursors of groups without a reader here, as last read
        self._absent_valid_until = -inf
        self._released: dict[str, int] = {}  # cursors stored since the absent ones were read
        self._wakeup = anyio.Event()
        self._reader_left = anyio.Event()  # a group lost its reader: other processes need its cursor at once

    def join(
        self,
        name: str,
        member: ConsumerSession,
        first_offset: Callable[[], int],
        *,
        member_id: bytes | None = None,
    ) -> GroupAssignment:
        """Let this member read for the group, or stand by while another one reads.

        `first_offset`: returns the first offset for a new group. `member_id`: a client that reconnects
        replaces its former connection at once. Raises Refused (BAD_REQUEST, LOG_FAILED), and what
        `first_offset` raises.
        """
        state = self._groups.get(name)
        if state is None:
            state = self._acquire(name)
            self._wakeup.set()
        if state.offset is None:
            try:
                state.offset = first_offset()
            finally:
                self._wakeup.set()  # to store the cursor, or to release the group
        joining = _Membership(member, member_id)
        if member_id is not None:
            self._fence_former(name, state, joining)
        reader = state.reader
        if (reader is None and not state.is_remote) or (reader is not None and reader.member is member):
            state.reader = joining
            return state.assignment()
        if all(membership.member is not member for membership in state.standby):
            state.standby.append(joining)
        return state.assignment(is_standby=True)

    def commit(self, name: str, offset: int, member: ConsumerSession) -> None:
        """Set the group's cursor: everything below `offset` is processed. Ignored unless from its reader."""
        state = self._groups.get(name)
        if state is None or state.reader is None or state.reader.member is not member:
            return
        if offset != state.offset:
            state.offset = offset
            self._wakeup.set()

    def leave(self, name: str, member: ConsumerSession) -> None:
        """Remove a member; if it was the reader, the next member resumes from the group's cursor."""
        state = self._groups.get(name)
        if state is None:
            return
        if state.reader is None or state.reader.member is not member:
            state.standby = deque(
                membership for membership in state.standby if membership.member is not member
            )
            return
        state.reader = None
        if state.offset is not None:  # a recovered log may have lost the last rows
            state.offset = min(state.offset, self._log.next_offset)
        self._wakeup.set()
        self._reader_left.set()
        _promote_standby(state)

    async def reset(self, name: str, offset: int) -> bool:
        """Move the cursor of a group that this process has, and return once it is stored.

        The reader is fenced: it reconnects and resumes there. Returns False if the process does not have the
        group.
        """
        state = self._groups.get(name)
        if state is None or state.is_remote:
            return False
        state.offset, state.resets = offset, state.resets + 1
        resets, cursor, reader = state.resets, state.cursor, state.reader
        self._wakeup.set()
        if reader is not None:
            reader.member.fence(_reset_error(name, offset))
        while True:
            if cursor is None or (cursor.stored is not None and cursor.stored.resets >= resets):
                return True
            await anyio.sleep(_POLL_INTERVAL_S)

    async def run(self) -> None:
        """Store cursors until cancelled, and once more at the end."""
        threads = self._world.new_threads()
        try:
            while True:
                with anyio.move_on_after(STORE_INTERVAL_S if self._has_remote() else inf):
                    await self._wakeup.wait()
                self._wakeup = anyio.Event()
                self._poll_remote()
                self._reader_left = anyio.Event()
                if not await self._store(threads):
                    self._wakeup.set()
                await self._pause(threads)
        finally:
            with anyio.CancelScope(shield=True):
                await self._store(threads)
            for state in self._groups.values():
                if state.cursor is not None:
                    state.cursor.release()
            self._groups.clear()

    def statistics(self) -> dict[str, GroupStatistics]:
        """Return a snapshot of the groups that this process has."""
        return {
            name: GroupStatistics(state.offset, state.reader is not None, len(state.standby))
            for name, state in self._groups.items()
        }

    async def poll_absent(self, threads: Threads) -> None:
        """Read the cursors of groups without a reader, unless the cached ones are recent."""
        disk, now = self._disk, self._world.clock.now()
        if disk is None or now < self._absent_valid_until:
            return
        self._absent_valid_until, self._released = inf, {}  # concurrent callers share this read
        try:
            cursors = await threads.run(lambda: read_groups(disk, self._log.log_id))
        except OSError as error:
            logger.warning("the cursors of groups cannot be read: %s", error)
        else:
            self._absent = {name: cursor for name, cursor in cursors.items() if isinstance(cursor, int)}
            self._absent |= self._released  # cursors that may be newer than those in the files
        finally:
            read_at = self._world.clock.now()
            self._absent_valid_until = read_at + ABSENT_CACHE_FACTOR * (read_at - now)

    def all_statistics(self) -> dict[str, GroupStatistics]:
        """Return every group, the absent ones as `poll_absent` last read them."""
        absent = {name: GroupStatistics(offset, False) for name, offset in self._absent.items()}
        return dict(sorted((absent | self.statistics()).items()))

    # --- helpers

    def _fence_former(self, name: str, state: _GroupState, membership: _Membership) -> None:
        """Give a client that reconnects the place of its former connection, and fence that connection."""
        reader, member_id = state.reader, membership.member_id
        if reader is not None and reader.member_id == member_id and reader.member is not membership.member:
            state.reader = membership
            reader.member.fence(_fenced_error(name))
        former = [standby for standby in state.standby if standby.member_id == member_id]
        for standby in former:
            if standby.member is not membership.member:
                state.standby[state.standby.index(standby)] = membership
                standby.member.fence(_fenced_error(name))

    async def _pause(self, threads: Threads) -> None:
        """Pause for a store interval; meanwhile store only the cursors of groups whose reader leaves."""
        until = self._world.clock.now() + STORE_INTERVAL_S
        while True:
            with anyio.move_on_after(until - self._world.clock.now()):
                await self._reader_left.wait()
            if not self._reader_left.is_set():
                return
            self._reader_left = anyio.Event()
            await self._store(threads, without_reader_only=True)

    def _acquire(self, name: str) -> _GroupState:
        try:
            check_name("group", name, NAME_BYTES_MAX)
            self._check_count(name)
            state = self._groups[name] = self._open(name)
        except InvalidDelta as error:
            raise Refused(ErrorCode.BAD_REQUEST, error.message) from None
        except UsageError as error:  # its file is corrupted
            raise Refused(ErrorCode.BAD_REQUEST, str(error), retry_after_ms=_RETRY_AFTER_MS) from None
        except OSError as error:
            raise Refused(
                ErrorCode.LOG_FAILED,
                f"the cursor of group {name!r} cannot be read: the disk fails with {error}: try again",
                retry_after_ms=_RETRY_AFTER_MS,
            ) from None
        self._names.add(name)
        return state

    def _open(self, name: str) -> _GroupState:
        if self._disk is None:
            return _GroupState(None)
        if not self._prepared:
            create_directory(self._disk)
            self._prepared = True
        try:
            cursor = GroupCursor(self._disk, name, self._log.log_id, prepared=True)
        except GroupBusy:
            position = read_position(self._disk, name, self._log.log_id)
            return _GroupState(None if position is None else position.next_offset, is_remote=True)
        return _GroupState(cursor.next_offset, cursor, resets=cursor.resets)

    def _has_remote(self) -> bool:
        return any(state.is_remote for state in self._groups.values())

    def _poll_remote(self) -> None:
        """Take over groups whose reader in another process has left, for the standbys here."""
        for name, state in list(self._groups.items()):
            if not state.is_remote:
                continue
            if not state.standby:
                del self._groups[name]
                continue
            try:
                opened = self._open(name)
            except (UsageError, OSError) as error:
                logger.warning("group %r cannot be taken over: %s: retrying", name, error)
                continue
            state.offset = state.offset if opened.offset is None else opened.offset
            state.cursor, state.is_remote, state.resets = opened.cursor, opened.is_remote, opened.resets
            if not state.is_remote:
                _promote_standby(state)

    def _check_count(self, name: str) -> None:
        if self._disk is not None and (not self._prepared or len(self._names) >= GROUPS_MAX):
            self._names = list_names(self._disk) | self._groups.keys()
        if name not in self._names and len(self._names) >= GROUPS_MAX:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"group {name!r}: there are {len(self._names)} groups already: use up to {GROUPS_MAX}, or "
                "have an operator delete some",
            )

    async def _store(self, threads: Threads, *, without_reader_only: bool = False) -> bool:
        """Store changed cursors, as far as the log is synced; return True if nothing is left to store.

        `without_reader_only`: only the cursors of groups without a reader.
        """
        synced_offset = self._log.offset_at_level(AckLevel.DURABLE)
        for name, state in list(self._groups.items()):
            cursor, offset = state.cursor, state.offset
            if cursor is None or state.is_settled or (without_reader_only and state.reader is not None):
                continue
            # A power cut may lose unsynced rows; other deltas then get their offsets.
            cursor.next_offset = offset if offset is None else min(offset, synced_offset)
            cursor.resets = state.resets
            try:
                await threads.run(partial(self._log.write_small, cursor.store))
            except OSError as error:
                logger.warning("the cursor of group %r cannot be stored: %s: retrying", name, error)
            if state.reader is None and state.is_stored:
                if state.offset is not None:
                    self._absent[name] = self._released[name] = state.offset
                cursor.release()
                del self._groups[name]
        return all(state.is_settled for state in self._groups.values())


def _promote_standby(state: _GroupState) -> None:
    """Make the member that has stood by longest the reader."""
    if state.standby:
        state.reader = state.standby.popleft()
        state.reader.member.take_over(state.assignment())


def _fenced_error(name: str) -> Refused:
    return Refused(
        ErrorCode.FENCED, f"this member of group {name!r} has reconnected: use the newer connection"
    )


def _reset_error(name: str, offset: int) -> Refused:
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        f"an operator has moved group {name!r} to offset {offset}: reconnect, and resume from there",
        retry_after_ms=50,
    )


class GroupMembership:
    """The membership of one session, `member`. Without a group, its methods do nothing."""

    def __init__(self, groups: Groups, member: ConsumerSession) -> None:
        self.group: str | None = None
        """The group's name; None if it is in no group."""
        self.standing_by = False
        """True while another member reads for the group."""
        self.resets = 0
        """How often operators have reset the group's cursor."""
        self._groups = groups
        self._member = member

    def resolve_start(self, request: Subscription, log: Log) -> int:
        """Join the group that a first subscription names; return the first offset to read.

        That is the group's cursor; without a group or for a new one, the start. Raises Refused.
        """
        start, group = request.start, request.group
        if group is None:
            if start.kind is StartAt.GROUP:
                raise Refused(ErrorCode.BAD_REQUEST, "start at group: no group is named: name one")
            return resolve_start(start, log)
        if isinstance(start.value, Cursor):  # a cursor of another log, or of a lost tail, is always refused
            check_cursor(start.value, log)

        def first_offset_of_new_group() -> int:
            return log.start_offset if start.kind is StartAt.GROUP else resolve_start(start, log)

        joined = self._groups.join(group, self._member, first_offset_of_new_group, member_id=request.member)
        self.group, self.standing_by, self.resets = group, joined.is_standby, joined.resets
        return joined.offset if joined.is_standby else check_offset(joined.offset, log)

    def take_over(self, assignment: GroupAssignment) -> None:
        """Note that the member reads for the group now."""
        self.standing_by, self.resets = False, assignment.resets

    def commit(self, offset: int) -> None:
        """Commit the group's cursor, unless the member stands by."""
        if self.group is not None and not self.standing_by:
            self._groups.commit(self.group, offset, self._member)

    def leave(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self._groups.leave(self.group, self._member)
            self.group, self.standing_by = None, False
