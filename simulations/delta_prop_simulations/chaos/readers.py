"""Subscribers that work as users' programs do: they save what they read together with the cursor after it,
and resume from that cursor.

The saved data of a reader outlives its process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from delta_prop.client import ClientSettings, Subscriber
from delta_prop.client.consumer_state import CREDIT
from delta_prop_wire.errors import ProtocolError, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.calls.outcomes import Delivered
    from delta_prop.client.subscriber import StartPosition
    from delta_prop.platform.ports import World
    from delta_prop_wire.cursor import Cursor
    from delta_prop_wire.delta import Dot

RETRY_S = 0.2
SAVE_EVERY = 5
"""A reader of single deltas saves its cursor after this many."""
_LOST_CURSOR_CODES = frozenset({ErrorCode.CURSOR_TOO_OLD, ErrorCode.BAD_REQUEST})
"""Codes of an unusable cursor: the next row was removed from the log, or the cursor is of another log."""
CLIENT = ClientSettings(
    heartbeat_interval_s=1.0,
    peer_timeout_s=4.0,
    open_timeout_s=20.0,
    reconnect_timeout_s=30.0,
    close_timeout_s=1.0,
)


@dataclass(slots=True)
class ReadSession:
    """The rows that one subscriber object received. `begin`: the saved cursor at which it asked to start;
    None if it asked for the group's cursor, or for the earliest row. `first`: the offset at which it started.
    `saved_end`: the offset after the saved rows. `is_from_start`: no cursor could be used, as none was saved,
    or the saved one was unusable.
    """

    begin: Cursor | None
    is_from_start: bool
    log_id: bytes = b""
    first: int | None = None
    saved_end: int = 0
    rows: list[tuple[int, Dot | None]] = field(default_factory=list)


class Reader:
    """One subscriber, across all its processes."""

    def __init__(
        self,
        name: str,
        *,
        node: str,
        topics: str = "*",
        group: bool = False,
        batches: bool = True,
        credit: int = CREDIT.deltas,
    ) -> None:
        self.name = name
        self.node = node
        self.topics = topics
        self.group = group
        self.is_stalled = False
        """True while a fault of the plan makes the reader read nothing."""
        self.sessions: list[ReadSession] = []
        self._batches = batches
        self._credit = (credit, CREDIT.bytes)
        self._saved_cursor: Cursor | None = None
        self._is_from_start = True

    @property
    def saved_offset(self) -> int:
        """The offset after the saved rows, in the log that was read last."""
        return self.sessions[-1].saved_end if self.sessions else 0

    async def run(self, world: World, addresses: str | Sequence[str]) -> None:
        """Read until cancelled, and reconnect after errors."""
        while True:
            try:
                await self._read(world, addresses)
            except Refused as refusal:
                if refusal.code in _LOST_CURSOR_CODES:  # the removed rows cannot be read
                    self._saved_cursor, self._is_from_start = None, True
            except UsageError:  # the service has another log: the previous one was in memory, and is lost
                self._saved_cursor, self._is_from_start = None, True
            except (ProtocolError, OSError):
                pass
            await anyio.sleep(RETRY_S)

    async def _read(self, world: World, addresses: str | Sequence[str]) -> None:
        start: StartPosition | None = self._saved_cursor or "earliest"
        if self.group and not self._is_from_start:
            start = None
        async with Subscriber(
            addresses,
            self.topics,
            start=start,
            group=f"group of {self.name}" if self.group else None,
            deltas=not self._batches,
            credit=self._credit,
            name=self.name,
            settings=CLIENT,
            world=world,
        ) as subscriber:
            session = ReadSession(None if self.group else self._saved_cursor, self._is_from_start)
            self.sessions.append(session)
            self._save_cursor(session, subscriber)
            while True:
                await anyio.sleep(RETRY_S if self.is_stalled else 0)
                if not self.is_stalled:
                    with anyio.move_on_after(RETRY_S):
                        await self._receive(session, subscriber)
                    self._save_cursor(session, subscriber)

    async def _receive(self, session: ReadSession, subscriber: Subscriber) -> None:
        """Receive the next deltas."""
        if self._batches:
            for delivered in await subscriber.next_batch():
                _add(session, delivered)
            return
        for _ in range(SAVE_EVERY):
            _add(session, await anext(subscriber))

    def _save_cursor(self, session: ReadSession, subscriber: Subscriber) -> None:
        """Save the cursor, and thus the rows before it."""
        cursor = subscriber.cursor
        if cursor is not None:
            self._is_from_start = False
            if session.first is None:
                session.first, session.log_id = cursor.next_offset, cursor.log_id
            session.saved_end = max(session.saved_end, cursor.next_offset)
            if not self.group:
                self._saved_cursor = cursor


def _add(session: ReadSession, delivered: Delivered) -> None:
    session.rows.append((delivered.offset, delivered.delta.dot))
