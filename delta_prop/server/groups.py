"""Named groups of subscribers: who reads for each, who stands by, and how far it is; the same files as
`subscribe --data`.

A place that is written down only lags behind the truth: what lies behind it comes again. Nobody's log waits
for a group.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

import anyio

from delta_prop.group_places import (
    NAME_BYTES_MAX,
    Group,
    GroupBusy,
    names_taken,
    prepare,
    read_groups,
    read_place,
)
from delta_prop_broker.log.durable import DurableLog
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.ports import Threads, World
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.contract import Log

logger = logging.getLogger("delta_prop.server")

AWAY_SHARE = 10
"""Times as long as reading took, for which what was read of groups that are away is good enough."""
KEEP_S = 1.0
"""How often a place is written down, at most."""
GROUPS_MAX = 10_000
_RETRY_AFTER_MS = 1_000
_LOOK_S = 0.1


class Joined(NamedTuple):
    """How a group stands for who reads for it, or stands by: where it goes on, and how often an operator has
    set that.
    """

    place: int
    resets: int
    standby: bool = False


class Member(Protocol):
    """A member of a group, which reads for it or stands by."""

    def take_over(self, joined: Joined) -> None:
        """It stood by, and reads for the group from now on."""

    def fence(self, refused: Refused) -> None:
        """It reads for the group no more, and does not stand by."""


class GroupStatistics(NamedTuple):
    """A group that is read for, or whose place is not written down yet."""

    next_offset: int | None
    has_member: bool
    standing_by: int = 0


class _Joining(NamedTuple):
    """A member that reads, or stands by. `identity`: of the client, over all its connections; None: none."""

    member: Member
    identity: bytes | None


@dataclass(slots=True, eq=False)
class _Held:
    """A group that this process has, or waits for. `place`: where it goes on; None before its first one."""

    place: int | None
    group: Group | None = None  # None beside a log in memory, and while another process has it
    elsewhere: bool = False  # another process reads for it
    reader: _Joining | None = None
    standby: deque[_Joining] = field(default_factory=deque)
    resets: int = 0

    @property
    def settled(self) -> bool:
        """Whether nothing is left to be written down, or released."""
        return self.group is None or (self.reader is not None and self.written)

    @property
    def written(self) -> bool:
        """True if the place is written down."""
        kept = None if self.group is None else self.group.kept
        return kept == (None if self.place is None else (self.place, self.resets))

    def joined(self, *, standby: bool = False) -> Joined:
        """The answer to a member."""
        assert self.place is not None, "the first member gives it one"
        return Joined(self.place, self.resets, standby)


class Groups:
    """All groups of one log. One member reads for each at a time; others stand by, in the order in which
    they came.

    Beside a log in memory places live as long as this object.
    """

    def __init__(self, disk: Disk | None, log: Log, world: World) -> None:
        self._disk = disk
        self._log = log
        self._world = world
        self._held: dict[str, _Held] = {}
        self._names: set[str] = set()  # every group there is, as far as this process knows
        self._prepared = False
        self._away: dict[str, int] = {}  # groups that nobody reads for here, as they were read last
        self._away_until = -inf
        self._released: dict[str, int] = {}  # places written down since those that are away were read
        self._bell = anyio.Event()
        self._left = anyio.Event()  # a group has no reader any more: others are to see its place at once

    def join(
        self, name: str, member: Member, begin: Callable[[], int], *, identity: bytes | None = None
    ) -> Joined:
        """Have this member read for the group, or stand by while another one does.

        `begin`: where a new group begins. `identity`: a client that connects again takes the place of the
        connection that it had, at once. Raises Refused (BAD_REQUEST, LOG_FAILED), and what `begin` raises.
        """
        held = self._held.get(name)
        if held is None:
            held = self._take(name)
            self._bell.set()
        if held.place is None:
            try:
                held.place = begin()
            finally:
                self._bell.set()  # to write it down, or to let the group go again
        joining = _Joining(member, identity)
        if identity is not None:
            self._end_former(name, held, joining)
        reader = held.reader
        if (reader is None and not held.elsewhere) or (reader is not None and reader.member is member):
            held.reader = joining
            return held.joined()
        if all(one.member is not member for one in held.standby):
            held.standby.append(joining)
        return held.joined(standby=True)

    def commit(self, name: str, offset: int, member: Member) -> None:
        """Everything below is dealt with, so the group goes on there. Who stands by is not heard."""
        held = self._held.get(name)
        if held is None or held.reader is None or held.reader.member is not member:
            return
        if offset != held.place:
            held.place = offset
            self._bell.set()

    def leave(self, name: str, member: Member) -> None:
        """This member reads for it no more, or stands by no more; the next one goes on where it stopped."""
        held = self._held.get(name)
        if held is None:
            return
        if held.reader is None or held.reader.member is not member:
            held.standby = deque(one for one in held.standby if one.member is not member)
            return
        held.reader = None
        if held.place is not None:  # a log that was recovered may have lost what came last
            held.place = min(held.place, self._log.next_offset)
        self._bell.set()
        self._left.set()
        _hand_on(held)

    async def reset(self, name: str, offset: int) -> bool:
        """Have a group that this process has go on at an offset, and return once that is written down; the
        member connects again, and learns it. False where this process does not have the group.
        """
        held = self._held.get(name)
        if held is None or held.elsewhere:
            return False
        held.place, held.resets = offset, held.resets + 1
        resets, group, reader = held.resets, held.group, held.reader
        self._bell.set()
        if reader is not None:
            reader.member.fence(_moved(name, offset))
        while True:
            if group is None or (group.kept is not None and group.kept.resets >= resets):
                return True
            await anyio.sleep(_LOOK_S)

    async def run(self) -> None:
        """Write places down until cancelled, and once more then."""
        threads = self._world.new_threads()
        try:
            while True:
                with anyio.move_on_after(KEEP_S if self._waits_for_others() else inf):
                    await self._bell.wait()
                self._bell = anyio.Event()
                self._look_elsewhere()
                self._left = anyio.Event()
                if not await self._keep(threads):
                    self._bell.set()
                await self._pause(threads)
        finally:
            with anyio.CancelScope(shield=True):
                await self._keep(threads)
            for held in self._held.values():
                if held.group is not None:
                    held.group.release()
            self._held.clear()

    def statistics(self) -> dict[str, GroupStatistics]:
        """A snapshot of those that this process has."""
        return {
            name: GroupStatistics(held.place, held.reader is not None, len(held.standby))
            for name, held in self._held.items()
        }

    async def look(self, threads: Threads) -> None:
        """Read how far groups are that nobody reads for, unless that was done just now."""
        disk, now = self._disk, self._world.clock.now()
        if disk is None or now < self._away_until:
            return
        self._away_until, self._released = inf, {}  # one reads for all
        try:
            found = await threads.run(lambda: read_groups(disk, self._log.log_id))
        except OSError as error:
            logger.warning("the places of groups cannot be read: %s", error)
        else:
            self._away = {name: place for name, place in found.items() if isinstance(place, int)}
            self._away |= self._released  # which may be newer than what was read
        finally:
            read = self._world.clock.now()
            self._away_until = read + AWAY_SHARE * (read - now)

    def places(self) -> dict[str, GroupStatistics]:
        """Every group, those that are away as `look` has read them."""
        away = {name: GroupStatistics(place, False) for name, place in self._away.items()}
        return dict(sorted((away | self.statistics()).items()))

    # --- helpers

    def _end_former(self, name: str, held: _Held, joining: _Joining) -> None:
        """Let a client have the place of the connection that it had, which it knows to be gone."""
        reader, identity = held.reader, joining.identity
        if reader is not None and reader.identity == identity and reader.member is not joining.member:
            held.reader = joining
            reader.member.fence(_fenced(name))
        former = [one for one in held.standby if one.identity == identity]
        for one in former:
            if one.member is not joining.member:
                held.standby[held.standby.index(one)] = joining
                one.member.fence(_fenced(name))

    async def _pause(self, threads: Threads) -> None:
        """Write nothing for a while, but the places of groups whose reader leaves."""
        until = self._world.clock.now() + KEEP_S
        while True:
            with anyio.move_on_after(until - self._world.clock.now()):
                await self._left.wait()
            if not self._left.is_set():
                return
            self._left = anyio.Event()
            await self._keep(threads, left=True)

    def _take(self, name: str) -> _Held:
        try:
            check_name("group", name, NAME_BYTES_MAX)
            self._check_count(name)
            held = self._held[name] = self._open(name)
        except InvalidDelta as error:
            raise Refused(ErrorCode.BAD_REQUEST, error.message) from None
        except UsageError as error:  # its place is damaged
            raise Refused(ErrorCode.BAD_REQUEST, str(error), retry_after_ms=_RETRY_AFTER_MS) from None
        except OSError as error:
            raise Refused(
                ErrorCode.LOG_FAILED,
                f"the place of group {name!r} cannot be read, as the disk fails with {error}: try again",
                retry_after_ms=_RETRY_AFTER_MS,
            ) from None
        self._names.add(name)
        return held

    def _open(self, name: str) -> _Held:
        if self._disk is None:
            return _Held(None)
        if not self._prepared:
            prepare(self._disk)
            self._prepared = True
        try:
            group = Group(self._disk, name, self._log.log_id, prepared=True)
        except GroupBusy:
            place = read_place(self._disk, name, self._log.log_id)
            return _Held(None if place is None else place.next_offset, elsewhere=True)
        return _Held(group.next_offset, group, resets=group.resets)

    def _waits_for_others(self) -> bool:
        return any(held.elsewhere for held in self._held.values())

    def _look_elsewhere(self) -> None:
        """Take groups over whose reader in another process has gone, for who stands by here."""
        for name, held in list(self._held.items()):
            if not held.elsewhere:
                continue
            if not held.standby:
                del self._held[name]
                continue
            try:
                found = self._open(name)
            except (UsageError, OSError) as error:
                logger.warning("group %r cannot be taken over, which is tried again: %s", name, error)
                continue
            held.place = held.place if found.place is None else found.place
            held.group, held.elsewhere, held.resets = found.group, found.elsewhere, found.resets
            if not held.elsewhere:
                _hand_on(held)

    def _check_count(self, name: str) -> None:
        if self._disk is not None and (not self._prepared or len(self._names) >= GROUPS_MAX):
            self._names = names_taken(self._disk) | self._held.keys()
        if name not in self._names and len(self._names) >= GROUPS_MAX:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"there are {len(self._names)} groups, allowed are {GROUPS_MAX}: use one that is there, or "
                "have an operator forget some",
            )

    async def _keep(self, threads: Threads, *, left: bool = False) -> bool:
        """Write down what has changed, as far as it is on stable storage; whether that was all. `left`: only
        of groups that nobody reads for.
        """
        safe = self._log.reached(AckLevel.DURABLE)
        for name, held in list(self._held.items()):
            group, place = held.group, held.place
            if group is None or held.settled or (left and held.reader is not None):
                continue
            # What is not synced may be gone with the next power cut, and other deltas come in its place.
            group.next_offset = place if place is None else min(place, safe)
            group.resets = held.resets
            try:
                await threads.run(partial(self._use_reserve, group))
            except OSError as error:
                logger.warning(
                    "the place of group %r could not be written, which is tried again: %s", name, error
                )
            if held.reader is None and held.written:
                if held.place is not None:
                    self._away[name] = self._released[name] = held.place
                group.release()
                del self._held[name]
        return all(held.settled for held in self._held.values())

    def _use_reserve(self, group: Group) -> None:
        """Write a place down, on a full disk too. For a thread; raises OSError."""
        if isinstance(self._log, DurableLog):
            self._log.reserve.use(group.keep)
        else:
            group.keep()


def _hand_on(held: _Held) -> None:
    """Let the one who has stood by longest read for the group."""
    if held.standby:
        held.reader = held.standby.popleft()
        held.reader.member.take_over(held.joined())


def _fenced(name: str) -> Refused:
    return Refused(
        ErrorCode.FENCED, f"this member of group {name!r} has connected again: go on over that connection"
    )


def _moved(name: str, offset: int) -> Refused:
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        f"an operator has had group {name!r} go on at offset {offset}: connect again, and go on from there",
        retry_after_ms=50,
    )
