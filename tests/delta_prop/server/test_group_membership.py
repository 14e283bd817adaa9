"""`GroupMembership`: one member reads for a group, the next one stands by and takes over."""

from __future__ import annotations

import pytest

from delta_prop.server.groups import GroupAssignment, GroupMembership, Groups
from delta_prop.testing import virtual_world
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Start, StartAt
from tests.broker.durable import LOG_ID
from tests.delta_prop.server.session_fakes import LATEST, rows_batch, subscription


class GroupMember:
    """A member that only follows its membership."""

    def __init__(self, groups: Groups) -> None:
        self.membership = GroupMembership(groups, self)
        self.fenced: list[Refused] = []

    def take_over(self, assignment: GroupAssignment) -> None:
        self.membership.take_over(assignment)

    def fence(self, refused: Refused) -> None:
        self.fenced.append(refused)


def make_groups() -> tuple[MemoryLog, Groups]:
    log = MemoryLog(LOG_ID)
    log.append(rows_batch(5, 1), lamport=1, source=Source.LOCAL)
    return log, Groups(None, log, virtual_world())


def test_standby_takes_over_at_the_committed_cursor() -> None:
    log, groups = make_groups()
    first, second = GroupMember(groups), GroupMember(groups)
    request = subscription(start=Start(StartAt.EARLIEST), group="g")
    assert first.membership.resolve_start(request, log) == 0
    first.membership.commit(3)
    assert second.membership.resolve_start(request, log) == 3
    assert (first.membership.standing_by, second.membership.standing_by) == (False, True)
    second.membership.commit(5)
    assert groups.statistics()["g"].next_offset == 3, "a member that stands by must not commit"
    first.membership.leave()
    assert (first.membership.group, second.membership.standing_by) == (None, False)
    second.membership.commit(5)
    assert groups.statistics()["g"].next_offset == 5


def test_without_a_group_nothing_is_committed() -> None:
    log, groups = make_groups()
    membership = GroupMember(groups).membership
    assert membership.resolve_start(subscription(start=LATEST), log) == 5
    membership.commit(4)
    membership.leave()
    assert groups.statistics() == {}


def test_start_at_the_group_needs_a_group() -> None:
    log, groups = make_groups()
    with pytest.raises(Refused, match="no group is named"):
        GroupMember(groups).membership.resolve_start(subscription(start=Start(StartAt.GROUP)), log)
