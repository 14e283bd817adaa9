"""Subscribers as users write them: they save deltas with the cursor after them, and resume there.

A reader's saved data outlives its process.
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

    from delta_prop.client.subscriber import StartPosition
    from delta_prop.outcomes import Delivered
    from delta_prop.ports import World
    from delta_prop_wire.cursor import Cursor
    from delta_prop_wire.delta import Dot

RETRY_S = 0.2
SAVE_EVERY = 5
_LOST_CURSOR_CODES = frozenset({ErrorCode.CURSOR_TOO_OLD, ErrorCode.BAD_REQUEST})
"""Codes of an unusable cursor: the log has removed the next row, or is another log."""
CLIENT = ClientSettings(
    heartbeat_interval_s=1.0,
    peer_timeout_s=4.0,
    open_timeout_s=20.0,
    reconnect_timeout_s=30.0,
    close_timeout_s=1.0,
)


@dataclass(slots=True)
class ReadSession:
    """The rows received over one subscriber object. `begin`: the cursor to start at, None if the group or the
    log's start or end decided; `first`: the offset at which it started; `saved_rows`: all below was saved.
    `is_from_start`: it resumed from no cursor, as none was saved, or the next row was removed.
    """

    begin: Cursor | None
    is_from_start: bool
    log_id: bytes = b""
    first: int | None = None
    saved_rows: int = 0
    rows: list[tuple[int, Dot | None]] = field(default_factory=list)


class Reader:
    """One subscriber over all its lives."""

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
        self.sessions: list[ReadSession] = []
        self._batches = batches
        self._credit = (credit, CREDIT.bytes)
        self._saved_cursor: Cursor | None = None
        self._is_from_start = True

    @property
    def saved_offset(self) -> int:
        """The end of the saved rows, in the log that was read last."""
        return self.sessions[-1].saved_rows if self.sessions else 0

    async def run_life(self, world: World, addresses: str | Sequence[str]) -> None:
        """Run one life: read until cancelled."""
        while True:
            try:
                await self._read(world, addresses)
            except Refused as refusal:
                if refusal.code in _LOST_CURSOR_CODES:  # the removed rows cannot be read
                    self._saved_cursor, self._is_from_start = None, True
            except UsageError:  # the log is another one, as the previous one was in memory
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
            reading = ReadSession(None if self.group else self._saved_cursor, self._is_from_start)
            self.sessions.append(reading)
            self._save_cursor(reading, subscriber)
            while True:
                await anyio.sleep(RETRY_S if self.is_stalled else 0)
                if not self.is_stalled:
                    with anyio.move_on_after(RETRY_S):
                        await self._take(reading, subscriber)
                    self._save_cursor(reading, subscriber)

    async def _take(self, session: ReadSession, subscriber: Subscriber) -> None:
        """Take the next deltas."""
        if self._batches:
            for one in await subscriber.next_batch():
                _add(session, one)
            return
        for _ in range(SAVE_EVERY):
            _add(session, await anext(subscriber))

    def _save_cursor(self, session: ReadSession, subscriber: Subscriber) -> None:
        """Save the cursor with the rows before it."""
        cursor = subscriber.cursor
        if cursor is not None:
            self._is_from_start = False
            if session.first is None:
                session.first, session.log_id = cursor.next_offset, cursor.log_id
            session.saved_rows = max(session.saved_rows, cursor.next_offset)
            if not self.group:
                self._saved_cursor = cursor


def _add(session: ReadSession, one: Delivered) -> None:
    session.rows.append((one.offset, one.delta.dot))
