"""Named groups of subscribers: who reads for each, and how far it is; the same files as `subscribe --data`.

A place that is written down only lags behind the truth: what lies behind it comes again. Nobody's log waits
for a group.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

import anyio

from delta_prop.group_places import NAME_BYTES_MAX, Group, names_taken, prepare, read_groups
from delta_prop_broker.log.durable import DurableLog
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.ports import Threads, World
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.contract import Log

logger = logging.getLogger("delta_prop.server")

AWAY_S = 5.0
"""How long what was read of groups that are away is good enough for who asks."""
KEEP_S = 1.0
"""How often a place is written down, at most."""
GROUPS_MAX = 10_000
_RETRY_AFTER_MS = 1_000


class Member(Protocol):
    """Who reads for a group."""

    def fence(self, refused: Refused) -> None:
        """Another one reads for it from now on."""


class GroupStatistics(NamedTuple):
    """A group that is read for, or whose place is not written down yet."""

    next_offset: int | None
    has_member: bool


@dataclass(slots=True, eq=False)
class _Held:
    """A group that this process has. `place`: where it goes on; None where it begins."""

    place: int | None
    group: Group | None = None  # None beside a log in memory
    member: Member | None = None

    @property
    def settled(self) -> bool:
        """Whether nothing is left to be written down, or released."""
        return self.group is None or (self.member is not None and self.place == self.group.kept)


class Groups:
    """All groups of one log. One member reads for each at a time; a second one fences the first.

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
        self._bell = anyio.Event()

    def join(self, name: str, member: Member) -> int | None:
        """Have this member alone read for the group; where it goes on, None where it begins.

        Raises Refused (BAD_REQUEST, LOG_FAILED).
        """
        held = self._held.get(name)
        if held is None:
            held = self._take(name)
        elif held.member is not None and held.member is not member:
            held.member.fence(_fenced(name))
        held.member = member
        return held.place

    def commit(self, name: str, offset: int, member: Member) -> None:
        """Everything below is dealt with, so the group goes on there. One that was fenced is not heard."""
        held = self._held.get(name)
        if held is not None and held.member is member and offset != held.place:
            held.place = offset
            self._bell.set()

    def leave(self, name: str, member: Member) -> None:
        """This member reads for it no more; whoever comes next goes on where it stopped."""
        held = self._held.get(name)
        if held is None or held.member is not member:
            return
        held.member = None
        if held.place is not None:  # a log that was recovered may have lost what came last
            held.place = min(held.place, self._log.next_offset)
        self._bell.set()

    async def run(self) -> None:
        """Write places down until cancelled, and once more then."""
        threads = self._world.new_threads()
        try:
            while True:
                await self._bell.wait()
                self._bell = anyio.Event()
                if not await self._keep(threads):
                    self._bell.set()
                await anyio.sleep(KEEP_S)
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
            name: GroupStatistics(held.place, held.member is not None) for name, held in self._held.items()
        }

    async def look(self, threads: Threads) -> None:
        """Read how far groups are that nobody reads for, unless that was done just now."""
        disk, now = self._disk, self._world.clock.now()
        if disk is None or now < self._away_until:
            return
        self._away_until = now + AWAY_S
        try:
            found = await threads.run(lambda: read_groups(disk, self._log.log_id))
        except OSError as error:
            logger.warning("the places of groups cannot be read: %s", error)
        else:
            self._away = {name: place for name, place in found.items() if isinstance(place, int)}

    def places(self) -> dict[str, GroupStatistics]:
        """Every group, those that are away as `look` has read them."""
        away = {name: GroupStatistics(place, False) for name, place in self._away.items()}
        return dict(sorted((away | self.statistics()).items()))

    # --- helpers

    def _take(self, name: str) -> _Held:
        try:
            check_name("group", name, NAME_BYTES_MAX)
            self._check_count(name)
            held = self._held[name] = self._open(name)
        except InvalidDelta as error:
            raise Refused(ErrorCode.BAD_REQUEST, error.message) from None
        except UsageError as error:  # another process reads for it, or its place is damaged
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
        group = Group(self._disk, name, self._log.log_id, prepared=True)
        return _Held(group.next_offset, group)

    def _check_count(self, name: str) -> None:
        if self._disk is not None and (not self._prepared or len(self._names) >= GROUPS_MAX):
            self._names = names_taken(self._disk) | self._held.keys()
        if name not in self._names and len(self._names) >= GROUPS_MAX:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"there are {len(self._names)} groups, allowed are {GROUPS_MAX}: use one that is there, or "
                "have an operator forget some",
            )

    async def _keep(self, threads: Threads) -> bool:
        """Write down what has changed, as far as it is on stable storage; whether that was all."""
        safe = self._log.reached(AckLevel.DURABLE)
        for name, held in list(self._held.items()):
            group, place = held.group, held.place
            if group is None or held.settled:
                continue
            # What is not synced may be gone with the next power cut, and other deltas come in its place.
            group.next_offset = place if place is None else min(place, safe)
            try:
                await threads.run(partial(self._use_reserve, group))
            except OSError as error:
                logger.warning(
                    "the place of group %r could not be written, which is tried again: %s", name, error
                )
            if held.member is None and held.place == group.kept:
                group.release()
                del self._held[name]
        return all(held.settled for held in self._held.values())

    def _use_reserve(self, group: Group) -> None:
        """Write a place down, on a full disk too. For a thread; raises OSError."""
        if isinstance(self._log, DurableLog):
            self._log.reserve.use(group.keep)
        else:
            group.keep()


def _fenced(name: str) -> Refused:
    return Refused(
        ErrorCode.FENCED,
        f"another member reads for group {name!r} now: stop this one, or give each a group of its own",
    )
