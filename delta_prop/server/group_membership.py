"""A consumer session's membership of a group: it reads for the group, or stands by for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.server.start_offsets import check_cursor, check_offset, resolve_start
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import StartAt
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.server.groups import GroupAssignment, Groups, Member
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.frames import Subscription


class GroupMembership:
    """The membership of one session, `member`. Without a group, its methods do nothing."""

    def __init__(self, groups: Groups, member: Member) -> None:
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
