"""A connection's way out of the log: everything of its topics from its cursor on, read from the log.

No task of its own, and it never waits: whoever writes the connection asks it for what comes next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop.route.table import Nothing
from delta_prop_wire.codec import encode_head
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Granted, StartAt
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import Stamp

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from delta_prop.inside import Inside
    from delta_prop.route.table import Rows
    from delta_prop.server.groups import Groups
    from delta_prop.server.settings import ServerSettings
    from delta_prop_broker.disk import FileRange
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.frames import Backpressure, Credit, Subscription


@dataclass(slots=True)
class Sending:
    """What is to be written next."""

    parts: list[Buffer] | FileRange
    deltas: int
    bytes: int
    next_offset: int


class Outlet:
    """One cursor."""

    def __init__(
        self,
        inside: Inside,
        *,
        settings: ServerSettings,
        codecs: frozenset[int],
        may_read: Callable[[str], bool] | None,
        ring: Callable[[], None],
        groups: Groups,
    ) -> None:
        self.dealt_with = 0
        self.behind = False
        self.warning: Backpressure | None = None
        self._inside = inside
        self._ring = ring
        self._numbers: set[int] = set()

    def subscribe(self, request: Subscription) -> Granted:
        """Begin."""
        log = self._inside.log
        if not self._numbers:
            earliest = request.start.at is StartAt.EARLIEST
            self.dealt_with = log.first_offset if earliest else log.visible
        self._numbers.add(request.subscription)
        self._inside.sinks.add_outlet(self, request.topics)
        return Granted(
            request.subscription,
            Cursor(log.log_id, log.epoch, self.dealt_with),
            request.batch_deltas_max,
            request.wait_ms_max,
        )

    def unsubscribe(self, subscription: int) -> None:
        """End one."""
        if subscription not in self._numbers:
            raise Refused(ErrorCode.BAD_REQUEST, f"no subscription {subscription} is open here")
        self._numbers.remove(subscription)
        self._inside.sinks.add_outlet(self, ())

    def grant(self, credit: Credit) -> None:
        """More may be delivered."""

    def note_dealt_with(self, offset: int) -> None:
        """The client has done with this."""

    def commit(self, cursor: Cursor) -> None:
        """The client has done with this."""

    def offer(self, logged: LoggedBatch, rows: Rows) -> None:
        """More is visible."""
        self._ring()

    def note_visible(self) -> None:
        """More is visible."""
        self._ring()

    def note_recovered(self) -> None:
        """The log was recovered."""
        self._ring()

    def take(self, now: float, bytes_max: int) -> Sending | None:
        """What comes next."""
        log = self._inside.log
        if self.dealt_with >= log.visible:
            return None
        parts: list[Buffer] = []
        deltas = size = 0
        for one in log.read(self.dealt_with, rows_max=100_000, bytes_max=bytes_max):
            self.dealt_with = one.next_offset
            if isinstance(self._inside.sinks.rows_for(self, one.batch), Nothing):
                continue
            stamp = Stamp(one.lamport, one.source, body_crc=one.batch.crc)
            parts += [one.head or encode_head(one.batch, one.offset, stamp), one.batch.raw]
            deltas += one.count
            size += one.batch.size
        return Sending(parts, deltas, size, self.dealt_with) if parts else None

    def wait_s(self, now: float) -> float | None:
        """When to ask again."""
        return None

    def close(self) -> None:
        """The connection has gone."""
        self._inside.sinks.remove_outlet(self)
